"""How near the loss and the gradients of a strategy are to those of one process."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from graphpipe.capture import Autocast, eager_loss

SMALLEST_SCALE = 1e-3
"""Gradients smaller than this share of the largest one are compared on the scale of that share."""


@dataclass(frozen=True)
class Reference:
    """A step of one process.

    Attributes:
        loss: Its loss.
        gradients: By parameter; None for those that the loss does not depend on.
        is_random: Whether it drew random numbers, as dropout does, so that no other step can give the same.
    """

    loss: float
    gradients: Mapping[str, Tensor | None]
    is_random: bool


def single_process(model: nn.Module, batch: Any, loss_fn: Callable[[Any, Any], Tensor] | None) -> Reference:
    """Return the loss and gradients of a batch, and leave the model, and the state of random numbers, as they are."""
    reference = copy.deepcopy(model)
    for parameter in reference.parameters():
        parameter.grad = None
    with torch.random.fork_rng():
        before = torch.get_rng_state()
        loss = eager_loss(reference, batch, loss_fn)
        is_random = not torch.equal(before, torch.get_rng_state())
        torch.autograd.backward(loss)
    gradients = {
        n: None if p.grad is None else p.grad.to_dense() for n, p in reference.named_parameters() if p.requires_grad
    }
    return Reference(float(loss.detach()), gradients, is_random)


def default_tolerance(dtypes: Collection[torch.dtype]) -> float:
    """Return the relative difference that rounding may make, for parameters of these types."""
    if Autocast.ambient().dtypes:
        return 5e-2
    return 1e-9 if set(dtypes) == {torch.float64} else 1e-4


def smallest_scale(gradients: Mapping[str, Tensor | None]) -> float:
    """Return the scale on which the smallest of some gradients are compared."""
    return SMALLEST_SCALE * max(
        (float(g.abs().max()) for g in gradients.values() if g is not None and g.numel()), default=0.0
    )


def gradient_error(found: Tensor | None, expected: Tensor | None, scale: float) -> float:
    """Return the largest difference of two gradients over the largest entry of the second, or over `scale`."""
    if expected is None or found is None:
        other = found if expected is None else expected
        return 0.0 if other is None or not other.any() else math.inf
    largest = max(float(expected.abs().max()), scale, torch.finfo(expected.dtype).tiny)
    error = float((found - expected).abs().max()) / largest
    return error if math.isfinite(error) else math.inf


def loss_error(found: float, expected: float) -> float:
    """Return the difference of two losses, relative to the second where that is above 1."""
    error = abs(found - expected) / max(1.0, abs(expected))
    return error if math.isfinite(error) else math.inf
