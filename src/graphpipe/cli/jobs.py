"""What `verify` and `train` make of a job."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from graphpipe.api import Job
from graphpipe.capture.api import flat_batch
from graphpipe.capture.batch import resize


class Batches:
    """Batches without end: the job's own, again and again, or its example batch repeated to size.

    Where the job's loader has ``state_dict`` and ``load_state_dict``, so have these batches, and `is_stateful` is True.

    Args:
        job: Whose batches.
        mini_batch_size: The samples of a repeated example batch.
    """

    def __init__(self, job: Job, mini_batch_size: int) -> None:
        self._job = job
        self._mini_batch_size = mini_batch_size
        self._epoch = 0
        self._drawn = 0
        self._loader: Iterable[Any] | None = job.batches() if job.batches is not None else None
        self.is_stateful = hasattr(self._loader, "state_dict") and hasattr(self._loader, "load_state_dict")

    def __iter__(self) -> Iterator[Any]:
        if self._job.batches is None or self._loader is None:
            repeated = tile(self._job, self._mini_batch_size)
            while True:
                yield repeated
        while True:
            for batch in self._loader:
                self._drawn += 1
                yield batch
            if not self._drawn:
                return
            self._epoch, self._drawn = self._epoch + 1, 0
            self._loader = self._job.batches()

    @property
    def position(self) -> tuple[int, int]:
        """The epoch and the number in it of the batch that was drawn last, both from 0."""
        return self._epoch, max(self._drawn - 1, 0)

    def state_dict(self) -> dict[str, Any]:
        """Return where in which epoch the batches are, as the loader puts it."""
        loader: Any = self._loader
        return {"epoch": self._epoch, "drawn": self._drawn, "loader": loader.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where `state_dict` was called."""
        loader: Any = self._loader
        self._epoch, self._drawn = state["epoch"], state["drawn"]
        loader.load_state_dict(state["loader"])


def tile(job: Job, num_samples: int) -> Any:
    """Return a job's example batch with its samples repeated or cut to `num_samples`."""
    layout, tensors = flat_batch(job.model, job.example_batch, job.free_sizes, job.sample_axes)
    found = iter(resize(layout, tensors, num_samples).values())
    batch = dict(job.example_batch) if isinstance(job.example_batch, Mapping) else job.example_batch
    return pytree.tree_map(lambda leaf: next(found) if isinstance(leaf, Tensor) else leaf, batch)


def default_optimizer(parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Return AdamW with a learning rate of 1e-3."""
    return torch.optim.AdamW(parameters, lr=1e-3)
