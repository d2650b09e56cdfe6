"""The computation graph of a captured model: what planners see of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import sympy
from torch import fx
from torch.utils import _pytree as pytree

from graphpipe.capture.accounting import Accounting
from graphpipe.capture.cheap import is_light
from graphpipe.capture.classes import Kind
from graphpipe.capture.classification import Classification
from graphpipe.capture.naming import place_of, unit_names
from graphpipe.capture.nodes import inputs_of, storages, tensors_of, written_by
from graphpipe.capture.sizes import size_expression
from graphpipe.capture.specs import SampleLayout, ValueSpec
from graphpipe.capture.training_graph import AttributeKind, TrainingGraph
from graphpipe.capture.units import Units
from graphpipe.graph.computation import ComputationGraph, Operator, Parameter, Value

LOSS = "loss"


@dataclass(frozen=True, eq=False)
class Description:
    """A computation graph, and how its values relate to the operations of a training graph.

    Attributes:
        graph: The computation graph.
        values: The type of each value.
        value_names: The name of each operation's result that passes between units, and of the loss.
    """

    graph: ComputationGraph
    values: Mapping[str, ValueSpec]
    value_names: Mapping[fx.Node, str]


def describe(
    name: str,
    graph: TrainingGraph,
    classification: Classification,
    accounting: Accounting,
    units: Units,
) -> Description:
    """Return the computation graph of a divided model.

    Args:
        name: Of the model.
        graph: Its training graph.
        classification: How its tensors depend on the samples.
        accounting: Its costs.
        units: Its operations, divided.
    """
    heavy = {node for node in graph.operations if not is_light(node, classification, accounting)}
    names = unit_names(units.members, heavy, graph.attributes)
    places = [place_of(nodes, heavy) for nodes in units.members]
    unit_of = {node: i for i, nodes in enumerate(units.members) for node in nodes}
    gradients = nodes_with_gradient(graph, accounting)
    saved = _saved_bytes(units, unit_of, accounting)
    operators = tuple(
        _operator(
            graph,
            classification,
            accounting,
            nodes,
            units.repeated_for(nodes),
            gradients,
            names[i],
            places[i],
            saved[i],
        )
        for i, nodes in enumerate(units.members)
    )
    crossing: dict[int, list[fx.Node]] = {}
    readers: dict[fx.Node, list[int]] = {}
    for node in graph.operations:
        if node in unit_of:
            readers[node] = sorted({unit_of[r] for r in graph.readers.get(node, ()) if r in unit_of} - {unit_of[node]})
            if readers[node]:
                crossing.setdefault(unit_of[node], []).append(node)
    taken = {LOSS, *graph.inputs}
    value_names = {graph.loss: LOSS, **{node: f"output:{i}" for i, node in enumerate(graph.outputs)}}
    specs: dict[str, ValueSpec] = {}
    values = []
    for i, nodes in sorted(crossing.items()):
        for node in nodes:
            base = names[i] if len(nodes) == 1 else f"{names[i]}:{node.name}"
            value_name = base if base not in taken else f"{base}:{node.name}"
            taken.add(value_name)
            assert node is not graph.loss, "the loss is read by another unit"
            value_names[node] = value_name
            spec = _value_spec(graph, classification, node, value_name, node in gradients)
            specs[value_name] = spec
            size = {"fixed_bytes" if spec.layout is None else "bytes_per_sample": spec.num_bytes}
            consumers = tuple(names[c] for c in readers[node])
            values.append(
                Value(
                    name=value_name,
                    producer=names[i],
                    consumers=consumers,
                    carries_gradient=spec.carries_gradient,
                    **size,
                )
            )
    return Description(ComputationGraph(name, operators, tuple(values)), specs, value_names)


def nodes_with_gradient(graph: TrainingGraph, accounting: Accounting) -> frozenset[fx.Node]:
    """Return the operations that backward visits: they need a gradient, and one comes from the loss."""
    sharing: dict[int, list[fx.Node]] = {}
    for node in graph.operations:
        for storage in storages(node) & graph.written_storages:
            sharing.setdefault(storage, []).append(node)
    found: set[fx.Node] = set()
    changed = True
    while changed:
        changed = False
        for node in reversed(graph.operations):
            if node in found or node not in accounting.requires_grad:
                continue
            receives = node is graph.loss or any(r in found for r in graph.readers.get(node, ()))
            # What an operation writes in place is read through another name.
            written = {s for w in written_by(node) for s in storages(w)}
            if receives or any(other in found for s in written for other in sharing.get(s, ())):
                found.add(node)
                changed = True
    return frozenset(found)


def _operator(
    graph: TrainingGraph,
    classification: Classification,
    accounting: Accounting,
    nodes: Sequence[fx.Node],
    repeated: set[fx.Node],
    gradients: frozenset[fx.Node],
    name: str,
    place: str,
    saved_bytes: int,
) -> Operator:
    everything = sorted({*nodes, *repeated}, key=graph.order.__getitem__)
    reads = {read for node in everything for read in inputs_of(node)}
    attributes = [a for node, a in graph.attributes.items() if node in reads]
    costs = [accounting.costs[node] for node in everything]
    samples = accounting.num_samples
    return Operator(
        name=name,
        module=place,
        parameters=tuple(
            Parameter(a.name, a.tensor.numel() * a.tensor.element_size(), a.tensor.requires_grad)
            for a in attributes
            if a.kind is AttributeKind.PARAMETER
        ),
        inputs=tuple(n for n, placeholder in graph.inputs.items() if placeholder in reads),
        is_batch_wise=any(node in classification.batch_wise for node in everything),
        has_backward=any(node in gradients for node in everything),
        forward_flops=sum(c.forward_flops for c in costs) / samples,
        backward_flops=sum(accounting.costs[n].backward_flops for n in everything if n in gradients) / samples,
        moved_bytes=sum(c.moved_bytes for c in costs) / samples,
        saved_bytes=saved_bytes / samples,
    )


def _saved_bytes(units: Units, unit_of: Mapping[fx.Node, int], accounting: Accounting) -> list[int]:
    """For each unit, the bytes of its own results that backward needs, whichever unit saved them."""
    found: list[dict[int, int]] = [{} for _ in units.members]
    for i, nodes in enumerate(units.members):
        for node in (*nodes, *units.repeated_for(nodes)):
            for key, size in accounting.costs[node].saved.items():
                maker = accounting.maker[key]
                found[unit_of.get(maker, i)][key] = size
    return [sum(storage.values()) for storage in found]


def _value_spec(
    graph: TrainingGraph, classification: Classification, node: fx.Node, name: str, carries_gradient: bool
) -> ValueSpec:
    (sample_class,) = pytree.tree_leaves(classification.classes[node])
    (tensor,) = tensors_of(node)
    assert sample_class.is_cuttable or node in classification.batch_wise, f"{node.name} passes between units"
    layout = SampleLayout(sample_class.axis, sample_class.inner) if sample_class.kind is Kind.PER_SAMPLE else None
    names = {symbol: sympy.Symbol(size.name) for symbol, size in graph.free_sizes.items()}
    names |= dict.fromkeys(graph.batch_symbols, sympy.Integer(1))
    sizes = tuple(size_expression(size).xreplace(names) for size in tensor.shape)
    is_free = any(size.free_symbols for size in sizes)
    return ValueSpec(name, tensor.dtype, graph.shape_at(tensor, 1), layout, carries_gradient, sizes if is_free else ())
