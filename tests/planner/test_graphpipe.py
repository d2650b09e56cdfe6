"""GraphPipe's planner: what it returns is valid, as good as brute force, and never worse than a chain."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, reject, settings

from graphpipe.cluster import Cluster
from graphpipe.cost import SGD
from graphpipe.errors import PlanningError
from graphpipe.estimate import estimate
from graphpipe.graph.series_parallel import decompose
from graphpipe.planner.base import PlanningProblem, divisors
from graphpipe.planner.candidates import Candidate, simulated
from graphpipe.planner.costs import RecomputePolicy
from graphpipe.planner.graphpipe import GraphPipePlanner, Objective
from graphpipe.planner.layout import lay_out, line
from graphpipe.planner.operators import OperatorTable
from graphpipe.planner.pipedream import PipeDreamPlanner
from graphpipe.planner.search import NEAR, PRECISION, Search, make_setting
from graphpipe.planner.sketch import Sketcher
from graphpipe.stage import Recompute
from graphpipe.strategy import Strategy
from tests.planner.models import towers
from tests.planner.oracle import bottleneck_s, check_strategy, every_plan, loads
from tests.planner.sketches import drafted
from tests.strategies import computation_graphs, problems, random_edges, series_parallel_edges

# Times that differ by less are the same.
SAME = 1e-9


@given(problems(computation_graphs(random_edges(7)), memory_bytes=(1000, 2000, 10**9)))
@settings(max_examples=60, deadline=None)
def test_every_strategy_is_valid(problem: PlanningProblem) -> None:
    try:
        strategy = GraphPipePlanner().plan(problem)
    except PlanningError:
        return
    check_strategy(strategy, estimate(strategy))
    assert json.loads(json.dumps(strategy.to_json()["notes"])) == strategy.notes
    assert Strategy.from_json(json.loads(json.dumps(strategy.to_json()))).stages.stages == strategy.stages.stages


@given(problems(computation_graphs(random_edges(5)), max_devices=3, memory_bytes=(1000, 2000, 10**9)))
@settings(max_examples=60, deadline=None)
def test_the_iteration_time_equals_that_of_brute_force(problem: PlanningProblem) -> None:
    try:
        strategy = GraphPipePlanner(recompute=RecomputePolicy.NEVER).plan(problem)
    except PlanningError:
        reject()
    assume(strategy.notes["certificate"]["best_of_all_plans"])
    found_s = strategy.notes["iteration_s"]
    sketcher = Sketcher(problem)
    reached = False
    for size in problem.micro_batch_sizes:
        for plan in every_plan(problem, size):
            reached |= plan == drafted(strategy.stages)
            # The others take longer on one device alone.
            if max(loads(problem, plan).values()) < found_s * (1 - SAME):
                tried = simulated(problem, Candidate(sketcher.sketch(plan), size), "brute force", 1)
                assert tried is None or tried.estimate.iteration_s >= found_s * (1 - SAME)
    assert reached


@given(problems(computation_graphs(random_edges(5)), max_devices=3))
@settings(max_examples=60, deadline=None)
def test_the_bottleneck_equals_that_of_brute_force(problem: PlanningProblem) -> None:
    one_node = Cluster.uniform(len(problem.cluster), memory_bytes=10**9, inside_node=problem.cluster.inside_node)
    problem = replace(problem, cluster=one_node)
    strategy = GraphPipePlanner(objective=Objective.BOTTLENECK).plan(problem)
    assume(strategy.notes["certificate"]["best_of_all_plans"])
    plans = (plan for size in problem.micro_batch_sizes for plan in every_plan(problem, size))
    wanted_s = min(bottleneck_s(problem, plan) for plan in plans)
    assert bottleneck_s(problem, drafted(strategy.stages)) == pytest.approx(wanted_s, rel=SAME, abs=1e-15)


def least_bottlenecks_s(problem: PlanningProblem, size: int) -> list[float]:
    """Return the least bottleneck with the graph in its own shape and in line, for a micro-batch size."""
    graph, table = problem.graph, OperatorTable(problem)
    found = []
    for layout in (lay_out(graph, decompose(graph), table), line(range(len(graph.operators)))):
        search = Search(make_setting(table, layout, size, (Recompute.NONE,), 1), layout)
        least_s = search.least_target_s(0.0, search.slowest_s())
        assert least_s is not None
        found.append(least_s * search.setting.num_micro_batches)
    return found


def test_the_bottleneck_is_that_of_the_better_layout() -> None:
    # Four towers divide among eight devices, and the shape is as good as the line; among seven they do not.
    even, odd = (replace(towers(4, 5, num_devices=count), micro_batch_sizes=(4,)) for count in (8, 7))
    shaped_s, in_line_s = least_bottlenecks_s(even, 4)
    assert shaped_s == pytest.approx(in_line_s, rel=PRECISION)
    strategy = GraphPipePlanner(objective=Objective.BOTTLENECK).plan(even)
    assert bottleneck_s(even, drafted(strategy.stages)) <= shaped_s * (1 + PRECISION)
    assert strategy.stages.depth < len(strategy.stages.stages)

    shaped_s, in_line_s = least_bottlenecks_s(odd, 4)
    assert in_line_s < shaped_s * (1 - NEAR)
    strategy = GraphPipePlanner(objective=Objective.BOTTLENECK).plan(odd)
    assert bottleneck_s(odd, drafted(strategy.stages)) <= in_line_s * (1 + PRECISION)


@given(problems(computation_graphs(random_edges(7)), max_devices=4))
@settings(max_examples=30, deadline=None)
def test_no_plan_is_worse_than_a_chain(problem: PlanningProblem) -> None:
    ours = GraphPipePlanner().plan(problem)
    chain = PipeDreamPlanner().plan(problem)
    assert estimate(ours).iteration_s <= chain.notes["iteration_s"] * 1.001


@given(problems(computation_graphs(random_edges(6)), max_devices=3))
@settings(max_examples=20, deadline=None)
def test_the_same_problem_has_the_same_plan(problem: PlanningProblem) -> None:
    first, second = GraphPipePlanner().plan(problem), GraphPipePlanner().plan(problem)
    assert first.stages.stages == second.stages.stages
    assert first.schedule == second.schedule


@given(problems(computation_graphs(random_edges(7)), max_devices=4))
@settings(max_examples=40, deadline=None)
def test_no_plan_beats_the_lower_bound(problem: PlanningProblem) -> None:
    notes = GraphPipePlanner().plan(problem).notes
    assert notes["certificate"]["ratio"] >= 1 - 1e-9


def test_two_towers_with_an_exact_contrastive_loss_run_side_by_side() -> None:
    strategy = GraphPipePlanner().plan(towers(2, 17, num_devices=2, is_batch_wise=True))
    homes = {stage.operators[0]: stage.devices for stage in strategy.stages.stages}
    assert [len(stage.operators) for stage in strategy.stages.stages] == [17, 17, 1]
    assert homes["tower0.0"] != homes["tower1.0"]
    assert homes["loss"] in (homes["tower0.0"], homes["tower1.0"])
    # 34 operators of 3 ms a sample over two devices, and little more.
    assert strategy.notes["iteration_s"] < 1.02 * 34 * 3e-3 * 32 / 2


def test_two_towers_on_four_devices_use_them_all() -> None:
    strategy = GraphPipePlanner().plan(towers(2, 17, num_devices=4, is_batch_wise=True))
    assert strategy.stages.devices == (0, 1, 2, 3)
    assert strategy.stages.depth <= 3
    assert strategy.notes["iteration_s"] < 1.3 * 34 * 3e-3 * 32 / 4


def test_a_light_join_waits_alone() -> None:
    # The tail of one tower must not wait for the other tower.
    strategy = GraphPipePlanner().plan(replace(towers(2, 4, num_devices=2), micro_batch_sizes=(4,)))
    assert [len(stage.operators) for stage in strategy.stages.stages] == [4, 4, 1]
    assert strategy.stages.depth == 2


def test_fourteen_small_branches_share_eight_devices() -> None:
    strategy = GraphPipePlanner().plan(towers(14, 2, num_devices=8, parameter_bytes=0))
    assert strategy.notes["certificate"]["ratio"] < 1.35


def test_costs_that_hardly_grow_with_the_samples_make_large_micro_batches() -> None:
    problem = towers(2, 6, num_devices=2, seconds=1e-5, overhead_s=1e-2)
    strategy = GraphPipePlanner().plan(problem)
    assert max(stage.micro_batch_size for stage in strategy.stages.stages) == 32


def test_more_devices_than_operators_become_replicas_or_stay_idle() -> None:
    problem = towers(1, 1, num_devices=7, mini_batch_size=4, parameter_bytes=0, sizes=(1, 2, 4))
    strategy = GraphPipePlanner().plan(problem)
    assert all(stage.operators for stage in strategy.stages.stages)
    assert len(strategy.stages.devices) >= 4
    idle = [f"cpu{d}" for d in range(7) if d not in strategy.stages.devices]
    assert strategy.notes["idle_devices"] == idle


def test_work_that_seven_devices_do_not_divide() -> None:
    strategy = GraphPipePlanner().plan(towers(2, 5, num_devices=7))
    check_strategy(strategy, estimate(strategy))
    assert strategy.notes["certificate"]["ratio"] < 1.6


def test_replicas_stay_inside_a_node() -> None:
    problem = replace(towers(4, 6, num_devices=8), micro_batch_sizes=(8,))
    cluster = Cluster.uniform(8, memory_bytes=10**10, devices_per_node=2)
    strategy = GraphPipePlanner().plan(replace(problem, cluster=cluster))
    assert {len(stage.devices) for stage in strategy.stages.stages} == {2}
    for stage in strategy.stages.stages:
        assert len({cluster.devices[d].node for d in stage.devices}) == 1


def test_recomputation_is_tried_when_nothing_fits_without() -> None:
    problem = towers(2, 6, num_devices=2, value_bytes=10**6, memory_bytes=430 * 10**6, is_batch_wise=True)
    with pytest.raises(PlanningError):
        GraphPipePlanner(recompute=RecomputePolicy.NEVER).plan(problem)
    strategy = GraphPipePlanner().plan(problem)
    assert any(stage.recompute is Recompute.ALL for stage in strategy.stages.stages)
    check_strategy(strategy, estimate(strategy))


def test_nothing_is_recomputed_for_nothing() -> None:
    strategy = GraphPipePlanner(recompute=RecomputePolicy.AUTO).plan(towers(2, 6, num_devices=2))
    assert all(stage.recompute is Recompute.NONE for stage in strategy.stages.stages)


def test_an_operator_that_cannot_fit_is_named() -> None:
    problem = towers(2, 4, num_devices=2, memory_bytes=10**6, optimizer=SGD)
    with pytest.raises(PlanningError) as error:
        GraphPipePlanner().plan(problem)
    message = str(error.value)
    # 4 MB of parameters and as much of gradients, 16 kB saved, 4 kB received by all but the first of a tower.
    assert "operator 'tower0.0' alone needs 8.26 MB of the 1 MB of a device" in message
    assert "parameters 4 MB, gradients 4 MB, optimizer 0 B, activations 16.4 kB" in message
    assert "7 more operators are too large" in message
    assert "What would fit: 2 devices of" in message


def test_a_model_that_fits_nowhere_as_a_whole_says_what_would() -> None:
    problem = towers(2, 4, num_devices=2, memory_bytes=40 * 10**6)
    with pytest.raises(PlanningError, match=r"2 devices of 40 MB cannot hold 'towers'.*devices of 40 MB") as error:
        GraphPipePlanner().plan(problem)
    # What it says is true.
    count = int(str(error.value).split("or ")[1].split()[0])
    assert count > 2
    GraphPipePlanner().plan(replace(problem, cluster=Cluster.uniform(count, memory_bytes=40 * 10**6)))


def test_an_indivisible_micro_batch_is_refused() -> None:
    with pytest.raises(PlanningError, match="micro-batches of 5 do not divide a mini-batch of 32; sizes that do: 1, 2"):
        replace(towers(1, 2, num_devices=1), micro_batch_sizes=(5,))


def test_every_divisor_is_never_worse() -> None:
    problem = towers(2, 5, num_devices=4, mini_batch_size=24)
    few = GraphPipePlanner().plan(problem).notes["iteration_s"]
    many = GraphPipePlanner().plan(replace(problem, micro_batch_sizes=divisors(24))).notes["iteration_s"]
    assert many <= few * 1.001


def test_a_time_limit_returns_the_best_so_far() -> None:
    problem = towers(4, 24, num_devices=16, mini_batch_size=128, sizes=(1, 8, 32, 128))
    start = time.process_time()
    strategy = GraphPipePlanner(time_limit_s=0.0).plan(problem)
    limited_s = time.process_time() - start
    check_strategy(strategy, estimate(strategy))
    assert len(strategy.notes["iteration_s_by_micro_batch_size"]) == 1
    assert limited_s < 10


def test_rounds_of_several_passes_are_scheduled() -> None:
    problem = replace(towers(1, 8, num_devices=2), micro_batch_sizes=(2,))
    strategy = GraphPipePlanner(k=2).plan(problem)
    check_strategy(strategy, estimate(strategy))
    assert strategy.stages.depth == 2
    last = next(order for order in strategy.schedule.orders if order.devices == strategy.stages.stages[-1].devices)
    assert " ".join(map(str, last.tasks[:4])) == "1F0 1F1 1B0 1B1"


def test_sizes_of_stages_own_are_never_worse() -> None:
    problem = towers(2, 5, num_devices=3)
    equal = GraphPipePlanner().plan(problem).notes["iteration_s"]
    own = GraphPipePlanner(per_stage_micro_batches=True).plan(problem)
    check_strategy(own, estimate(own))
    assert own.notes["iteration_s"] <= equal


def test_progress_is_told() -> None:
    lines: list[str] = []
    GraphPipePlanner().plan(towers(2, 3, num_devices=2), progress=lines.append)
    assert any(line.startswith("micro-batches of 4: ") for line in lines)


def test_branches_without_parameters_and_idle_costs() -> None:
    problem = towers(3, 2, num_devices=3, parameter_bytes=0, seconds=0.0, overhead_s=0.0)
    assert not np.any(problem.profile.forward_s)
    strategy = GraphPipePlanner().plan(problem)
    check_strategy(strategy, estimate(strategy))


@given(problems(computation_graphs(series_parallel_edges(6)), max_devices=4))
@settings(max_examples=15, deadline=None)
def test_a_sweep_is_never_worse_than_its_parts(problem: PlanningProblem) -> None:
    found_s = GraphPipePlanner().plan(problem).notes["iteration_s"]
    for size in problem.micro_batch_sizes:
        part = GraphPipePlanner().plan(replace(problem, micro_batch_sizes=(size,)))
        assert found_s <= part.notes["iteration_s"] * (1 + 1e-9), size


@given(problems(computation_graphs(series_parallel_edges(5)), max_devices=3))
@settings(max_examples=15, deadline=None)
def test_sizes_of_stages_own_never_make_a_plan_worse(problem: PlanningProblem) -> None:
    equal = GraphPipePlanner().plan(problem).notes["iteration_s"]
    own = GraphPipePlanner(per_stage_micro_batches=True).plan(problem)
    assert own.notes["iteration_s"] <= equal * (1 + 1e-9)


def test_times_by_size_are_those_of_plans_that_were_played_through() -> None:
    problem = towers(2, 6, num_devices=4)
    notes = GraphPipePlanner().plan(problem).notes
    times = notes["iteration_s_by_micro_batch_size"]
    assert min(times.values()) == notes["iteration_s"]
    assert {int(size) for size in times} | set(notes["micro_batch_sizes_ruled_out"]) == {1, 2, 4, 8, 16, 32}
    for size, taken_s in times.items():
        part = GraphPipePlanner().plan(replace(problem, micro_batch_sizes=(int(size),)))
        assert part.notes["iteration_s"] == pytest.approx(taken_s, rel=0.02)


def test_rounds_count_where_nothing_fits() -> None:
    # A stage holds at least a round of micro-batches, so what would fit is more.
    problem = towers(2, 4, num_devices=2, value_bytes=10**6, memory_bytes=30 * 10**6, parameter_bytes=0)
    problem = replace(problem, micro_batch_sizes=(4,))
    wanted = []
    for k in (1, 4):
        with pytest.raises(PlanningError, match="What would fit: 2 devices of") as error:
            GraphPipePlanner(k=k, recompute=RecomputePolicy.NEVER).plan(problem)
        wanted.append(float(str(error.value).split("What would fit: 2 devices of ")[1].split()[0]))
    assert wanted[0] < wanted[1]
