"""A plain Transformer, without branches: what every pipeline can do."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, kw_only=True)
class SequentialTransformerConfig:
    """The sizes of a `SequentialTransformer`.

    Attributes:
        num_layers: Transformer layers.
        sequence_length: Tokens of a sample.
        hidden_size: Features of a token.
        num_heads: Attention heads.
        feed_forward_size: Features inside a feed-forward layer.
        num_classes: What the head tells apart.
        dropout: The probability of dropping a feature in training.
    """

    num_layers: int = 4
    sequence_length: int = 6
    hidden_size: int = 32
    num_heads: int = 4
    feed_forward_size: int = 64
    num_classes: int = 8
    dropout: float = 0.0

    @classmethod
    def small(cls) -> SequentialTransformerConfig:
        """Return sizes for tests, which train in milliseconds."""
        return cls()

    @classmethod
    def paper(cls) -> SequentialTransformerConfig:
        """Return the paper's sizes: the layers of its `MMT`, 32 in a row."""
        return cls(
            num_layers=32,
            sequence_length=256,
            hidden_size=1024,
            num_heads=16,
            feed_forward_size=4096,
            num_classes=1000,
        )

    def example_batch(self, num_samples: int) -> dict[str, Tensor]:
        """Return a random batch: ``tokens``, ``[samples, tokens, features]``, and ``labels``, ``[samples]``."""
        return {
            "tokens": torch.randn(num_samples, self.sequence_length, self.hidden_size),
            "labels": torch.randint(self.num_classes, (num_samples,)),
        }


class SequentialTransformer(nn.Module):
    """Transformer layers in a row, averaged over tokens, and classified.

    Args:
        config: The sizes.
    """

    def __init__(self, config: SequentialTransformerConfig) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(
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
        self.head = nn.Linear(config.hidden_size, config.num_classes)

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return the loss if labels are given, else ``[samples, classes]`` logits."""
        logits: Tensor = self.head(self.encoder(tokens).mean(dim=1))
        return logits if labels is None else functional.cross_entropy(logits, labels)
