"""How messages and reductions travel between devices: what the executor asks of a transport."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Protocol

from torch import Tensor

from graphpipe.program import Message


class Channel(IntEnum):
    """What a message carries: the tensor itself, or the virtual time at which it arrives."""

    TENSOR = 0
    TIME = 1


class Pending(Protocol):
    """A reduction on its way."""

    def wait(self) -> object:
        """Return once the sum is in the tensor. Called once."""
        ...


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

    def start_all_reduce(self, devices: Sequence[int], tensor: Tensor) -> Pending:
        """Begin to sum a tensor over devices, in place. Every one of them does so in the same order."""
        ...

    def all_reduce(self, devices: Sequence[int], tensor: Tensor) -> None:
        """Sum a tensor over devices, in place. Every one of them calls this in the same order."""
        ...
