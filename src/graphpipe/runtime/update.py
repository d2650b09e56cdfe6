"""What happens between the gradients of a mini-batch and the new parameters, in the same way on every rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from graphpipe.errors import GraphPipeError
from graphpipe.runtime.loss_scale import LossScaler
from graphpipe.stage import StageGraph

OptimizerFactory = Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
LRSchedulerFactory = Callable[[torch.optim.Optimizer], LRScheduler]

# As in torch.nn.utils.clip_grad_norm_, so that a norm of zero divides nothing by zero.
_NORM_EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """What an update did, the same on every rank.

    Attributes:
        gradient_norm: The 2-norm of all gradients of the model before clipping; None without clipping and loss scaling.
        is_skipped: Whether the parameters were left as they are because a scaled gradient was infinite or undefined.
    """

    gradient_norm: float | None = None
    is_skipped: bool = False


class Update:
    """The optimizer of one rank with what goes around it.

    Args:
        parameters: Those of the rank's stages, by name.
        counted: The names of those that this rank adds to the norm, from `counted_parameters`.
        sum_over_ranks: Returns the sum of a number of every rank. All ranks call `apply`, also those without
            parameters.
        optimizer: None to leave the parameters as they are, and on a rank without trainable ones.
        lr_scheduler: Stepped after the optimizer, unless it needs a metric as `ReduceLROnPlateau` does.
        max_gradient_norm: All gradients are scaled down together where their norm is larger.
        loss_scaler: Hears of every update; one with an infinite or undefined gradient on any rank is skipped on all.

    Raises:
        ValueError: The largest norm is not above zero.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        counted: Collection[str],
        sum_over_ranks: Callable[[float], float],
        *,
        optimizer: torch.optim.Optimizer | None = None,
        lr_scheduler: LRScheduler | None = None,
        max_gradient_norm: float | None = None,
        loss_scaler: LossScaler | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.loss_scaler = loss_scaler
        self._parameters = parameters
        self._counted = frozenset(counted)
        self._sum_over_ranks = sum_over_ranks
        self._max_norm = checked_norm(max_gradient_norm)

    def apply(self) -> UpdateResult:
        """Clip the gradients, then step the optimizer and the scheduler."""
        norm = None if self._max_norm is None and self.loss_scaler is None else self._norm()
        if norm is not None and self.loss_scaler is not None:
            overflowed = not math.isfinite(norm)
            self.loss_scaler.updated(overflowed=overflowed)
            if overflowed:
                return UpdateResult(norm, is_skipped=True)
        if norm is not None and self._max_norm is not None:
            self._clip(norm, self._max_norm)
        if self.optimizer is not None:
            self.optimizer.step()
        if self.lr_scheduler is not None and not isinstance(self.lr_scheduler, ReduceLROnPlateau):
            self.lr_scheduler.step()
        return UpdateResult(norm)

    def _norm(self) -> float:
        total = sum_of_squares(p.grad for name, p in self._parameters.items() if name in self._counted)
        return math.sqrt(self._sum_over_ranks(float(total)))

    def _clip(self, norm: float, max_norm: float) -> None:
        # A norm that is not a number goes into the gradients, as in torch: hiding it would train on.
        factor = max_norm / (norm + _NORM_EPSILON)
        if not factor >= 1.0:
            for parameter in self._parameters.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)


def make_optimizer(make: OptimizerFactory, trainable: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Return a rank's optimizer.

    Raises:
        GraphPipeError: The parameter groups hold names, which torch does not take where one of them is empty.
    """
    try:
        return make(trainable)
    except ValueError as error:
        if "with/without names" not in str(error):
            raise
        raise GraphPipeError(
            "a parameter group is empty on this rank, and torch takes no empty group beside groups of pairs "
            "(name, parameter); put the parameters alone into the groups: [p for name, p in pairs if ...]"
        ) from error


def checked_norm(max_gradient_norm: float | None) -> float | None:
    """Return a largest norm, if it is one.

    Raises:
        ValueError: It is not above zero.
    """
    if max_gradient_norm is not None and not max_gradient_norm > 0:
        raise ValueError(f"the largest gradient norm must be above 0, got {max_gradient_norm}")
    return max_gradient_norm


def counted_parameters(stages: StageGraph, device: int) -> frozenset[str]:
    """Return the names of the parameters that a device counts for all: those of which it is the lowest holder.

    After the sums over replicas every copy has the whole gradient, so one copy stands for all of them.
    """
    holder: dict[str, int] = {}
    for x, stage in enumerate(stages.stages):
        for i in stages.operator_positions[x]:
            for parameter in stages.graph.operators[i].parameters:
                lowest = min(stage.devices)
                holder[parameter.name] = min(lowest, holder.get(parameter.name, lowest))
    return frozenset(name for name, lowest in holder.items() if lowest == device)


def sum_of_squares(gradients: Iterable[Tensor | None]) -> Tensor:
    """Return the sum of the squares of all entries, float64 with shape ``[1]``; None and none at all give zero."""
    total = torch.zeros(1, dtype=torch.float64)
    for gradient in gradients:
        if gradient is not None:
            entries = gradient.coalesce().values() if gradient.is_sparse else gradient
            total += torch.linalg.vector_norm(entries.detach(), dtype=torch.float64).square().cpu()
    return total
