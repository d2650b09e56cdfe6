"""Fold the operations of a graph into the units that a planner places.

Light operations go to the heavy one that they follow, so that what is left are matrix products, attention and the like,
joins between branches, and operations that mix the samples of a batch.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from torch import fx

from graphpipe.capture.accounting import Accounting
from graphpipe.capture.cheap import is_light, repeated_operations
from graphpipe.capture.classes import Kind, SampleClass
from graphpipe.capture.classification import Classification
from graphpipe.capture.grouping import Groups, atomic_groups, components, join_uncuttable
from graphpipe.capture.naming import block_of
from graphpipe.capture.nodes import inputs_of, operator_name
from graphpipe.capture.training_graph import AttributeKind, TrainingGraph
from graphpipe.capture.wishes import Wishes

# A source table, such as that of token types, is folded into its join when it has this share of the largest one.
_SMALL_TABLE_SHARE = 0.1


class Granularity(StrEnum):
    """How finely a model is divided."""

    OPERATOR = "operator"
    """A unit for each matrix product, convolution, attention or embedding, with the light operations after it."""
    BLOCK = "block"
    """A unit for each repeated block of the model, such as a Transformer layer, where its operations allow it."""


@dataclass(frozen=True, eq=False)
class Units:
    """The operations of a graph, divided.

    Attributes:
        members: The operations of each unit in order; the units in a topological order.
        repeated: Operations that belong to no unit, because every stage repeats those that it needs.
        companions: For a repeated operation, those that are repeated together with it.
    """

    members: tuple[tuple[fx.Node, ...], ...]
    repeated: frozenset[fx.Node]
    companions: Mapping[fx.Node, tuple[fx.Node, ...]]

    def repeated_for(self, nodes: Iterable[fx.Node]) -> set[fx.Node]:
        """Return the repeated operations that these operations need."""
        found: set[fx.Node] = set()
        waiting = [read for node in nodes for read in inputs_of(node)]
        while waiting:
            node = waiting.pop()
            if node in self.repeated and node not in found:
                # A repeated operation may be written in place by others of its group, which nothing reads.
                found.add(node)
                waiting += inputs_of(node)
                waiting += self.companions.get(node, ())
        return found


def form_units(
    graph: TrainingGraph,
    classification: Classification,
    accounting: Accounting,
    granularity: Granularity,
    wishes: Wishes | None = None,
) -> Units:
    """Return the units of a graph.

    Args:
        graph: The training graph.
        classification: How its tensors depend on the samples.
        accounting: Its costs.
        granularity: How finely to divide.
        wishes: What the user wants of the division.

    Raises:
        CaptureError: A wish cannot be fulfilled.
    """
    wishes = wishes or Wishes()
    groups = atomic_groups(graph)
    repeated = repeated_operations(graph, classification, accounting, groups)
    companions = {n: tuple(m) for m in groups.members() if len(m) > 1 for n in m if n in repeated}
    join_uncuttable(graph, classification, groups, repeated)
    for nodes in wishes.whole(graph.operations).values():
        groups.join(node for node in nodes if node not in repeated)
    quotient = _Quotient(graph, classification, accounting, groups, repeated, wishes)
    quotient.join_cycles()
    quotient.absorb_into_producers()
    quotient.absorb_into_readers()
    if granularity is Granularity.BLOCK:
        quotient.join_blocks()
    members = hand_on_views(graph, classification, accounting, atomic_groups(graph), quotient.ordered(), wishes)
    wishes.check(members)
    return Units(members, repeated, companions)


def hand_on_views(
    graph: TrainingGraph,
    classification: Classification,
    accounting: Accounting,
    atoms: Groups,
    members: Sequence[Sequence[fx.Node]],
    wishes: Wishes,
) -> tuple[tuple[fx.Node, ...], ...]:
    """Move views to the only unit that reads them, where that unit could as well read what they are views of.

    It can if that is sent to some unit anyway, so a tensor and a view of it are not both sent. And it should if the
    view takes the samples off axis 0, as a transpose before a product does: on axis 0 they are sent without a copy.
    """
    unit_of = {node: i for i, nodes in enumerate(members) for node in nodes}
    sizes = Counter(map(atoms.find, graph.operations))
    for node in reversed(graph.operations):
        reads = [read for read in inputs_of(node) if read in unit_of]
        readers = {unit_of[r] for r in graph.readers.get(node, ()) if r in unit_of}
        if node not in unit_of or len(reads) != 1 or len(readers) != 1 or readers == {unit_of[node]}:
            continue
        is_view = accounting.costs[node].moved_bytes == 0 and sizes[atoms.find(node)] == 1
        sample_class = classification.classes[node]
        source_class = classification.classes[reads[0]]
        home = unit_of[node]
        crosses = len(wishes.side([node, *(r for r in graph.readers[node] if r in unit_of)])) > 1
        is_sent = any(unit_of.get(r, home) != home for r in graph.readers[reads[0]])
        if is_view and not crosses and unit_of[reads[0]] == home and _is_better(source_class, sample_class, is_sent):
            (unit_of[node],) = readers
    found: list[list[fx.Node]] = [[] for _ in members]
    for node in graph.operations:
        if node in unit_of:
            found[unit_of[node]].append(node)
    return tuple(map(tuple, found))


def _is_better(source: object, view: object, is_sent: bool) -> bool:
    if not isinstance(view, SampleClass) or not isinstance(source, SampleClass) or not source.is_cuttable:
        return False
    return is_sent or (view.kind is source.kind is Kind.PER_SAMPLE and view.axis > 0 and source.axis <= view.axis)


class _Quotient:
    """The graph of groups, which absorption makes coarser while it stays acyclic."""

    def __init__(
        self,
        graph: TrainingGraph,
        classification: Classification,
        accounting: Accounting,
        groups: Groups,
        repeated: frozenset[fx.Node],
        wishes: Wishes,
    ) -> None:
        self.graph = graph
        self.groups = groups
        self.repeated = repeated
        self.wishes = wishes
        self.batch_wise = classification.batch_wise
        self.heavy = {n for n in graph.operations if not is_light(n, classification, accounting)}

    def members(self) -> dict[fx.Node, list[fx.Node]]:
        """The operations of each group by its first one, repeated ones left out."""
        return {m[0]: m for m in self.groups.members() if m[0] not in self.repeated}

    def predecessors(self, members: dict[fx.Node, list[fx.Node]]) -> dict[fx.Node, set[fx.Node]]:
        """The groups that each group reads from."""
        found: dict[fx.Node, set[fx.Node]] = {}
        for root, nodes in members.items():
            reads = (r for n in nodes for r in inputs_of(n) if r in self.graph.order and r not in self.repeated)
            found[root] = {self.groups.find(r) for r in reads} - {root}
        return found

    def join_cycles(self) -> None:
        """Join the groups of each cycle, until there is none."""
        while True:
            predecessors = self.predecessors(self.members())
            cycles = components(predecessors)
            if not cycles:
                return
            for cycle in cycles:
                self.groups.join(cycle)

    def may_join(self, *parts: Collection[fx.Node]) -> bool:
        """Whether joining these leaves heavy work that treats samples one by one free of operations that mix them.

        And whether it crosses no split point.
        """
        nodes = [node for part in parts for node in part]
        if len(self.wishes.side(nodes)) > 1:
            return False
        mixes = any(node in self.batch_wise for node in nodes)
        return not mixes or all(node in self.batch_wise for node in nodes if node in self.heavy)

    def topological(self, predecessors: dict[fx.Node, set[fx.Node]]) -> list[fx.Node]:
        """The groups in a topological order, ties broken by their first operations."""
        order = self.graph.order
        missing = {root: len(found) for root, found in predecessors.items()}
        successors: dict[fx.Node, list[fx.Node]] = {root: [] for root in predecessors}
        for root, found in predecessors.items():
            for p in found:
                successors[p].append(root)
        ready = [(order[root], root) for root, count in missing.items() if not count]
        heapq.heapify(ready)
        found_order = []
        while ready:
            _, root = heapq.heappop(ready)
            found_order.append(root)
            for s in successors[root]:
                missing[s] -= 1
                if not missing[s]:
                    heapq.heappush(ready, (order[s], s))
        assert len(found_order) == len(predecessors), "the quotient has a cycle"
        return found_order

    def absorb_into_producers(self) -> None:
        """Put each light group into the only group that it must wait for.

        Of the groups that it reads, those that another one waits for add no order. If one is left, every path to the
        light group leads through it, so joining the two closes no cycle, and changes no group's ancestors.
        """
        members = self.members()
        predecessors = self.predecessors(members)
        bit = {root: 1 << i for i, root in enumerate(members)}
        ancestors: dict[fx.Node, int] = {}
        home: dict[fx.Node, fx.Node] = {root: root for root in members}
        for root in self.topological(predecessors):
            reads = {home[p] for p in predecessors[root]}
            above = 0
            for p in reads:
                above |= ancestors[p] | bit[p]
            ancestors[root] = above
            if any(node in self.heavy for node in members[root]):
                continue
            last = [p for p in reads if not any(ancestors[q] & bit[p] for q in reads)]
            small = self._small_tables(last, members) if len(last) > 1 else []
            last = [p for p in last if p not in small]
            if len(last) != 1 or not self.may_join(members[last[0]], members[root]):
                continue
            target = last[0]
            for source in [*small, root]:
                home[source] = target
                members[target] = members[target] + members[source]
            self.groups.join([target, *small, root])
            # Whatever was placed with a joined table now lives with the target.
            home = {k: (target if v in small else v) for k, v in home.items()} if small else home

    def _small_tables(self, last: list[fx.Node], members: dict[fx.Node, list[fx.Node]]) -> list[fx.Node]:
        """Embeddings of the model's inputs with one reader, far smaller than the largest other group of `last`."""
        largest = max(last, key=lambda p: (self._parameter_bytes(members[p]), -self.graph.order[p]))
        bound = _SMALL_TABLE_SHARE * self._parameter_bytes(members[largest])
        found = []
        for p in last:
            if p is largest or self._parameter_bytes(members[p]) > bound:
                continue
            reads = [r for n in members[p] for r in inputs_of(n) if r in self.graph.order and r not in self.repeated]
            readers = {self.groups.find(r) for n in members[p] for r in self.graph.readers.get(n, ())} - {
                self.groups.find(p)
            }
            only_embeds = all(operator_name(n) in ("embedding", "embedding_bag") for n in members[p] if n in self.heavy)
            if only_embeds and len(readers) == 1 and all(self.groups.find(r) is self.groups.find(p) for r in reads):
                found.append(p)
        return found

    def _parameter_bytes(self, nodes: Iterable[fx.Node]) -> int:
        found = {r for n in nodes for r in inputs_of(n) if r in self.graph.attributes}
        tensors = [self.graph.attributes[r] for r in found]
        return sum(a.tensor.numel() * a.tensor.element_size() for a in tensors if a.kind is AttributeKind.PARAMETER)

    def absorb_into_readers(self) -> None:
        """Put light groups into the only group that waits for them, where they could not join a producer.

        That is each group that reads from no other, and each that mixes samples and is read by one that does too.
        """
        while True:
            members = self.members()
            predecessors = self.predecessors(members)
            order = self.topological(predecessors)
            ancestors: dict[fx.Node, set[fx.Node]] = {}
            for root in order:
                ancestors[root] = set().union(predecessors[root], *(ancestors[p] for p in predecessors[root]))
            for root in order:
                if any(node in self.heavy for node in members[root]):
                    continue
                readers = [r for r in order if root in predecessors[r]]
                first = [r for r in readers if not ancestors[r] & set(readers)]
                if len(first) != 1 or not self.may_join(members[root], members[first[0]]):
                    continue
                both_mix = all(not self.batch_wise.isdisjoint(members[r]) for r in (root, first[0]))
                if not predecessors[root] or (both_mix and len(readers) == 1):
                    self.groups.join([root, first[0]])
                    break
            else:
                return

    def join_blocks(self) -> None:
        """Join the groups of each repeated block where that closes no cycle."""
        blocks: dict[str, list[fx.Node]] = {}
        for root, nodes in self.members().items():
            heavy = [n for n in nodes if n in self.heavy] or nodes
            name = block_of(heavy[0])
            if name:
                blocks.setdefault(name, []).append(root)
        for roots in blocks.values():
            for part in self._convex_parts(roots):
                self.groups.join(part)

    def _convex_parts(self, roots: list[fx.Node]) -> list[list[fx.Node]]:
        """Connected runs of these groups, in order, each of which may be joined."""
        members = self.members()
        predecessors = self.predecessors(members)
        order = self.topological(predecessors)
        wanted = {self.groups.find(r) for r in roots}
        parts: list[list[fx.Node]] = []
        for root in order:
            if root not in wanted:
                continue
            for part in parts:
                candidate = [*part, root]
                touches = bool(predecessors[root] & set(part)) or any(
                    predecessors[root] & predecessors[p] for p in part
                )
                if (
                    touches
                    and self.may_join(*(members[p] for p in candidate))
                    and _is_convex(candidate, predecessors, order)
                ):
                    part.append(root)
                    break
            else:
                parts.append([root])
        return [part for part in parts if len(part) > 1]

    def ordered(self) -> tuple[tuple[fx.Node, ...], ...]:
        """The operations of each group, the groups in a topological order."""
        members = self.members()
        return tuple(tuple(members[root]) for root in self.topological(self.predecessors(members)))


def _is_convex(part: list[fx.Node], predecessors: dict[fx.Node, set[fx.Node]], order: list[fx.Node]) -> bool:
    """Whether no path leaves the part and comes back to it."""
    inside = set(part)
    outside_after: set[fx.Node] = set()
    for root in order:
        reads_after = bool(predecessors[root] & outside_after)
        if root in inside:
            if reads_after:
                return False
        elif reads_after or predecessors[root] & inside:
            outside_after.add(root)
    return True
