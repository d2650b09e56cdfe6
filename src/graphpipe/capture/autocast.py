"""The autocast under which a model is captured, which is the one that its stages run under.

Export records tensor operations and not the casts that autocast adds to them, so a graph means something else under
another autocast: tensors between stages have other types.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

_DEVICE_TYPES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class Autocast:
    """Autocast as `torch.autocast` takes it.

    Attributes:
        dtypes: The lower type by the type of device; empty where nothing is cast.
    """

    dtypes: tuple[tuple[str, torch.dtype], ...] = ()

    @classmethod
    def ambient(cls) -> Autocast:
        """Return what is in force here."""
        return cls(tuple((d, torch.get_autocast_dtype(d)) for d in _DEVICE_TYPES if torch.is_autocast_enabled(d)))

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Run the block under it, whatever is in force around.

        Casts of parameters are not kept from one block to the next: kept ones would be those of before an update, or
        have no gradient where the first forward pass of a recomputed stage made them.
        """
        ambient = Autocast.ambient()
        wanted = dict(self.dtypes)
        with contextlib.ExitStack() as stack:
            for device_type in _DEVICE_TYPES:
                if device_type in wanted:
                    stack.enter_context(torch.autocast(device_type, wanted[device_type], cache_enabled=False))
                elif device_type in dict(ambient.dtypes):
                    stack.enter_context(torch.autocast(device_type, enabled=False))
            yield

    def __str__(self) -> str:
        casts = [f"{str(dtype).removeprefix('torch.')} on {device}" for device, dtype in self.dtypes]
        return f"autocast to {' and '.join(casts)}" if casts else "no autocast"
