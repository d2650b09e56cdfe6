"""Small torch models with the shape of any computation graph, for tests of the runtime.

A `GraphModel` is what `graphpipe.capture` makes of a model, written down directly, so that a test can draw hundreds of
them: no export, but every kind of value that crosses stages. Operators mix what they read with a matrix of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from graphpipe.capture.autocast import Autocast
from graphpipe.capture.specs import LossReduction, SampleLayout, ValueSpec
from graphpipe.graph import ComputationGraph, Operator, Parameter, Value

WIDTH = 3
SEQUENCE = 2
BYTES = 8


@dataclass(frozen=True)
class OperatorShape:
    """What an operator of a `GraphModel` reads and gives.

    Attributes:
        reads: The operators before it whose values it reads; without one it reads the input ``x``.
        gives_mask: It also gives a boolean tensor without gradient.
        gives_scale: It also gives a number that does not depend on the batch.
        is_batch_wise: It subtracts the mean over the mini-batch.
        sample_axis: Which axis of its main value holds the samples, 0 or 1.
        is_frozen: Its matrix needs no gradient.
        matrix: The name of its matrix; operators may share one.
    """

    reads: tuple[int, ...]
    gives_mask: bool = False
    gives_scale: bool = False
    is_batch_wise: bool = False
    sample_axis: int = 0
    is_frozen: bool = False
    matrix: str = ""


class GraphModel(nn.Module):
    """A model with one operator a shape, and a loss over the last one's value and the target ``y``.

    Args:
        shapes: The operators in a topological order. Everything must flow into the last one.
        seed: Of the parameters.
        reduction: MEAN or SUM for a loss a sample, WHOLE for one that mixes samples.
    """

    def __init__(
        self, shapes: Sequence[OperatorShape], seed: int = 0, reduction: LossReduction = LossReduction.MEAN
    ) -> None:
        super().__init__()
        self.shapes = tuple(shapes)
        self.seed = seed
        self.loss_reduction = reduction
        self.autocast = Autocast()
        generator = torch.Generator().manual_seed(seed)
        self.matrices = nn.ParameterDict()
        self.scales = nn.ParameterDict()
        for i, shape in enumerate(self.shapes):
            name = self.matrix_name(i)
            if name not in self.matrices:
                draw = torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64) / WIDTH**0.5
                self.matrices[name] = nn.Parameter(draw, requires_grad=not shape.is_frozen)
            if shape.gives_scale:
                self.scales[f"t{i}"] = nn.Parameter(torch.rand((), generator=generator, dtype=torch.float64))
        self.loss = "loss"
        self.sparse_parameters: frozenset[str] = frozenset()
        self.loss_operator = f"op{len(shapes) - 1}"
        self.needs_gradient = self._find_gradients()
        self.values = self._specs()
        self.inputs = {
            "x": ValueSpec("x", torch.float64, (1, SEQUENCE, WIDTH), SampleLayout(0, 1), False),
            "y": ValueSpec("y", torch.float64, (1, WIDTH), SampleLayout(0, 1), False),
        }
        self.graph = self._graph()

    def matrix_name(self, i: int) -> str:
        """Return the name of operator `i`'s matrix."""
        return self.shapes[i].matrix or f"w{i}"

    def _find_gradients(self) -> list[bool]:
        found: list[bool] = []
        for i, shape in enumerate(self.shapes):
            own = self.matrices[self.matrix_name(i)].requires_grad
            found.append(own or any(found[j] or self.shapes[j].gives_scale for j in shape.reads))
        return found

    def _specs(self) -> dict[str, ValueSpec]:
        specs = {}
        for i, shape in enumerate(self.shapes[:-1]):
            axes = (1, SEQUENCE, WIDTH) if shape.sample_axis == 0 else (SEQUENCE, 1, WIDTH)
            layout = SampleLayout(shape.sample_axis, 1)
            specs[f"v{i}"] = ValueSpec(f"v{i}", torch.float64, axes, layout, self.needs_gradient[i])
            if shape.gives_mask:
                specs[f"m{i}"] = ValueSpec(f"m{i}", torch.bool, (1,), SampleLayout(0, 1), False)
                specs[f"i{i}"] = ValueSpec(f"i{i}", torch.int64, (2,), SampleLayout(0, 2), False)
            if shape.gives_scale:
                specs[f"t{i}"] = ValueSpec(f"t{i}", torch.float64, (), None, True)
        return specs

    def _graph(self) -> ComputationGraph:
        operators = []
        consumers: dict[str, list[str]] = {name: [] for name in self.values}
        for i, shape in enumerate(self.shapes):
            parameters = [f"matrices.{self.matrix_name(i)}"] + ([f"scales.t{i}"] if shape.gives_scale else [])
            tensors = dict(self.named_parameters())
            operators.append(
                Operator(
                    name=f"op{i}",
                    parameters=tuple(
                        Parameter(n, tensors[n].numel() * BYTES, tensors[n].requires_grad) for n in parameters
                    ),
                    is_batch_wise=shape.is_batch_wise
                    or (i == len(self.shapes) - 1 and self.loss_reduction is LossReduction.WHOLE),
                    has_backward=self.needs_gradient[i] or shape.gives_scale,
                )
            )
            for name in self.read_names(i):
                consumers[name].append(f"op{i}")
        values = tuple(
            Value(
                name=name,
                producer=f"op{name[1:]}",
                consumers=tuple(consumers[name]),
                bytes_per_sample=spec.num_bytes if spec.layout else 0,
                fixed_bytes=0 if spec.layout else spec.num_bytes,
                carries_gradient=spec.carries_gradient,
            )
            for name, spec in self.values.items()
            if consumers[name]
        )
        return ComputationGraph("random", tuple(operators), values)

    def read_names(self, i: int) -> list[str]:
        """Return the values that operator `i` reads."""
        return [n for j in self.shapes[i].reads for n in (f"v{j}", f"m{j}", f"i{j}", f"t{j}") if n in self.values]

    def run(self, i: int, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run operator `i`."""
        shape = self.shapes[i]
        mixed = self._read_sum(i, tensors)
        if shape.is_batch_wise:
            mixed = mixed - mixed.mean(0, keepdim=True)
        result = torch.tanh(mixed @ self.matrices[self.matrix_name(i)])
        if i == len(self.shapes) - 1:
            return {"loss": self._loss_of(result.sum(1), tensors["y"])}
        given = {f"v{i}": result if shape.sample_axis == 0 else result.transpose(0, 1)}
        if shape.gives_mask:
            given[f"m{i}"] = result[:, 0, 0].detach() > 0
            given[f"i{i}"] = (result[:, :, 0].detach() * 1e6).round().to(torch.int64).reshape(-1)
        if shape.gives_scale:
            given[f"t{i}"] = self.scales[f"t{i}"].exp()
        return given

    def _read_sum(self, i: int, tensors: Mapping[str, Tensor]) -> Tensor:
        reads = self.shapes[i].reads
        total = tensors["x"] if not reads else torch.zeros(())
        for j in reads:
            part = tensors[f"v{j}"]
            if self.shapes[j].sample_axis == 1:
                part = part.transpose(0, 1)
            if f"m{j}" in tensors:
                part = part * (1 + tensors[f"m{j}"].to(part.dtype))[:, None, None]
                part = part + tensors[f"i{j}"].reshape(len(part), 2)[:, :, None].to(part.dtype) / 1e6
            if f"t{j}" in tensors:
                part = part * tensors[f"t{j}"]
            total = total + part
        return total

    def _loss_of(self, result: Tensor, target: Tensor) -> Tensor:
        if self.loss_reduction is LossReduction.WHOLE:
            return -(torch.log_softmax(result @ target.T, dim=1)).diagonal().mean()
        losses = ((result - target) ** 2).sum(1)
        return losses.sum() if self.loss_reduction is LossReduction.SUM else losses.mean()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss of a batch, as one process computes it."""
        tensors = {"x": x, "y": y}
        for i in range(len(self.shapes)):
            tensors.update(self.run(i, tensors))
        return tensors["loss"]

    # What the runtime asks of a captured model.

    def sized(self, _: Mapping[str, Tensor]) -> GraphModel:
        """Return itself: no size but the number of samples differs from batch to batch."""
        return self

    def flatten_batch(self, batch: Mapping[str, Tensor], needed: object = None) -> dict[str, Tensor]:
        """Return the batch."""
        return dict(batch)

    def num_samples(self, flat: Mapping[str, Tensor]) -> int:
        """Return the number of samples."""
        return len(flat["x"])

    def stage_module(self, operators: Sequence[str]) -> GraphStage:
        """Return the module of some operators."""
        return GraphStage(self, tuple(int(name.removeprefix("op")) for name in operators))


class GraphStage(nn.Module):
    """Some operators of a `GraphModel`; holds its parameters only."""

    def __init__(self, model: GraphModel, operators: tuple[int, ...]) -> None:
        super().__init__()
        inside = {f"op{i}" for i in operators}
        read = [name for i in operators for name in model.read_names(i)]
        made = {v.name for v in model.graph.values if v.producer in inside}
        self.input_names = tuple(dict.fromkeys([n for n in read if n not in made] + ["x", "y"]))
        leaves = {v.name for v in model.graph.values if v.name in made and set(v.consumers) - inside}
        ends = {"loss"} if model.loss_operator in inside else set()
        self.output_names = tuple(sorted(leaves | ends))
        self.operators = operators
        self._part = _Part(model, operators)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        """Yield the parameters of these operators under the model's names."""
        yield from self._part.own.items()

    def written_buffers(self) -> dict[str, Tensor]:
        """Return the buffers that a call writes: there are none."""
        return {}

    def forward_again(
        self, tensors: Mapping[str, Tensor], num_samples: int, draws: object, buffers: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Run the operators again."""
        found: dict[str, Tensor] = self(tensors, num_samples, draws)
        return found

    def forward(self, tensors: Mapping[str, Tensor], num_samples: int, draws: object) -> dict[str, Tensor]:
        """Run the operators."""
        known = dict(tensors)
        assert len(known["x"]) == num_samples
        for i in self.operators:
            known.update(self._part.model.run(i, known))
        return {name: known[name] for name in self.output_names}


class _Part:
    """Keeps the model out of the stage's own module tree."""

    def __init__(self, model: GraphModel, operators: tuple[int, ...]) -> None:
        self.model = model
        names = {p.name for i in operators for p in model.graph.operators[i].parameters}
        self.own = {n: p for n, p in model.named_parameters() if n in names}


def make_batch(num_samples: int, seed: int = 1) -> dict[str, Tensor]:
    """Return a batch for a `GraphModel`."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(num_samples, SEQUENCE, WIDTH, generator=generator, dtype=torch.float64),
        "y": torch.randn(num_samples, WIDTH, generator=generator, dtype=torch.float64),
    }


def reference(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[float, dict[str, Tensor | None]]:
    """Return the loss and the gradients of one process."""
    model.zero_grad(set_to_none=True)
    loss = model(**batch)
    loss.backward()
    gradients = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return float(loss.detach()), gradients
