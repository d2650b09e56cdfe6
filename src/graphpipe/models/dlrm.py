"""The recommendation model of the GraphPipe paper: dense and embedding branches, joined by a concatenation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from graphpipe.models.feed_forward import feed_forward


@dataclass(frozen=True, kw_only=True)
class DLRMConfig:
    """The sizes of a `DLRM`.

    Attributes:
        num_dense: Branches of feed-forward layers.
        num_sparse: Branches with an embedding table.
        num_layers: Feed-forward layers of a dense branch.
        num_top_layers: Feed-forward layers after the concatenation.
        hidden_size: Features of a feed-forward layer, and of a dense input.
        num_rows: Rows of an embedding table.
        embedding_size: Features of an embedding.
        bag_size: Rows that one sample looks up in a table; they are summed.
    """

    num_dense: int = 3
    num_sparse: int = 3
    num_layers: int = 2
    num_top_layers: int = 2
    hidden_size: int = 32
    num_rows: int = 50
    embedding_size: int = 16
    bag_size: int = 5

    @classmethod
    def small(cls) -> DLRMConfig:
        """Return sizes for tests, which train in milliseconds."""
        return cls()

    @classmethod
    def paper(cls) -> DLRMConfig:
        """Return the paper's sizes: 7 dense branches of 4 layers, and 7 tables of a million rows."""
        return cls(
            num_dense=7,
            num_sparse=7,
            num_layers=4,
            num_top_layers=4,
            hidden_size=4096,
            num_rows=1_000_000,
            embedding_size=64,
            bag_size=100,
        )

    def example_batch(self, num_samples: int) -> dict[str, list[Tensor] | Tensor]:
        """Return a random batch: ``dense`` features, ``sparse`` rows, ``[samples, bag]`` each, and the ``clicks``."""
        return {
            "dense": [torch.randn(num_samples, self.hidden_size) for _ in range(self.num_dense)],
            "sparse": [torch.randint(self.num_rows, (num_samples, self.bag_size)) for _ in range(self.num_sparse)],
            "clicks": torch.randint(2, (num_samples,)).to(torch.get_default_dtype()),
        }


class DLRM(nn.Module):
    """Feed-forward branches over dense features and embedding bags over sparse ones, concatenated, and scored.

    Args:
        config: The sizes.
    """

    def __init__(self, config: DLRMConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.dense = nn.ModuleList(feed_forward([size] * (config.num_layers + 1)) for _ in range(config.num_dense))
        self.sparse = nn.ModuleList(
            nn.EmbeddingBag(config.num_rows, config.embedding_size, mode="sum") for _ in range(config.num_sparse)
        )
        width = config.num_dense * size + config.num_sparse * config.embedding_size
        self.top = feed_forward([width] + [size] * config.num_top_layers)
        self.score = nn.Linear(size, 1)

    def forward(self, dense: Sequence[Tensor], sparse: Sequence[Tensor], clicks: Tensor | None = None) -> Tensor:
        """Return the loss if the clicks are given, else ``[samples]`` logits."""
        features = [branch(x) for branch, x in zip(self.dense, dense, strict=True)]
        features += [table(rows) for table, rows in zip(self.sparse, sparse, strict=True)]
        logits: Tensor = self.score(self.top(torch.cat(features, dim=-1))).squeeze(-1)
        return logits if clicks is None else functional.binary_cross_entropy_with_logits(logits, clicks)
