"""The chain of operators and blocks that is searched."""

from __future__ import annotations

import numpy as np
import pytest

from graphpipe.cluster import Cluster
from graphpipe.cost import Profile
from graphpipe.graph import ComputationGraph, Operator, Value
from graphpipe.graph.series_parallel import decompose
from graphpipe.planner import layout
from graphpipe.planner.base import PlanningProblem
from graphpipe.planner.layout import Block, Chain, lay_out
from graphpipe.planner.operators import OperatorTable


def diamonds(seconds: list[float]) -> Chain:
    """Lay out diamonds one after another: a light operator, two branches of these seconds, and so on.

    s0 -> a0, b0 -> s1 -> a1, b1 -> s2 ...
    """
    names = [f"{kind}{i}" for i in range(len(seconds)) for kind in "sab"] + ["end"]
    values = [Value(name=f"of s{i}", producer=f"s{i}", consumers=(f"a{i}", f"b{i}")) for i in range(len(seconds))]
    after = [*(f"s{i + 1}" for i in range(len(seconds) - 1)), "end"]
    values += [Value(name=f"of {n}{i}", producer=f"{n}{i}", consumers=(s,)) for i, s in enumerate(after) for n in "ab"]
    graph = ComputationGraph("diamonds", tuple(Operator(name=name) for name in names), tuple(values))
    costs = np.array([[0.001 if n[0] in "se" else seconds[int(n[1:])] for n in names]])
    problem = PlanningProblem(
        graph=graph,
        profile=Profile(tuple(names), (1,), costs, costs, 0 * costs),
        cluster=Cluster.uniform(8, memory_bytes=10**9),
        mini_batch_size=8,
    )
    return lay_out(graph, decompose(graph), OperatorTable(problem))


def blocks_of(chain: Chain) -> list[int]:
    """Return which diamonds are blocks."""
    return [item.operators[0] // 3 for item in chain.items if isinstance(item, Block)]


def test_small_blocks_of_a_deep_network_are_in_line() -> None:
    seconds = [1.0] * 40
    seconds[7], seconds[30] = 9.0, 8.0
    chain = diamonds(seconds)
    assert blocks_of(chain) == [7, 30]
    assert chain.operators == tuple(range(121))


def test_few_blocks_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    assert blocks_of(diamonds([1.0, 3.0, 2.0])) == [0, 1, 2]
    # Around the three blocks are 1 and 5, 3 and 3, 5 and 1 items.
    monkeypatch.setattr(layout, "MAX_PASSAGES", 18)
    assert blocks_of(diamonds([1.0, 3.0, 2.0])) == [1, 2]
    monkeypatch.setattr(layout, "MAX_PASSAGES", 19)
    assert blocks_of(diamonds([1.0, 3.0, 2.0])) == [0, 1, 2]
