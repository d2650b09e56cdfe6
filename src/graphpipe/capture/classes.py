"""How a tensor depends on the samples of a batch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor


class Kind(StrEnum):
    """The ways in which a tensor can depend on the batch."""

    INDEPENDENT = "independent"
    """Not at all: the same for every batch."""
    PER_SAMPLE = "per sample"
    """Along one axis, with rows that belong to one sample each."""
    COUNT = "count"
    """Only on the number of samples, such as ``arange(batch_size)``: any part of a batch makes its own."""
    MEAN = "mean"
    """The tensor of a batch is the sample-weighted mean of those of its parts."""
    SUM = "sum"
    """The tensor of a batch is the sum of those of its parts."""
    MIXED = "mixed"
    """Rows of all samples in another order, such as that of their experts: any part of a batch makes its own."""
    WHOLE = "whole"
    """In no way that parts of the batch could give."""


@dataclass(frozen=True, slots=True)
class SampleClass:
    """How a tensor depends on the samples of a batch.

    Attributes:
        kind: The way.
        axis: PER_SAMPLE only: the axis that holds samples; it has ``outer * num_samples * inner`` entries.
        outer: PER_SAMPLE only: what varies slower than the sample, such as the sequence in ``nn.MultiheadAttention``.
        inner: PER_SAMPLE only: what varies faster than the sample, such as the heads.
    """

    kind: Kind
    axis: int = 0
    outer: int = 1
    inner: int = 1

    @property
    def is_cuttable(self) -> bool:
        """Whether a stage boundary may run through the tensor: consecutive samples are consecutive rows."""
        return self.kind is Kind.INDEPENDENT or (self.kind is Kind.PER_SAMPLE and self.outer == 1)

    def part(self, tensor: Tensor, start: int, stop: int, num_samples: int) -> Tensor:
        """Return the rows of the samples ``start <= i < stop`` of a PER_SAMPLE tensor, a copy."""
        axis = self.axis
        split = tensor.reshape(*tensor.shape[:axis], self.outer, num_samples, self.inner, *tensor.shape[axis + 1 :])
        rows = split.narrow(axis + 1, start, stop - start)
        shape = (*tensor.shape[:axis], self.outer * (stop - start) * self.inner, *tensor.shape[axis + 1 :])
        return rows.reshape(shape).clone(memory_format=torch.contiguous_format)


INDEPENDENT = SampleClass(Kind.INDEPENDENT)
COUNT = SampleClass(Kind.COUNT)
MEAN = SampleClass(Kind.MEAN)
SUM = SampleClass(Kind.SUM)
MIXED = SampleClass(Kind.MIXED)
WHOLE = SampleClass(Kind.WHOLE)
