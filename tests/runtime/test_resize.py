"""Strategies for mini-batches of other sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from graphpipe.cluster import Cluster
from graphpipe.cost import ADAM
from graphpipe.errors import BatchError
from graphpipe.estimate import estimate
from graphpipe.runtime.resize import resized
from graphpipe.schedule import kfkb
from graphpipe.stage import StageGraph
from graphpipe.strategy import Strategy
from tests.stage_graphs import CHAIN_3, TWO_TOWERS, flat_profile, make_stages


def strategy_of(stages: StageGraph, k: int = 1, limits: Sequence[int] | None = None) -> Strategy:
    draft = Strategy(
        stages, kfkb(stages), flat_profile(stages.graph), Cluster.uniform(3, memory_bytes=10**9), ADAM, "test"
    )
    return replace(draft, schedule=kfkb(stages, draft.costs, k=k, limits=limits))


def chain(k: int = 1, limits: Sequence[int] | None = None) -> Strategy:
    return strategy_of(make_stages(CHAIN_3, mini_batch_size=8, sizes=2), k, limits)


@pytest.mark.parametrize("k", [1, 2])
def test_rounds_are_those_of_the_strategy(k: int) -> None:
    graph, schedule = resized(chain(k), 12)
    last = str(schedule).splitlines()[2].split()
    assert last[: 2 * k] == [*(f"2F{m}" for m in range(k)), *(f"2B{m}" for m in range(k))]
    assert graph.mini_batch_size == 12


def test_samples_in_flight_are_those_of_the_strategy() -> None:
    _, closed = resized(chain(), 12)
    _, roomy = resized(chain(limits=(8, 8, 2)), 12)
    assert str(closed).startswith("0F0 0F1 0F2 0B0")
    assert str(roomy).startswith("0F0 0F1 0F2 0F3")


def test_a_stage_with_the_whole_mini_batch_keeps_its_micro_batches() -> None:
    # Only what mixes samples must see all of them.
    stages = make_stages(TWO_TOWERS, mini_batch_size=4, sizes=4, batch_wise=[2])
    strategy = strategy_of(stages)
    graph, _ = resized(strategy, 10)
    assert [stage.micro_batch_size for stage in graph.stages] == [4, 4, 10]


def test_a_larger_batch_that_does_not_fit_is_refused() -> None:
    stages = make_stages(TWO_TOWERS, mini_batch_size=4, sizes=(2, 2, 4), batch_wise=[2])
    strategy = strategy_of(stages)
    most = max(estimate(strategy).peak_bytes)
    tight = replace(strategy, cluster=Cluster.uniform(3, memory_bytes=int(most) + 1))
    resized(tight, 3)
    with pytest.raises(BatchError, match=r"batch of 40 samples is larger than the 4 .* does not fit"):
        resized(tight, 40)


def test_fewer_samples_than_replicas_are_refused() -> None:
    stages = make_stages([], mini_batch_size=4, sizes=4, devices=[(0, 1, 2)])
    strategy = strategy_of(stages)
    with pytest.raises(BatchError, match="2 samples cannot be split over the 3 replicas of stage 0"):
        resized(strategy, 2)
