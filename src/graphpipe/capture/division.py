"""A model divided into operators: what a capture finds out, and what can be kept of it as plain data."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from graphpipe.capture.classes import Kind, SampleClass
from graphpipe.capture.classification import Classification
from graphpipe.capture.describe import Description
from graphpipe.capture.node_data import (
    UnstorableError,
    argument_from_plain,
    argument_to_plain,
    dtype_from_plain,
    expression_from_plain,
    expression_to_plain,
    target_from_plain,
    target_to_plain,
)
from graphpipe.capture.nodes import attribute_of, value_of
from graphpipe.capture.sizes import free_symbols, size_expression
from graphpipe.capture.specs import SampleLayout, ValueSpec
from graphpipe.capture.training_graph import Attribute, AttributeKind, FreeSize, TrainingGraph
from graphpipe.capture.units import Units
from graphpipe.errors import FieldError
from graphpipe.graph.computation import ComputationGraph

_LARGEST_CONSTANT_BYTES = 1 << 20
_SIZES = {"int": torch.SymInt, "float": torch.SymFloat, "bool": torch.SymBool}


@dataclass(frozen=True, eq=False)
class Division:
    """What a capture finds out about a model.

    Attributes:
        graph: Its operations.
        classification: How its tensors depend on the samples.
        units: The operations, divided.
        description: The computation graph.
    """

    graph: TrainingGraph
    classification: Classification
    units: Units
    description: Description


def division_to_plain(division: Division, model: nn.Module) -> dict[str, Any]:
    """Return a division as plain data. The model's own tensors are in it by name.

    Raises:
        UnstorableError: It has Python code in it, or something else without such a form.
    """
    graph, classification, units = division.graph, division.classification, division.units
    if graph.leaves:
        raise UnstorableError(f"{graph.leaves[0]} is Python code")
    known = graph.batch_symbols | graph.free_sizes.keys()
    for node in graph.module.graph.nodes:
        if any(free_symbols(leaf) - known for leaf in pytree.tree_leaves(value_of(node))):
            raise UnstorableError(f"{node.name} is a size that depends on values")
    numbers = {node: i for i, node in enumerate(graph.module.graph.nodes)}
    owners = {id(t): (path, n) for path, m in model.named_modules() for n, t in vars(m).items() if type(t) is Tensor}

    def listed(nodes: Any) -> list[int]:
        return [numbers[node] for node in nodes]

    return {
        "nodes": _nodes_to_plain(graph.module, numbers),
        "attributes": {numbers[n]: _attribute_to_plain(a, owners) for n, a in graph.attributes.items()},
        "inputs": {name: numbers[node] for name, node in graph.inputs.items()},
        "operations": listed(graph.operations),
        "loss": numbers[graph.loss],
        "batch_symbols": [expression_to_plain(s) for s in sorted(graph.batch_symbols, key=str)],
        "free_sizes": [
            [expression_to_plain(s), size.name, size.input, size.axis, size.example, size.least, size.most]
            for s, size in graph.free_sizes.items()
        ],
        "classes": [[numbers[n], _classes_to_plain(c)] for n, c in classification.classes.items() if n in numbers],
        "batch_wise": sorted(listed(classification.batch_wise)),
        "counted_targets": [[numbers[n], count] for n, count in classification.counted_targets.items()],
        "filled": sorted(listed(classification.filled)),
        "units": [listed(members) for members in units.members],
        "repeated": sorted(listed(units.repeated)),
        "companions": [[numbers[n], listed(others)] for n, others in units.companions.items()],
        "computation": division.description.graph.to_json(),
        "values": [_spec_to_plain(spec) for spec in division.description.values.values()],
        "value_names": [[numbers[n], name] for n, name in division.description.value_names.items()],
    }


def division_from_plain(data: Mapping[str, Any], model: nn.Module, num_samples: int) -> Division:
    """Return the division that `division_to_plain` wrote, of another model that does the same.

    What its nodes recorded has the shapes and types of what export recorded. Which of them share memory is lost.

    Args:
        data: The plain data.
        model: The model.
        num_samples: Of the example batch.

    Raises:
        Exception: The data is damaged; of whatever type that shows in.
    """
    free_sizes = {expression_from_plain(s): FreeSize(*of_size) for s, *of_size in data["free_sizes"]}
    batch_symbols = frozenset(expression_from_plain(s) for s in data["batch_symbols"])
    example = {symbol: sympy.Integer(size.example) for symbol, size in free_sizes.items()}
    records = _Records({**example, **dict.fromkeys(batch_symbols, sympy.Integer(num_samples))})
    tensors = _TensorsByName(model)
    attributes = {int(i): tensors.attribute(a) for i, a in data["attributes"].items()}
    root: dict[str, Any] = {data["nodes"][i]["target"]: a.tensor for i, a in attributes.items()}
    module, nodes = _graph_from_plain(data["nodes"], root, records)
    graph = TrainingGraph(
        module,
        {nodes[i]: attribute for i, attribute in attributes.items()},
        {name: nodes[i] for name, i in data["inputs"].items()},
        tuple(nodes[i] for i in data["operations"]),
        nodes[data["loss"]],
        batch_symbols,
        (),
        free_sizes,
    )
    classification = Classification(
        {nodes[i]: _classes_from_plain(c) for i, c in data["classes"]},
        frozenset(nodes[i] for i in data["batch_wise"]),
        {nodes[i]: int(count) for i, count in data["counted_targets"]},
        frozenset(nodes[i] for i in data["filled"]),
    )
    units = Units(
        tuple(tuple(nodes[i] for i in members) for members in data["units"]),
        frozenset(nodes[i] for i in data["repeated"]),
        {nodes[i]: tuple(nodes[j] for j in others) for i, others in data["companions"]},
    )
    specs = [_spec_from_plain(spec) for spec in data["values"]]
    description = Description(
        ComputationGraph.from_json(data["computation"]),
        {spec.name: spec for spec in specs},
        {nodes[i]: str(name) for i, name in data["value_names"]},
    )
    return Division(graph, classification, units, description)


def _nodes_to_plain(module: fx.GraphModule, numbers: Mapping[fx.Node, int]) -> list[dict[str, Any]]:
    found = []
    for node in module.graph.nodes:
        entry: dict[str, Any] = {"name": node.name, "op": node.op}
        entry["target"] = target_to_plain(node.target) if node.op == "call_function" else str(node.target)
        entry["args"] = [argument_to_plain(a, numbers) for a in node.args]
        if node.kwargs:
            entry["kwargs"] = {name: argument_to_plain(a, numbers) for name, a in node.kwargs.items()}
        if "val" in node.meta:
            entry["val"] = _record_to_plain(value_of(node))
        if node.op == "get_attr":
            attribute = attribute_of(module, str(node.target))
            if isinstance(attribute, fx.GraphModule):
                entry["region"] = _nodes_to_plain(attribute, {n: i for i, n in enumerate(attribute.graph.nodes)})
            elif not isinstance(attribute, Tensor):
                raise UnstorableError(f"the graph reads a {type(attribute).__name__}")
        found.append(entry)
    return found


def _graph_from_plain(
    data: Sequence[Mapping[str, Any]], root: dict[str, Any], records: _Records | None
) -> tuple[fx.GraphModule, list[fx.Node]]:
    graph = fx.Graph()
    nodes: list[fx.Node] = []
    for entry in data:
        op, target = entry["op"], entry["target"]
        if op not in ("placeholder", "get_attr", "call_function", "output"):
            raise FieldError(f"no node is a {str(op)[:60]}")
        args = tuple(argument_from_plain(a, nodes) for a in entry["args"])
        kwargs = {name: argument_from_plain(a, nodes) for name, a in entry.get("kwargs", {}).items()}
        found = target_from_plain(target) if op == "call_function" else str(target)
        node = graph.create_node(op, found, args, kwargs, name=entry["name"])
        if node.name != entry["name"]:
            raise FieldError(f"there are two nodes {entry['name']!r}")
        if "val" in entry and records is not None:
            node.meta["val"] = records.read(entry["val"])
        if "region" in entry:
            root[target], _ = _graph_from_plain(entry["region"], {}, None)
        nodes.append(node)
    return fx.GraphModule(root, graph), nodes


def _record_to_plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return {"float": value.hex()}
    for kind, cls in _SIZES.items():
        if isinstance(value, cls):
            return {"size": kind, "is": expression_to_plain(size_expression(value))}
    if isinstance(value, Tensor):
        return {
            "shape": [expression_to_plain(size_expression(size)) for size in value.shape],
            "stride": [expression_to_plain(size_expression(size)) for size in value.stride()],
            "dtype": str(value.dtype),
            "device": str(value.device),
        }
    if isinstance(value, list | tuple):
        return {"list" if isinstance(value, list) else "tuple": [_record_to_plain(entry) for entry in value]}
    raise UnstorableError(f"a node's result is {type(value).__name__}")


class _Records:
    """Reads what nodes recorded.

    Args:
        example: The value of each symbol in the example batch.
    """

    def __init__(self, example: Mapping[sympy.Basic, sympy.Integer]) -> None:
        self._example = dict(example)
        self._environment = ShapeEnv()
        self._mode = FakeTensorMode(shape_env=self._environment)
        self._sizes: dict[sympy.Basic, Any] = {}
        self._tensors: dict[str, Tensor] = {}  # There are few different ones, and each takes a millisecond.

    def read(self, data: Any) -> Any:
        """Return the record."""
        match data:
            case None | bool() | int():
                return data
            case {"float": str(text)}:
                return float.fromhex(text)
            case {"size": str(kind), "is": expression}:
                return self._size(expression_from_plain(expression), kind)
            case {"shape": list(shape), "stride": list(stride), "dtype": str(dtype), "device": str(device)}:
                key = str(data)
                if key not in self._tensors:
                    sizes, strides = ([self._plain_or_size(size) for size in given] for given in (shape, stride))
                    with self._mode:
                        self._tensors[key] = torch.empty_strided(
                            sizes, strides, dtype=dtype_from_plain(dtype), device=device
                        )
                return self._tensors[key]
            case {"list": list(entries)}:
                return [self.read(entry) for entry in entries]
            case {"tuple": list(entries)}:
                return tuple(self.read(entry) for entry in entries)
        raise FieldError(f"no record: {str(data)[:60]}")

    def _plain_or_size(self, data: Any) -> Any:
        return data if isinstance(data, int) else self._size(expression_from_plain(data), "int")

    def _size(self, expression: sympy.Basic, kind: str) -> Any:
        if expression in self._sizes:
            return self._sizes[expression]
        now = expression.xreplace(self._example)
        found: Any
        if kind == "bool":
            found = self._environment.create_symboolnode(expression)
        elif kind == "float":
            found = self._environment.create_symfloatnode(expression, hint=float(now))
        else:
            found = self._environment.create_symintnode(expression, hint=int(now))
        self._sizes[expression] = found
        return found


def _attribute_to_plain(attribute: Attribute, owners: Mapping[int, tuple[str, str]]) -> dict[str, Any]:
    found: dict[str, Any] = {"kind": attribute.kind.value, "name": attribute.name}
    if attribute.kind is not AttributeKind.CONSTANT:
        return found
    tensor = attribute.tensor
    if id(tensor) in owners:
        return {**found, "owner": owners[id(tensor)]}
    if tensor.numel() * tensor.element_size() > _LARGEST_CONSTANT_BYTES or tensor.device.type != "cpu":
        raise UnstorableError(f"{attribute.name} is too large, or on a {tensor.device.type}")
    if type(tensor) is not Tensor:
        raise UnstorableError(f"{attribute.name} is a {type(tensor).__name__}")
    values = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    values_text = base64.b64encode(values).decode()
    return {**found, "values": values_text, "shape": list(tensor.shape), "dtype": str(tensor.dtype)}


class _TensorsByName:
    """Finds the tensors of a model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._own: Mapping[str, Mapping[str, Tensor]] = {
            AttributeKind.PARAMETER: dict(model.named_parameters()),
            AttributeKind.BUFFER: dict(model.named_buffers()),
        }

    def attribute(self, data: Mapping[str, Any]) -> Attribute:
        """Return what `_attribute_to_plain` wrote."""
        kind, name = AttributeKind(data["kind"]), str(data["name"])
        if kind is not AttributeKind.CONSTANT:
            return Attribute(kind, name, self._own[kind][name])
        if "owner" in data:
            path, own_name = data["owner"]
            tensor = vars(self._model.get_submodule(path))[own_name]
            assert isinstance(tensor, Tensor)
            return Attribute(kind, name, tensor)
        values = bytearray(base64.b64decode(data["values"], validate=True))
        dtype, shape = dtype_from_plain(data["dtype"]), tuple(data["shape"])
        flat = torch.frombuffer(values, dtype=dtype) if values else torch.empty(0, dtype=dtype)
        return Attribute(kind, name, flat.reshape(shape).clone())


def _classes_to_plain(classes: Any) -> Any:
    if isinstance(classes, SampleClass):
        return [classes.kind.value, classes.axis, classes.outer, classes.inner]
    if isinstance(classes, list | tuple):
        return {"list" if isinstance(classes, list) else "tuple": [_classes_to_plain(entry) for entry in classes]}
    raise UnstorableError(f"a result is told by {type(classes).__name__}")


def _classes_from_plain(data: Any) -> Any:
    match data:
        case [str(kind), int(axis), int(outer), int(inner)]:
            return SampleClass(Kind(kind), axis, outer, inner)
        case {"list": list(entries)}:
            return [_classes_from_plain(entry) for entry in entries]
        case {"tuple": list(entries)}:
            return tuple(_classes_from_plain(entry) for entry in entries)
    raise FieldError(f"no sample class: {str(data)[:60]}")


def _spec_to_plain(spec: ValueSpec) -> dict[str, Any]:
    return {
        "name": spec.name,
        "dtype": str(spec.dtype),
        "shape": list(spec.shape),
        "layout": None if spec.layout is None else [spec.layout.axis, spec.layout.rows_per_sample],
        "carries_gradient": spec.carries_gradient,
        "sizes": [expression_to_plain(size) for size in spec.sizes],
    }


def _spec_from_plain(data: Mapping[str, Any]) -> ValueSpec:
    return ValueSpec(
        data["name"],
        dtype_from_plain(data["dtype"]),
        tuple(data["shape"]),
        None if data["layout"] is None else SampleLayout(*data["layout"]),
        data["carries_gradient"],
        tuple(expression_from_plain(size) for size in data["sizes"]),
    )
