from __future__ import annotations

import torch
from torch import nn

from graphpipe.runtime.buckets import Bucket, start_buckets
from graphpipe.runtime.in_process import Hub, InProcessTransport

Gradients = list[torch.Tensor | None]


def on_two_devices(gradients: tuple[Gradients, Gradients], **options: int) -> list[list[nn.Parameter]]:
    """Sum the gradients of two devices and return each one's parameters."""
    hub = Hub()
    shapes = [((2, 3), torch.float32), ((4,), torch.float64), ((), torch.float32), ((5,), torch.float32)]
    held = [[nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape, dtype in shapes] for _ in range(2)]
    waiting: list[list[Bucket]] = []
    for device in range(2):
        for parameter, gradient in zip(held[device], gradients[device], strict=True):
            parameter.grad = gradient
        waiting.append(start_buckets(InProcessTransport(hub, device), (0, 1), held[device], **options))
        # While the sum is on its way the gradients are in the buffers alone.
        assert all(parameter.grad is None for parameter in held[device])
    for buckets in waiting:
        for bucket in buckets:
            bucket.finish()
    return held


def test_gradients_are_summed_and_one_that_no_device_has_stays_none() -> None:
    matrix, vector = torch.arange(6.0).reshape(2, 3), torch.arange(4, dtype=torch.float64)
    # The transposed gradient lies in another order in memory.
    first: Gradients = [matrix, vector, None, None]
    second: Gradients = [matrix.T.contiguous().T, None, None, torch.ones(5)]
    for bucket_bytes in (1, 30, 2**20):
        copies = [[None if g is None else g.clone() for g in gradients] for gradients in (first, second)]
        for parameters in on_two_devices((copies[0], copies[1]), bucket_bytes=bucket_bytes):
            torch.testing.assert_close(parameters[0].grad, 2 * matrix)
            torch.testing.assert_close(parameters[1].grad, vector)
            assert parameters[2].grad is None
            torch.testing.assert_close(parameters[3].grad, torch.ones(5))


def test_buckets_are_filled_up_to_their_size_and_hold_one_dtype() -> None:
    parameters = [nn.Parameter(torch.zeros(n, dtype=d)) for n, d in ((4, torch.float32), (4, torch.float64))] + [
        nn.Parameter(torch.zeros(n)) for n in (4, 9, 1)
    ]
    transport = InProcessTransport(Hub(), 0)
    found = start_buckets(transport, (0,), parameters, bucket_bytes=32)
    assert [[p.numel() for p in bucket.parameters] for bucket in found] == [[4, 4], [9], [1], [4]]
