"""Candidates: their variants, and the simulation that picks one of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from graphpipe.cluster import Cluster, Link
from graphpipe.cost import Profile
from graphpipe.estimate import estimate
from graphpipe.graph import ComputationGraph, Operator, Value
from graphpipe.planner.backtrack import Piece
from graphpipe.planner.base import PlanningProblem, scheduled
from graphpipe.planner.candidates import (
    AS_PLAYED,
    SIMULATED_PLANS,
    Candidate,
    best_simulated,
    simulated,
    variants,
    with_sizes_of_stages,
)
from graphpipe.planner.costs import Choice
from graphpipe.planner.draft import draft, stage_graph
from graphpipe.planner.sketch import Sketcher
from graphpipe.schedule.play import play
from graphpipe.stage import Recompute
from tests.planner.models import towers

ONE = Choice(1, Recompute.NONE)


def candidate(problem: PlanningProblem, *parts: tuple[int, ...], size: int = 8, replicas: int = 1) -> Candidate:
    """Stages of some operators, each on devices of its own."""
    pieces = [Piece(part, Choice(replicas, Recompute.NONE)) for part in parts]
    return Candidate(Sketcher(problem).sketch(draft(problem, pieces, size)), size)


def test_variants_are_the_plan_and_its_joins_and_forks_apart() -> None:
    # The tail of the second tower has the join, so the join waits for the first one.
    problem = towers(2, 2, num_devices=2)
    plan = draft(problem, [Piece((0, 1), ONE), Piece((2, 3, 4), ONE)], 8)
    found = list(variants(Sketcher(problem), plan, 8))
    assert [[(s.operators, s.group) for s in each.plan.stages] for each in found] == [
        [((0, 1), 0), ((2, 3, 4), 1)],
        [((0, 1), 0), ((2, 3), 1), ((4,), 1)],
    ]
    assert {each.micro_batch_size for each in found} == {8}


def test_joins_and_forks_are_also_divided_together() -> None:
    # 0 - 1 - 3 and 0 - 2 meet in 4. With 1, operator 0 keeps 2 waiting; with 2, operator 4 is kept waiting by 3.
    values = tuple(
        Value(name=f"v{u}", producer=f"op{u}", consumers=tuple(f"op{v}" for v in out), bytes_per_sample=4)
        for u, out in ((0, (1, 2)), (1, (3,)), (2, (4,)), (3, (4,)))
    )
    graph = ComputationGraph("two ways", tuple(Operator(name=f"op{i}") for i in range(5)), values)
    ones = np.ones((1, 5))
    profile = Profile(tuple(o.name for o in graph.operators), (1,), ones, ones, ones)
    cluster = Cluster.uniform(3, memory_bytes=10**9)
    problem = PlanningProblem(graph=graph, profile=profile, cluster=cluster, mini_batch_size=8)
    plan = draft(problem, [Piece((0, 1), ONE), Piece((2, 4), ONE), Piece((3,), ONE)], 4)
    found = [{s.operators for s in each.plan.stages} for each in variants(Sketcher(problem), plan, 4)]
    assert found == [
        {(0, 1), (2, 4), (3,)},
        {(0, 1), (2,), (4,), (3,)},
        {(0,), (1,), (2, 4), (3,)},
        {(0,), (1,), (2,), (4,), (3,)},
    ]


def test_a_plan_that_does_not_fit_is_not_simulated() -> None:
    # A stage of two operators takes 32 MB with Adam.
    problem = towers(1, 4, num_devices=2, memory_bytes=30 * 10**6)
    assert simulated(problem, candidate(problem, (0, 1), (2, 3, 4)), "test", 1) is None


def slow_links(memory_bytes: int = 10**10) -> PlanningProblem:
    """A chain whose messages take as long as a pass, so that a pipeline needs more samples in flight."""
    problem = towers(1, 3, num_devices=3, parameter_bytes=0, memory_bytes=memory_bytes)
    link = Link(latency_s=2.6e-3, bandwidth_bytes_per_s=1e12)
    return replace(problem, cluster=Cluster.uniform(3, memory_bytes=memory_bytes, inside_node=link))


def test_samples_in_flight_are_as_many_as_pay() -> None:
    problem = slow_links()
    plan = candidate(problem, (0,), (1,), (2, 3), size=1)
    found = simulated(problem, plan, "test", 1)
    assert found is not None
    closed = scheduled(problem, stage_graph(problem, plan.plan).stages, planner="test")
    assert found.estimate.iteration_s < 0.9 * estimate(closed).iteration_s
    assert found.estimate.iteration_s == pytest.approx(plan.sketch.played_s, rel=1e-9)
    assert found.estimate.iteration_s == estimate(found.strategy).iteration_s


def test_limits_that_were_fitted_on_a_beginning_are_wide_enough_for_the_whole() -> None:
    # Twelve samples are played instead of 128, and a round trip takes as long as some twenty.
    problem = replace(towers(1, 2, num_devices=2, parameter_bytes=0, mini_batch_size=128), micro_batch_sizes=(1,))
    link = Link(latency_s=40e-3, bandwidth_bytes_per_s=1e12)
    problem = replace(problem, cluster=Cluster.uniform(2, memory_bytes=10**10, inside_node=link))
    plan = candidate(problem, (0,), (1, 2), size=1)
    sketch = plan.sketch
    assert max(sketch.fitted) <= 12
    widest_s = play(sketch.timed, sketch.rounds, sketch.most).makespan_s
    assert play(sketch.timed, sketch.rounds, sketch.fitted).makespan_s > 1.2 * widest_s
    found = simulated(problem, plan, "test", 1)
    assert found is not None
    assert found.estimate.iteration_s == pytest.approx(widest_s, rel=AS_PLAYED)
    # No wider than that takes: far from all samples.
    assert found.estimate.memory[0].activations < 0.5 * 128 * 4 * 4096


def test_samples_in_flight_are_fewer_where_memory_does_not_allow_more() -> None:
    # The sketch believes that there is room, the walk through the program finds that there is not.
    plan = candidate(slow_links(), (0,), (1,), (2, 3), size=1)
    wide = simulated(slow_links(), plan, "test", 1)
    assert wide is not None
    tight = slow_links(int(max(wide.estimate.peak_bytes)) - 1)
    found = simulated(tight, plan, "test", 1)
    assert found is not None
    assert max(found.estimate.peak_bytes) <= tight.cluster.devices[0].memory_bytes
    assert found.estimate.iteration_s > wide.estimate.iteration_s


def test_the_best_is_chosen_by_simulation_whatever_its_rank() -> None:
    problem = towers(1, 4, num_devices=2)
    plans = [candidate(problem, *parts) for parts in (((0,), (1, 2, 3, 4)), ((0, 1, 2), (3, 4)), ((0, 1), (2, 3, 4)))]
    for ranked in (plans, plans[::-1], plans[1:] + plans[:1]):
        best = best_simulated(problem, ranked, "test", 1)
        assert best is not None
        assert best.candidate is plans[2]


def test_no_more_plans_are_simulated_than_pay() -> None:
    # Ranked from the worst to the best: each is better than the one before it, so only their number ends it.
    problem = towers(1, 6, num_devices=3)
    parts = [
        ((0,), (1, 2, 3, 4, 5, 6)),
        ((0, 1), (2, 3, 4, 5, 6)),
        ((0, 1, 2), (3, 4, 5, 6)),
        ((0, 1), (2, 3), (4, 5, 6)),
    ]
    ranked = [candidate(problem, *each, size=1) for each in (((0, 1, 2, 3, 4, 5, 6),), *parts)]
    assert len(ranked) == SIMULATED_PLANS + 1
    found = best_simulated(problem, ranked, "test", 1)
    assert found is not None
    assert found.candidate is ranked[SIMULATED_PLANS - 1]


def test_plans_that_do_not_fit_do_not_count() -> None:
    # The second one is guessed to be faster than the first one, but every device would hold all parameters.
    problem = towers(1, 4, num_devices=2, memory_bytes=60 * 10**6)
    slow, best = candidate(problem, (0,), (1, 2, 3, 4)), candidate(problem, (0, 1), (2, 3, 4))
    too_large = candidate(problem, (0, 1, 2, 3, 4), replicas=2)
    assert too_large.sketch.played_s < slow.sketch.played_s
    assert best_simulated(problem, [too_large], "test", 1) is None
    found = best_simulated(problem, [slow] + [too_large] * SIMULATED_PLANS + [best], "test", 1)
    assert found is not None
    assert found.candidate is best


def test_sizes_of_stages_change_by_a_divisor_and_stay_whole_where_samples_mix() -> None:
    problem = towers(1, 2, num_devices=4, mini_batch_size=12, is_batch_wise=True, sizes=(1, 4, 12))
    pieces = [Piece((0,), Choice(3, Recompute.NONE)), Piece((1, 2), ONE)]
    plan = Candidate(Sketcher(problem).sketch(draft(problem, pieces, 4)), 4)
    assert [(s.operators, s.micro_batch_size) for s in plan.plan.stages] == [((0,), 4), ((1,), 4), ((2,), 12)]
    found = [
        tuple(s.micro_batch_size for s in each.plan.stages) for each in with_sizes_of_stages(Sketcher(problem), plan)
    ]
    # One stage after the other, down and up; three replicas have a sample each.
    assert found == [(3, 4, 12), (6, 4, 12), (4, 3, 12), (4, 6, 12)]
    smallest = Candidate(Sketcher(problem).sketch(draft(problem, pieces, 3)), 3)
    found = [
        tuple(s.micro_batch_size for s in each.plan.stages)
        for each in with_sizes_of_stages(Sketcher(problem), smallest)
    ]
    assert found == [(4, 3, 12), (3, 2, 12), (3, 4, 12)]
