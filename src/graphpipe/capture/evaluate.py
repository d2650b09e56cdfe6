"""Running single operations of a training graph on given values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from graphpipe.capture.nodes import is_size, operator_name, subgraphs, value_of, written_by
from graphpipe.capture.training_graph import TrainingGraph

# They read the shape of their second argument only.
_SHAPED_LIKE_SECOND = ("expand_as", "view_as", "reshape_as")

Adapt = Callable[[fx.Node, tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]


def run_node(
    graph: TrainingGraph,
    node: fx.Node,
    values: Mapping[fx.Node, Any],
    num_samples: int,
    adapt: Adapt | None = None,
) -> Any:
    """Run one operation on the values of the nodes that it reads.

    Args:
        graph: Holds the node.
        node: The operation.
        values: Of every node that it reads, sizes left out.
        num_samples: What the batch symbol stands for.
        adapt: Changes the arguments of the operator just before the call.
    """

    def look_up(argument: fx.Node) -> Any:
        if is_size(argument):
            return concrete(graph, value_of(argument), num_samples)
        if argument.op == "get_attr" and argument not in values:
            return getattr(graph.module, str(argument.target))
        return values[argument]

    args = fx.node.map_arg(node.args, look_up)
    kwargs = fx.node.map_arg(node.kwargs, look_up)
    if adapt is not None:
        args, kwargs = adapt(node, args, kwargs)
    target: Callable[..., Any] = node.target  # type: ignore[assignment]
    return target(*args, **kwargs)


def value_from_inputs(
    graph: TrainingGraph, node: fx.Node, inputs: Mapping[fx.Node, Tensor], num_samples: int
) -> Tensor | None:
    """Return the value of a node that follows from the batch alone, as masks do; None if it reads a parameter.

    Args:
        graph: Holds the node.
        node: An operation, or an input.
        inputs: The tensor of each placeholder.
        num_samples: What the batch symbol stands for.
    """
    values: dict[fx.Node, Any] = dict(inputs)
    waiting = [node]
    while waiting:
        last = waiting[-1]
        if last in values:
            waiting.pop()
            continue
        if last.op != "call_function" or subgraphs(last) or written_by(last):
            return None
        if operator_name(last) in _SHAPED_LIKE_SECOND:
            like = last.all_input_nodes[-1]
            values.setdefault(like, torch.empty(graph.shape_at(value_of(like), num_samples)))
        missing = [read for read in last.all_input_nodes if not is_size(read) and read not in values]
        if not missing:
            values[waiting.pop()] = run_node(graph, last, values, num_samples)
        waiting += missing
    found = values[node]
    return found if isinstance(found, Tensor) else None


def concrete(graph: TrainingGraph, size: Any, num_samples: int) -> Any:
    """Return a symbolic number for a number of samples."""
    if isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return evaluate(size.node.expr, graph.example_sizes(num_samples))
    return size


def evaluate(expression: sympy.Basic, values: Mapping[sympy.Symbol, sympy.Integer]) -> int | float | bool:
    """Return the value of an expression in sizes."""
    found = expression.xreplace(dict(values))
    if found.is_Boolean:
        return bool(found)
    return int(found) if found.is_integer else float(found)
