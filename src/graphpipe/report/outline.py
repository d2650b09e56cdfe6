"""The shape of a model in few parts: branches, what is in line, and knots, each with its share of the work.

Work is floating-point operations, forward and backward: the same on every machine. What is neither of use as a branch
nor a knot, such as the query, key and value products of one attention, is part of the line that it is in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from graphpipe.graph import ComputationGraph
from graphpipe.graph.dag import ancestors, bits, descendants, longest_path, members, transitive_reduction
from graphpipe.graph.series_parallel import Knot, Leaf, Node, Parallel, Series, decompose, operators_of
from graphpipe.report.labels import operators_label

_MOST_SINGLE_BRANCHES = 6


class PartKind(StrEnum):
    """What a part of a model is."""

    LINE = "line"
    """Operators that follow each other, up to branches inside one module."""
    SERIES = "series"
    """Parts that follow each other."""
    BRANCHES = "branches"
    """Parts that do not depend on each other."""
    KNOT = "knot"
    """Operators whose order is neither; they are planned in line."""


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a part is a knot: the first two operators lead to `after_both`, but only `one` leads to `after_one`.

    Attributes:
        other: Leads to `after_both` only.
        one: Leads to both.
        after_both: Waits for both.
        after_one: Waits for `one` only.
    """

    other: str
    one: str
    after_both: str
    after_one: str

    def __str__(self) -> str:
        return (
            f"{self.after_both} waits for {self.other} and {self.one}, while {self.after_one} waits for {self.one} "
            f"and not for {self.other}"
        )


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a model.

    Attributes:
        kind: What it is.
        label: What it holds, in few words.
        operators: Positions in the graph, in a topological order.
        share: Of the model's work, from 0 to 1.
        parameter_bytes: Of the parameters that it reads, each once.
        is_batch_wise: Whether some operator of it mixes samples.
        count: How many branches are drawn as this one, because each is a single operator.
        children: The parts of a series or of branches.
        cause: Of a knot.
    """

    kind: PartKind
    label: str
    operators: tuple[int, ...]
    share: float
    parameter_bytes: int
    is_batch_wise: bool
    count: int = 1
    children: tuple[Part, ...] = ()
    cause: Cause | None = None


def outline(graph: ComputationGraph, *, every_operator: bool = False) -> Part:
    """Return the shape of a model in few parts.

    Args:
        graph: The model.
        every_operator: Give each operator a part of its own.
    """
    outliner = _Outliner(graph, every_operator=every_operator)
    return outliner.part(decompose(graph))


def longest_path_share(graph: ComputationGraph) -> float:
    """Return the share of the work on the longest path of operators: no number of branches takes less time."""
    weights = _weights(graph)
    return longest_path(graph.successors, weights) / sum(weights)


def num_branches(part: Part) -> int:
    """Return how many parts can run at the same time at most."""
    if part.kind is PartKind.BRANCHES:
        return sum(num_branches(child) for child in part.children)
    return max((num_branches(child) for child in part.children), default=part.count)


def knots(part: Part) -> tuple[Part, ...]:
    """Return all knots of a part."""
    if part.kind is PartKind.KNOT:
        return (part,)
    return tuple(knot for child in part.children for knot in knots(child))


class _Outliner:
    """Makes parts of one graph."""

    def __init__(self, graph: ComputationGraph, *, every_operator: bool) -> None:
        self.graph = graph
        self.every_operator = every_operator
        self.weights = _weights(graph)
        self.total = sum(self.weights)

    def part(self, node: Node) -> Part:
        match node:
            case Knot(operators):
                return self._made(PartKind.KNOT, operators, cause=knot_cause(self.graph, operators))
            case Parallel(children) if not self._is_plain(node):
                parts = self._alike([self.part(child) for child in children])
                return self._made(PartKind.BRANCHES, operators_of(node), children=tuple(parts))
            case Series(children):
                parts = self._line(children)
                if len(parts) == 1:
                    return parts[0]
                return self._made(PartKind.SERIES, operators_of(node), children=tuple(parts))
            case Leaf() | Parallel():
                return self._made(PartKind.LINE, operators_of(node))

    def _is_plain(self, node: Node) -> bool:
        """Whether a part is one operator, or branches inside one module."""
        if isinstance(node, Leaf):
            return True
        if self.every_operator or isinstance(node, Knot) or _has_knot(node):
            return False
        return len({self.graph.operators[i].module or i for i in operators_of(node)}) == 1

    def _line(self, children: Sequence[Leaf | Parallel | Knot]) -> list[Part]:
        """The parts of a series: what is plain goes together."""
        found: list[Part] = []
        run: list[int] = []
        for child in children:
            if self._is_plain(child) and not self.every_operator:
                run += operators_of(child)
                continue
            if run:
                found.append(self._made(PartKind.LINE, run))
                run = []
            found.append(self.part(child))
        if run:
            found.append(self._made(PartKind.LINE, run))
        return found

    def _alike(self, parts: list[Part]) -> list[Part]:
        """Branches, the single operators among them as one part where they are many."""
        single = [part for part in parts if len(part.operators) == 1]
        if self.every_operator or len(single) <= _MOST_SINGLE_BRANCHES:
            return parts
        together = self._made(PartKind.LINE, [i for p in single for i in p.operators], count=len(single))
        at = parts.index(single[0])
        rest = [part for part in parts if len(part.operators) > 1]
        before = sum(len(part.operators) > 1 for part in parts[:at])
        return [*rest[:before], together, *rest[before:]]

    def _made(
        self,
        kind: PartKind,
        positions: Sequence[int],
        *,
        children: tuple[Part, ...] = (),
        count: int = 1,
        cause: Cause | None = None,
    ) -> Part:
        operators = [self.graph.operators[i] for i in positions]
        parameters = {p.name: p.num_bytes for o in operators for p in o.parameters}
        return Part(
            kind=kind,
            label=operators_label(operators),
            operators=tuple(positions),
            share=sum(self.weights[i] for i in positions) / self.total,
            parameter_bytes=sum(parameters.values()),
            is_batch_wise=any(o.is_batch_wise for o in operators),
            count=count,
            children=children,
            cause=cause,
        )


def _weights(graph: ComputationGraph) -> list[float]:
    """The work of each operator; all count the same where none has any."""
    found = [o.forward_flops + o.backward_flops for o in graph.operators]
    return found if any(found) else [1.0] * len(found)


def _has_knot(node: Node) -> bool:
    match node:
        case Leaf():
            return False
        case Knot():
            return True
        case Series(children) | Parallel(children):
            return any(map(_has_knot, children))


def knot_cause(graph: ComputationGraph, operators: Sequence[int]) -> Cause:
    """Return four operators of a knot whose order is neither series nor parallel.

    Args:
        graph: The model.
        operators: The positions of a knot in it.

    Raises:
        ValueError: The order of these operators is series-parallel.

    Source:
        Valdes, Tarjan and Lawler, SIAM J. Comput. 11(2), 1982: an order is series-parallel where it has no such four.
    """
    inside = bits(operators)
    reduced = transitive_reduction(graph.successors)
    below = [mask & inside for mask in descendants(reduced)]
    above = [mask & inside for mask in ancestors(reduced)]
    near = [bits(found) & inside for found in reduced]
    # Neighbours make the plainest example, but there may be none among them.
    for reach in (near, below):
        for one in sorted(operators, reverse=True):
            for after_both in members(reach[one]):
                others = above[after_both] & ~above[one] & ~below[one] & ~(1 << one)
                for other in reversed(tuple(members(others))):
                    after_one = (
                        reach[one] & ~above[after_both] & ~below[after_both] & ~(1 << after_both) & ~below[other]
                    )
                    for last in members(after_one):
                        names = (graph.operators[i].name for i in (other, one, after_both, last))
                        return Cause(*names)
    raise ValueError(f"the order of {len(operators)} operators of {graph.name!r} is series-parallel")
