"""Sums over runs of a line against sums written out."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings

from graphpipe.planner.base import PlanningProblem
from graphpipe.planner.layout import line
from graphpipe.planner.operators import OperatorTable
from graphpipe.planner.search import make_setting
from graphpipe.planner.spans import Line
from graphpipe.stage import Recompute
from tests.strategies import computation_graphs, problems, random_edges


@given(problems(computation_graphs(random_edges(7))))
@settings(max_examples=60, deadline=None)
def test_runs_receive_send_and_hold_what_they_must(problem: PlanningProblem) -> None:
    graph = problem.graph
    table = OperatorTable(problem)
    # Every other operator is outside of the line.
    inside = list(range(0, len(graph.operators), 2)) + [len(graph.operators) - 1] * (len(graph.operators) % 2 == 0)
    size = problem.micro_batch_sizes[0]
    setting = make_setting(table, line(inside), size, (Recompute.NONE,), 1)
    sums = Line(table, [(u,) for u in inside]).sums(setting, [size])
    for i, j in itertools.combinations(range(len(inside) + 1), 2):
        run = {graph.operators[u].name for u in inside[i:j]}
        received = [v for v in graph.values if v.producer not in run and run & set(v.consumers)]
        sent = [v for v in graph.values if v.producer in run and set(v.consumers) - run]
        for values, all_bytes, gradient_bytes in (
            (received, sums.received_bytes, sums.returned_bytes),
            (sent, sums.sent_bytes, sums.awaited_bytes),
        ):
            assert all_bytes[i, j] == sum(v.num_bytes(size) for v in values)
            assert gradient_bytes[i, j] == sum(v.num_bytes(size) for v in values if v.carries_gradient)
        operators = inside[i:j]
        costs = problem.profile.at(size)
        if not table.is_batch_wise[operators].any():
            assert np.isclose(sums.forward_s[0, i, j], costs.forward_s[operators].sum())
            assert np.isclose(sums.saved_bytes[0, i, j], costs.saved_bytes[operators].sum())
        assert sums.has_backward[i, j] == any(graph.operators[u].has_backward for u in operators)
