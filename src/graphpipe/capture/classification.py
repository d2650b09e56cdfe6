"""What a probe finds out about a graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx


@dataclass(frozen=True, eq=False)
class Classification:
    """How the tensors of a graph depend on the samples of a batch.

    Attributes:
        classes: By node: a class, or a tuple of them where the operation gives several tensors.
        batch_wise: The operations that need the whole mini-batch.
        counted_targets: For the classification losses that micro-batches share, how many targets of each sample count.
        filled: The operations that put rows into the places of a mask, as many for each sample as it has places. That
            is to be checked for every micro-batch.
    """

    classes: Mapping[fx.Node, Any]
    batch_wise: frozenset[fx.Node]
    counted_targets: Mapping[fx.Node, int]
    filled: frozenset[fx.Node]
