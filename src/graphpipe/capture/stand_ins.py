"""Numbers to probe a model with: inputs that differ from sample to sample, and random parameters, all in float64."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from graphpipe.capture.nodes import RECURRENT, operator_name, value_of
from graphpipe.capture.training_graph import TrainingGraph


def perturbed(graph: TrainingGraph, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a batch whose samples differ: scale floats by 0.5 to 1, and zero some positive integers, unevenly."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for name, tensor in tensors.items():
        noise = torch.rand(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.device)
        depends = any(graph.depends_on_batch(size) for size in value_of(graph.inputs[name]).shape)
        if not depends:
            found[name] = tensor
        elif tensor.is_floating_point():
            found[name] = tensor * (0.5 + 0.5 * noise).to(tensor.dtype)
        elif tensor.is_complex():
            found[name] = tensor * (0.5 + 0.5 * noise)
        else:
            zeroed = (noise < 0.25) & (tensor > 0)
            if tensor.dim() > 1:
                zeroed[..., 0] = False  # a mask row without a single entry gives NaN, which hides differences
            found[name] = torch.where(zeroed, torch.zeros_like(tensor), tensor)
    return found


def random_windows(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return a random tensor whose row i starts at entry i of one vector, so that a large one takes little memory."""
    numbers = 0.5 + 0.5 * torch.rand(sum(shape) + 1, device=device)
    return numbers.as_strided(shape, (1,) * len(shape))


class RandomNumbers:
    """Tensors of numbers between -1 and 1 in random order, in no time: parts of one vector.

    Past a million entries the vector repeats itself. The period is a prime, so no two samples of a tensor have the same
    numbers, unless their size is a multiple of it.

    Args:
        device: Where the tensors are.
    """

    _PERIOD = 1_048_583
    _STEP = 7919  # Each tensor starts at another place of the vector.

    def __init__(self, device: torch.device) -> None:
        self._numbers = 2 * torch.rand(self._PERIOD, device=device) - 1
        self._start = 0

    def draw(self, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor to read: it shares memory with others."""
        size = math.prod(shape)
        self._start = (self._start + self._STEP) % self._PERIOD
        if self._start + size > len(self._numbers):
            self._numbers = self._numbers[: self._PERIOD].repeat(2 + (self._start + size) // self._PERIOD)
        return self._numbers[self._start : self._start + size].view(shape)


def in_double(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor, in float64 if it holds floats."""
    return tensor.to(torch.float64, copy=True) if tensor.is_floating_point() else tensor.clone()


class ProbeArguments:
    """Changes the arguments of operators for a probe: they compute in float64, and drop nothing."""

    def __init__(self) -> None:
        self._regions: dict[fx.GraphModule, fx.GraphModule] = {}

    def __call__(
        self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the changed arguments of a node."""

        def doubled(argument: Any) -> Any:
            if isinstance(argument, torch.dtype) and argument.is_floating_point:
                return torch.float64
            return self._region_in_double(argument) if isinstance(argument, fx.GraphModule) else argument

        args, kwargs = pytree.tree_map(doubled, (args, kwargs))
        return without_dropout(node, args, kwargs)

    def _region_in_double(self, region: fx.GraphModule) -> fx.GraphModule:
        if region not in self._regions:
            graph = fx.Graph()
            output = graph.graph_copy(region.graph, {})
            graph.output(output)
            copied = fx.GraphModule(region, graph)
            for node in copied.graph.nodes:
                if node.op == "call_function":
                    node.args, node.kwargs = self(node, node.args, dict(node.kwargs))
            copied.recompile()
            self._regions[region] = copied
        return self._regions[region]


def without_dropout(
    node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of an operator call with its dropout switched off."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return args, kwargs
    changes = {"dropout_p": 0.0} if operator_name(node) == "scaled_dot_product_attention" else {}
    if "dropout" in operator_name(node):
        changes = {"train": False, "p": 0.0}
    elif operator_name(node) in RECURRENT:
        changes = {"dropout": 0.0}
    for i, argument in enumerate(target._schema.arguments):
        if argument.name in changes:
            if i < len(args):
                args = (*args[:i], changes[argument.name], *args[i + 1 :])
            elif argument.name in kwargs or (not argument.kwarg_only and argument.has_default_value()):
                kwargs = {**kwargs, argument.name: changes[argument.name]}
    return args, kwargs
