"""What each rank does in a case about kinds of models and batches: one job of three ranks for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from graphpipe.runtime.compilation import Compilation
from graphpipe.runtime.process_transports import TransportKind
from graphpipe.runtime.sharding import OptimizerStates
from tests.distributed import parity
from tests.distributed.cases import Fork, batch_of, mean_square
from tests.distributed.parity import Part, compare
from tests.distributed.training_cases import train_both


def compiled() -> dict[str, Any]:
    """Three stages with unequal micro-batches, the first with two replicas, are compiled."""
    parts = [("a b", 3, (0, 1)), ("c", 4, (2,)), ("", 5, (2,))]
    batches = [batch_of(10, seed=s) for s in range(2)]
    return compare(Fork(), parts, batches, 10, loss_fn=mean_square, compilation=Compilation(backend="aot_eager"))


class Tables(nn.Module):
    """A table and a bag of rows, and a last layer that may be the table."""

    def __init__(self, *, sparse: bool, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(11, 4, sparse=sparse)
        self.bag = nn.EmbeddingBag(7, 4, mode="sum", sparse=sparse)
        self.head = nn.Linear(4, 11, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids: Tensor, bags: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(torch.tanh(self.table(ids)) + self.bag(bags)), labels)


def rows_of(num_samples: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "ids": torch.randint(0, 11, (num_samples,), generator=generator),
        "bags": torch.randint(0, 7, (num_samples, 3), generator=generator),
        "labels": torch.randint(0, 11, (num_samples,), generator=generator),
    }


def adagrad(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=0.1)


def sparse() -> dict[str, Any]:
    """Tables with sparse gradients beside dense ones: on one device, with replicas, and tied to a dense layer."""
    batches = [rows_of(6, seed) for seed in range(4)]
    alone = [("table", 2, (0,)), ("bag", 3, (1,)), ("", 6, (2,))]
    replicas = [("table bag", 3, (0, 1)), ("", 4, (2,))]
    return {
        "alone": beside_dense(alone, batches),
        "replicas": beside_dense(replicas, batches, accumulated=2, optimizer_states=OptimizerStates.SHARDED),
        "tied": beside_dense(replicas, batches, tied=True),
    }


def beside_dense(parts: Sequence[Part], batches: Sequence[Any], *, tied: bool = False, **options: Any) -> Any:
    """Train tables with sparse gradients by a strategy, and dense ones in one process."""
    sparse, dense = Tables(sparse=True, tied=tied), Tables(sparse=False, tied=tied)
    return train_both(sparse, parts, batches, alone=dense, optimizer=adagrad, max_gradient_norm=0.5, **options)


def features() -> dict[str, Any]:
    """Run every case; the slow one, which messages have no part in, over one transport."""
    slow = {"compiled": compiled()} if parity.kind is TransportKind.ORDERED else {}
    return {"sparse": sparse(), **slow}
