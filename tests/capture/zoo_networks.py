"""Networks of the zoo that no library has in one piece."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class OffsetsDLRM(nn.Module):
    """DLRM whose tables are looked up with indices, three for each sample, and the offset at which each bag begins."""

    def __init__(self, num_tables: int = 3) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(20, 8, mode="sum") for _ in range(num_tables))
        self.bottom = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU())
        count = num_tables + 1
        self.register_buffer("pairs", torch.tril_indices(count, count, -1), persistent=False)
        self.top = nn.Sequential(nn.Linear(8 + count * (count - 1) // 2, 16), nn.ReLU(), nn.Linear(16, 1))

    @staticmethod
    def batch(num_samples: int) -> dict[str, Any]:
        """Return a batch."""
        return {
            "dense": torch.randn(num_samples, 6),
            "indices": [torch.randint(0, 20, (3 * num_samples,)) for _ in range(3)],
            "offsets": [torch.arange(0, 3 * num_samples, 3) for _ in range(3)],
            "clicked": torch.rand(num_samples),
        }

    def forward(self, dense: Tensor, indices: list[Tensor], offsets: list[Tensor], clicked: Tensor) -> Tensor:
        """Return the loss."""
        features = self.bottom(dense)
        rows = [t(i, o) for t, i, o in zip(self.tables, indices, offsets, strict=True)]
        vectors = torch.stack([features, *rows], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        crossed = products[:, self.pairs[0], self.pairs[1]]
        logits = self.top(torch.cat([features, crossed], dim=1)).squeeze(-1)
        return functional.binary_cross_entropy_with_logits(logits, clicked)


def _convolution(given: int, made: int, size: int = 3, stride: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(given, made, size, stride, padding=size // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(made), nn.ReLU(inplace=True))


class _Residual(nn.Module):
    def __init__(self, given: int, made: int) -> None:
        super().__init__()
        self.first = _convolution(given, made, 3, 2)
        self.second = nn.Sequential(nn.Conv2d(made, made, 3, padding=1, bias=False), nn.BatchNorm2d(made))
        self.shortcut = nn.Sequential(nn.Conv2d(given, made, 1, 2, bias=False), nn.BatchNorm2d(made))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.second(self.first(x))
        found += self.shortcut(x)
        activated: Tensor = self.relu(found)
        return activated


class _Inception(nn.Module):
    def __init__(self, given: int, made: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            [
                _convolution(given, made, 1),
                nn.Sequential(_convolution(given, made, 1), _convolution(made, made, 3)),
                nn.Sequential(_convolution(given, made, 1), _convolution(made, made, 5)),
                nn.Sequential(nn.MaxPool2d(3, 1, 1), _convolution(given, made, 1)),
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


class ConvNet(nn.Module):
    """A residual block and an Inception block, with batch statistics and operations in place."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.stem = _convolution(3, width)
        self.residual = _Residual(width, 2 * width)
        self.inception = _Inception(2 * width, width)
        self.head = nn.Linear(4 * width, 5)

    @staticmethod
    def batch(num_samples: int) -> dict[str, Any]:
        """Return a batch."""
        return {"x": torch.randn(num_samples, 3, 8, 8), "y": torch.randint(0, 5, (num_samples,))}

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss."""
        x = self.inception(self.residual(self.stem(x)))
        return functional.cross_entropy(self.head(functional.adaptive_avg_pool2d(x, 1).flatten(1)), y)


class UNet(nn.Module):
    """Two levels with long skips, pooling and transposed convolutions."""

    def __init__(self, depth: int = 2, width: int = 4) -> None:
        super().__init__()
        widths = [width * 2**i for i in range(depth + 1)]
        self.stem = _convolution(3, width)
        self.down = nn.ModuleList(
            nn.Sequential(nn.MaxPool2d(2), _convolution(widths[i], widths[i + 1])) for i in range(depth)
        )
        levels = list(reversed(range(depth)))
        self.up = nn.ModuleList(nn.ConvTranspose2d(widths[i + 1], widths[i], 2, 2) for i in levels)
        self.join = nn.ModuleList(_convolution(2 * widths[i], widths[i]) for i in levels)
        self.head = nn.Conv2d(width, 2, 1)

    @staticmethod
    def batch(num_samples: int) -> dict[str, Any]:
        """Return a batch."""
        return {"x": torch.randn(num_samples, 3, 8, 8), "y": torch.randint(0, 2, (num_samples, 8, 8))}

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss."""
        skips = [self.stem(x)]
        for down in self.down:
            skips.append(down(skips[-1]))
        found = skips.pop()
        for up, join in zip(self.up, self.join, strict=True):
            found = join(torch.cat([up(found), skips.pop()], 1))
        return functional.cross_entropy(self.head(found), y)


class Tagger(nn.Module):
    """A bidirectional LSTM with a tag for each word."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 8)
        self.lstm = nn.LSTM(8, 6, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(12, 5)

    @staticmethod
    def batch(num_samples: int) -> dict[str, Any]:
        """Return a batch."""
        return {"words": torch.randint(0, 30, (num_samples, 7)), "tags": torch.randint(0, 5, (num_samples, 7))}

    def forward(self, words: Tensor, tags: Tensor) -> Tensor:
        """Return the loss."""
        hidden, _ = self.lstm(self.embedding(words))
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), tags.flatten())


class TwoTower(nn.Module):
    """Retrieval with one encoder for queries and documents, and in-batch negatives."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.projection = nn.Linear(8, 8)

    @staticmethod
    def batch(num_samples: int) -> dict[str, Any]:
        """Return a batch."""
        return {"query": torch.randint(0, 40, (num_samples, 4)), "document": torch.randint(0, 40, (num_samples, 6))}

    def encode(self, words: Tensor) -> Tensor:
        """Return a unit vector for each sentence."""
        hidden = self.encoder(self.embedding(words)).mean(1)
        return functional.normalize(self.projection(hidden), dim=-1)

    def forward(self, query: Tensor, document: Tensor) -> Tensor:
        """Return the loss."""
        scores = self.encode(query) @ self.encode(document).T / 0.1
        return functional.cross_entropy(scores, torch.arange(query.shape[0]))
