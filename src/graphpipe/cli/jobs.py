"""What `verify` and `train` make of a job."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from graphpipe.api import Job


def batches(job: Job, mini_batch_size: int) -> Iterator[Any]:
    """Yield batches without end: the job's own, again and again, or its example batch repeated to size."""
    if job.batches is None:
        repeated = tile(job.example_batch, mini_batch_size)
        while True:
            yield repeated
    while True:
        count = 0
        for batch in job.batches():
            count += 1
            yield batch
        if not count:
            return


def tile(tree: Any, num_samples: int) -> Any:
    """Return a batch whose tensors repeat their samples along axis 0 until there are `num_samples`."""
    if isinstance(tree, Tensor):
        if tree.dim() == 0:
            return tree
        repeats = -(-num_samples // len(tree))
        return torch.cat([tree] * repeats)[:num_samples]
    if isinstance(tree, Mapping):
        return {name: tile(value, num_samples) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(tile(value, num_samples) for value in tree)
    return tree


def default_optimizer(parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Return AdamW with a learning rate of 1e-3."""
    return torch.optim.AdamW(parameters, lr=1e-3)
