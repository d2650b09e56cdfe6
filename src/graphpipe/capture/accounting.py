"""What each operation costs and saves for backward, and where gradients flow, found without computing anything.

The graph runs once on fake tensors, which have shapes, storages and autograd history but no memory. So this works for
models of any size, on the meta device too.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from graphpipe.capture.evaluate import run_node
from graphpipe.capture.keeping import leaf_of, untraceable_costs
from graphpipe.capture.nodes import (
    RECURRENT,
    argument_of,
    inputs_of,
    is_grouped_product,
    is_heavy,
    operator_name,
    tensors_of,
    value_of,
    written_by,
)
from graphpipe.capture.training_graph import AttributeKind, TrainingGraph


@dataclass(frozen=True, slots=True)
class OperationCosts:
    """What one operation costs for a batch of `Accounting.num_samples` samples.

    Attributes:
        forward_flops: Floating-point operations of the forward pass.
        backward_flops: Floating-point operations of the backward pass.
        moved_bytes: Activation bytes that the forward pass reads and writes; a view moves none.
        saved: The bytes of each storage that the operation keeps for backward, by the storage's key. A storage is that
            of the operation which made it; keys of storages that are no operation's result are the operation's own.
    """

    forward_flops: float
    backward_flops: float
    moved_bytes: float
    saved: Mapping[int, int]


@dataclass(frozen=True, eq=False)
class Accounting:
    """The costs and gradient flow of a whole graph.

    Attributes:
        num_samples: The size of the batch.
        costs: By operation.
        maker: For the key of a storage, the operation that made it. The model's parameters, buffers and inputs are
            made by none.
        requires_grad: The nodes whose tensor takes part in backward.
    """

    num_samples: int
    costs: Mapping[fx.Node, OperationCosts]
    maker: Mapping[int, fx.Node]
    requires_grad: frozenset[fx.Node]


def account(graph: TrainingGraph, num_samples: int) -> Accounting:
    """Return the costs and gradient flow of a graph for a batch of `num_samples` samples."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    values: dict[fx.Node, Any] = {}
    maker: dict[int, fx.Node] = {}
    own: set[int] = set()
    raw: dict[fx.Node, tuple[float, dict[int, int]]] = {}
    flops = _FlopTable(graph, num_samples)
    kept: list[Tensor] = []  # a storage's key is its address, so no storage may be freed before the end

    with mode:
        for node in (*graph.attributes, *graph.inputs.values()):
            values[node] = _fake(graph, value_of(node), num_samples)
            own.add(_key(values[node]))
            attribute = graph.attributes.get(node)
            if attribute is not None and attribute.kind is AttributeKind.PARAMETER:
                values[node].requires_grad_(attribute.tensor.requires_grad)

    for node in graph.operations:
        saved: dict[int, int] = {}

        def keep(tensor: Tensor, saved: dict[int, int] = saved) -> Tensor:
            if _key(tensor) not in own:
                saved[_key(tensor)] = tensor.untyped_storage().nbytes()
                kept.append(tensor)
            return tensor

        with mode, torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            result = run_node(graph, node, values, num_samples, _on_cpu)
        values[node] = result
        costs_of_leaf = untraceable_costs(node, num_samples)
        if costs_of_leaf is not None:
            saved[-1 - len(raw)] = int(costs_of_leaf[0])  # no storage's address is negative
        moved = _moved_bytes(node, values, own)
        for tensor in _tensors(result):
            if _key(tensor) not in own:
                maker.setdefault(_key(tensor), node)
        for key in saved:
            maker.setdefault(key, node)
        raw[node] = (moved, saved)

    requires_grad = frozenset(n for n, value in values.items() if any(t.requires_grad for t in _tensors(value)))
    costs = {node: OperationCosts(*flops.of(node, requires_grad), moved, saved) for node, (moved, saved) in raw.items()}
    return Accounting(num_samples, costs, maker, requires_grad)


def _fake(graph: TrainingGraph, tensor: Tensor, num_samples: int) -> Tensor:
    strides = tuple(graph.size_at(stride, num_samples) for stride in tensor.stride())
    return torch.empty_strided(graph.shape_at(tensor, num_samples), strides, dtype=tensor.dtype, device="cpu")


def _on_cpu(_: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    found: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map_only(
        torch.device, lambda _: torch.device("cpu"), (args, kwargs)
    )
    return found


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _moved_bytes(node: fx.Node, values: Mapping[fx.Node, Any], own: set[int]) -> float:
    """Activation bytes read and written; the model's own tensors are left out, they are counted as parameters."""
    read = [t for source in inputs_of(node) if source.op != "get_attr" for t in _tensors(values[source])]
    made = _tensors(values[node])
    if not written_by(node) and {_key(t) for t in made} <= {_key(t) for t in read} | own:
        return 0.0
    return float(sum(map(_bytes, read)) + sum(map(_bytes, made)))


class _FlopTable:
    """Floating-point operations of single operations, remembered by operator, shapes and gradients."""

    def __init__(self, graph: TrainingGraph, num_samples: int) -> None:
        self._graph = graph
        self._num_samples = num_samples
        self._known: dict[Any, tuple[float, float]] = {}

    def of(self, node: fx.Node, requires_grad: frozenset[fx.Node]) -> tuple[float, float]:
        """Return the operations of the forward and of the backward pass."""
        if not (is_heavy(node) or leaf_of(node)) or operator_name(node) in (
            "embedding",
            "embedding_bag",
            "_embedding_bag",
        ):
            return 0.0, 0.0
        reads = list(inputs_of(node))
        key = (
            str(node.target),
            tuple(str(a) for a in node.args if not isinstance(a, fx.Node)) if not reads else None,
            tuple(self._graph.shape_at(t, self._num_samples) for read in reads for t in tensors_of(read)),
            tuple(read in requires_grad for read in reads),
            str([a for a in pytree.tree_leaves((node.args, dict(node.kwargs))) if not isinstance(a, fx.Node)]),
            node.name
            if any(a.op == "get_attr" and a not in self._graph.attributes for a in node.all_input_nodes)
            else "",
        )
        if key not in self._known:
            self._known[key] = self._count(node, reads, requires_grad)
        return self._known[key]

    def _count(self, node: fx.Node, reads: list[fx.Node], requires_grad: frozenset[fx.Node]) -> tuple[float, float]:
        measured = untraceable_costs(node, self._num_samples)
        if measured is not None:
            return measured[1], measured[2]
        if operator_name(node) in RECURRENT:
            return self._recurrent(node, reads, requires_grad)
        if is_grouped_product(node):
            return self._grouped(node, reads, requires_grad)
        counter = FlopCounterMode(display=False, custom_mapping=_CPU_FORMULAS)
        values: dict[fx.Node, Any] = {}
        with FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad():
            for read in reads:
                values[read] = pytree.tree_map_only(
                    Tensor, lambda t: _fake(self._graph, t, self._num_samples), value_of(read)
                )
                if read in requires_grad and isinstance(values[read], Tensor):
                    values[read].requires_grad_()
            with counter:
                made = run_node(self._graph, node, values, self._num_samples, _on_cpu)
                forward = counter.get_total_flops()
                roots = [t for t in _tensors(made) if t.requires_grad]
                if roots and not self._run_backward(node, roots):
                    return float(forward), 2.0 * forward
        return float(forward), float(counter.get_total_flops() - forward)

    @staticmethod
    def _run_backward(node: fx.Node, roots: list[Tensor]) -> bool:
        """Run the backward pass without values; False if the code of a user in it needs them."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                torch.autograd.backward(roots, [torch.empty_like(t) for t in roots])
            except Exception:
                if leaf_of(node) is None:
                    raise
                return False
        return True

    def _recurrent(self, node: fx.Node, reads: list[fx.Node], requires_grad: frozenset[fx.Node]) -> tuple[float, float]:
        # One multiply-add per weight and step, which the counter does not see in every kernel. The backward pass has
        # the same for a weight's gradient and for that of what it multiplies, which the first state does not need.
        steps_and_samples = self._graph.shape_at(tensors_of(node)[0], self._num_samples)[:-1]
        batch_first = argument_of(node, "batch_first") is True
        steps = steps_and_samples[1 if batch_first and len(steps_and_samples) > 1 else 0]
        given, *rest = reads
        states = [read for read in rest if read not in self._graph.attributes]
        weights = [read for read in rest if value_of(read).dim() == 2 and read in self._graph.attributes]
        num_first = len(weights) // int(argument_of(node, "num_layers"))
        forward = backward = 0.0
        for i, weight in enumerate(weights):
            product = 2.0 * value_of(weight).numel() * float(torch.Size(steps_and_samples).numel())
            forward += product
            backward += product if weight in requires_grad else 0.0
            if i % 2:  # multiplies the state
                needed = steps if any(state in requires_grad for state in states) else steps - 1
                backward += product * needed / steps
            elif i >= num_first or given in requires_grad:
                backward += product
        needs_gradient = any(read in requires_grad for read in reads)
        return forward, backward if needs_gradient else 0.0

    def _grouped(self, node: fx.Node, reads: list[fx.Node], requires_grad: frozenset[fx.Node]) -> tuple[float, float]:
        # Each row meets the matrix of one group, of size inner by outer; the counter knows no such operator.
        rows = self._graph.shape_at(tensors_of(reads[0])[0], self._num_samples)
        made = self._graph.shape_at(tensors_of(node)[0], self._num_samples)
        forward = 2.0 * float(torch.Size(rows).numel()) * made[-1]
        return forward, forward * sum(read in requires_grad for read in reads[:2])


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]


def _attention_backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(grad, query, key, value))  # type: ignore[no-untyped-call]


# The counter of torch 2.13 knows the kernels of GPUs only.
_CPU_FORMULAS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
