"""Classes of heavy operations that follow from their shapes alone.

Trying them out would take most of the time of a probe, and their results need not be known: a later operation is
tested on whatever numbers it reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx

from graphpipe.capture.classes import INDEPENDENT, Kind, SampleClass
from graphpipe.capture.nodes import argument_of, mixes_in_backward, operator_name, value_of

_CONVOLUTIONS = {
    **{f"conv{n}d": n for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": n for n in (1, 2, 3)},
}


def class_of_product(node: fx.Node, classes: Mapping[fx.Node, Any]) -> SampleClass | None:
    """Return the class of a heavy operation's result, None if it must be tried out.

    Args:
        node: The operation.
        classes: Of what it reads.
    """
    name = operator_name(node)
    if mixes_in_backward(node):
        return None
    if name == "linear":
        return _rows_kept(node, classes, "input", ("weight", "bias"), last_axes=1)
    if name in _CONVOLUTIONS:
        return _rows_kept(node, classes, "input", ("weight", "bias"), last_axes=1 + _CONVOLUTIONS[name])
    if name == "embedding":
        return _rows_kept(node, classes, "indices", ("weight",), last_axes=0)
    if name in ("matmul", "bmm"):
        return _product(node, classes, "self", "other" if name == "matmul" else "mat2")
    if name == "scaled_dot_product_attention":
        return _attention(node, classes)
    return None


def _rows_kept(
    node: fx.Node, classes: Mapping[fx.Node, Any], data: str, weights: tuple[str, ...], last_axes: int
) -> SampleClass | None:
    """The class of the data if its rows are not on the axes that the operation mixes, and the weights are fixed."""
    for weight in weights:
        argument = argument_of(node, weight)
        if isinstance(argument, fx.Node) and classes[argument] != INDEPENDENT:
            return None
    source = argument_of(node, data)
    found = classes[source]
    if not isinstance(found, SampleClass) or found.kind not in (Kind.INDEPENDENT, Kind.PER_SAMPLE):
        return None
    if found.kind is Kind.PER_SAMPLE and found.axis >= value_of(source).dim() - last_axes:
        return None
    return found


def _product(node: fx.Node, classes: Mapping[fx.Node, Any], left: str, right: str) -> SampleClass | None:
    a, b = argument_of(node, left), argument_of(node, right)
    if classes[b] == INDEPENDENT and value_of(b).dim() == 2:
        return _rows_kept(node, classes, left, (right,), last_axes=1)
    same = classes[a] == classes[b] and value_of(a).dim() == value_of(b).dim()
    found: SampleClass = classes[a]
    return found if same and _is_leading(found, value_of(a), 2) else None


def _attention(node: fx.Node, classes: Mapping[fx.Node, Any]) -> SampleClass | None:
    query = argument_of(node, "query")
    found: SampleClass = classes[query]
    if not _is_leading(found, value_of(query), 2):
        return None
    for name in ("key", "value"):
        argument = argument_of(node, name)
        if classes[argument] != found or value_of(argument).dim() != value_of(query).dim():
            return None
    mask = argument_of(node, "attn_mask")
    if isinstance(mask, fx.Node):
        axis = found.axis + value_of(mask).dim() - value_of(query).dim()
        aligned = SampleClass(Kind.PER_SAMPLE, axis, found.outer, found.inner)
        broadcast = classes[mask] == INDEPENDENT and (axis < 0 or value_of(mask).shape[axis] == 1)
        if not broadcast and (found == INDEPENDENT or classes[mask] != aligned):
            return None
    return found


def _is_leading(found: Any, tensor: Tensor, last_axes: int) -> bool:
    """Whether rows lie on an axis that a batched matrix product treats one by one."""
    if not isinstance(found, SampleClass):
        return False
    return found == INDEPENDENT or (found.kind is Kind.PER_SAMPLE and found.axis < tensor.dim() - last_axes)
