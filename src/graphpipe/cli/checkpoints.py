"""The checkpoints of ``graphpipe train``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from graphpipe.cli.jobs import Batches
from graphpipe.errors import CheckpointError
from graphpipe.runtime.checkpoint import Checkpointer, Saving
from graphpipe.runtime.pipeline import Pipeline
from graphpipe.runtime.process_group import is_done, note_done, rank


class TrainingCheckpoints:
    """Takes up the newest checkpoint of a folder, and saves others; a failure to save does not end the training.

    Args:
        pipeline: What is trained.
        batches: All batches of the job.
        folder: Where the checkpoints are.
        save_every: Steps between checkpoints.
        keep: How many stay.
        saving: Whether training waits for the disk.
    """

    def __init__(
        self, pipeline: Pipeline, batches: Batches, folder: Path, *, save_every: int, keep: int, saving: Saving
    ) -> None:
        self._pipeline = pipeline
        self._batches = batches
        self._folder = folder
        self._checkpointer = Checkpointer(
            pipeline,
            folder,
            save_every=save_every,
            keep=keep,
            saving=saving,
            states={"batches": batches} if batches.is_stateful else {},
        )

    def resume(self, step: int | None) -> Iterator[Any]:
        """Take up a checkpoint, and return the batches that are left.

        Args:
            step: Which one; None for the newest, if there is one. A job that torchrun starts again goes back once.
        """
        went_back = f"going back to step {step}"
        if step is not None and is_done(went_back):
            step = None  # Before a restart; what was trained since then is to stay.
        restored = self._checkpointer.restore(step)
        if step is not None:
            note_done(went_back)
        if restored:
            say(f"going on after step {self._pipeline.num_steps}, from the checkpoint in {self._folder}")
        stream: Iterable[Any] = self._batches
        return iter(stream) if self._batches.is_stateful else self._checkpointer.remaining(stream)

    def step_done(self) -> None:
        """Save if it is time to."""
        self._attempt(self._checkpointer.save_if_due)

    def close(self) -> None:
        """Save the last step.

        Raises:
            CheckpointError: It cannot be saved.
        """
        try:
            self._attempt(self._checkpointer.wait)
            self._checkpointer.save()
        finally:
            self._checkpointer.close()

    def _attempt(self, work: Callable[[], None]) -> None:
        try:
            work()
        except CheckpointError as error:
            say(f"warning: {error}; training goes on")


def say(line: str) -> None:
    """Print a line once, not once a rank."""
    if rank() == 0:
        print(line, file=sys.stderr if line.startswith("warning") else sys.stdout, flush=True)
