"""Which storages the backward pass keeps alive, and whose results they are."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor


class SavedBytes:
    """The bytes that each operator's own results take until the backward pass, over one pass through a model.

    A result that several operators save counts once, for the operator that made it. Parameters, buffers and the model's
    inputs count for none.
    """

    def __init__(self) -> None:
        self._fresh = itertools.count()
        # A storage's address may be used again after it is freed, so each storage gets a number of its own.
        self._number_of_value: dict[str, tuple[str, int]] = {}
        self._bytes: defaultdict[str, dict[int, int]] = defaultdict(dict)

    @contextmanager
    def recording(
        self, operator: str, received: Mapping[str, Tensor], free: Iterable[Tensor]
    ) -> Iterator[dict[str, Tensor]]:
        """Record what autograd saves in the block.

        Args:
            operator: What runs in the block.
            received: The values that it reads.
            free: Tensors that count for no operator.

        Yields:
            A mapping for the block to put the values into that `operator` makes.
        """
        known = {
            _address(t): self._number_of_value[name] for name, t in received.items() if name in self._number_of_value
        }
        ignored = {_address(t) for t in free}
        alive: dict[int, Tensor] = {}

        def keep(tensor: Tensor) -> Tensor:
            alive.setdefault(_address(tensor), tensor.detach())
            return tensor

        made: dict[str, Tensor] = {}
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            yield made
        for name, tensor in made.items():
            self._number_of_value[name] = known.setdefault(_address(tensor), (operator, next(self._fresh)))
        for address, tensor in alive.items():
            if address not in ignored:
                owner, number = known.setdefault(address, (operator, next(self._fresh)))
                self._bytes[owner][number] = tensor.untyped_storage().nbytes()

    def of(self, operator: str) -> int:
        """Return the bytes of the operator's own results that backward needs."""
        return sum(self._bytes[operator].values())


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
