"""A trial batch in two parts, and whether what an operation makes of the parts gives what it makes of the whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from graphpipe.capture.classes import MEAN, SUM, WHOLE, Kind, SampleClass
from graphpipe.capture.training_graph import TrainingGraph

NUM_SAMPLES = 6
SPLIT = 2
# The samples of the parts: 0-1 and 2-5.
PARTS = ((0, SPLIT), (SPLIT, NUM_SAMPLES))


def rows_of_parts(axis: int, full: Tensor, parts: Sequence[Tensor]) -> SampleClass:
    """Return the first way to see an axis as ``outer * samples * inner`` that gives the parts, or `WHOLE`."""
    rows, rest = divmod(full.shape[axis], NUM_SAMPLES)
    if rest or [p.shape[axis] for p in parts] != [rows * (stop - start) for start, stop in PARTS]:
        return WHOLE
    for outer in range(1, rows + 1):
        if rows % outer:
            continue
        found = SampleClass(Kind.PER_SAMPLE, axis, outer, rows // outer)
        if all(is_equal(found.part(full, *span, NUM_SAMPLES), p) for span, p in zip(PARTS, parts, strict=True)):
            return found
    return WHOLE


def mean_or_sum(full: Tensor, parts: Sequence[Tensor]) -> SampleClass:
    """Return whether a tensor is the mean or the sum of those of the parts, or `WHOLE`."""
    weights = [(stop - start) / NUM_SAMPLES for start, stop in PARTS]
    if is_equal(parts[0] * weights[0] + parts[1] * weights[1], full):
        return MEAN
    return SUM if is_equal(parts[0] + parts[1], full) else WHOLE


def rows_by_shape(graph: TrainingGraph, fake: Any) -> SampleClass | None:
    """Return the rows of a tensor with one axis of a multiple of the batch size; None if there is no such axis."""
    if not isinstance(fake, Tensor):
        return None
    axes = [axis for axis, size in enumerate(fake.shape) if graph.depends_on_batch(size)]
    if len(axes) != 1:
        return None
    one, two = (graph.size_at(fake.shape[axes[0]], count) for count in (1, 2))
    return SampleClass(Kind.PER_SAMPLE, axes[0], 1, one) if two == 2 * one else None


def is_unchanged(full: Tensor, parts: Sequence[Tensor]) -> bool:
    """Return whether every part gives the same as the whole."""
    return all(is_equal(part, full) for part in parts)


def is_equal(a: Tensor, b: Tensor) -> bool:
    """Return whether two results are the same but for the order of additions."""
    if a.shape != b.shape:
        return False
    if not a.is_floating_point() or torch.equal(a, b):
        return torch.equal(a, b)
    # Both sides are computed from the same numbers in float64, so only the order of additions may differ.
    finite = b[torch.isfinite(b)]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    return torch.allclose(a, b, rtol=1e-7, atol=1e-10 * min(scale, 1e6) + 1e-300, equal_nan=True)
