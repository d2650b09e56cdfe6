"""How messages and reductions travel between the processes of a job."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from enum import IntEnum
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from graphpipe.program import Message


class Channel(IntEnum):
    """What a message carries: the tensor itself, or the virtual time at which it arrives."""

    TENSOR = 0
    TIME = 1


class Transport(Protocol):
    """Moves messages between devices. One call a message and channel; every wait is for one message."""

    def post_receive(self, message: Message, buffer: Tensor, channel: Channel = Channel.TENSOR) -> None:
        """Let a message come into a contiguous buffer of its exact size."""
        ...

    def await_receive(self, message: Message, channel: Channel = Channel.TENSOR) -> None:
        """Return once the message is in its buffer."""
        ...

    def send(self, message: Message, tensor: Tensor, channel: Channel = Channel.TENSOR) -> None:
        """Let a contiguous tensor go; it must not change before `await_send` has returned."""
        ...

    def await_send(self, message: Message, channel: Channel = Channel.TENSOR) -> None:
        """Return once the tensor may change."""
        ...

    def all_reduce(self, devices: Sequence[int], tensor: Tensor) -> None:
        """Sum a tensor over devices, in place. Every one of them calls this in the same order."""
        ...


class GlooTransport:
    """Messages over torch.distributed with gloo, which matches them by tag, in any order.

    Activations, and each group of devices that sum gradients, have a process group of their own: in a shared one, four
    bytes wait behind megabytes. Every `Work` is kept until it was waited for, once: gloo loses the message of a
    dropped one and a second wait blocks.

    Args:
        reductions: The groups of devices that will call `all_reduce`, the same on every rank.
        timeout: After this long a wait raises.
    """

    def __init__(self, reductions: Sequence[tuple[int, ...]], timeout: datetime.timedelta) -> None:
        everyone = list(range(dist.get_world_size()))
        self._messages = dist.new_group(everyone, timeout=timeout, backend="gloo")
        self._groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        for devices in sorted({tuple(group) for group in reductions} | {tuple(everyone)}):
            self._groups[devices] = dist.new_group(list(devices), timeout=timeout, backend="gloo")
        self._receiving: dict[int, dist.Work | None] = {}
        self._sending: dict[int, tuple[dist.Work | None, Tensor]] = {}

    def post_receive(self, message: Message, buffer: Tensor, channel: Channel = Channel.TENSOR) -> None:
        """Let a message come into a contiguous buffer of its exact size."""
        tag = _tag(message, channel)
        self._receiving[tag] = dist.irecv(buffer, src=message.source_device, group=self._messages, tag=tag)

    def await_receive(self, message: Message, channel: Channel = Channel.TENSOR) -> None:
        """Return once the message is in its buffer."""
        work = self._receiving.pop(_tag(message, channel))
        if work is not None:
            work.wait()

    def send(self, message: Message, tensor: Tensor, channel: Channel = Channel.TENSOR) -> None:
        """Let a contiguous tensor go."""
        tag = _tag(message, channel)
        work = dist.isend(tensor, dst=message.target_device, group=self._messages, tag=tag)
        self._sending[tag] = (work, tensor)

    def await_send(self, message: Message, channel: Channel = Channel.TENSOR) -> None:
        """Return once the tensor may change."""
        work, _ = self._sending.pop(_tag(message, channel))
        if work is not None:
            work.wait()

    def all_reduce(self, devices: Sequence[int], tensor: Tensor) -> None:
        """Sum a tensor over devices, in place."""
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=self._groups[tuple(devices)])


def _tag(message: Message, channel: Channel) -> int:
    return 2 * message.tag + int(channel)
