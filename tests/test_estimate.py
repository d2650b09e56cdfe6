from __future__ import annotations

from dataclasses import replace

import pytest

from graphpipe.cost import SGD
from graphpipe.errors import PlanningError
from graphpipe.estimate import check_memory, estimate, format_bytes
from graphpipe.stage import Recompute, StageGraph
from tests.stage_graphs import CHAIN_3, TWO_TOWERS, frozen_first, make_stages, make_strategy


def test_memory_of_a_chain_by_hand() -> None:
    # Parameters of 100 bytes, gradients 100, Adam 200. Stage 0 holds 3 micro-batches of 2 samples, 10 bytes each, and
    # the gradients of 2 passes of 2 samples that may be posted ahead, 4 bytes each.
    found = estimate(make_strategy(make_stages(CHAIN_3, mini_batch_size=16, sizes=2)))
    first = found.memory[0]
    assert (first.parameters, first.gradients, first.optimizer) == (100, 100, 200)
    assert first.activations == 3 * 2 * 10 + 2 * 2 * 4


def test_memory_does_not_grow_with_the_micro_batches() -> None:
    peaks = {
        m: estimate(make_strategy(make_stages(CHAIN_3, mini_batch_size=2 * m, sizes=2))).peak_bytes for m in (8, 32)
    }
    assert peaks[8] == peaks[32]


def test_a_frozen_stage_holds_a_few_of_the_values_that_it_sends_however_many_there_are() -> None:
    held = [
        estimate(make_strategy(frozen_first(CHAIN_3, mini_batch_size))).memory[0].activations
        for mini_batch_size in (4, 16, 64)
    ]
    # The 10 bytes of the pass that runs, and values of 4 bytes: those of all passes before it, or four and the one by
    # which the stage is ahead of its reader.
    assert held[0] == 10 + 3 * 4
    assert held[1] == held[2] == 10 + 5 * 4


def test_branches_hold_less_than_their_chain() -> None:
    towers = estimate(make_strategy(make_stages(TWO_TOWERS, mini_batch_size=8)))
    chain = estimate(make_strategy(make_stages(CHAIN_3, mini_batch_size=8)))
    assert towers.memory[0].activations < chain.memory[0].activations


def test_recomputation_trades_memory_for_time() -> None:
    plain = make_stages(CHAIN_3, mini_batch_size=8)
    recomputing = StageGraph(
        plain.graph, tuple(replace(s, recompute=Recompute.ALL) for s in plain.stages), plain.mini_batch_size
    )
    saving, full = estimate(make_strategy(recomputing)), estimate(make_strategy(plain))
    assert saving.memory[0].activations < full.memory[0].activations
    assert saving.iteration_s > full.iteration_s


def test_a_strategy_over_the_limit_is_refused_with_its_parts() -> None:
    strategy = make_strategy(make_stages(CHAIN_3, mini_batch_size=8), optimizer=SGD)
    check_memory(strategy, estimate(strategy))
    small = replace(strategy, cluster=strategy.cluster.with_memory(210))
    with pytest.raises(PlanningError, match=r"cpu0 with stages \[0\] needs .* of 210 B: parameters 100 B.*lower the"):
        check_memory(small, estimate(small))


@pytest.mark.parametrize(("num_bytes", "text"), [(12, "12 B"), (1234, "1.23 kB"), (18.2e9, "18.2 GB"), (2e12, "2 TB")])
def test_bytes_are_written_as_people_read_them(num_bytes: float, text: str) -> None:
    assert format_bytes(num_bytes) == text
