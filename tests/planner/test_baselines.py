"""PipeDream's and Piper's planners: stages in sequence, valid strategies, known optima, honest limits."""

from __future__ import annotations

from dataclasses import replace

import networkx as nx
import pytest
from hypothesis import given, settings

from graphpipe.errors import PlanningError
from graphpipe.estimate import estimate
from graphpipe.graph import ComputationGraph
from graphpipe.graph.dag import members
from graphpipe.planner.base import Planner, PlanningProblem
from graphpipe.planner.graphpipe import GraphPipePlanner
from graphpipe.planner.layout import line
from graphpipe.planner.operators import OperatorTable
from graphpipe.planner.pipedream import PipeDreamPlanner
from graphpipe.planner.piper import Downsets, DownsetSearch, PiperPlanner, enumerate_downsets
from graphpipe.planner.search import PRECISION, make_setting, replica_counts
from graphpipe.stage import Recompute
from tests.planner.models import towers
from tests.planner.oracle import check_strategy
from tests.strategies import computation_graphs, problems, random_edges

BASELINES: tuple[Planner, ...] = (PipeDreamPlanner(), PiperPlanner())


@pytest.mark.parametrize("planner", BASELINES, ids=lambda planner: planner.name)
@given(problem=problems(computation_graphs(random_edges(6)), memory_bytes=(2000, 10**9)))
@settings(max_examples=30, deadline=None)
def test_every_strategy_is_valid(planner: Planner, problem: PlanningProblem) -> None:
    try:
        strategy = planner.plan(problem)
    except PlanningError:
        return
    found = estimate(strategy)
    check_strategy(strategy, found)
    assert strategy.planner == planner.name
    assert found.iteration_s == pytest.approx(strategy.notes["iteration_s"])
    assert strategy.stages.depth == len(strategy.stages.stages)


@given(computation_graphs(random_edges(7)))
def test_downsets_equal_networkx_antichains(graph: ComputationGraph) -> None:
    order = nx.DiGraph(list(graph.edges))
    order.add_nodes_from(range(len(graph.operators)))
    # A downset is what lies below an antichain.
    wanted = set()
    for antichain in nx.antichains(order):
        below = set(antichain).union(*(nx.ancestors(order, u) for u in antichain))
        wanted.add(frozenset(below))
    found = enumerate_downsets(graph, 10**6)
    assert {frozenset(members(downset)) for downset in found} == wanted
    assert len(found) == len(wanted)


@given(problems(computation_graphs(random_edges(5), may_mix_samples=False), max_devices=3))
@settings(max_examples=40, deadline=None)
def test_pipers_least_target_equals_brute_force(problem: PlanningProblem) -> None:
    table = OperatorTable(problem)
    size = problem.micro_batch_sizes[0]
    chain = line(range(len(problem.graph.operators)))
    downsets = Downsets(table, enumerate_downsets(problem.graph, 1000))
    search = DownsetSearch(make_setting(table, chain, size, (Recompute.NONE,), 1), downsets)
    by_pair = zip(*downsets.pairs, *search.tables.seconds, strict=True)
    seconds = {(int(start), int(stop)): by_choice for start, stop, *by_choice in by_pair}
    counts = replica_counts(size, len(problem.cluster))

    def best(start: int, devices: int) -> float:
        if start == len(downsets.sets) - 1:
            return 0.0
        return min(
            (
                max(float(taken_s), best(stop, devices - r))
                for stop in range(start + 1, len(downsets.sets))
                if downsets.sets[start] & ~downsets.sets[stop] == 0
                for r, taken_s in zip(counts, seconds[start, stop], strict=True)
                if r <= devices
            ),
            default=float("inf"),
        )

    found = search.least_target_s(0.0, search.slowest_s())
    assert found == pytest.approx(best(0, len(problem.cluster)), rel=2 * PRECISION)


def test_too_many_downsets_end_the_search() -> None:
    problem = towers(3, 9, num_devices=4)
    # Three towers of nine have 10^3 downsets, and the loss adds one.
    assert len(enumerate_downsets(problem.graph, 1001)) == 1001
    with pytest.raises(PlanningError, match="'towers' has more than 1000 downsets, the limit of Piper's planner"):
        PiperPlanner(max_downsets=1000).plan(problem)


def test_piper_recomputes_where_memory_is_scarce() -> None:
    problem = towers(1, 6, num_devices=2, value_bytes=10**6, memory_bytes=75 * 10**6)
    with pytest.raises(PlanningError):
        PipeDreamPlanner().plan(problem)
    strategy = PiperPlanner().plan(problem)
    assert any(stage.recompute is Recompute.ALL for stage in strategy.stages.stages)


def test_a_loss_over_the_mini_batch_shares_the_last_device() -> None:
    problem = replace(towers(2, 4, num_devices=2, is_batch_wise=True), micro_batch_sizes=(4,))
    for planner in BASELINES:
        strategy = planner.plan(problem)
        *_, last, loss = strategy.stages.stages
        assert loss.operators == ("loss",)
        assert loss.micro_batch_size == 32
        assert loss.devices == last.devices


def test_on_a_chain_all_planners_agree() -> None:
    problem = towers(1, 12, num_devices=4, parameter_bytes=10_000)
    ours = GraphPipePlanner().plan(problem).notes["iteration_s"]
    for planner in BASELINES:
        notes = planner.plan(problem).notes
        assert ours <= notes["iteration_s"] * 1.001
        assert notes["iteration_s"] == pytest.approx(ours, rel=0.03)


def test_side_by_side_beats_one_after_the_other() -> None:
    problem = towers(2, 8, num_devices=8, mini_batch_size=32, parameter_bytes=10**9, memory_bytes=10**11)
    ours = GraphPipePlanner().plan(problem).notes["iteration_s"]
    for planner in BASELINES:
        assert ours < 0.9 * planner.plan(problem).notes["iteration_s"]
