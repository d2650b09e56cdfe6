"""Cases of planning: never behind the baselines, odd costs and counts, what cannot fit, and large graphs."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from graphpipe.cluster import Cluster
from graphpipe.cost import Profile
from graphpipe.errors import PlanningError
from graphpipe.estimate import estimate
from graphpipe.graph import ComputationGraph, Operator, Parameter, Value
from graphpipe.planner.base import Planner, PlanningProblem
from graphpipe.planner.costs import RecomputePolicy
from graphpipe.planner.graphpipe import FEW_DOWNSETS, GraphPipePlanner, Objective
from graphpipe.planner.pipedream import PipeDreamPlanner
from graphpipe.planner.piper import PiperPlanner
from graphpipe.stage import Recompute
from graphpipe.strategy import Strategy
from tests.planner.models import towers
from tests.planner.oracle import check_strategy
from tests.strategies import computation_graphs, problems, random_edges, series_parallel_edges

PLANNERS: tuple[Planner, ...] = (GraphPipePlanner(), PipeDreamPlanner(), PiperPlanner())
# Seconds that large problems may take; they take a fraction of it, and a search that explodes takes far more.
LARGE_LIMIT_S = 30.0


@given(problems(computation_graphs(random_edges(7)), memory_bytes=(1000, 2000, 4000, 10**9)))
@settings(max_examples=60, deadline=None)
def test_never_slower_than_pipedream(problem: PlanningProblem) -> None:
    try:
        theirs = PipeDreamPlanner().plan(problem)
    except PlanningError:
        return
    # What fits as a chain fits for us.
    ours = GraphPipePlanner().plan(problem)
    assert estimate(ours).samples_per_s >= estimate(theirs).samples_per_s * (1 - 1e-9)


@given(problems(computation_graphs(series_parallel_edges(6)), memory_bytes=(1000, 2000, 4000, 10**9)))
@settings(max_examples=60, deadline=None)
def test_never_slower_than_piper_on_a_graph_with_few_downsets(problem: PlanningProblem) -> None:
    # In a larger graph, any difference of two downsets may be a stage of Piper's and not of ours: a whole branch with
    # the tail of another one, the join and what follows, say.
    try:
        theirs = PiperPlanner(max_downsets=FEW_DOWNSETS).plan(problem)
    except PlanningError:
        return
    # Piper may recompute where it likes, so we may, too.
    ours = GraphPipePlanner(recompute=RecomputePolicy.AUTO).plan(problem)
    assert estimate(ours).samples_per_s >= estimate(theirs).samples_per_s * (1 - 1e-9)
    # By default we recompute only where nothing fits otherwise: the exception is a plan of Piper's that recomputes.
    if all(stage.recompute is Recompute.NONE for stage in theirs.stages.stages):
        assert estimate(GraphPipePlanner().plan(problem)).samples_per_s >= estimate(theirs).samples_per_s * (1 - 1e-9)


def with_costs(problem: PlanningProblem, forward_s_by_size: dict[int, float]) -> PlanningProblem:
    """Return the problem with these seconds of a forward pass for every operator; a backward pass takes twice that."""
    names = tuple(o.name for o in problem.graph.operators)
    column = np.array(list(forward_s_by_size.values()))[:, None]
    forward_s = column * np.ones((1, len(names)))
    saved_bytes = (
        np.array([o.saved_bytes for o in problem.graph.operators]) * np.array(list(forward_s_by_size))[:, None]
    )
    sizes = tuple(forward_s_by_size)
    return replace(problem, profile=Profile(names, sizes, forward_s, 2 * forward_s, saved_bytes))


def local_sizes(strategy: Strategy) -> set[int]:
    """Return the samples that replicas of the stages take at a time."""
    return {strategy.stages.local_size(x) for x in range(len(strategy.stages.stages))}


def test_a_cost_that_jumps_is_looked_up_and_never_scaled() -> None:
    # Four samples fill the processor; from five on it works in two rounds, and worse.
    jumps = {1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0, 5: 4.0, 6: 4.0, 8: 4.0, 11: 8.0, 16: 8.0, 32: 16.0}
    for planner in PLANNERS:
        strategy = planner.plan(with_costs(towers(2, 4, num_devices=4, parameter_bytes=0), jumps))
        check_strategy(strategy, estimate(strategy))
        assert local_sizes(strategy) == {4}, planner.name


def test_a_cost_that_falls_with_the_samples_is_believed() -> None:
    # Eight samples meet a faster kernel than four.
    odd = {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0, 5: 5.0, 6: 6.0, 8: 2.0, 11: 11.0, 16: 16.0, 32: 32.0}
    strategy = GraphPipePlanner().plan(with_costs(towers(2, 4, num_devices=4, parameter_bytes=0), odd))
    check_strategy(strategy, estimate(strategy))
    assert local_sizes(strategy) == {8}


def test_where_all_sizes_cost_the_same_only_branches_gain() -> None:
    # A pass takes 1 s forward and 2 s back, over one sample or over all of them. Towers of 4 and a loss.
    flat = dict.fromkeys((1, 2, 3, 4, 5, 6, 8, 11, 16, 32), 1.0)
    problem = with_costs(towers(2, 4, num_devices=4), flat)
    assert GraphPipePlanner().plan(problem).notes["iteration_s"] == pytest.approx(3 * (4 + 1), rel=1e-3)
    for planner in (PipeDreamPlanner(), PiperPlanner()):
        assert planner.plan(problem).notes["iteration_s"] == pytest.approx(3 * (2 * 4 + 1))


@pytest.mark.parametrize("num_devices", [3, 5, 6, 7, 11])
def test_devices_that_do_not_divide_the_work_are_still_worth_having(num_devices: int) -> None:
    problem = towers(2, 5, num_devices=num_devices)
    fewer = replace(problem, cluster=Cluster.uniform(num_devices - 1, memory_bytes=10**10))
    for planner in PLANNERS:
        strategy = planner.plan(problem)
        check_strategy(strategy, estimate(strategy))
        assert strategy.notes["iteration_s"] <= planner.plan(fewer).notes["iteration_s"], planner.name
    # The work of one device, spread over this many, is what the plan is near to.
    ours = GraphPipePlanner().plan(problem)
    assert ours.notes["certificate"]["ratio"] < 1.7


@pytest.mark.parametrize(("num_towers", "length", "num_devices"), [(1, 1, 8), (2, 1, 16), (3, 2, 32)])
def test_more_devices_than_operators(num_towers: int, length: int, num_devices: int) -> None:
    problem = towers(num_towers, length, num_devices=num_devices, mini_batch_size=8, sizes=(1, 2, 3, 4, 8))
    for planner in PLANNERS:
        strategy = planner.plan(problem)
        check_strategy(strategy, estimate(strategy))  # No stage is empty, none has more replicas than samples.
        used = set(strategy.stages.devices)
        names = [device.name for d, device in enumerate(problem.cluster.devices) if d not in used]
        assert strategy.notes["idle_devices"] == names, planner.name
        assert all(strategy.notes["idle_share"][d] == 1 for d in range(num_devices) if d not in used)
        assert len(used) >= min(num_devices, num_towers), planner.name


def test_branches_without_parameters_share_a_device_with_those_that_have_some() -> None:
    # Two heavy branches, too large to be worth a replica, and two that only rearrange their input.
    heavy = [Operator(name=f"heavy{i}", parameters=(Parameter(f"w{i}", 40_000_000),)) for i in range(2)]
    light = [Operator(name=f"light{i}") for i in range(2)]
    operators = (*heavy, *light, Operator(name="join", parameters=(Parameter("w", 4000),)))
    values = tuple(
        Value(name=f"{o.name}.out", producer=o.name, consumers=("join",), bytes_per_sample=4096) for o in operators[:-1]
    )
    graph = ComputationGraph("mixed", operators, values)
    seconds = np.array([1e-2, 1e-2, 1e-4, 1e-4, 2e-4]) * np.array([1.0, 2.0, 4.0, 8.0])[:, None]
    profile = Profile(tuple(o.name for o in operators), (1, 2, 4, 8), seconds, 2 * seconds, 0 * seconds)
    cluster = Cluster.uniform(2, memory_bytes=10**9)
    problem = PlanningProblem(graph=graph, profile=profile, cluster=cluster, mini_batch_size=8)
    strategy = GraphPipePlanner().plan(problem)
    check_strategy(strategy, estimate(strategy))
    homes = {name: stage.devices for stage in strategy.stages.stages for name in stage.operators}
    assert homes["heavy0"] != homes["heavy1"]
    # Two devices at most halve the work, and light branches are not in the way of that.
    assert strategy.notes["certificate"]["ratio"] < 1.1


@pytest.mark.parametrize(("num_towers", "length"), [(32, 8), (1, 1000)])
def test_a_large_graph_is_planned_well_within_a_minute(num_towers: int, length: int, tmp_path: Path) -> None:
    problem = replace(towers(num_towers, length, num_devices=32, parameter_bytes=1_000_000), micro_batch_sizes=(2, 8))
    start_s = time.process_time()
    strategy = GraphPipePlanner().plan(problem)
    assert time.process_time() - start_s < LARGE_LIMIT_S
    check_strategy(strategy, estimate(strategy))
    assert strategy.notes["certificate"]["ratio"] < 2.5
    # A time limit returns the best so far, and that plan is whole.
    limited = GraphPipePlanner(time_limit_s=0.0).plan(problem)
    check_strategy(limited, estimate(limited))
    assert len(limited.notes["iteration_s_by_micro_batch_size"]) < len(problem.micro_batch_sizes)
    # A saved plan is read, not searched again: it still is what it was when the planner has become useless.
    strategy.save(tmp_path / "strategy.json")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GraphPipePlanner, "plan", None)
        loaded = Strategy.load(tmp_path / "strategy.json")
    assert loaded.stages.stages == strategy.stages.stages
    assert estimate(loaded).iteration_s == strategy.notes["iteration_s"]


@pytest.mark.parametrize("planner", PLANNERS, ids=lambda planner: planner.name)
def test_a_device_of_a_megabyte_is_refused_with_what_would_fit(planner: Planner) -> None:
    problem = towers(2, 4, num_devices=2, memory_bytes=10**6)
    with pytest.raises(PlanningError) as error:
        planner.plan(problem)
    message = str(error.value)
    # 4 MB of parameters, as much of gradients, twice that for Adam.
    assert re.search(r"operator 'tower0\.0' alone needs 16\.\d MB of the 1 MB of a device", message)
    assert "parameters 4 MB, gradients 4 MB, optimizer 8 MB, activations" in message
    # What would fit does.
    found = re.search(r"What would fit: 2 devices of (\d+(?:\.\d+)?) (MB|GB)", message)
    assert found, message
    memory_bytes = float(found[1]) * {"MB": 1e6, "GB": 1e9}[found[2]]
    enough = replace(problem, cluster=problem.cluster.with_memory(int(memory_bytes)))
    strategy = planner.plan(enough)
    check_strategy(strategy, estimate(strategy))


def test_out_of_time_a_plan_is_found_for_a_model_that_no_single_device_holds() -> None:
    small = Cluster.uniform(6, memory_bytes=40 * 10**6)
    problem = replace(towers(2, 4, num_devices=2, memory_bytes=40 * 10**6), cluster=small)
    assert len(GraphPipePlanner(time_limit_s=0.0).plan(problem).stages.stages) > 1


def test_a_size_is_not_given_up_for_a_guess_that_leaves_out_waiting() -> None:
    problem = towers(1, 4, num_devices=3, value_bytes=10**6, memory_bytes=201 * 10**6, overhead_s=0)
    theirs = PipeDreamPlanner().plan(problem).notes["iteration_s"]
    assert GraphPipePlanner().plan(problem).notes["iteration_s"] <= theirs * (1 + 1e-9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 0}, "at least one pass, got k = 0"),
        ({"time_limit_s": -1.0}, "at least 0 s, got -1.0"),
        ({"per_stage_micro_batches": True, "objective": Objective.BOTTLENECK}, "no difference to the bottleneck"),
    ],
)
def test_options_without_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GraphPipePlanner(**options)
