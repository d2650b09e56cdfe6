"""The exported graph, cleaned: a node per tensor of the model, the model's own names, and only what the loss needs."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn

from graphpipe.capture.assignments import assign_at_the_end
from graphpipe.capture.batch import BatchLayout
from graphpipe.capture.export import MODEL
from graphpipe.capture.leaves import Leaf, UntraceableModuleError
from graphpipe.capture.nodes import (
    attribute_of,
    inputs_of,
    is_size,
    is_transformed,
    module_path,
    operator_name,
    source_line,
    storages,
    subgraphs,
    tensors_of,
    value_of,
    written_by,
)
from graphpipe.capture.sizes import free_symbols
from graphpipe.errors import CaptureError


class AttributeKind(StrEnum):
    """What a tensor that belongs to the model is."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"
    """A tensor that the model's code makes from literals."""


@dataclass(frozen=True, eq=False)
class Attribute:
    """A tensor that belongs to the model.

    Attributes:
        kind: What it is.
        name: The model's own name for it, of tied ones the first.
        tensor: The model's own object.
    """

    kind: AttributeKind
    name: str
    tensor: Tensor


@dataclass(frozen=True, slots=True)
class FreeSize:
    """A size that may differ from batch to batch.

    Attributes:
        name: What the user calls it.
        input: The name of an input that has it.
        axis: Where the input has it.
        example: The size in the example batch.
        least: The smallest size for which the model does what it did when it was captured.
        most: The largest; None if there is none.
    """

    name: str
    input: str
    axis: int
    example: int
    least: int
    most: int | None

    @classmethod
    def of(cls, name: str, given: str, axis: int, example: int, size: torch.SymInt) -> FreeSize:
        """Return a size with the bounds that conditions in the model's code have put on it.

        Args:
            name: What the user calls it.
            given: The name of an input that has it.
            axis: Where the input has it.
            example: The size in the example batch.
            size: As export has it: a symbol.
        """
        bounds = size.node.shape_env.var_to_range[size.node.expr]
        # Export takes every size for 2 at least; that is no condition.
        least = int(bounds.lower) if bounds.lower > 2 else 0
        return cls(name, given, axis, example, least, int(bounds.upper) if bounds.upper.is_Integer else None)

    def holds(self, size: int) -> bool:
        """Return whether the model does the same for another size."""
        return size >= self.least and (self.most is None or size <= self.most)


@dataclass(frozen=True, eq=False)
class TrainingGraph:
    """The forward pass of a model and its loss.

    Attributes:
        module: Holds the nodes.
        attributes: The model's tensors by node.
        inputs: The batch's tensors: the placeholder of each input name.
        operations: The tensor operations that the loss or a buffer needs, in order. Sizes are not among them.
        loss: The operation that gives the loss.
        batch_symbols: The symbols that stand for the number of samples.
        leaves: The Python code that some operations run.
        free_sizes: By symbol, the other sizes that may differ from batch to batch.
        outputs: The operations whose results are wanted besides the loss.
    """

    module: fx.GraphModule
    attributes: Mapping[fx.Node, Attribute]
    inputs: Mapping[str, fx.Node]
    operations: tuple[fx.Node, ...]
    loss: fx.Node
    batch_symbols: frozenset[sympy.Symbol]
    leaves: tuple[Leaf, ...]
    free_sizes: Mapping[sympy.Symbol, FreeSize]
    outputs: tuple[fx.Node, ...] = ()

    def with_tensors(self, tensors: Mapping[int, Tensor]) -> TrainingGraph:
        """Return the graph with other tensors in the place of the model's own, by the identity of these."""
        attributes = {n: replace(a, tensor=tensors.get(id(a.tensor), a.tensor)) for n, a in self.attributes.items()}
        return replace(self, attributes=attributes)

    @cached_property
    def order(self) -> Mapping[fx.Node, int]:
        """The position of each operation."""
        return {node: i for i, node in enumerate(self.operations)}

    @cached_property
    def fingerprint(self) -> str:
        """A hash of what each operation is and reads."""
        names = {node: node.op for node in self.module.graph.nodes}
        names |= {node: attribute.name for node, attribute in self.attributes.items()}
        names |= self.input_names
        names |= {node: f"#{i}" for node, i in self.order.items()}
        lines = [" ".join([str(node.target), *(names[n] for n in node.all_input_nodes)]) for node in self.operations]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]

    @cached_property
    def input_names(self) -> Mapping[fx.Node, str]:
        """The name of each placeholder."""
        return {node: name for name, node in self.inputs.items()}

    @cached_property
    def readers(self) -> Mapping[fx.Node, tuple[fx.Node, ...]]:
        """For each node, the operations that read its tensors, in order."""
        found: defaultdict[fx.Node, list[fx.Node]] = defaultdict(list)
        for node in self.operations:
            for read in inputs_of(node):
                found[read].append(node)
        return {node: tuple(readers) for node, readers in found.items()}

    @cached_property
    def writers(self) -> tuple[fx.Node, ...]:
        """The operations that write a tensor in place, in order."""
        return tuple(node for node in self.operations if written_by(node))

    @cached_property
    def written_storages(self) -> frozenset[int]:
        """The storages that some operation writes in place."""
        return frozenset(s for node in self.writers for w in written_by(node) for s in storages(w))

    def writes_buffer(self, node: fx.Node) -> bool:
        """Return whether an operation writes a buffer of the model."""
        buffers = {s for a in self.attributes for s in storages(a)}
        return any(storages(written) & buffers for written in written_by(node))

    def depends_on_batch(self, size: Any) -> bool:
        """Return whether a size follows from the number of samples."""
        return not free_symbols(size).isdisjoint(self.batch_symbols)

    def example_sizes(self, num_samples: int) -> dict[sympy.Symbol, sympy.Integer]:
        """Return the value of each symbol for so many samples, with other sizes as in the example batch."""
        free = {symbol: sympy.Integer(size.example) for symbol, size in self.free_sizes.items()}
        return {**free, **dict.fromkeys(self.batch_symbols, sympy.Integer(num_samples))}

    def size_at(self, size: Any, num_samples: int) -> int:
        """Return a symbolic size for a number of samples."""
        if isinstance(size, torch.SymInt):
            return int(size.node.expr.xreplace(self.example_sizes(num_samples)))
        return int(size)

    def shape_at(self, tensor: Tensor, num_samples: int) -> tuple[int, ...]:
        """Return the shape of a recorded tensor for a number of samples."""
        return tuple(self.size_at(size, num_samples) for size in tensor.shape)


def clean(
    module: fx.GraphModule,
    model: nn.Module,
    layout: BatchLayout,
    original: Mapping[int, Tensor],
    leaves: Sequence[Leaf],
) -> TrainingGraph:
    """Return the cleaned graph of an exported model.

    Args:
        module: The exported graph.
        model: The user's model.
        layout: Of the batch.
        original: The model's own tensor for the identity of each one that was exported in its place.
        leaves: The Python code in the graph.

    Raises:
        UntraceableModuleError: A module cannot be followed inside, but perhaps kept whole.
        CaptureError: The model writes one of its inputs, or a size depends on the values of a tensor.
    """
    graph = module.graph
    attributes = _attributes(module, model, original)
    assign_at_the_end(graph)
    _refuse_unknown_regions(graph, type(model).__name__)
    for node in list(graph.nodes):
        if operator_name(node).startswith(("_assert", "sym_constrain_range")):
            graph.erase_node(node)
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    inputs = dict(zip(layout.inputs, placeholders, strict=True))
    loss, *outputs = next(n for n in graph.nodes if n.op == "output").args[0]
    if loss.op != "call_function":
        raise CaptureError(f"the loss of {type(model).__name__} is one of its inputs or parameters; nothing to train")
    symbols: set[sympy.Symbol] = set()
    free_sizes: dict[sympy.Symbol, FreeSize] = {}
    for input_name, node in inputs.items():
        own = layout.free_axes.get(input_name, {})
        for axis, size in enumerate(value_of(node).shape):
            if axis not in own:
                symbols |= free_symbols(size)
            for symbol in free_symbols(size) if axis in own else ():
                example = layout.inputs[input_name].shape[axis]
                free_sizes.setdefault(symbol, FreeSize.of(own[axis], input_name, axis, example, size))
    operations = _live(graph, [loss, *outputs], attributes)
    found = TrainingGraph(
        module, attributes, inputs, operations, loss, frozenset(symbols), tuple(leaves), free_sizes, tuple(outputs)
    )
    _check(found, model)
    return found


def _refuse_unknown_regions(graph: fx.Graph, name: str) -> None:
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        path, line = module_path(node, MODEL), source_line(node) or node.name
        if is_transformed(value_of(node)):
            raise UntraceableModuleError(
                f"{name} uses torch.func at {line}, which cannot be followed; write it over whole tensors", path
            )
        if len(subgraphs(node)) > 1:
            raise UntraceableModuleError(
                f"{name} branches on the values of a tensor by {operator_name(node)} at {line}; use torch.where", path
            )


def _attributes(module: fx.GraphModule, model: nn.Module, original: Mapping[int, Tensor]) -> dict[fx.Node, Attribute]:
    """Leave one node per tensor of the model, and say what each is."""
    parameters = {id(p): name for name, p in model.named_parameters()}
    buffers = {id(b): name for name, b in model.named_buffers()}
    first: dict[int, fx.Node] = {}
    found: dict[fx.Node, Attribute] = {}
    for node in list(module.graph.nodes):
        if node.op != "get_attr":
            continue
        tensor = attribute_of(module, str(node.target))
        if not isinstance(tensor, Tensor):
            continue
        tensor = original.get(id(tensor), tensor)
        if id(tensor) in first:
            node.replace_all_uses_with(first[id(tensor)])
            module.graph.erase_node(node)
            continue
        first[id(tensor)] = node
        if id(tensor) in parameters:
            found[node] = Attribute(AttributeKind.PARAMETER, parameters[id(tensor)], tensor)
        elif id(tensor) in buffers:
            found[node] = Attribute(AttributeKind.BUFFER, buffers[id(tensor)], tensor)
        else:
            found[node] = Attribute(AttributeKind.CONSTANT, str(node.target).removeprefix(MODEL + "."), tensor)
    return found


def _live(graph: fx.Graph, wanted: list[fx.Node], attributes: Mapping[fx.Node, Attribute]) -> tuple[fx.Node, ...]:
    """The tensor operations that the wanted ones need, or that write a buffer or a tensor that is needed."""
    writers = [(node, written_by(node)) for node in graph.nodes if node.op == "call_function"]
    writers = [(node, written) for node, written in writers if written]
    live: set[fx.Node] = set()
    needed = {s for node in attributes for s in storages(node)}
    waiting = list(wanted)
    while waiting:
        while waiting:
            node = waiting.pop()
            if node in live:
                continue
            live.add(node)
            needed |= storages(node)
            waiting += node.all_input_nodes
        waiting = [n for n, written in writers if n not in live and any(storages(w) & needed for w in written)]
    return tuple(n for n in graph.nodes if n in live and n.op == "call_function" and not is_size(n))


def _check(graph: TrainingGraph, model: nn.Module) -> None:
    name = type(model).__name__
    for input_name, placeholder in graph.inputs.items():
        for writer in graph.writers:
            if any(storages(placeholder) & storages(written) for written in written_by(writer)):
                raise CaptureError(
                    f"forward of {name} modifies its input {input_name!r} in place at {source_line(writer)}; "
                    "work on a copy, such as x = x.clone()"
                )
    known = graph.batch_symbols | graph.free_sizes.keys()
    for node in graph.operations:
        for tensor in tensors_of(node):
            for size in tensor.shape:
                unknown = free_symbols(size) - known
                if unknown:
                    raise UntraceableModuleError(
                        f"a size in {name} depends on the values of a tensor at {source_line(node) or node.name}; "
                        "keep the shape and use a mask or torch.where",
                        module_path(node, MODEL),
                    )
        for read in node.all_input_nodes:
            if is_size(read) and free_symbols(value_of(read)) - known:
                raise UntraceableModuleError(
                    f"{name} turns the value of a tensor into a number at {source_line(read) or read.name}; "
                    "keep it a tensor",
                    module_path(node, MODEL),
                )
