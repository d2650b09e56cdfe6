"""Operations that no stage boundary may part."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from torch import Tensor, fx
from torch.utils import _pytree as pytree

from graphpipe.capture.classification import Classification
from graphpipe.capture.nodes import module_path, storages, tensors_of, value_of, written_by
from graphpipe.capture.training_graph import TrainingGraph


class Groups:
    """A partition of operations that only ever gets coarser.

    Args:
        order: The operations, each at first by itself.
    """

    def __init__(self, order: Sequence[fx.Node]) -> None:
        self._order = order
        self._position = {node: i for i, node in enumerate(order)}
        self._parent = {node: node for node in order}

    def find(self, node: fx.Node) -> fx.Node:
        """Return the first operation of the group of `node`, which stands for the group."""
        root = node
        while self._parent[root] is not root:
            root = self._parent[root]
        while self._parent[node] is not root:
            self._parent[node], node = root, self._parent[node]
        return root

    def join(self, nodes: Iterable[fx.Node]) -> None:
        """Put all of these operations, with their groups, into one group."""
        roots = sorted({self.find(node) for node in nodes}, key=self._position.__getitem__)
        for root in roots[1:]:
            self._parent[root] = roots[0]

    def members(self) -> list[list[fx.Node]]:
        """Return the operations of each group, in order of their first ones."""
        found: dict[fx.Node, list[fx.Node]] = {}
        for node in self._order:
            found.setdefault(self.find(node), []).append(node)
        return [found[root] for root in sorted(found, key=self._position.__getitem__)]


def atomic_groups(graph: TrainingGraph) -> Groups:
    """Return the operations that must run together because they share memory or are parts of one result.

    * The entries of a tuple stay with the operation that makes it.
    * Everything that touches a tensor up to the last time it is written in place stays together; so does everything
      that touches a buffer which is written, at any time. Later readers of another tensor find it in its last state.
    """
    groups = Groups(graph.operations)
    for node in graph.operations:
        if node.target is operator.getitem:
            source = node.args[0]
            if isinstance(source, fx.Node) and source in graph.order and not isinstance(value_of(source), Tensor):
                groups.join([source, node])
    touching: defaultdict[int, list[fx.Node]] = defaultdict(list)
    for node in graph.operations:
        for storage in storages(node) | {s for read in node.all_input_nodes for s in storages(read)}:
            touching[storage].append(node)
    buffers = {s for attribute in graph.attributes for s in storages(attribute)}
    last_write: dict[int, fx.Node] = {}
    for node in graph.writers:
        for written in written_by(node):
            last_write.update(dict.fromkeys(storages(written), node))
    for storage, last in last_write.items():
        groups.join(n for n in touching[storage] if storage in buffers or graph.order[n] <= graph.order[last])
    _place_lone_writers(graph, groups)
    return groups


def _place_lone_writers(graph: TrainingGraph, groups: Groups) -> None:
    """Keep an operation that only updates a buffer, such as a counter of batches, with its module's next operation."""
    for i, node in enumerate(graph.operations):
        reads = [read for read in node.all_input_nodes if read in graph.order]
        if reads or graph.readers.get(node) or node is graph.loss:
            continue
        path = module_path(node, "")
        others = [*graph.operations[i + 1 :], *reversed(graph.operations[:i])]
        near = [n for n in others if module_path(n, "") == path and (n in graph.readers or n is graph.loss)]
        groups.join([node, *(near or others)[:1]])


def join_uncuttable(
    graph: TrainingGraph, classification: Classification, groups: Groups, left_out: Collection[fx.Node]
) -> None:
    """Join makers and readers of the tensors that a stage boundary may not cut.

    What mixes samples may pass between operations that take the whole mini-batch, if its size is fixed.

    Args:
        graph: The training graph.
        classification: How its tensors depend on the samples.
        groups: The groups to join.
        left_out: Operations that every stage repeats for itself.
    """
    for node in graph.operations:
        readers = [r for r in graph.readers.get(node, ()) if r not in left_out]
        if node in left_out or not readers:
            continue
        is_whole = classification.batch_wise.issuperset([node, *readers])
        is_fixed = not any(graph.depends_on_batch(size) for tensor in tensors_of(node) for size in tensor.shape)
        is_cuttable = all(leaf.is_cuttable for leaf in pytree.tree_leaves(classification.classes[node]))
        if not is_cuttable and not (is_whole and is_fixed):
            groups.join([node, *readers])


def components(successors: Mapping[fx.Node, Collection[fx.Node]]) -> list[list[fx.Node]]:
    """Return the strongly connected components with more than one node (Tarjan, without recursion)."""
    index: dict[fx.Node, int] = {}
    low: dict[fx.Node, int] = {}
    on_stack: set[fx.Node] = set()
    stack: list[fx.Node] = []
    found: list[list[fx.Node]] = []
    for root in successors:
        if root in index:
            continue
        work = [(root, iter(successors[root]))]
        index[root] = low[root] = len(index)
        stack.append(root)
        on_stack.add(root)
        while work:
            node, rest = work[-1]
            for target in rest:
                if target not in index:
                    index[target] = low[target] = len(index)
                    stack.append(target)
                    on_stack.add(target)
                    work.append((target, iter(successors[target])))
                    break
                if target in on_stack:
                    low[node] = min(low[node], index[target])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    component = []
                    while True:
                        member = stack.pop()
                        on_stack.discard(member)
                        component.append(member)
                        if member == node:
                            break
                    if len(component) > 1:
                        found.append(component)
    return found
