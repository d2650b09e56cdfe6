"""All plans of small problems: that there are no others, that none is left out wrongly, and when there are too many."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpipe.cluster import Cluster
from graphpipe.estimate import estimate
from graphpipe.planner import exhaustive
from graphpipe.planner.base import PlanningProblem
from graphpipe.planner.candidates import Candidate, simulated
from graphpipe.planner.exhaustive import AllPlans, Bounds, Effort
from graphpipe.planner.graphpipe import GraphPipePlanner
from graphpipe.planner.sketch import Sketcher
from graphpipe.schedule import ModelCosts, kfkb
from graphpipe.stage import Recompute, StageGraph
from graphpipe.strategy import Strategy
from tests.planner.models import towers
from tests.planner.oracle import every_plan, loads
from tests.planner.sketches import drafted
from tests.strategies import LINKS, computation_graphs, problems, profiles, random_edges, stage_graphs

MANY = Effort(10**12, lambda: False)


@given(problems(computation_graphs(random_edges(4)), max_devices=3), st.data())
@settings(max_examples=30, deadline=None)
def test_all_plans_are_those_of_brute_force(problem: PlanningProblem, data: st.DataObject) -> None:
    size = data.draw(st.sampled_from(problem.micro_batch_sizes))
    wanted = list(every_plan(problem, size))
    found = list(AllPlans(problem, size, (Recompute.NONE,), MANY).below(float("inf")))
    assert len(found) == len(set(found)) == len(wanted)
    assert set(found) == set(wanted)
    limit_s = data.draw(st.sampled_from([max(loads(problem, plan).values()) for plan in wanted])) * (1 + 1e-9)
    below = set(AllPlans(problem, size, (Recompute.NONE,), MANY).below(limit_s))
    assert below == {plan for plan in wanted if max(loads(problem, plan).values()) < limit_s}


def test_every_stage_may_recompute_but_those_that_mix_samples() -> None:
    problem = towers(1, 2, num_devices=1, is_batch_wise=True)
    plans = list(AllPlans(problem, 8, (Recompute.NONE, Recompute.ALL), MANY).below(float("inf")))
    chosen = {tuple((len(s.operators), s.choice.recompute) for s in plan.stages) for plan in plans}
    either = (Recompute.NONE, Recompute.ALL)
    assert chosen == {((2, a), (1, Recompute.NONE)) for a in either} | {
        ((1, a), (1, b), (1, Recompute.NONE)) for a in either for b in either
    }


@given(stage_graphs(computation_graphs(random_edges(6)), equal_sizes=True), st.data())
@settings(max_examples=200, deadline=None)
def test_no_schedule_beats_the_bound(stages: StageGraph, data: st.DataObject) -> None:
    profile = data.draw(profiles(stages.graph))
    cluster = Cluster.uniform(
        max(stages.devices) + 1,
        memory_bytes=10**9,
        devices_per_node=data.draw(st.sampled_from((None, 2))),
        inside_node=data.draw(st.sampled_from(LINKS)),
        between_nodes=data.draw(st.sampled_from(LINKS)),
    )
    problem = PlanningProblem(
        graph=stages.graph, profile=profile, cluster=cluster, mini_batch_size=stages.mini_batch_size
    )
    schedule = kfkb(stages, ModelCosts(problem.cost_model, stages), k=data.draw(st.integers(1, 2)))
    strategy = Strategy(stages, schedule, profile, cluster, problem.optimizer, "random", {})
    assert Bounds(problem).least_s(drafted(stages)) <= estimate(strategy).iteration_s * (1 + 1e-12)


def test_the_bound_of_a_balanced_pipeline_is_what_it_takes() -> None:
    # Two equal stages: the first samples come down, and the last gradient goes back up.
    problem = replace(towers(1, 2, num_devices=2, parameter_bytes=0), micro_batch_sizes=(8,))
    plan = next(
        plan
        for plan in AllPlans(problem, 8, (Recompute.NONE,), MANY).below(float("inf"))
        if [stage.operators for stage in plan.stages] == [(0,), (1, 2)] and plan.num_devices == 2
    )
    found = simulated(problem, Candidate(Sketcher(problem).sketch(plan), 8), "test", 1)
    assert found is not None
    assert Bounds(problem).least_s(plan) == pytest.approx(found.estimate.iteration_s, rel=1e-9)


def test_what_is_weighed_is_better_than_what_the_search_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    # A plan with a slow search: every device may only hold a stage that the tables of fewest devices prefer.
    problem = towers(2, 2, num_devices=3, mini_batch_size=4, sizes=(1, 2, 4))
    weighed = GraphPipePlanner().plan(problem).notes
    assert weighed["certificate"]["best_of_all_plans"] is True
    monkeypatch.setattr(exhaustive, "MOST_OPERATORS", 0)
    searched = GraphPipePlanner().plan(problem).notes
    assert searched["certificate"]["best_of_all_plans"] is None
    assert weighed["iteration_s"] <= searched["iteration_s"]


def test_nothing_is_claimed_where_plans_are_too_many_or_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = towers(2, 2, num_devices=3, mini_batch_size=4, sizes=(1, 2, 4))
    for planner in (GraphPipePlanner(time_limit_s=0.0), GraphPipePlanner(per_stage_micro_batches=True)):
        assert planner.plan(problem).notes["certificate"]["best_of_all_plans"] is None
    assert GraphPipePlanner().plan(towers(2, 4, num_devices=2)).notes["certificate"]["best_of_all_plans"] is None
    monkeypatch.setattr(exhaustive, "EFFORT", 1000)
    assert GraphPipePlanner().plan(problem).notes["certificate"]["best_of_all_plans"] is None
