"""The scheduler's own simulation against that of the program, and the limits that it finds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpipe.program import lower
from graphpipe.schedule import UniformCosts, fitted_limits, in_flight_limits, kfkb
from graphpipe.schedule.play import TimedStages, play, timed_stages
from graphpipe.simulator import simulate
from graphpipe.stage import StageGraph
from tests.stage_graphs import CHAIN_3, DIAMOND, TWO_TOWERS, make_stages

BY_SAMPLE = UniformCosts(0.0, 0.0, 1.0, 2.0)
EDGES = {"chain": CHAIN_3, "towers": TWO_TOWERS, "diamond": DIAMOND}


@st.composite
def stage_graphs(draw: st.DrawFn) -> StageGraph:
    edges = EDGES[draw(st.sampled_from(sorted(EDGES)))]
    count = 1 + max(max(pair) for pair in edges)
    sizes = draw(st.tuples(*(st.sampled_from((1, 2, 3, 4)),) * count))
    return make_stages(edges, mini_batch_size=draw(st.sampled_from((4, 12))), sizes=sizes)


@given(stage_graphs(), st.integers(1, 3), st.floats(0, 2), st.floats(0, 2))
def test_playing_takes_as_long_as_the_program(stages: StageGraph, k: int, fixed_s: float, per_sample_s: float) -> None:
    costs = UniformCosts(fixed_s, 1.0, per_sample_s, 2.0)
    rounds = (k,) * len(stages.stages)
    played = play(timed_stages(stages, costs), rounds, in_flight_limits(stages, k))
    simulated = simulate(lower(stages, kfkb(stages, costs, k=k)), costs)
    assert played.makespan_s == pytest.approx(simulated.makespan_s)


def unlimited_s(timed: TimedStages) -> float:
    return play(timed, (1,) * len(timed.sizes), (timed.mini_batch_size,) * len(timed.sizes)).makespan_s


@pytest.mark.parametrize(
    ("sizes", "limits", "makespan_s"),
    [((1, 2, 4), (12, 8, 4), 114), ((4, 2, 1), (12, 4, 1), 114), ((4, 4, 4), (12, 8, 4), 120)],
)
def test_unequal_sizes_need_no_more_than_this(
    sizes: tuple[int, ...], limits: tuple[int, ...], makespan_s: float
) -> None:
    timed = timed_stages(make_stages(CHAIN_3, mini_batch_size=32, sizes=sizes), BY_SAMPLE)
    found = fitted_limits(timed, (1, 1, 1))
    assert play(timed, (1, 1, 1), found).makespan_s == unlimited_s(timed) == makespan_s
    assert all(least <= most for least, most in zip(found, limits, strict=True))


@given(stage_graphs(), st.integers(1, 2))
@settings(max_examples=50)
def test_no_limit_can_be_lowered_without_a_longer_iteration(stages: StageGraph, k: int) -> None:
    timed = timed_stages(stages, BY_SAMPLE)
    rounds = (k,) * len(stages.stages)
    found = fitted_limits(timed, rounds)
    fitted_s = play(timed, rounds, found).makespan_s
    closed_s = play(timed, rounds, in_flight_limits(stages, k)).makespan_s
    assert fitted_s <= min(closed_s, play(timed, rounds, (timed.mini_batch_size,) * len(found)).makespan_s) * (1 + 1e-6)
    for x, limit in enumerate(found):
        lower_limit = limit - timed.sizes[x]
        if lower_limit >= rounds[x] * timed.sizes[x]:
            tried = play(timed, rounds, (*found[:x], lower_limit, *found[x + 1 :]))
            assert not tried.is_complete(timed) or tried.makespan_s > fitted_s


def test_room_pays_where_transfers_take_time() -> None:
    # Two stages, and a hop that takes as long as a pass: a round trip takes 6 and a pass there and back 2.
    stages = make_stages([(0, 1)], mini_batch_size=12)
    timed = timed_stages(stages, UniformCosts(1.0, 1.0))
    slow = replace(timed, edges=[replace(edge, latency_s=1.0) for edge in timed.edges])
    least = in_flight_limits(stages)
    found = fitted_limits(slow, (1, 1))
    assert least == (2, 1)
    assert found == (3, 1)
    assert play(slow, (1, 1), found).makespan_s < play(slow, (1, 1), least).makespan_s
