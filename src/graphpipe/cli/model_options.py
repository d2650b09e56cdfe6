"""The options of the command line that say which model is meant, and how it is captured."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from graphpipe.disk_cache import DiskCache

if TYPE_CHECKING:
    from graphpipe.api import Job


@dataclass(frozen=True)
class ModelOptions:
    """A model on the command line.

    Attributes:
        reference: ``package.module:function``, which returns the job.
        split_points: Paths of modules to divide the model at, besides those of the job.
        keep_whole: Paths of modules that are one operator each, besides those of the job.
        cache: Where captures and profiles are kept.
    """

    reference: str
    split_points: tuple[str, ...]
    keep_whole: tuple[str, ...]
    cache: DiskCache

    def job(self) -> Job:
        """Return the job.

        Raises:
            GraphPipeError: There is none.
        """
        from graphpipe.cli.model_reference import load_job

        job = load_job(self.reference)
        return dataclasses.replace(
            job,
            split_points=(*job.split_points, *self.split_points),
            keep_whole=(*job.keep_whole, *self.keep_whole),
        )

    def arguments(self) -> list[str]:
        """Return the options for another process."""
        return [
            *("--model", self.reference),
            *(text for path in self.split_points for text in ("--split-at", path)),
            *(text for path in self.keep_whole for text in ("--keep-whole", path)),
            *([] if self.cache.folder is not None else ["--no-cache"]),
        ]


def model_options(purpose: str, *, required: bool = True) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of a model, which it gets as ``model``: `ModelOptions`, or None without ``--model``.

    Args:
        purpose: What the job is for, as help.
        required: Whether the command needs a model.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @click.option("--model", "reference", required=required, metavar="MODULE:FUNCTION", help=purpose)
        @click.option(
            "--split-at", "split_points", multiple=True, metavar="PATH", help="Divide at this module; repeatable."
        )
        @click.option("--keep-whole", multiple=True, metavar="PATH", help="Make this module one operator; repeatable.")
        @click.option("--no-cache", is_flag=True, help="Capture and measure anew, and keep nothing of it on disk.")
        @functools.wraps(command)
        def with_model(
            *args: Any,
            reference: str | None,
            split_points: tuple[str, ...],
            keep_whole: tuple[str, ...],
            no_cache: bool,
            **kwargs: Any,
        ) -> None:
            if reference is None and (split_points or keep_whole or no_cache):
                raise click.UsageError("--split-at, --keep-whole and --no-cache belong to --model")
            cache = DiskCache.off() if no_cache else DiskCache.default()
            model = None if reference is None else ModelOptions(reference, split_points, keep_whole, cache)
            command(*args, model=model, **kwargs)

        return with_model

    return decorate
