"""CANDLE-Uno, a model of how tumours respond to drugs: feed-forward branches, joined by a concatenation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from graphpipe.models.feed_forward import feed_forward


@dataclass(frozen=True, kw_only=True)
class CandleUnoConfig:
    """The sizes of a `CandleUno`.

    Attributes:
        num_branches: Kinds of features, with a branch each.
        num_layers: Feed-forward layers of a branch.
        num_top_layers: Feed-forward layers after the concatenation.
        hidden_size: Features of a layer, and of each input.
    """

    num_branches: int = 4
    num_layers: int = 2
    num_top_layers: int = 2
    hidden_size: int = 32

    @classmethod
    def small(cls) -> CandleUnoConfig:
        """Return sizes for tests, which train in milliseconds."""
        return cls()

    @classmethod
    def paper(cls, num_branches: int = 7) -> CandleUnoConfig:
        """Return the paper's sizes: branches of 4 layers of 4096 features; it varies the branches from 2 to 16."""
        return replace(cls(), num_branches=num_branches, num_layers=4, num_top_layers=4, hidden_size=4096)

    def example_batch(self, num_samples: int) -> dict[str, list[Tensor] | Tensor]:
        """Return a random batch: ``features``, ``[samples, hidden_size]`` each, and the ``growth`` of each sample."""
        return {
            "features": [torch.randn(num_samples, self.hidden_size) for _ in range(self.num_branches)],
            "growth": torch.randn(num_samples),
        }


class CandleUno(nn.Module):
    """A feed-forward branch per kind of features, concatenated, and a regression on top.

    Args:
        config: The sizes.
    """

    def __init__(self, config: CandleUnoConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.branches = nn.ModuleList(
            feed_forward([size] * (config.num_layers + 1)) for _ in range(config.num_branches)
        )
        self.top = feed_forward([config.num_branches * size] + [size] * config.num_top_layers)
        self.growth = nn.Linear(size, 1)

    def forward(self, features: Sequence[Tensor], growth: Tensor | None = None) -> Tensor:
        """Return the loss if the growth is given, else its ``[samples]`` prediction."""
        found = [branch(x) for branch, x in zip(self.branches, features, strict=True)]
        predicted: Tensor = self.growth(self.top(torch.cat(found, dim=-1))).squeeze(-1)
        return predicted if growth is None else functional.mse_loss(predicted, growth)
