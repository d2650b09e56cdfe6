"""A reference runner: the stages of a captured model one after another, each over its own micro-batches."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphpipe.capture import CapturedModel, LossReduction, StageModule

Partition = list[list[str]]


@dataclass(frozen=True)
class Training:
    """The loss and the gradients by name of one step, and the buffers after it."""

    loss: Tensor
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


def train_eagerly(model: nn.Module, loss_of: Callable[[nn.Module], Tensor]) -> Training:
    """One step of the model itself."""
    model = copy.deepcopy(model)
    loss = loss_of(model)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Training(loss.detach(), gradients, dict(model.named_buffers()))


def random_partition(captured: CapturedModel, num_stages: int, rng: random.Random) -> Partition:
    """Cut a random topological order: every stage is convex, and they form no cycle."""
    graph = captured.graph
    missing = [len(found) for found in graph.predecessors]
    ready = [i for i, count in enumerate(missing) if not count]
    order = []
    while ready:
        i = ready.pop(rng.randrange(len(ready)))
        order.append(graph.operators[i].name)
        for j in graph.successors[i]:
            missing[j] -= 1
            if not missing[j]:
                ready.append(j)
    num_stages = min(num_stages, len(order))
    cuts = [0, *sorted(rng.sample(range(1, len(order)), num_stages - 1)), len(order)]
    return [order[a:b] for a, b in itertools.pairwise(cuts)]


def train_in_stages(captured: CapturedModel, partition: Partition, batch: Any, rng: random.Random) -> Training:
    """One step, stage by stage with detached boundaries. Stages draw micro-batch sizes of their own."""
    flat = captured.flatten_batch(batch)
    total = captured.num_samples(flat)
    specs = {**captured.inputs, **captured.values}
    stages = [copy.deepcopy(captured.stage_module(operators)) for operators in partition]
    spans = [_spans(captured, operators, total, rng) for operators in partition]
    whole: dict[str, Tensor] = dict(flat)
    kept: list[list[tuple[dict[str, Tensor], dict[str, Tensor]]]] = []
    for stage, stage_spans in zip(stages, spans, strict=True):
        runs = []
        for start, stop in stage_spans:
            inputs = {}
            for name in stage.input_names:
                inputs[name] = _rows(whole[name], specs[name], start, stop).detach().clone()
                inputs[name].requires_grad_(specs[name].carries_gradient)
            runs.append((inputs, stage(inputs, stop - start)))
        for name in stage.output_names:
            parts = [outputs[name] for _, outputs in runs]
            if name == captured.loss:
                whole[name] = torch.stack(
                    [_weight(captured, s, total) * p for s, p in zip(stage_spans, parts, strict=True)]
                ).sum()
                continue
            for (start, stop), part in zip(stage_spans, parts, strict=True):
                assert part.shape == specs[name].shape_for(stop - start), name
                assert part.dtype == specs[name].dtype, name
                if specs[name].carries_gradient:
                    assert part.requires_grad, name
            layout = specs[name].layout
            whole[name] = parts[0] if layout is None else torch.cat(parts, layout.axis)
        kept.append(runs)
    _run_backward(captured, stages, spans, kept, whole, total)
    gradients: dict[str, Tensor] = {}
    buffers: dict[str, Tensor] = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            if parameter.grad is not None:
                gradients[name] = gradients[name] + parameter.grad if name in gradients else parameter.grad
        buffers.update(stage.named_buffers())
    return Training(whole[captured.loss].detach(), gradients, buffers)


def _run_backward(
    captured: CapturedModel,
    stages: Sequence[StageModule],
    spans: Sequence[Sequence[tuple[int, int]]],
    kept: Sequence[Sequence[tuple[dict[str, Tensor], dict[str, Tensor]]]],
    whole: Mapping[str, Tensor],
    total: int,
) -> None:
    specs = {**captured.inputs, **captured.values}
    coming: dict[str, Tensor] = {}
    for stage, stage_spans, runs in reversed(list(zip(stages, spans, kept, strict=True))):
        for i, ((start, stop), (inputs, outputs)) in enumerate(zip(stage_spans, runs, strict=True)):
            roots, seeds = [], []
            for name in stage.output_names:
                if name == captured.loss:
                    roots.append(outputs[name])
                    seeds.append(torch.full_like(outputs[name], _weight(captured, (start, stop), total)))
                elif specs[name].carries_gradient and name in coming and (specs[name].layout is not None or i == 0):
                    roots.append(outputs[name])
                    seeds.append(_rows(coming[name], specs[name], start, stop))
            if roots:
                torch.autograd.backward(roots, seeds)
            for name, value in inputs.items():
                if value.grad is not None:
                    coming.setdefault(name, torch.zeros_like(whole[name]))
                    _rows(coming[name], specs[name], start, stop).add_(value.grad)


def _spans(captured: CapturedModel, operators: Sequence[str], total: int, rng: random.Random) -> list[tuple[int, int]]:
    by_name = {o.name: o for o in captured.graph.operators}
    if any(by_name[name].is_batch_wise for name in operators):
        return [(0, total)]
    found, start = [], 0
    while start < total:
        stop = min(total, start + rng.randint(1, 4))
        found.append((start, stop))
        start = stop
    return found


def _rows(tensor: Tensor, spec: Any, start: int, stop: int) -> Tensor:
    if spec.layout is None:
        return tensor
    rows = spec.layout.rows_per_sample
    return tensor.narrow(spec.layout.axis, start * rows, (stop - start) * rows)


def _weight(captured: CapturedModel, span: tuple[int, int], total: int) -> float:
    return (span[1] - span[0]) / total if captured.loss_reduction is LossReduction.MEAN else 1.0


@pytest.fixture
def assert_equal_training() -> Callable[..., None]:
    """Check random partitions of a captured model against the model itself, in float64."""

    def check(
        captured: CapturedModel, model: nn.Module, batch: Any, loss_of: Callable[[nn.Module], Tensor], tries: int = 4
    ) -> None:
        expected = train_eagerly(model, loss_of)
        for seed in range(tries):
            rng = random.Random(seed)
            partition = random_partition(captured, rng.randint(2, 5), rng)
            found = train_in_stages(captured, partition, batch, rng)
            torch.testing.assert_close(found.loss, expected.loss, rtol=1e-9, atol=1e-9)
            assert found.gradients.keys() == expected.gradients.keys()
            for name, gradient in expected.gradients.items():
                torch.testing.assert_close(found.gradients[name], gradient, rtol=1e-9, atol=1e-9, msg=name)
            for name, buffer in found.buffers.items():
                torch.testing.assert_close(buffer, expected.buffers[name], rtol=1e-9, atol=1e-9, msg=name)

    return check


@pytest.fixture
def double() -> Iterator[None]:
    """Random numbers from the same seed, in float64."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def batch_wise(captured: CapturedModel) -> list[str]:
    """Return the operators that mix samples."""
    return [operator.name for operator in captured.graph.operators if operator.is_batch_wise]
