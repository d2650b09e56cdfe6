"""The search of one micro-batch size against brute force over the same stages."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpipe.graph.series_parallel import decompose
from graphpipe.planner.layout import Chain, lay_out, line
from graphpipe.planner.operators import OperatorTable
from graphpipe.planner.search import PRECISION, Search, make_setting, replica_counts
from graphpipe.planner.base import PlanningProblem
from graphpipe.stage import Recompute
from tests.planner.oracle import Oracle
from tests.strategies import computation_graphs, problems, series_parallel_edges

SMALL = computation_graphs(series_parallel_edges(6), may_be_frozen=True)


def compare(problem: PlanningProblem, size: int, *, in_line: bool) -> None:
    table = OperatorTable(problem)
    chain: Chain = lay_out(problem.graph, decompose(problem.graph), table)
    if in_line:
        chain = line(range(len(problem.graph.operators)))
    search = Search(make_setting(table, chain, size, (Recompute.NONE,), 1), chain)
    found = search.least_target_s(0.0, search.slowest_s())
    wanted = Oracle(problem, size).least_target_s(chain, replica_counts(size, len(problem.cluster)))
    if found is None:
        assert wanted == math.inf
    else:
        assert found == pytest.approx(wanted, rel=2 * PRECISION)


@given(problems(SMALL), st.data())
@settings(max_examples=150, deadline=None)
def test_least_target_equals_brute_force(problem: PlanningProblem, data: st.DataObject) -> None:
    compare(problem, data.draw(st.sampled_from(problem.micro_batch_sizes)), in_line=False)


@given(problems(SMALL, memory_bytes=(600, 1000, 1600)), st.data())
@settings(max_examples=150, deadline=None)
def test_least_target_equals_brute_force_where_memory_is_short(problem: PlanningProblem, data: st.DataObject) -> None:
    compare(problem, data.draw(st.sampled_from(problem.micro_batch_sizes)), in_line=False)
