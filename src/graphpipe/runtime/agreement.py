"""Lets all ranks do something together, and fail together."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from graphpipe.errors import CheckpointError, GraphPipeError
from graphpipe.runtime.process_group import rank, world_size

_T = TypeVar("_T")


class Agreement:
    """Work with checkpoints that every rank does, and that fails on every rank when it fails on one.

    All ranks make one together, and call its methods in the same order. A thread may use it while the others of its
    rank do not.

    Args:
        timeout: How long a rank waits for the others.
    """

    def __init__(self, timeout: datetime.timedelta) -> None:
        self.group = dist.new_group(list(range(world_size())), timeout=timeout, backend="gloo")

    def gather(self, value: _T) -> list[_T]:
        """Return what every rank gives."""
        values: list[Any] = [None] * world_size()
        dist.all_gather_object(values, value, group=self.group)
        return values

    def everywhere(self, work: Callable[[], _T]) -> _T:
        """Do something on every rank.

        Raises:
            CheckpointError: It has failed on a rank.
            GraphPipeError: What it has raised on this one.
        """
        result, error = _attempt(work)
        failures = self.gather(None if error is None else _message(error))
        _check(error, next((f for f in failures if f is not None), None))
        return result  # type: ignore[return-value]

    def on_first_rank(self, work: Callable[[], _T]) -> _T:
        """Do something on rank 0, and return the outcome on every rank.

        Raises:
            CheckpointError: It has failed.
            GraphPipeError: What it has raised, on rank 0.
        """
        result, error = _attempt(work) if rank() == 0 else (None, None)
        outcome: list[Any] = [result, None if error is None else _message(error)]
        dist.broadcast_object_list(outcome, src=0, group=self.group)
        _check(error, outcome[1])
        found: _T = outcome[0]
        return found


def _attempt(work: Callable[[], _T]) -> tuple[_T | None, Exception | None]:
    try:
        return work(), None
    except Exception as error:
        return None, error


def _message(error: Exception) -> str:
    return str(error) if isinstance(error, GraphPipeError) else f"rank {rank()}: {type(error).__name__}: {error}"


def _check(error: Exception | None, failure: str | None) -> None:
    """Raise this rank's own error, or what happened on another rank."""
    if isinstance(error, GraphPipeError):
        raise error
    if failure is not None:
        raise CheckpointError(failure) from error
