"""NCCL's rules between threads of one process: no tags, and whatever a device has begun waits for all before it.

A transfer happens once it is the first thing that both of its devices have begun and not ended, a sum once it is for
all of them. It is an error if the first things of two devices are different transfers between the two.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from graphpipe.errors import GraphPipeError
from graphpipe.program import Message
from graphpipe.runtime.transport import Channel, Pending


@dataclass(eq=False)
class _Begun:
    """A transfer, or a sum, that one of its devices or all have begun.

    Attributes:
        devices: For a transfer the source and the target.
        message: None for a sum.
        tensors: What each device gave.
        is_over: Set once it has happened.
    """

    devices: tuple[int, ...]
    message: Message | None
    tensors: dict[int, Tensor] = field(default_factory=dict)
    is_over: threading.Event = field(default_factory=threading.Event)

    def happen(self) -> None:
        """Move or sum the tensors."""
        first = self.tensors[self.devices[0]]
        if self.message is not None:
            deliver(self.message, first, self.tensors[self.devices[1]])
            return
        total = first.clone()
        for device in self.devices[1:]:
            total += self.tensors[device]
        for device in self.devices:
            self.tensors[device].copy_(total)


def deliver(message: Message, tensor: Tensor, buffer: Tensor) -> None:
    """Copy what was sent to where it is expected.

    Raises:
        GraphPipeError: It has another shape or type.
    """
    if (tensor.shape, tensor.dtype) != (buffer.shape, buffer.dtype):
        raise GraphPipeError(
            f"{message}: sent {tuple(tensor.shape)} {tensor.dtype}, expected {tuple(buffer.shape)} {buffer.dtype}"
        )
    buffer.copy_(tensor)


class OrderedHub:
    """What the threads share: for each device, what it has begun, in order.

    Args:
        num_devices: All devices.
        timeout_s: After this long a wait raises, so that a wrong order does not hang.
    """

    def __init__(self, num_devices: int, timeout_s: float = 30.0) -> None:
        self.timeout_s = timeout_s
        self._lock = threading.Lock()
        self._queues: list[deque[_Begun]] = [deque() for _ in range(num_devices)]
        self._messages: dict[tuple[int, Channel], _Begun] = {}
        self._sums: dict[tuple[tuple[int, ...], int], _Begun] = {}
        self._turns: defaultdict[tuple[tuple[int, ...], int], int] = defaultdict(int)
        self._failure: Exception | None = None

    def begin_message(self, device: int, message: Message, channel: Channel, tensor: Tensor) -> _Begun:
        """Let one end of a message begin."""
        with self._lock:
            devices = (message.source_device, message.target_device)
            begun = self._messages.setdefault((message.tag, channel), _Begun(devices, message))
            return self._begin(device, begun, tensor)

    def begin_sum(self, device: int, devices: tuple[int, ...], tensor: Tensor) -> _Begun:
        """Let one device begin its next sum with some others."""
        with self._lock:
            turn = self._turns[devices, device]
            self._turns[devices, device] += 1
            return self._begin(device, self._sums.setdefault((devices, turn), _Begun(devices, None)), tensor)

    def _begin(self, device: int, begun: _Begun, tensor: Tensor) -> _Begun:
        begun.tensors[device] = tensor
        self._queues[device].append(begun)
        try:
            self._go_on(begun)
        except GraphPipeError as error:
            self._failure = error
            raise
        return begun

    def _go_on(self, begun: _Begun) -> None:
        """Let happen what is first on all of its devices, and what is first then."""
        candidates = [begun]
        while candidates:
            found = candidates.pop()
            queues = [self._queues[device] for device in found.devices]
            self._check_order([queue[0] for queue in queues if queue])
            if found.is_over.is_set() or any(not queue or queue[0] is not found for queue in queues):
                continue
            found.happen()
            found.is_over.set()
            for queue in queues:
                queue.popleft()
                candidates.extend(list(queue)[:1])

    def _check_order(self, first: Sequence[_Begun]) -> None:
        transfers = {id(begun): begun for begun in first if begun.message is not None}
        if len(transfers) > 1 and len({frozenset(begun.devices) for begun in transfers.values()}) == 1:
            what = " and ".join(str(begun.message) for begun in transfers.values())
            raise GraphPipeError(f"out of order: two devices begin with different messages to each other: {what}")

    def fail(self) -> None:
        """Let every wait raise, since one thread has failed."""
        self._failure = self._failure or GraphPipeError("another device has failed")

    def wait(self, begun: _Begun) -> None:
        """Return once something is over.

        Raises:
            GraphPipeError: A thread has failed, or the time is up.
        """
        waited_s = 0.0
        while not begun.is_over.wait(0.05):
            waited_s += 0.05
            if self._failure is not None:
                raise GraphPipeError(str(self._failure)) from self._failure
            if waited_s > self.timeout_s:
                raise GraphPipeError(f"nothing arrived for {self.timeout_s} s")


class OrderedInProcessTransport:
    """The transport of one device, run by one thread.

    Args:
        hub: Shared by all devices.
        device: Whose transport this is.
    """

    def __init__(self, hub: OrderedHub, device: int) -> None:
        self._hub = hub
        self._device = device
        self._begun: dict[tuple[int, Channel], _Begun] = {}

    def post_receive(self, message: Message, buffer: Tensor, channel: Channel = Channel.TENSOR) -> None:
        """Let a message come into a contiguous buffer of its exact size."""
        self._begin(message, buffer, channel)

    def send(self, message: Message, tensor: Tensor, channel: Channel = Channel.TENSOR) -> None:
        """Let a contiguous tensor go."""
        self._begin(message, tensor.detach(), channel)

    def _begin(self, message: Message, tensor: Tensor, channel: Channel) -> None:
        if not tensor.is_contiguous():
            raise ValueError(f"the tensor of {message} is not contiguous")
        self._begun[message.tag, channel] = self._hub.begin_message(self._device, message, channel, tensor)

    def await_receive(self, message: Message, channel: Channel = Channel.TENSOR) -> None:
        """Return once the message is in its buffer."""
        self._hub.wait(self._begun.pop((message.tag, channel)))

    def await_send(self, message: Message, channel: Channel = Channel.TENSOR) -> None:
        """Return once the tensor may change."""
        self._hub.wait(self._begun.pop((message.tag, channel)))

    def start_all_reduce(self, devices: Sequence[int], tensor: Tensor) -> Pending:
        """Begin to sum a tensor over devices, in place, in the order of the devices."""
        return _PendingSum(self._hub, self._hub.begin_sum(self._device, tuple(devices), tensor))

    def all_reduce(self, devices: Sequence[int], tensor: Tensor) -> None:
        """Sum a tensor over devices, in place, in the order of the devices."""
        self.start_all_reduce(devices, tensor).wait()


@dataclass(frozen=True, slots=True)
class _PendingSum:
    hub: OrderedHub
    begun: _Begun

    def wait(self) -> None:
        self.hub.wait(self.begun)
