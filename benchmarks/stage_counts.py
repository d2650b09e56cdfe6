"""How many different stages the planners' recursions can weigh, counted from the shape of a graph.

The counts are those of the recursions, whoever implements them. A search weighs each of these stages at several levels,
with several numbers of replicas and for several targets.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from graphpipe.graph import ComputationGraph
from graphpipe.graph.series_parallel import Knot, Leaf, Node, Parallel, Series, decompose
from graphpipe.planner.base import PlanningProblem
from graphpipe.planner.layout import Block, Chain, lay_out
from graphpipe.planner.operators import OperatorTable


def pipedream_stages(graph: ComputationGraph) -> int:
    """Return the runs of operators in line."""
    return _runs(len(graph.operators))


def graphpipe_stages(problem: PlanningProblem) -> int:
    """Return the stages that respect the shape of the graph, those of equal branches once."""
    table = OperatorTable(problem)
    return _of_chain(lay_out(problem.graph, decompose(problem.graph), table))


def piper_stages(graph: ComputationGraph) -> int:
    """Return the pairs of downsets of which one holds the other, and more.

    Raises:
        ValueError: A part of the graph is neither series nor parallel.
    """
    found = _downsets(decompose(graph))
    return found.num_pairs - found.num_sets


def _runs(count: int) -> int:
    return count * (count + 1) // 2


def _of_chain(chain: Chain) -> int:
    total = _runs(len(chain.items))
    for at, item in enumerate(chain.items):
        if isinstance(item, Block):
            branches = [item.branches_of(kind)[0] for kind in range(len(item.kinds))]
            lengths = sum(len(branch.items) for branch in branches)
            # Groups of at least two branches, but for all of them, which are a run.
            several = math.prod(count + 1 for count in item.kinds) - 1 - len(item.kinds) - 1
            # What precedes the block with the head of a branch, and the tail of one with what follows it.
            ends = at + len(chain.items) - at - 1
            total += sum(map(_of_chain, branches)) + max(several, 0) + ends * lengths
    return total


@dataclass(frozen=True)
class _Count:
    """Downsets, and pairs of them of which the first is part of the second or equal to it."""

    num_sets: int
    num_pairs: int


def _downsets(node: Node) -> _Count:
    match node:
        case Leaf():
            return _Count(2, 3)
        case Parallel(children):
            found = [_downsets(child) for child in children]
            return _Count(math.prod(c.num_sets for c in found), math.prod(c.num_pairs for c in found))
        case Series(children):
            total = _Count(1, 1)
            for child in children:
                # A downset lies within what came before, or holds all of it and some of the child.
                more = _downsets(child)
                total = _Count(
                    total.num_sets + more.num_sets - 1,
                    total.num_pairs + total.num_sets * (more.num_sets - 1) + more.num_pairs - more.num_sets,
                )
            return total
        case Knot(operators):
            raise ValueError(f"{len(operators)} operators are neither series nor parallel, their downsets not counted")
