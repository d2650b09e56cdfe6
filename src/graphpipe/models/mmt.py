"""The multi-modal Transformer of the GraphPipe paper: one Transformer tower per modality, joined by a concatenation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, kw_only=True)
class MMTConfig:
    """The sizes of an `MMT`.

    Attributes:
        num_branches: Modalities, with a tower each.
        num_layers: Transformer layers of a tower.
        sequence_length: Tokens of each modality.
        hidden_size: Features of a token.
        num_heads: Attention heads.
        feed_forward_size: Features inside a feed-forward layer.
        num_classes: What the head tells apart.
        dropout: The probability of dropping a feature in training.
    """

    num_branches: int = 4
    num_layers: int = 2
    sequence_length: int = 6
    hidden_size: int = 32
    num_heads: int = 4
    feed_forward_size: int = 64
    num_classes: int = 8
    dropout: float = 0.0

    @classmethod
    def small(cls) -> MMTConfig:
        """Return sizes for tests, which train in milliseconds."""
        return cls()

    @classmethod
    def paper(cls) -> MMTConfig:
        """Return the paper's sizes: 4 branches of 8 layers, 400 million parameters."""
        return cls(
            num_branches=4,
            num_layers=8,
            sequence_length=256,
            hidden_size=1024,
            num_heads=16,
            feed_forward_size=4096,
            num_classes=1000,
        )

    def example_batch(self, num_samples: int) -> dict[str, list[Tensor] | Tensor]:
        """Return a random batch: ``modalities``, ``[samples, tokens, features]`` each, and the ``labels``."""
        shape = (num_samples, self.sequence_length, self.hidden_size)
        return {
            "modalities": [torch.randn(shape) for _ in range(self.num_branches)],
            "labels": torch.randint(self.num_classes, (num_samples,)),
        }


class MMT(nn.Module):
    """A Transformer tower per modality, averaged over tokens, concatenated, and classified.

    Args:
        config: The sizes.
    """

    def __init__(self, config: MMTConfig) -> None:
        super().__init__()
        self.towers = nn.ModuleList(
            nn.TransformerEncoder(
                nn.TransformerEncoderLayer(
                    config.hidden_size,
                    config.num_heads,
                    config.feed_forward_size,
                    config.dropout,
                    activation="gelu",
                    batch_first=True,
                ),
                config.num_layers,
                enable_nested_tensor=False,
            )
            for _ in range(config.num_branches)
        )
        self.head = nn.Sequential(
            nn.Linear(config.num_branches * config.hidden_size, config.hidden_size),
            nn.GELU(),
            nn.Linear(config.hidden_size, config.num_classes),
        )

    def forward(self, modalities: Sequence[Tensor], labels: Tensor | None = None) -> Tensor:
        """Return the loss if labels are given, else ``[samples, classes]`` logits."""
        features = [tower(modality).mean(dim=1) for tower, modality in zip(self.towers, modalities, strict=True)]
        logits: Tensor = self.head(torch.cat(features, dim=-1))
        return logits if labels is None else functional.cross_entropy(logits, labels)
