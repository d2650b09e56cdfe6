"""The shape of a computation graph: what comes after what, and what may run side by side.

A graph between a virtual source and a virtual sink is taken apart into series and parallel compositions of operators.
It is the order that is taken apart, not the edges: edges that another path makes superfluous (residuals, masks,
encoder outputs that every decoder layer reads, long skips) play no part. What is neither series nor parallel is a
*knot*, and is put in line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graphpipe.graph.computation import ComputationGraph, Value
from graphpipe.graph.dag import bits, components, descendants, transitive_reduction


@dataclass(frozen=True, slots=True)
class Leaf:
    """One operator.

    Attributes:
        operator: Its position in the graph.
    """

    operator: int


@dataclass(frozen=True, slots=True)
class Series:
    """Parts that follow each other: all of one come before all of the next. No part is a series itself."""

    children: tuple[Leaf | Parallel | Knot, ...]


@dataclass(frozen=True, slots=True)
class Parallel:
    """Parts that do not depend on each other. No part is parallel itself."""

    children: tuple[Leaf | Series | Knot, ...]


@dataclass(frozen=True, slots=True)
class Knot:
    """A part that is neither series nor parallel, put in line.

    Attributes:
        operators: Positions in the graph, in a topological order that keeps few bytes alive across its cuts.
    """

    operators: tuple[int, ...]


Node = Leaf | Series | Parallel | Knot


def decompose(graph: ComputationGraph) -> Node:
    """Return the shape of a graph.

    Whether a part is a series shows in its topological order: it may be cut where everything before the cut leads to
    everything after it. That covers cut vertices, and blocks that meet without one. A part that cannot be cut is
    parallel if it falls into weakly connected components, else a knot.

    Source:
        Valdes, Tarjan and Lawler, SIAM J. Comput. 11(2), 1982, define the class; this simpler recursion costs one pass
        of bit operations a level, and also yields the parts that are outside the class.
    """
    successors = transitive_reduction(graph.successors)
    return _Decomposition(graph, successors, descendants(successors)).part(range(len(graph.operators)))


def operators_of(node: Node) -> tuple[int, ...]:
    """Return the operators of a part, branch by branch, in a topological order."""
    match node:
        case Leaf(operator):
            return (operator,)
        case Knot(operators):
            return operators
        case Series(children) | Parallel(children):
            return tuple(i for child in children for i in operators_of(child))


def knots_of(node: Node) -> tuple[Knot, ...]:
    """Return all knots in a part."""
    match node:
        case Leaf():
            return ()
        case Knot():
            return (node,)
        case Series(children) | Parallel(children):
            return tuple(knot for child in children for knot in knots_of(child))


class _Decomposition:
    """Takes parts of one graph apart."""

    def __init__(self, graph: ComputationGraph, successors: Sequence[Sequence[int]], below: Sequence[int]) -> None:
        self.graph = graph
        self.successors = successors
        self.below = below

    def part(self, nodes: Sequence[int]) -> Node:
        if len(nodes) == 1:
            return Leaf(nodes[0])
        pieces = self._cut(nodes)
        if len(pieces) > 1:
            # What cannot be cut again is no series.
            found = tuple(self._uncut(piece) for piece in pieces)
            return Series(found)
        return self._uncut(nodes)

    def _uncut(self, nodes: Sequence[int]) -> Leaf | Parallel | Knot:
        if len(nodes) == 1:
            return Leaf(nodes[0])
        branches = components(nodes, self.successors)
        if len(branches) == 1:
            return Knot(_few_live_bytes(self.graph, nodes))
        children = tuple(self.part(branch) for branch in branches)
        # A connected part that is not a series is no parallel either.
        assert not any(isinstance(child, Parallel) for child in children)
        return Parallel(tuple(child for child in children if not isinstance(child, Parallel)))

    def _cut(self, nodes: Sequence[int]) -> list[Sequence[int]]:
        """Return the longest list of pieces such that all of a piece leads to all of the next."""
        rest = bits(nodes)
        shared = rest
        pieces = []
        start = 0
        for at, node in enumerate(nodes):
            rest ^= 1 << node
            shared &= self.below[node]
            # `shared` is what everything so far leads to.
            if shared & rest == rest:
                pieces.append(nodes[start : at + 1])
                start = at + 1
        return pieces


def _few_live_bytes(graph: ComputationGraph, nodes: Sequence[int]) -> tuple[int, ...]:
    """Return `nodes` in a topological order that keeps few bytes alive across its cuts.

    The best order is hard to find. This one takes next what leaves the fewest bytes alive, and is compared with the
    order of the graph; bytes are those of one sample.
    """
    greedy = _greedy_order(graph, frozenset(nodes))
    return min((tuple(sorted(nodes)), greedy), key=lambda order: _live_bytes(graph, order))


def _greedy_order(graph: ComputationGraph, inside: frozenset[int]) -> tuple[int, ...]:
    made = [0] * len(graph.operators)
    reads: list[list[Value]] = [[] for _ in graph.operators]
    unread = {}
    for value in graph.values:
        consumers = {graph.index[c] for c in value.consumers}
        made[graph.index[value.producer]] += value.num_bytes(1)
        unread[value.name] = len(consumers)
        for u in consumers:
            reads[u].append(value)

    def growth(u: int) -> tuple[int, int]:
        return made[u] - sum(value.num_bytes(1) for value in reads[u] if unread[value.name] == 1), u

    missing = {u: sum(p in inside for p in graph.predecessors[u]) for u in sorted(inside)}
    ready = [u for u, count in missing.items() if not count]
    order = []
    while ready:
        node = min(ready, key=growth)
        ready.remove(node)
        order.append(node)
        for value in reads[node]:
            unread[value.name] -= 1
        for v in graph.successors[node]:
            if v in inside:
                missing[v] -= 1
                if not missing[v]:
                    ready.append(v)
    return tuple(order)


def _live_bytes(graph: ComputationGraph, order: Sequence[int]) -> tuple[int, int]:
    """Return the largest and the summed bytes of values alive across the cuts of an order."""
    place = {node: at for at, node in enumerate(order)}
    change = [0] * (len(order) + 1)
    for value in graph.values:
        start = place.get(graph.index[value.producer])
        if start is None:
            continue
        stop = max(place.get(graph.index[c], len(order)) for c in value.consumers)
        change[start] += value.num_bytes(1)
        change[stop] -= value.num_bytes(1)
    alive = highest = total = 0
    for at in range(len(order) - 1):
        alive += change[at]
        highest = max(highest, alive)
        total += alive
    return highest, total
