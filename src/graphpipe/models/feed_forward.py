"""Stacks of linear layers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn


def feed_forward(sizes: Sequence[int]) -> nn.Sequential:
    """Return linear layers between these sizes, with a ReLU after each."""
    layers: list[nn.Module] = []
    for size, next_size in pairwise(sizes):
        layers += [nn.Linear(size, next_size), nn.ReLU()]
    return nn.Sequential(*layers)
