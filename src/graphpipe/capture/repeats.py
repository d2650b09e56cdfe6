"""Operations that a model repeats, layer by layer, so that one of them need be tried."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx

from graphpipe.capture.classes import Kind
from graphpipe.capture.nodes import inputs_of, is_random, is_size, subgraphs, value_of, written_by
from graphpipe.capture.training_graph import AttributeKind, TrainingGraph
from graphpipe.capture.trial import NUM_SAMPLES


def signature(graph: TrainingGraph, node: fx.Node, classes: Mapping[fx.Node, Any]) -> tuple[Any, ...] | None:
    """Return what decides the class of an operation on floats.

    None where values may matter as well, as indices and masks do.
    """
    if written_by(node) or subgraphs(node) or is_random(node) or not isinstance(value_of(node), Tensor):
        return None
    read = []
    for argument in inputs_of(node):
        fake, found = value_of(argument), classes[argument]
        is_fixed = argument in graph.attributes and graph.attributes[argument].kind is not AttributeKind.PARAMETER
        if not isinstance(fake, Tensor) or not fake.is_floating_point() or is_fixed:
            return None
        if argument not in graph.attributes and found.kind is not Kind.PER_SAMPLE:
            return None
        read.append((graph.shape_at(fake, NUM_SAMPLES), found))
    numbers: list[fx.Node] = []
    structure = fx.node.map_arg((node.args, dict(node.kwargs)), lambda a: _place(a, numbers))
    return str(node.target), str(structure), tuple(str(value_of(n)) for n in numbers), tuple(read)


def _place(node: fx.Node, numbers: list[fx.Node]) -> str:
    """Stand for a node in printed arguments; sizes are listed beside."""
    if is_size(node):
        numbers.append(node)
        return "size"
    return "tensor"
