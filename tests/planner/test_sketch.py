"""What a draft is reduced to, against the stage graph that is made of it and its simulation."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from graphpipe.planner.base import PlanningProblem
from graphpipe.planner.candidates import AS_PLAYED, Candidate, simulated
from graphpipe.planner.draft import Draft, stage_graph
from graphpipe.planner.graphpipe import GraphPipePlanner
from graphpipe.schedule import ModelCosts, device_groups
from graphpipe.schedule.play import play, timed_stages
from graphpipe.stage import StageOrder
from graphpipe.strategy import Strategy
from tests.planner.models import towers
from tests.planner.sketches import long_plans, sketch
from tests.strategies import computation_graphs, random_edges, strategies


@given(strategies(computation_graphs(random_edges(7))))
@settings(max_examples=60, deadline=None)
def test_a_sketch_has_the_times_of_the_stage_graph(strategy: Strategy) -> None:
    assume(strategy.stages.order is StageOrder.GRAPH)
    problem = PlanningProblem(
        graph=strategy.graph,
        profile=strategy.profile,
        cluster=strategy.cluster,
        mini_batch_size=strategy.mini_batch_size,
        optimizer=strategy.optimizer,
    )
    found = sketch(problem, strategy.stages)
    stages = stage_graph(problem, Draft(found.plan.stages), found.devices)
    wanted = timed_stages(stages, ModelCosts(problem.cost_model, stages))
    timed = found.timed
    assert (timed.sizes, timed.has_backward) == (list(wanted.sizes), list(wanted.has_backward))
    assert [list(held) for held in timed.groups] == [list(held) for _, held in device_groups(stages)]
    for ours, theirs in ((timed.pass_s, wanted.pass_s), (timed.last_pass_s, wanted.last_pass_s)):
        assert list(ours[0]) == pytest.approx(list(theirs[0]))
        # What has no backward pass does not take time for one, whatever is written there.
        has = [x for x, each in enumerate(timed.has_backward) if each]
        assert [ours[1][x] for x in has] == pytest.approx([theirs[1][x] for x in has])
    assert [(e.source, e.target, e.returns) for e in timed.edges] == [
        (e.source, e.target, e.returns) for e in wanted.edges
    ]
    for name in ("sent_s", "returned_s", "latency_s"):
        assert [getattr(e, name) for e in timed.edges] == pytest.approx([getattr(e, name) for e in wanted.edges]), name


@pytest.mark.parametrize("num_devices", [2, 5])
def test_the_beginning_of_a_long_step_tells_how_long_it_takes(num_devices: int) -> None:
    problem = replace(towers(2, 6, num_devices=num_devices, mini_batch_size=1024), micro_batch_sizes=(2,))
    strategy = GraphPipePlanner().plan(problem)
    found = sketch(problem, strategy.stages)
    assert found.played_tasks < 2 * sum(found.timed.counts)
    # The figures of a plan are those of the whole simulation; only its rank among others comes from the beginning.
    assert found.played_s == pytest.approx(strategy.notes["iteration_s"], rel=0.02)


@given(st.lists(long_plans(), min_size=9, max_size=9))
@settings(max_examples=10, deadline=None)
def test_the_beginning_of_random_plans_tells_how_long_they_take(
    drawn: list[tuple[PlanningProblem, Candidate]],
) -> None:
    # A guess, no law: the pipelines of a few take longer to come to repeat themselves than what is played of them. Of
    # 4,000 such plans more than 98 in 100 are exact; one is off by 10 %, and one is 19 % slower with limits that were
    # fitted on its beginning.
    played, fitted = [], []
    for _, plan in drawn:
        found = plan.sketch
        whole_s = play(found.timed, found.rounds, found.most).makespan_s
        played.append(abs(found.played_s / whole_s - 1))
        limited = play(found.timed, found.rounds, found.fitted)
        assert limited.is_complete(found.timed)
        fitted.append(limited.makespan_s / whole_s - 1)
    assert max(played) < 0.25
    assert max(fitted) < 0.5
    assert sorted(played)[4] < 0.01
    assert sorted(fitted)[4] < 0.01


@given(long_plans())
@settings(max_examples=30, deadline=None)
def test_a_simulated_plan_is_as_fast_as_with_all_samples_in_flight(drawn: tuple[PlanningProblem, Candidate]) -> None:
    problem, plan = drawn
    assume(problem.cluster.devices[0].memory_bytes == 10**9)
    whole_s = play(plan.sketch.timed, plan.sketch.rounds, plan.sketch.most).makespan_s
    found = simulated(problem, plan, "test", 1)
    assert found is not None
    assert found.estimate.iteration_s <= whole_s * (1 + AS_PLAYED)
