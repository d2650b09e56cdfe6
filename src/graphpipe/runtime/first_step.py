"""The comparison of a strategy's first mini-batch with one process, before it trains on it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from graphpipe.capture import Autocast, CapturedModel, Draws
from graphpipe.errors import GraphPipeError
from graphpipe.graph import ComputationGraph
from graphpipe.runtime.comparison import (
    Reference,
    default_tolerance,
    gradient_error,
    loss_error,
    single_process,
    smallest_scale,
)
from graphpipe.runtime.meeting import broadcast_text
from graphpipe.runtime.stages import StageSource

SMALL_FLOPS = 1e10
"""A step of at most so many operations is compared unasked: about a second of one core."""
SMALL_BYTES = 250e6
"""What parameters and saved activations of a step that is compared unasked may take."""
UNASKED_TOLERANCE = 1e-3
"""What an unasked comparison allows: a wrong gradient is wrong by far more, and a right one is never to end a job."""


class Verify(StrEnum):
    """When a pipeline compares itself with one process."""

    AUTO = "auto"
    """On the first mini-batch, where that is cheap and rounding is small: see `is_small` and `comparable_unasked`."""
    NEVER = "never"
    """Not at all; `graphpipe.verify` does it on demand."""
    FIRST_STEP = "first-step"
    """On the first mini-batch, before it trains on it."""


class _IncomparableError(Exception):
    """A step cannot be compared, and why."""


def is_small(graph: ComputationGraph, num_samples: int) -> bool:
    """Return whether a step is cheap enough to be computed once more by every rank."""
    flops = sum(operator.forward_flops + operator.backward_flops for operator in graph.operators)
    saved = sum(operator.saved_bytes for operator in graph.operators)
    parameters = {p.name: p.num_bytes for operator in graph.operators for p in operator.parameters}
    return num_samples * flops <= SMALL_FLOPS and num_samples * saved + sum(parameters.values()) <= SMALL_BYTES


def comparable_unasked(model: nn.Module) -> bool:
    """Return whether rounding is too small to be taken for a fault: float32 or better, without autocast."""
    types = {p.dtype for p in model.parameters() if p.dtype.is_floating_point}
    return not Autocast.ambient().dtypes and types <= {torch.float32, torch.float64}


def reference_step(
    source: StageSource, batch: Any, loss_fn: Callable[[Any, Any], Tensor] | None, draws: Draws
) -> Reference | str:
    """Return the loss and gradients of a mini-batch in one process, or why it cannot be compared with one.

    All ranks call this, and all get the one or the other.

    A model that draws random numbers, as dropout does, is not run itself, since it would draw others: its captured
    graph is run as a whole.

    Args:
        source: The model.
        batch: The mini-batch.
        loss_fn: Its loss.
        draws: What the random numbers of the pipeline's step follow from.
    """
    found: Reference | None = None
    reason = ""
    try:
        found = _reference(source, batch, loss_fn, draws)
    except _IncomparableError as error:
        reason = str(error)
    except Exception as error:  # A rank's batch may lack what only others need, or memory may not suffice.
        reason = f"one process cannot run it on this batch: {type(error).__name__}: {error}"
    reason = next(filter(None, _of_all_ranks(reason)), "")
    if reason:
        return reason
    assert found is not None
    return found


def _reference(
    source: StageSource, batch: Any, loss_fn: Callable[[Any, Any], Tensor] | None, draws: Draws
) -> Reference:
    name = source.graph.name
    if any(parameter.is_meta for parameter in source.model.parameters()):
        raise _IncomparableError(f"{name!r} was built on the meta device, and no rank holds all of it to compare with")
    if isinstance(source, CapturedModel) and source.is_random:
        if not source.draws_alike:
            raise _IncomparableError(
                f"{name!r} draws random numbers that depend on the micro-batches, so no two plans give the same step"
            )
        return _graph_as_a_whole(source, batch, draws)
    found = single_process(source.model, batch, loss_fn)
    if found.is_random:
        raise _IncomparableError(f"{name!r} draws random numbers in code that is kept whole, so no two steps are equal")
    return found


def _graph_as_a_whole(captured: CapturedModel, batch: Any, draws: Draws) -> Reference:
    whole = copy.deepcopy(captured.stage_module([operator.name for operator in captured.graph.operators]))
    for parameter in whole.parameters():
        parameter.grad = None
    tensors = captured.flatten_batch(batch)
    with torch.random.fork_rng():
        loss = whole(tensors, captured.num_samples(tensors), draws)[captured.loss]
        torch.autograd.backward(loss)
    gradients = {
        n: None if p.grad is None else p.grad.to_dense() for n, p in whole.named_parameters() if p.requires_grad
    }
    return Reference(float(loss.detach()), gradients, is_random=True)


@dataclass(frozen=True)
class Difference:
    """How a number of the strategy differs from that of one process.

    Attributes:
        error: Relative.
        name: Of the parameter; empty for the loss.
        found: The number that differs most.
        expected: What one process gives.
    """

    error: float
    name: str
    found: float
    expected: float


def largest_difference(found_loss: float, found: Mapping[str, Tensor | None], expected: Reference) -> Difference:
    """Return the largest difference of all ranks. All ranks call this.

    Args:
        found_loss: The strategy's loss.
        found: The gradients of this rank's parameters.
        expected: Those of one process.
    """
    floor = smallest_scale(expected.gradients)
    differences = [Difference(loss_error(found_loss, expected.loss), "", found_loss, expected.loss)]
    for name, gradient in found.items():
        other = expected.gradients.get(name)
        error = gradient_error(gradient, other, floor)
        differences.append(Difference(error, name, *_worst_entry(gradient, other)))
    own = max(differences, key=lambda difference: (difference.error, difference.name))
    # JSON has no infinities.
    entry = [min(own.error, 1e300), own.name, repr(own.found), repr(own.expected)]
    error, name, *numbers = max(map(json.loads, _of_all_ranks(json.dumps(entry))))
    return Difference(error, name, *map(float, numbers))


def check(largest: Difference, loss: float, expected_loss: float, tolerance: float) -> None:
    """Check that a difference is no more than rounding can explain.

    Raises:
        GraphPipeError: It is.
    """
    if largest.error <= tolerance:
        return
    what = f"the gradient of {largest.name!r}" if largest.name else "the loss"
    raise GraphPipeError(
        f"the strategy does not give what one process gives on the first batch: {what} differs by {largest.error:.1e} "
        f"of its size, allowed {tolerance:.0e}: {largest.found:.9g}, one process {largest.expected:.9g}; loss "
        f"{loss:.9g}, one process {expected_loss:.9g}. Report this, and pass verify='never' to train all the same"
    )


def tolerance_of(verify: Verify, model: nn.Module) -> float:
    """Return what a comparison allows."""
    tolerance = default_tolerance({parameter.dtype for parameter in model.parameters()})
    return max(tolerance, UNASKED_TOLERANCE) if verify is Verify.AUTO else tolerance


def _worst_entry(found: Tensor | None, expected: Tensor | None) -> tuple[float, float]:
    """The entries that differ most; zeros stand for a gradient that is missing."""
    known = expected if found is None else found
    if known is None or not known.numel():
        return 0.0, 0.0
    first = torch.zeros_like(known) if found is None else found
    second = torch.zeros_like(known) if expected is None else expected
    place = int((first - second).abs().nan_to_num(nan=float("inf")).argmax())
    return float(first.reshape(-1)[place]), float(second.reshape(-1)[place])


def _of_all_ranks(text: str) -> list[str]:
    return [broadcast_text(text, source) for source in range(dist.get_world_size())]
