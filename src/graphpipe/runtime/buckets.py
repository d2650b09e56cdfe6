"""Sums of gradients over the devices that hold a parameter, in flat buffers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from graphpipe.runtime.transport import Pending, Transport

# So large that latency does not count, and so small that the first bucket is under way while the next is filled.
BUCKET_BYTES = 32 * 2**20


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients on their way to their sum.

    Attributes:
        parameters: Whose gradients.
        flat: The gradients one after the other, then for each parameter on how many devices it has one.
        pending: Is waited for before `flat` is read.
    """

    parameters: tuple[nn.Parameter, ...]
    flat: Tensor
    pending: Pending

    def finish(self) -> None:
        """Wait for the sum and give each parameter its part, as a view. A gradient that no device has stays None."""
        self.pending.wait()
        sizes = [parameter.numel() for parameter in self.parameters]
        *summed, counts = torch.split(self.flat, [*sizes, len(sizes)])
        for parameter, total, count in zip(self.parameters, summed, counts.tolist(), strict=True):
            parameter.grad = total.view_as(parameter) if count else None


def start_buckets(
    transport: Transport,
    devices: Sequence[int],
    parameters: Sequence[nn.Parameter],
    bucket_bytes: int = BUCKET_BYTES,
) -> list[Bucket]:
    """Begin to sum the gradients of some parameters.

    The parameters lose their gradients until the sum is there, so that no gradient is held twice.

    Args:
        transport: Sums over devices.
        devices: Those that hold the parameters; each of them calls this with the same parameters in the same order.
        parameters: Whose gradients.
        bucket_bytes: A bucket is filled up to this, and has at least one parameter.
    """
    buckets = []
    for group in grouped(parameters, bucket_bytes):
        dtype, device = group[0].dtype, group[0].device
        gradients = [parameter.grad for parameter in group]
        parts = [
            torch.zeros(parameter.numel(), dtype=dtype, device=device) if grad is None else grad.to_dense().reshape(-1)
            for parameter, grad in zip(group, gradients, strict=True)
        ]
        present = torch.tensor([grad is not None for grad in gradients], dtype=dtype, device=device)
        flat = torch.cat([*parts, present])
        for parameter in group:
            parameter.grad = None
        del gradients, parts
        buckets.append(Bucket(tuple(group), flat, transport.start_all_reduce(devices, flat)))
    return buckets


def grouped(parameters: Sequence[nn.Parameter], bucket_bytes: int) -> Iterator[list[nn.Parameter]]:
    """Yield the parameters of one dtype at a time, in the order given, in groups of up to some bytes."""
    for dtype in sorted({parameter.dtype for parameter in parameters}, key=str):
        group: list[nn.Parameter] = []
        filled = 0
        for parameter in parameters:
            if parameter.dtype != dtype:
                continue
            if group and filled + parameter.nbytes > bucket_bytes:
                yield group
                group, filled = [], 0
            group.append(parameter)
            filled += parameter.nbytes
        if group:
            yield group
