"""The shape of a graph as the search wants it: chains of operators and blocks, blocks of chains side by side."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from graphpipe.graph import ComputationGraph
from graphpipe.graph.series_parallel import Knot, Leaf, Node, Parallel, Series, operators_of
from graphpipe.planner.operators import OperatorTable

# Branches whose costs differ by less than this take one search where all different branches would take too many.
SIMILAR = 0.1
# Ways to choose how many branches of each kind go into a stage. Above it, similar branches count as equal.
MAX_GROUPS = 128
# A fork or a join takes at most this many items of the chain around a block, or those of some stages' fair share.
MERGED_ITEMS = 16
MERGED_SHARES = 4
# Forks times joins, over all blocks. Above it, the blocks with the least work are put in line.
MAX_PASSAGES = 5_000


@dataclass(frozen=True)
class Chain:
    """Items that follow each other.

    Attributes:
        items: Operators (positions in the graph) and blocks.
    """

    items: tuple[int | Block, ...]

    @cached_property
    def units(self) -> tuple[tuple[int, ...], ...]:
        """``[items]`` the operators of each item, in a topological order."""
        return tuple((item,) if isinstance(item, int) else item.operators for item in self.items)

    @cached_property
    def operators(self) -> tuple[int, ...]:
        """All operators, in a topological order."""
        return tuple(i for unit in self.units for i in unit)

    @cached_property
    def depth(self) -> int:
        """The most stages on a path, when every stage has an operator of the path."""
        return sum(1 if isinstance(item, int) else item.depth for item in self.items)


@dataclass(frozen=True)
class Block:
    """Chains side by side.

    Attributes:
        branches: The chains, equal ones next to each other.
        kinds: For each kind of equal branches, how many there are.
    """

    branches: tuple[Chain, ...]
    kinds: tuple[int, ...]

    @cached_property
    def operators(self) -> tuple[int, ...]:
        """All operators, branch by branch."""
        return tuple(i for branch in self.branches for i in branch.operators)

    @cached_property
    def depth(self) -> int:
        """The most stages on a path."""
        return max(branch.depth for branch in self.branches)

    def branches_of(self, kind: int) -> tuple[Chain, ...]:
        """Return the branches of a kind."""
        start = sum(self.kinds[:kind])
        return self.branches[start : start + self.kinds[kind]]


def line(order: Sequence[int]) -> Chain:
    """Return operators in line."""
    return Chain(tuple(order))


def lay_out(graph: ComputationGraph, shape: Node, costs: OperatorTable) -> Chain:
    """Return the shape of a graph with its knots and its blocks of little work put in line.

    A deep network whose every layer has a small block, such as the projections of an attention, has as many blocks as
    layers, and so long a chain around each that all forks and joins would take hours. What such blocks could run side
    by side is a small part of a stage, so the smallest go first.

    Args:
        graph: The graph.
        shape: Its decomposition.
        costs: What the operators cost: a block with work in one branch only has nothing to run side by side, and equal
            branches are told by what they cost.
    """
    layout = _Layout(graph, costs)
    found = layout.chain(shape)
    while _num_passages(found, costs) > MAX_PASSAGES:
        # Rounded, so that equal blocks go together.
        least_work = min(float(f"{layout.work_of(block):.6g}") for block in _blocks(found))
        layout.real_block_work = least_work * (1 + 1e-5)
        found = layout.chain(shape)
    return found


def merged_items(costs: OperatorTable) -> int:
    """Return how many items of the chain around a block share a stage with a part of a branch at most."""
    return max(MERGED_ITEMS, MERGED_SHARES * len(costs.work) // costs.num_devices)


def _blocks(chain: Chain) -> Iterator[Block]:
    for item in chain.items:
        if isinstance(item, Block):
            yield item
            for branch in item.branches:
                yield from _blocks(branch)


def _num_passages(chain: Chain, costs: OperatorTable) -> int:
    """Return how many pairs of a fork and a join there are."""
    most, count = merged_items(costs), 0
    for at, item in enumerate(chain.items):
        if isinstance(item, Block):
            count += min(at, most) * min(len(chain.items) - at - 1, most)
            count += sum(_num_passages(branch, costs) for branch in item.branches)
    return count


class _Layout:
    def __init__(self, graph: ComputationGraph, costs: OperatorTable) -> None:
        self.graph = graph
        self.costs = costs
        # Less work than this is not worth a device: a hundredth of a device's fair share.
        self.real_work = 0.01 * float(costs.work.sum()) / costs.num_devices
        # Blocks with at most this work are put in line.
        self.real_block_work = 0.0

    def work_of(self, block: Block) -> float:
        """Return the work of all branches of a block."""
        return float(self.costs.work[list(block.operators)].sum())

    def chain(self, node: Node) -> Chain:
        parts = node.children if isinstance(node, Series) else (node,)
        return Chain(tuple(item for part in parts for item in self._items(part)))

    def _items(self, part: Node) -> tuple[int | Block, ...]:
        match part:
            case Leaf(operator):
                return (operator,)
            case Knot(operators):
                return operators
            case Parallel(children):
                working = [c for c in children if self.costs.work[list(operators_of(c))].sum() > self.real_work]
                if len(working) <= 1:
                    return operators_of(part)
                block = self._block([self.chain(child) for child in children])
                return (block,) if self.work_of(block) > self.real_block_work else operators_of(part)
            case Series():
                raise AssertionError("a series within a series")

    def _block(self, branches: list[Chain]) -> Block:
        exact = _sorted_by_kind(branches, [self._key(branch, self.kinds) for branch in branches])
        if _num_groups(exact) <= MAX_GROUPS:
            return exact
        similar = _sorted_by_kind(branches, [self._key(branch, self.similar_kinds) for branch in branches])
        if _num_groups(similar) <= MAX_GROUPS or len(branches) <= 2:
            return similar
        # Too many kinds: the two smallest branches become a block of their own.
        small, smaller, *others = sorted(branches, key=lambda b: self.costs.work[list(b.operators)].sum())
        return self._block([*others, Chain((self._block([small, smaller]),))])

    @cached_property
    def kinds(self) -> list[int]:
        """``[operators]`` a number that equal operators share."""
        return self.costs.kinds(None)

    @cached_property
    def similar_kinds(self) -> list[int]:
        """``[operators]`` a number that similar operators share."""
        return self.costs.kinds(SIMILAR)

    def _key(self, branch: Chain, kinds: Sequence[int]) -> object:
        """Return a key that equal branches share: their structure and the kinds of their operators."""
        return tuple(
            kinds[item] if isinstance(item, int) else tuple(sorted(str(self._key(b, kinds)) for b in item.branches))
            for item in branch.items
        )


def _num_groups(block: Block) -> int:
    return math.prod(count + 1 for count in block.kinds)


def _sorted_by_kind(branches: Sequence[Chain], keys: Sequence[object]) -> Block:
    counts = Counter(keys)
    kinds = list(counts)
    order = sorted(range(len(branches)), key=lambda i: (kinds.index(keys[i]), i))
    return Block(tuple(branches[i] for i in order), tuple(counts[kind] for kind in kinds))
