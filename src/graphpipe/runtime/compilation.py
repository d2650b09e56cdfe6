"""Stages that `torch.compile` has a part in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from graphpipe.errors import GraphPipeError
from graphpipe.runtime.stages import StageModule
from graphpipe.stage import Stage


@dataclass(frozen=True, kw_only=True, slots=True)
class Compilation:
    """How stages are compiled, each by itself, when it first runs in training.

    Attributes:
        backend: As `torch.compile` takes it.
        dynamic: As `torch.compile` takes it: whether sizes are free from the start; by default the second size that is
            seen makes them so.
        options: Of the backend, as `torch.compile` takes them.
        left_out: The stages to run as they are.
    """

    backend: str | Callable[..., Any] = "inductor"
    dynamic: bool | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    left_out: tuple[int, ...] = ()

    def check(self, num_stages: int) -> None:
        """Check that the stages to leave out exist.

        Raises:
            GraphPipeError: One does not.
        """
        for x in self.left_out:
            if not 0 <= x < num_stages:
                raise GraphPipeError(
                    f"Compilation(left_out={self.left_out}) names stage {x}, and the strategy has {num_stages} stages, "
                    f"0 to {num_stages - 1}"
                )

    def compile(self, modules: Mapping[int, StageModule]) -> None:
        """Let the modules of some stages be compiled when they first run."""
        for x, module in modules.items():
            if x not in self.left_out:
                module.compile_with(self.backend, dynamic=self.dynamic, options=dict(self.options) or None)

    def failure(self, x: int, stage: Stage, error: Exception) -> GraphPipeError | None:
        """Return what to say of an error that the compiler raised for a stage; None for an error of the model itself.

        Args:
            x: The number of the stage.
            stage: The stage.
            error: What ended its forward or backward pass.
        """
        # By name, as importing the compiler takes seconds.
        kinds = {f"{kind.__module__}.{kind.__name__}" for kind in type(error).__mro__}
        if x in self.left_out or "torch._dynamo.exc.TorchDynamoException" not in kinds:
            return None
        backend = self.backend if isinstance(self.backend, str) else getattr(self.backend, "__name__", self.backend)
        cause = getattr(error, "inner_exception", None) or error
        lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
        told = lines[0] if lines else "no more is known"
        return GraphPipeError(
            f"stage {x} (operators {stage.operators[0]!r} to {stage.operators[-1]!r}) cannot be compiled with the "
            f"backend {backend!r}: {type(cause).__name__}: {told}; run it as it is with "
            f"Compilation(left_out={(*self.left_out, x)}), or choose another backend"
        )
