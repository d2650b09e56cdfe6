"""What is known of the tensors that enter a model or pass between its operators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

import sympy
import torch


class LossReduction(StrEnum):
    """How the loss of a mini-batch follows from the losses of its micro-batches."""

    MEAN = "mean"
    """The mean of the micro-batches' losses, each weighted by its number of samples."""
    SUM = "sum"
    """Their sum."""
    WHOLE = "whole"
    """It does not follow: the loss needs the whole mini-batch as one micro-batch."""


@dataclass(frozen=True, slots=True)
class SampleLayout:
    """Where the samples of a tensor are.

    Attributes:
        axis: The axis that holds the samples.
        rows_per_sample: The consecutive entries of that axis that belong to one sample. The axis has
            ``rows_per_sample * num_samples`` entries, all of sample 0 first.
    """

    axis: int
    rows_per_sample: int


@dataclass(frozen=True, slots=True)
class ValueSpec:
    """The type of a model input or of a value between operators.

    Attributes:
        name: Unique among the inputs and values of a model.
        dtype: Of its elements.
        shape: For one sample. The entry of the sample axis is `SampleLayout.rows_per_sample`.
        layout: Where the samples are; None for a tensor that does not depend on the batch.
        carries_gradient: Whether a gradient comes back for it.
        sizes: The shape in terms of the sizes that may differ from batch to batch, by their names; empty if none
            does. Then `shape` and `layout` are those of the example batch.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    layout: SampleLayout | None
    carries_gradient: bool
    sizes: tuple[sympy.Basic, ...] = ()

    def at(self, sizes: Mapping[str, int]) -> ValueSpec:
        """Return the type for a batch in which the sizes that may differ have these values."""
        if not self.sizes:
            return self
        known = {sympy.Symbol(name): sympy.Integer(size) for name, size in sizes.items()}
        shape = tuple(int(size.xreplace(known)) for size in self.sizes)
        layout = self.layout and SampleLayout(self.layout.axis, shape[self.layout.axis])
        return replace(self, shape=shape, layout=layout)

    def shape_for(self, num_samples: int) -> tuple[int, ...]:
        """Return the shape of the tensor when it holds `num_samples` samples."""
        if self.layout is None:
            return self.shape
        axis = self.layout.axis
        return (*self.shape[:axis], self.shape[axis] * num_samples, *self.shape[axis + 1 :])

    @property
    def num_bytes(self) -> int:
        """The size for one sample, or the whole size where the tensor does not depend on the batch."""
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize
