"""Sums over devices of gradients that hold a few rows of an embedding table.

Devices tell each other how many rows they have while the backward passes go on, and exchange rows once these are done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from graphpipe.runtime.transport import Pending, Transport

# What a device tells of its gradient, or two more than its rows.
_NONE, _DENSE, _ROWS = 0, 1, 2


@dataclass(frozen=True, slots=True)
class SparseSum:
    """A gradient on its way to its sum.

    Attributes:
        transport: Sums over devices.
        devices: Those that hold the parameter.
        place: Of this device among them.
        parameter: Whose gradient.
        gradient: That of this device.
        counts: ``[devices]`` what each tells of its gradient, once `pending` was waited for.
        pending: The exchange of `counts`.
    """

    transport: Transport
    devices: tuple[int, ...]
    place: int
    parameter: nn.Parameter
    gradient: Tensor | None
    counts: Tensor
    pending: Pending

    @classmethod
    def start(cls, transport: Transport, devices: Sequence[int], device: int, parameter: nn.Parameter) -> SparseSum:
        """Begin to sum a gradient; the parameter loses it until the sum is there.

        Args:
            transport: Sums over devices.
            devices: Those that hold the parameter; each of them calls this.
            device: This one.
            parameter: Whose gradient.
        """
        place = tuple(devices).index(device)
        gradient, parameter.grad = parameter.grad, None
        counts = torch.zeros(len(devices), dtype=torch.int64, device=parameter.device)
        if gradient is not None and gradient.is_sparse:
            gradient = gradient.coalesce()
            counts[place] = _ROWS + gradient.values().shape[0]
        else:
            counts[place] = _NONE if gradient is None else _DENSE
        pending = transport.start_all_reduce(devices, counts)
        return cls(transport, tuple(devices), place, parameter, gradient, counts, pending)

    def finish(self) -> None:
        """Give the parameter the sum; it is dense if that of a device is, and None if no device has one.

        This waits for all of the devices to call it, in the order in which all of them have begun their sums. They do
        so when none has a message left, so nobody waits for one of theirs meanwhile.
        """
        self.pending.wait()
        counts: list[int] = self.counts.tolist()
        if _DENSE in counts:
            self.parameter.grad = self._dense_sum()
        elif any(counts):
            self.parameter.grad = self._sparse_sum([max(count - _ROWS, 0) for count in counts])

    def _dense_sum(self) -> Tensor:
        own = torch.zeros_like(self.parameter) if self.gradient is None else self.gradient
        total = own.to_dense() if own.is_sparse else own.contiguous()
        self.transport.all_reduce(self.devices, total)
        return total.detach()

    def _sparse_sum(self, counts: Sequence[int]) -> Tensor:
        shape, device = self.parameter.shape, self.parameter.device
        rows = torch.zeros(sum(counts), dtype=torch.int64, device=device)
        values = torch.zeros((sum(counts), *shape[1:]), dtype=self.parameter.dtype, device=device)
        if self.gradient is not None:
            own = slice(sum(counts[: self.place]), sum(counts[: self.place + 1]))
            rows[own], values[own] = self.gradient.indices()[0], self.gradient.values()
        if len(rows):
            self.transport.all_reduce(self.devices, rows)
            self.transport.all_reduce(self.devices, values)
        # The same rows in the same order on every device, so that copies of the parameter stay equal to the bit.
        return torch.sparse_coo_tensor(rows[None], values, shape, check_invariants=False).coalesce()
