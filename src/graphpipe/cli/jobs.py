"""What `verify` and `train` make of a job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

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
