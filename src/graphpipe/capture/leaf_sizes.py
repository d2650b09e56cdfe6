"""The sizes and costs of a module that is kept whole and cannot run on tensors without values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._sympy.symbol import SymT, symbol_is_type
from torch.utils.flop_counter import FlopCounterMode

from graphpipe.capture.leaves import ModuleLeaf, UntraceableModuleError
from graphpipe.capture.sizes import size_expression
from graphpipe.errors import CaptureError


class LeafSizes:
    """The sizes and costs of a module's results for any number of samples, found by running it on random tensors.

    Args:
        leaf: The module.
        tensors: Its arguments, without values; one of them must have the number of samples for a size.

    Raises:
        UntraceableModuleError: The sizes depend on values, so the module around it must be kept whole.
    """

    def __init__(self, leaf: ModuleLeaf, tensors: Sequence[Tensor]) -> None:
        self._leaf = leaf
        self._count = len(tensors) - leaf.num_own
        sizes: list[Any] = [size for t in tensors for size in t.shape]
        symbols = {s for size in sizes for s in size_expression(size).free_symbols}
        if any(symbol_is_type(symbol, SymT.UNBACKED_INT) for symbol in symbols):
            raise UntraceableModuleError(
                f"a size that {leaf} is given depends on the values of a tensor; keep the shape and use a mask",
                leaf.path.rpartition(".")[0],
            )
        # Each input may have a symbol of its own for the number of samples.
        plain = {s: int(size.node.hint) for size in sizes for s in symbols if size_expression(size) == s}
        if len(symbols) > 1 and (plain.keys() != symbols or leaf.free_examples & set(plain.values())):
            raise CaptureError(
                f"{leaf} must be kept whole, and then no other size than the number of samples may be free; capture "
                "the model with a fixed size"
            )
        place = _sample_axis(tensors[: self._count])
        if place is None:
            raise UntraceableModuleError(f"no input of {leaf} depends on the batch", leaf.path.rpartition(".")[0])
        self._place = place
        counts = (4, 5, 8)
        runs = [self._try(tensors, count) for count in counts]
        self._dtypes = [made.dtype for made in runs[0].made]
        self._requires_grad = [made.requires_grad for made in runs[0].made]
        self._dims = [
            [self._line(counts, sizes) for sizes in zip(*(made.shape for made in results), strict=True)]
            for results in zip(*(run.made for run in runs), strict=True)
        ]
        per_sample = [(run.saved_bytes, run.forward_flops, run.backward_flops) for run in (runs[0], runs[2])]
        self._costs = [((b - a) / (counts[2] - counts[0]), a) for a, b in zip(*per_sample, strict=True)]

    def made_from(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return results without values for arguments without values."""
        argument, axis, rows = self._place
        count = tensors[argument].shape[axis] // rows
        like = tensors[argument]
        needing = [t for t in tensors if t.requires_grad]
        found = []
        for dims, dtype, requires_grad in zip(self._dims, self._dtypes, self._requires_grad, strict=True):
            made = torch.empty([k * count + c if k else c for k, c in dims], dtype=dtype, device=like.device)
            if requires_grad and needing:
                made = made + sum(t.sum().to(dtype) for t in needing)
            found.append(made)
        return found

    def costs(self, num_samples: int) -> tuple[float, float, float]:
        """Return the bytes saved for backward and the operations of the forward and of the backward pass."""
        saved, forward, backward = (max(0.0, first + slope * (num_samples - 4)) for slope, first in self._costs)
        return saved, forward, backward

    def _line(self, counts: Sequence[int], sizes: Sequence[int]) -> tuple[int, int]:
        slope = (sizes[1] - sizes[0]) // (counts[1] - counts[0])
        constant = sizes[0] - slope * counts[0]
        if any(slope * n + constant != size for n, size in zip(counts, sizes, strict=True)):
            raise UntraceableModuleError(
                f"the sizes of what {self._leaf} gives depend on the values of a tensor; keep the shape and use a "
                "mask or torch.where",
                self._leaf.path.rpartition(".")[0],
            )
        return slope, constant

    def _try(self, tensors: Sequence[Tensor], num_samples: int) -> _Trial:
        with _disable_current_modes(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(num_samples)
            given = [_random(t, num_samples) for t in tensors[: self._count]]
            # A module computes on its own tensors if it has them, and on random ones if it is on the meta device.
            own = [
                _random(fake, num_samples) if isinstance(held, FakeTensor) or held.is_meta else held.detach().clone()
                for held, fake in zip(self._leaf.own_tensors, tensors[self._count :], strict=True)
            ]
            own = [t.requires_grad_(fake.requires_grad) for t, fake in zip(own, tensors[self._count :], strict=True)]
            try:
                return _trial(self._leaf, [*given, *own])
            except Exception as error:  # whatever the module's code says of such arguments
                raise UntraceableModuleError(
                    f"{self._leaf} must be kept whole, and its sizes are not known, since it does not run on random "
                    f"numbers and zeros: {error}",
                    self._leaf.path.rpartition(".")[0],
                ) from error


@dataclass(frozen=True, eq=False)
class _Trial:
    made: list[Tensor]
    saved_bytes: float
    forward_flops: float
    backward_flops: float


def _trial(leaf: ModuleLeaf, tensors: list[Tensor]) -> _Trial:
    given = {t.untyped_storage()._cdata for t in tensors}
    saved: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in given:
            saved[tensor.untyped_storage()._cdata] = tensor
        return tensor

    held = leaf.own_tensors
    try:
        with torch.enable_grad(), FlopCounterMode(display=False) as counter:
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
                made = leaf.run(tensors, [])
            forward = counter.get_total_flops()
            roots = [t for t in made if t.requires_grad]
            if roots:
                torch.autograd.backward(roots, [torch.ones_like(t) for t in roots])
        size = sum(t.untyped_storage().nbytes() for t in saved.values())
        return _Trial(made, float(size), float(forward), float(counter.get_total_flops() - forward))
    finally:
        leaf.hold(held)


def _sample_axis(tensors: Sequence[Tensor]) -> tuple[int, int, int] | None:
    """The first argument and axis of a multiple of the number of samples, and the multiple."""
    for i, tensor in enumerate(tensors):
        for axis, size in enumerate(tensor.shape):
            expression = size_expression(size)
            if len(expression.free_symbols) == 1:
                rows = expression / next(iter(expression.free_symbols))
                if rows.is_Integer:
                    return i, axis, int(rows)
    return None


def _random(fake: Tensor, num_samples: int) -> Tensor:
    shape = []
    for size in fake.shape:
        expression = size_expression(size)
        shape.append(int(expression.xreplace(dict.fromkeys(expression.free_symbols, sympy.Integer(num_samples)))))
    if not fake.is_floating_point():
        return torch.ones(shape, dtype=fake.dtype) if fake.dtype is torch.bool else torch.zeros(shape, dtype=fake.dtype)
    return (2 * torch.rand(shape) - 1).to(fake.dtype).requires_grad_(fake.requires_grad)
