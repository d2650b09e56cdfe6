from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphpipe.errors import StrategyError
from graphpipe.stage import SampleRange, Stage, StageGraph, stages_from_json, stages_to_json
from tests.stage_graphs import CHAIN_3, DIAMOND, TWO_TOWERS, make_graph, make_stages


def stage(*operators: str, size: int = 1, devices: tuple[int, ...] = (0,)) -> Stage:
    return Stage(operators=operators, micro_batch_size=size, devices=devices)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([stage("o0"), stage("o1", devices=(1,))], "'o2' is in no stage"),
        ([stage("o0", "o1", "o2"), stage("o2", devices=(1,))], "'o2' is in stage 0 and in stage 1"),
        ([stage("o0", "o1", "o2"), stage(devices=(1,))], "stage 1 has no operators"),
        ([stage("o0", "o1", "x")], "'x', which 'test' lacks"),
        ([stage("o0", "o2"), stage("o1", devices=(1,))], "not convex"),
        ([stage("o1", "o2"), stage("o0", devices=(1,))], "not in a topological order"),
        ([stage("o0", "o1", "o2", size=9)], "takes 9 samples at a time; the mini-batch has 8"),
        ([stage("o0", "o1", "o2", size=2, devices=(0, 1, 2))], "2 samples over 3 replicas"),
        ([stage("o0", "o1", "o2", devices=(0, 0), size=2)], "one or more different"),
        ([stage("o0", devices=(0, 1), size=2), stage("o1", "o2", devices=(1,))], "share all of their devices or none"),
    ],
)
def test_a_stage_graph_that_breaks_a_condition_is_refused(stages: list[Stage], message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        StageGraph(make_graph(CHAIN_3), tuple(stages), 8)


def test_an_operator_that_mixes_samples_takes_the_whole_mini_batch_on_one_device() -> None:
    make_stages(TWO_TOWERS, mini_batch_size=8, sizes=(2, 2, 8), batch_wise=[2])
    for sizes, devices in (((2, 2, 4), [(0,), (1,), (2,)]), ((2, 2, 8), [(0,), (1,), (2, 3)])):
        with pytest.raises(StrategyError, match="mixes the samples"):
            make_stages(TWO_TOWERS, mini_batch_size=8, sizes=sizes, devices=devices, batch_wise=[2])


def test_depth_is_the_longest_path() -> None:
    assert make_stages(DIAMOND, mini_batch_size=4).depth == 3
    assert make_stages(CHAIN_3, mini_batch_size=4).depth == 3
    assert make_stages(TWO_TOWERS, mini_batch_size=4).depth == 2


def test_replicas_share_out_every_micro_batch_also_the_smaller_last_one() -> None:
    stages = make_stages([], mini_batch_size=11, sizes=4, devices=[(0, 1, 2)])
    parts = [[stages.replica_samples(0, m, r) for r in range(3)] for m in range(stages.num_micro_batches(0))]
    samples = [i for row in parts for part in row for i in range(part.start, part.stop)]
    assert samples == list(range(11))
    assert stages.local_size(0) == 2


def test_json_round_trip() -> None:
    stages = make_stages(DIAMOND, mini_batch_size=4, sizes=2).stages
    assert stages_from_json(stages_to_json(stages)) == stages


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 20), st.data())
def test_replicas_that_hold_samples_are_those_that_share_some(
    num_replicas: int, micro_batch_size: int, mini_batch_size: int, data: st.DataObject
) -> None:
    size = max(micro_batch_size, num_replicas)
    batch = max(mini_batch_size, size)
    stages = make_stages([], mini_batch_size=batch, sizes=size, devices=[tuple(range(num_replicas))])
    m = data.draw(st.integers(0, stages.num_micro_batches(0) - 1))
    whole = stages.micro_batch(0, m)
    start = data.draw(st.integers(0, whole.stop - 1))
    samples = SampleRange(start, data.draw(st.integers(max(start, whole.start) + 1, batch)))
    wanted = [i for i in range(num_replicas) if len(stages.replica_samples(0, m, i) & samples)]
    found = list(stages.replicas_holding(0, m, samples))
    assert found[:1] == wanted[:1]
    assert set(wanted) <= set(found)
    # What lies between may be empty where there are more replicas than samples.
    assert all(not len(stages.replica_samples(0, m, i)) for i in set(found) - set(wanted))
