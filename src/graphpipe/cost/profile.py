"""What each operator costs, at each local micro-batch size that was measured or computed."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphpipe.errors import FieldError, GraphPipeError
from graphpipe.fields import Field


class ProfileSource(StrEnum):
    """Where the numbers of a profile come from."""

    MEASURED = "measured"
    ROOFLINE = "roofline"
    GIVEN = "given"


@dataclass(frozen=True, slots=True)
class OperatorCosts:
    """The costs of all operators at one local micro-batch size, each array in the graph's order.

    Attributes:
        forward_s: ``[operators]`` seconds of the forward pass.
        backward_s: ``[operators]`` seconds of the backward pass; 0 where nothing needs a gradient.
        saved_bytes: ``[operators]`` bytes of the operator's own results that backward needs.
    """

    forward_s: NDArray[np.float64]
    backward_s: NDArray[np.float64]
    saved_bytes: NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Profile:
    """Costs by local micro-batch size and operator. Between the sizes they are interpolated, beyond them extended.

    Attributes:
        operators: Names, in the graph's order.
        sizes: The samples that one replica takes at a time, ascending: where the costs are known.
        forward_s: ``[sizes, operators]`` seconds.
        backward_s: ``[sizes, operators]`` seconds.
        saved_bytes: ``[sizes, operators]`` bytes.
        source: Where the numbers come from.
        device: What they hold for.

    Raises:
        GraphPipeError: A shape is wrong, a number negative or not finite, or the sizes are not ascending.
    """

    operators: tuple[str, ...]
    sizes: tuple[int, ...]
    forward_s: NDArray[np.float64]
    backward_s: NDArray[np.float64]
    saved_bytes: NDArray[np.float64]
    source: ProfileSource = ProfileSource.GIVEN
    device: str = ""

    def __post_init__(self) -> None:
        if not self.sizes or list(self.sizes) != sorted(set(self.sizes)) or self.sizes[0] < 1:
            raise GraphPipeError(f"the sizes of a profile must ascend from at least 1, got {self.sizes}")
        shape = (len(self.sizes), len(self.operators))
        for name in ("forward_s", "backward_s", "saved_bytes"):
            array = getattr(self, name)
            if array.shape != shape:
                raise GraphPipeError(f"{name} of a profile has shape {array.shape} for {shape} sizes and operators")
            if not np.isfinite(array).all() or (array < 0).any():
                raise GraphPipeError(f"{name} of a profile holds a negative number or one that is not finite")

    @cached_property
    def _cache(self) -> dict[int, OperatorCosts]:
        return {}

    def is_interpolated(self, num_samples: int) -> bool:
        """Return whether the costs for `num_samples` are not known but derived from other sizes."""
        return num_samples not in self.sizes

    def at(self, num_samples: int) -> OperatorCosts:
        """Return the costs when one replica takes `num_samples` at a time.

        Between two known sizes the costs are linear; below the smallest and above the largest the nearest segment is
        continued, never below the proportional share (below) or the largest known cost (above). With a single known
        size the costs are proportional to the samples.

        Raises:
            ValueError: `num_samples` is less than 1.
        """
        if num_samples < 1:
            raise ValueError(f"a replica takes at least one sample at a time, got {num_samples}")
        if num_samples not in self._cache:
            self._cache[num_samples] = OperatorCosts(
                *(
                    self._interpolate(table, num_samples)
                    for table in (self.forward_s, self.backward_s, self.saved_bytes)
                )
            )
        return self._cache[num_samples]

    def _interpolate(self, table: NDArray[np.float64], num_samples: int) -> NDArray[np.float64]:
        sizes = self.sizes
        if num_samples in sizes:
            return np.asarray(table[sizes.index(num_samples)], dtype=np.float64)
        if len(sizes) == 1:
            return np.asarray(table[0] * (num_samples / sizes[0]), dtype=np.float64)
        right = int(np.clip(np.searchsorted(sizes, num_samples), 1, len(sizes) - 1))
        low, high = sizes[right - 1], sizes[right]
        slope = (table[right] - table[right - 1]) / (high - low)
        found = table[right - 1] + slope * (num_samples - low)
        if num_samples < sizes[0]:
            found = np.maximum(found, table[0] * (num_samples / sizes[0]))
        if num_samples > sizes[-1]:
            found = np.maximum(found, table[-1])
        return np.asarray(found, dtype=np.float64)

    def to_json(self) -> dict[str, Any]:
        """Return the profile as plain data."""
        return {
            "operators": list(self.operators),
            "sizes": list(self.sizes),
            "forward_s": self.forward_s.tolist(),
            "backward_s": self.backward_s.tolist(),
            "saved_bytes": self.saved_bytes.tolist(),
            "source": self.source.value,
            "device": self.device,
        }

    @classmethod
    def from_json(cls, data: object) -> Profile:
        """Return the profile that `to_json` wrote.

        Raises:
            GraphPipeError: A field is missing or not valid.
        """
        profile = Field(data, "<the profile>")
        return cls(
            operators=profile["operators"].texts(),
            sizes=tuple(size.integer(1) for size in profile["sizes"].elements()),
            forward_s=_table(profile["forward_s"]),
            backward_s=_table(profile["backward_s"]),
            saved_bytes=_table(profile["saved_bytes"]),
            source=profile["source"].choice(ProfileSource),
            device=profile["device"].text(),
        )


def _table(field: Field) -> NDArray[np.float64]:
    rows = [[entry.number() for entry in row.elements()] for row in field.elements()]
    if len({len(row) for row in rows}) > 1:
        raise FieldError(f"{field.path} has rows of different lengths")
    return np.asarray(rows, dtype=np.float64).reshape(len(rows), -1 if rows and rows[0] else 0)
