from __future__ import annotations

from dataclasses import replace

import pytest

from graphpipe.errors import DeadlockError, StrategyError
from graphpipe.program import lower
from graphpipe.schedule import (
    DeviceOrder,
    Phase,
    Schedule,
    Task,
    UniformCosts,
    check_schedule,
    gpipe,
    in_flight_limits,
    kfkb,
)
from graphpipe.simulator import simulate
from graphpipe.stage import StageOrder
from tests.stage_graphs import CHAIN_3, CHAIN_4, DIAMOND, TWO_TOWERS, make_stages

UNIT = UniformCosts(1.0, 1.0)
ONE_TWO = UniformCosts(1.0, 2.0)
BY_SAMPLE = UniformCosts(0.0, 0.0, 1.0, 2.0)


def test_branches_of_a_diamond_run_side_by_side() -> None:
    diamond = make_stages(DIAMOND, mini_batch_size=4)
    schedule = kfkb(diamond, UNIT)

    # stage 0: F0  F1  F2  .   .   B0  F3  B1  .   B2  .   B3
    # stage 1: .   F0  F1  .   B0  F2  B1  F3  B2  .   B3  .
    # stage 2: .   F0  F1  .   B0  F2  B1  F3  B2  .   B3  .
    # stage 3: .   .   F0  B0  F1  B1  F2  B2  F3  B3  .   .
    assert str(schedule) == (
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3\n"
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3\n"
        "2F0 2F1 2B0 2F2 2B1 2F3 2B2 2B3\n"
        "3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3"
    )
    # The same four stages in a chain take 2 * (4 + 4 - 1) = 14.
    assert simulate(lower(diamond, schedule), UNIT).makespan_s == 2 * (4 + 3 - 1)
    chain = make_stages(CHAIN_4, mini_batch_size=4)
    assert simulate(lower(chain, kfkb(chain, UNIT)), UNIT).makespan_s == 2 * (4 + 4 - 1)


def test_two_towers_take_nine_units_and_their_chain_twelve() -> None:
    towers = make_stages(TWO_TOWERS, mini_batch_size=2)
    chain = make_stages(CHAIN_3, mini_batch_size=2)
    in_turn = replace(towers, order=StageOrder.CHAIN)
    assert simulate(lower(in_turn, kfkb(in_turn, ONE_TWO)), ONE_TWO).makespan_s == 12
    assert simulate(lower(towers, kfkb(towers, ONE_TWO)), ONE_TWO).makespan_s == 9
    assert simulate(lower(chain, kfkb(chain, ONE_TWO)), ONE_TWO).makespan_s == 12


@pytest.mark.parametrize("num_micro_batches", [1, 2, 3, 8])
@pytest.mark.parametrize("depth", [2, 3, 4])
def test_a_balanced_chain_has_the_bubble_of_the_textbook(depth: int, num_micro_batches: int) -> None:
    chain = make_stages([(i, i + 1) for i in range(depth - 1)], mini_batch_size=num_micro_batches)
    makespan = simulate(lower(chain, kfkb(chain, ONE_TWO)), ONE_TWO).makespan_s
    assert makespan == 3 * (num_micro_batches + depth - 1)


def test_equal_sizes_hold_their_path_to_a_sink() -> None:
    assert in_flight_limits(make_stages(CHAIN_4, mini_batch_size=32, sizes=2)) == (8, 6, 4, 2)
    assert in_flight_limits(make_stages(DIAMOND, mini_batch_size=32, sizes=2)) == (6, 4, 4, 2)
    assert in_flight_limits(make_stages(CHAIN_3, mini_batch_size=32, sizes=2), k=2) == (12, 8, 4)
    assert in_flight_limits(make_stages(CHAIN_4, mini_batch_size=4, sizes=2)) == (4, 4, 4, 2)


@pytest.mark.parametrize(
    ("sizes", "makespan_s"), [((1, 2, 4), 144), ((4, 2, 1), 132), ((4, 4, 4), 120), ((1, 1, 1), 102)]
)
def test_unequal_sizes_reach_the_makespan_of_their_limits(sizes: tuple[int, ...], makespan_s: int) -> None:
    chain = make_stages(CHAIN_3, mini_batch_size=32, sizes=sizes)
    assert simulate(lower(chain, kfkb(chain, BY_SAMPLE)), BY_SAMPLE).makespan_s <= makespan_s


def test_k_passes_go_together() -> None:
    pair = make_stages([(0, 1)], mini_batch_size=4)
    assert str(kfkb(pair, ONE_TWO, k=2)).splitlines()[1] == "1F0 1F1 1B0 1B1 1F2 1F3 1B2 1B3"
    # k that does not divide the micro-batches, and k above them.
    assert str(kfkb(pair, ONE_TWO, k=3)).splitlines()[1] == "1F0 1F1 1F2 1B0 1B1 1B2 1F3 1B3"
    assert kfkb(pair, ONE_TWO, k=9) == kfkb(pair, ONE_TWO, k=4)


def test_gpipe_runs_all_forwards_first() -> None:
    chain = make_stages(CHAIN_3, mini_batch_size=3)
    for order in gpipe(chain).orders:
        assert [task.phase for task in order.tasks] == [Phase.FORWARD] * 3 + [Phase.BACKWARD] * 3


def test_a_batch_wise_stage_waits_for_the_whole_mini_batch_and_shares_a_device() -> None:
    towers = make_stages(TWO_TOWERS, mini_batch_size=4, sizes=(2, 2, 4), devices=[(0,), (1,), (0,)], batch_wise=[2])
    schedule = kfkb(towers, ONE_TWO)
    assert str(schedule) == "0F0 0F1 2F0 2B0 0B0 0B1\n1F0 1F1 1B0 1B1"


def test_limits_that_are_too_low_are_refused_with_the_least_that_works() -> None:
    towers = make_stages(TWO_TOWERS, mini_batch_size=4, sizes=(2, 2, 4), batch_wise=[2])
    with pytest.raises(DeadlockError, match=r"limit of 2 samples in flight is too low.* is 4"):
        kfkb(towers, limits=(2, 4, 4))


def test_a_round_needs_a_pass() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        kfkb(make_stages(CHAIN_3, mini_batch_size=2), k=0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0 0F1 0B0", "1 backward tasks; it needs 2 and 2"),
        ("0F0 0B1 0B0 0F1", "0B1 is out of sequence: micro-batch 0"),
        ("0F1 0F0 0B0 0B1", "0F1 is out of sequence: micro-batch 0"),
        ("0B0 0F0 0F1 0B1", "0B0 comes before its forward pass"),
        ("0F0 0F1 0B0 0B1 7F0", "lack its stage"),
    ],
)
def test_a_schedule_out_of_order_is_refused(text: str, message: str) -> None:
    stages = make_stages([], mini_batch_size=2)
    schedule = Schedule((DeviceOrder((0,), tuple(map(Task.parse, text.split()))),))
    with pytest.raises(StrategyError, match=message):
        check_schedule(schedule, stages)


def test_text_that_is_no_task_is_refused() -> None:
    assert Task.parse("2F0") == Task(2, Phase.FORWARD, 0)
    with pytest.raises(StrategyError, match="'2X0' is not a task"):
        Task.parse("2X0")
