"""Classes of light operations that follow from their arguments alone: those that leave every row to its sample.

Trying them out would compute tensors of the model's full width, for nothing where no operation that must be tried
reads them. The rules hold for any sizes and numbers; what is not plainly covered is tried.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from graphpipe.capture.classes import INDEPENDENT, Kind, SampleClass
from graphpipe.capture.keeping import leaf_of
from graphpipe.capture.nodes import (
    argument_of,
    inputs_of,
    is_random,
    is_size,
    mixes_in_backward,
    operator_name,
    storages,
    subgraphs,
    value_of,
    written_by,
)
from graphpipe.capture.training_graph import TrainingGraph

_COPIES = frozenset({
    "to", "_to_copy", "clone", "contiguous", "type_as", "float", "double", "detach", "alias", "dropout",
})  # fmt: skip
# The entries stay in their order.
_VIEWS = frozenset({
    "view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as",
})  # fmt: skip
_PARTS = frozenset({"select", "slice", "narrow", "split", "split_with_sizes", "chunk", "unbind"})
_NORMS = frozenset({"layer_norm", "rms_norm"})
_ALONG_ONE_AXIS = frozenset({"softmax", "log_softmax", "_softmax", "_log_softmax", "cumsum"})
_REDUCTIONS = frozenset({"mean", "sum", "amax", "amin", "logsumexp"})
# They work on the maps of each sample, which axis 0 counts.
_ON_MAPS = frozenset({
    "group_norm",
    *(f"{name}{n}d" for name in ("avg_pool", "adaptive_avg_pool", "max_pool") for n in (1, 2, 3)),
    *(f"upsample_{way}" for way in ("nearest1d", "nearest2d", "linear1d", "bilinear2d", "bicubic2d")),
})  # fmt: skip


def class_by_structure(graph: TrainingGraph, node: fx.Node, classes: Mapping[fx.Node, Any]) -> Any:
    """Return the class of an operation's result, a list or tuple for several, or None if it must be tried out.

    Args:
        graph: Holds the node.
        node: The operation.
        classes: Of what it reads.
    """
    if node.target is operator.getitem:
        return None if storages(node) & graph.written_storages else _entry(node, classes)
    if not _is_plain(graph, node):
        return None
    reads = list(inputs_of(node))
    if not reads or any(not isinstance(classes[read], SampleClass) for read in reads):
        return None
    sizes = [value_of(argument) for argument in node.all_input_nodes if is_size(argument)]
    varies = any(graph.depends_on_batch(size) for size in sizes)
    if all(classes[read] == INDEPENDENT for read in reads):
        shapes = [size for leaf in pytree.tree_leaves(value_of(node)) for size in getattr(leaf, "shape", ())]
        if varies or any(graph.depends_on_batch(size) for size in shapes):
            return None
        return pytree.tree_map(lambda _: INDEPENDENT, value_of(node))
    if any(classes[read].kind not in (Kind.INDEPENDENT, Kind.PER_SAMPLE) for read in reads):
        return None
    name = operator_name(node)
    if torch.Tag.pointwise in _tags(node) or name in _COPIES:
        return None if varies else _entry_by_entry(node, reads, classes)
    if classes[reads[0]].kind is not Kind.PER_SAMPLE:
        return None
    if name in _VIEWS:
        return _kept_order(graph, node, classes[reads[0]])
    rule = _RULES.get(name)
    return None if rule is None or varies else rule(node, reads, classes)


def _entry(node: fx.Node, classes: Mapping[fx.Node, Any]) -> SampleClass | None:
    """The class of one of several results."""
    source, position = node.args
    found = classes[source] if isinstance(source, fx.Node) else None
    kinds = {leaf.kind for leaf in pytree.tree_leaves(found) if isinstance(leaf, SampleClass)}
    if not isinstance(found, list | tuple) or not kinds <= {Kind.INDEPENDENT, Kind.PER_SAMPLE}:
        return None
    entry = found[position] if isinstance(position, int) else None
    return entry if isinstance(entry, SampleClass) else None


def _is_plain(graph: TrainingGraph, node: fx.Node) -> bool:
    """Whether a node is one of torch's own operators on floats, with no effect but its result."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace != "aten" or subgraphs(node):
        return False
    is_drawn = is_random(node) and operator_name(node) != "dropout"
    if is_drawn or leaf_of(node) is not None or written_by(node) or mixes_in_backward(node):
        return False
    leaves = pytree.tree_leaves(value_of(node))
    if not all(isinstance(leaf, Tensor) and leaf.is_floating_point() for leaf in leaves):
        return False
    touched = storages(node).union(*(storages(read) for read in inputs_of(node)))
    return not touched & graph.written_storages


def _tags(node: fx.Node) -> list[torch.Tag]:
    assert isinstance(node.target, torch._ops.OpOverload)
    return list(node.target.tags)


def _entry_by_entry(node: fx.Node, reads: list[fx.Node], classes: Mapping[fx.Node, Any]) -> SampleClass | None:
    """The one class of all arguments with samples, counted from the last axis, where the others have none."""
    dims = value_of(node).dim()
    found = {_moved(classes[r], dims - value_of(r).dim()) for r in reads if classes[r].kind is Kind.PER_SAMPLE}
    if len(found) != 1:
        return None
    (only,) = found
    # An argument without samples that is as long as their axis has other numbers for each sample.
    for read in reads:
        axis = only.axis - dims + value_of(read).dim()
        if classes[read] == INDEPENDENT and axis >= 0 and value_of(read).shape[axis] != 1:
            return None
    return only


def _kept_order(graph: TrainingGraph, node: fx.Node, found: SampleClass) -> SampleClass | None:
    """The class of the same entries in the same order, in another shape."""
    before, after = value_of(next(inputs_of(node))), value_of(node)
    axes = [axis for axis, size in enumerate(after.shape) if graph.depends_on_batch(size)]
    if len(axes) != 1:
        return None
    axis = axes[0]
    if math.prod(graph.shape_at(before, 2)) != math.prod(graph.shape_at(after, 2)):
        return None
    # A sample's entries lie next to each other in pieces of so many.
    piece = found.inner * math.prod(graph.size_at(size, 2) for size in before.shape[found.axis + 1 :])
    rest = math.prod(graph.size_at(size, 2) for size in after.shape[axis + 1 :])
    one, two = (graph.size_at(after.shape[axis], count) for count in (1, 2))
    if rest == 0 or piece % rest or two != 2 * one:
        return None
    inner = piece // rest
    if inner == 0 or one % inner:
        return None
    return SampleClass(Kind.PER_SAMPLE, axis, one // inner, inner)


def _permuted(node: fx.Node, reads: list[fx.Node], classes: Mapping[fx.Node, Any]) -> SampleClass | None:
    dims, found = value_of(reads[0]).dim(), classes[reads[0]]
    order = list(range(dims))
    if operator_name(node) == "permute":
        order = [axis % dims for axis in argument_of(node, "dims")]
    elif dims > 1:
        given = (0, 1) if operator_name(node) == "t" else (argument_of(node, "dim0"), argument_of(node, "dim1"))
        a, b = (axis % dims for axis in given)
        order[a], order[b] = b, a
    return SampleClass(Kind.PER_SAMPLE, order.index(found.axis), found.outer, found.inner)


def _part(node: fx.Node, reads: list[fx.Node], classes: Mapping[fx.Node, Any]) -> Any:
    """The class of what is cut along another axis than the samples'."""
    source, found = value_of(reads[0]), classes[reads[0]]
    axis = argument_of(node, "dim") % source.dim()
    if axis == found.axis:
        return None
    drops = operator_name(node) in ("select", "unbind")
    return pytree.tree_map(lambda _: _moved(found, -1 if drops and axis < found.axis else 0), value_of(node))


def _joined(node: fx.Node, reads: list[fx.Node], classes: Mapping[fx.Node, Any]) -> SampleClass | None:
    """The class of tensors with the same one that are put together along another axis."""
    found = {(classes[read], value_of(read).dim()) for read in reads}
    if len(found) != 1:
        return None
    dims = value_of(node).dim()
    only, axis = classes[reads[0]], argument_of(node, "dim") % dims
    if operator_name(node) == "stack":
        return _moved(only, 1 if axis <= only.axis else 0)
    return None if axis == only.axis or value_of(reads[0]).dim() != dims else only


def _expanded(node: fx.Node, reads: list[fx.Node], classes: Mapping[fx.Node, Any]) -> SampleClass | None:
    return _moved(classes[reads[0]], value_of(node).dim() - value_of(reads[0]).dim())


def _normalised(node: fx.Node, reads: list[fx.Node], classes: Mapping[fx.Node, Any]) -> SampleClass | None:
    """The class of an operation on the last axes, with weights that do not depend on the batch."""
    source, found = reads[0], classes[reads[0]]
    if any(classes[read] != INDEPENDENT for read in reads[1:]):
        return None
    first = value_of(source).dim() - len(argument_of(node, "normalized_shape"))
    return found if found.axis < first else None


def _on_maps(node: fx.Node, reads: list[fx.Node], classes: Mapping[fx.Node, Any]) -> SampleClass | None:
    """The class of maps with axis 0 for the samples, with weights that do not depend on the batch."""
    found = classes[reads[0]]
    is_fixed = all(classes[read] == INDEPENDENT for read in reads[1:])
    return found if found.axis == 0 and is_fixed and value_of(node).dim() == value_of(reads[0]).dim() else None


def _along_axis(node: fx.Node, reads: list[fx.Node], classes: Mapping[fx.Node, Any]) -> SampleClass | None:
    axis: int = argument_of(node, "dim") % value_of(reads[0]).dim()
    return None if axis == classes[reads[0]].axis else classes[reads[0]]


def _reduced(node: fx.Node, reads: list[fx.Node], classes: Mapping[fx.Node, Any]) -> SampleClass | None:
    """The class of what is left of other axes than the samples'."""
    source, found, given = value_of(reads[0]), classes[reads[0]], argument_of(node, "dim")
    if given is None or given == []:
        return None
    axes = {axis % source.dim() for axis in (given if isinstance(given, list | tuple) else (given,))}
    if found.axis in axes:
        return None
    return found if argument_of(node, "keepdim") else _moved(found, -sum(axis < found.axis for axis in axes))


def _moved(found: SampleClass, by: int) -> SampleClass:
    return SampleClass(Kind.PER_SAMPLE, found.axis + by, found.outer, found.inner)


_Rule = Callable[[fx.Node, list[fx.Node], Mapping[fx.Node, Any]], Any]
_RULES: Mapping[str, _Rule] = {
    **dict.fromkeys(("permute", "transpose", "t"), _permuted),
    **dict.fromkeys(_PARTS, _part),
    **dict.fromkeys(("cat", "stack"), _joined),
    "expand": _expanded,
    **dict.fromkeys(_NORMS, _normalised),
    **dict.fromkeys(_ON_MAPS, _on_maps),
    **dict.fromkeys(_ALONG_ONE_AXIS, _along_axis),
    **dict.fromkeys(_REDUCTIONS, _reduced),
}
