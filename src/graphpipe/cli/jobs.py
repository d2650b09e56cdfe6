"""What `verify` and `train` make of a job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from graphpipe.api import Job


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
            repeated = tile(self._job.example_batch, self._mini_batch_size)
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

    def state_dict(self) -> dict[str, Any]:
        """Return where in which epoch the batches are, as the loader puts it."""
        loader: Any = self._loader
        return {"epoch": self._epoch, "drawn": self._drawn, "loader": loader.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where `state_dict` was called."""
        loader: Any = self._loader
        self._epoch, self._drawn = state["epoch"], state["drawn"]
        loader.load_state_dict(state["loader"])


def tile(batch: Any, num_samples: int) -> Any:
    """Return a batch whose samples are repeated or cut to `num_samples`.

    As in capture, the samples are along axis 0 of the tensors whose axis 0 has the most common size; others are kept.
    """
    sizes = Counter(leaf.shape[0] for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim())
    if not sizes:
        return batch
    count = sizes.most_common(1)[0][0]

    def resized(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dim() == 0 or leaf.shape[0] != count or count == 0:
            return leaf
        return torch.cat([leaf] * -(-num_samples // count))[:num_samples]

    return pytree.tree_map(resized, batch)


def default_optimizer(parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Return AdamW with a learning rate of 1e-3."""
    return torch.optim.AdamW(parameters, lr=1e-3)
