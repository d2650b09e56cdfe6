"""Means and sums over samples: which operations give them, which keep them, and what lies around them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx
from torch.utils import _pytree as pytree

from graphpipe.capture.classes import Kind
from graphpipe.capture.losses import is_plain_loss
from graphpipe.capture.nodes import inputs_of, operator_name
from graphpipe.capture.training_graph import TrainingGraph

# Operators whose result over samples may be a sum or a weighted mean of those of parts.
_REDUCTIONS = frozenset({"sum", "mean", "matmul", "mm", "bmm", "linear", "dot", "vdot", "mv", "einsum", "nansum"})
# Linear in one argument when the others do not depend on the batch: the index of that argument, or None for all.
_LINEAR: Mapping[str, int | None] = {
    **dict.fromkeys(("add", "sub", "rsub", "stack", "cat"), None),
    **dict.fromkeys(
        ("mul", "div", "true_divide", "neg", "to", "_to_copy", "clone", "alias", "contiguous", "view", "reshape",
         "squeeze", "unsqueeze", "expand", "sum", "mean", "select", "slice", "getitem", "permute", "transpose", "t",
         "view_as", "reshape_as", "type_as", "flatten", "unbind", "float", "double"), 0),
}  # fmt: skip


def may_reduce(node: fx.Node) -> bool:
    """Return whether the result of an operation may be a sum or a mean over samples."""
    return operator_name(node) in _REDUCTIONS or is_plain_loss(node)


def is_linear(node: fx.Node, classes: Mapping[fx.Node, Any]) -> bool:
    """Return whether an operation is linear in the means and sums that it reads, all of one kind."""
    name = operator_name(node)
    if name not in _LINEAR:
        return False
    shared = [(r, leaf.kind) for r in inputs_of(node) for leaf in pytree.tree_leaves(classes[r])]
    shared = [(r, kind) for r, kind in shared if kind in (Kind.MEAN, Kind.SUM)]
    position = _LINEAR[name]
    if position is None:
        return len({kind for _, kind in shared}) == 1
    first = node.args[position] if node.args else None
    if name == "mul" and len({r for r, _ in shared}) == 1:
        return sum(argument is shared[0][0] for argument in node.args) == 1
    return {r for r, _ in shared} == {first} and sum(argument is first for argument in node.args) == 1


def spread(graph: TrainingGraph, classes: Mapping[fx.Node, Any], batch_wise: set[fx.Node]) -> set[fx.Node]:
    """Return the batch-wise operations, and all operations around a mean or sum of which one is batch-wise.

    Whoever reads such a value must see it of the same samples as whoever makes it.
    """
    found = set(batch_wise)
    links = [
        (node, reader)
        for node in graph.operations
        if any(leaf.kind in (Kind.MEAN, Kind.SUM) for leaf in pytree.tree_leaves(classes[node]))
        for reader in graph.readers.get(node, ())
    ]
    changed = True
    while changed:
        changed = False
        for a, b in links:
            if (a in found) != (b in found):
                found |= {a, b}
                changed = True
    return found
