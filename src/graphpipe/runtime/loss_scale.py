"""Loss scaling for float16, whose small gradients would be zero: one scale for all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from graphpipe.errors import GraphPipeError


@dataclass(frozen=True, kw_only=True, slots=True)
class LossScaling:
    """How the scale of the loss changes; the defaults are those of `torch.amp.GradScaler`.

    Attributes:
        initial_scale: What the gradient of the loss starts as.
        growth_factor: The scale grows by it after `growth_interval` updates in a row with finite gradients.
        backoff_factor: The scale is multiplied by it after one with an infinite or undefined gradient.
        growth_interval: Updates.

    Raises:
        ValueError: A number is out of range.
    """

    initial_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000

    def __post_init__(self) -> None:
        if not self.initial_scale > 0:
            raise ValueError(f"initial_scale must be above 0, got {self.initial_scale}")
        if not self.growth_factor >= 1:
            raise ValueError(f"growth_factor must be at least 1, got {self.growth_factor}")
        if not 0 < self.backoff_factor < 1:
            raise ValueError(f"backoff_factor must be between 0 and 1, got {self.backoff_factor}")
        if self.growth_interval < 1:
            raise ValueError(f"growth_interval must be at least 1, got {self.growth_interval}")


class LossScaler:
    """The scale as it is now. Every rank holds one, and all hear of the same overflows.

    Attributes:
        scale: What the gradient of the loss is multiplied by.
    """

    def __init__(self, options: LossScaling) -> None:
        self.scale = options.initial_scale
        self._options = options
        self._finite_updates = 0

    def updated(self, *, overflowed: bool) -> None:
        """Hear whether an update had an infinite or undefined gradient."""
        if overflowed:
            self.scale *= self._options.backoff_factor
            self._finite_updates = 0
            return
        self._finite_updates += 1
        if self._finite_updates == self._options.growth_interval:
            self.scale *= self._options.growth_factor
            self._finite_updates = 0

    def state_dict(self) -> dict[str, float | int]:
        """Return what `load_state_dict` takes."""
        return {"scale": self.scale, "finite_updates": self._finite_updates}

    def load_state_dict(self, state: Mapping[str, float | int]) -> None:
        """Go on from a state."""
        self.scale = float(state["scale"])
        self._finite_updates = int(state["finite_updates"])


def check_scalable(parameters: Mapping[str, nn.Parameter]) -> None:
    """Check that no gradient is float16 itself: the scale could not be undone in it.

    Raises:
        GraphPipeError: One is.
    """
    for name, parameter in parameters.items():
        if parameter.dtype is torch.float16 and parameter.requires_grad:
            raise GraphPipeError(
                f"parameter {name!r} is float16, and loss scaling needs float32 parameters under autocast to float16; "
                "leave the model in float32"
            )
