"""Transports between the processes of a job, over torch.distributed."""

from __future__ import annotations

import datetime
import queue
import threading
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from graphpipe.errors import GraphPipeError
from graphpipe.program import Matching, Message
from graphpipe.runtime.transport import Channel, Pending, Transport
from graphpipe.schedule import Phase


class TransportKind(StrEnum):
    """Which transport moves the messages of a job."""

    GLOO = "gloo"
    """For CPUs; matches by tag."""
    ORDERED = "ordered"
    """For CPUs, with the rules of NCCL, each of them enforced: slow, to try on CPUs what GPUs will do."""
    NCCL = "nccl"
    """For GPUs; matches by order."""

    @property
    def matching(self) -> Matching:
        """How it finds the receive of a send."""
        return Matching.TAG if self is TransportKind.GLOO else Matching.ORDER

    @classmethod
    def for_device(cls, device: torch.device) -> TransportKind:
        """Return the one that suits a torch device."""
        return cls.NCCL if device.type == "cuda" else cls.GLOO


class ProcessTransport(Transport, Protocol):
    """A transport between processes."""

    def broadcast(self, devices: Sequence[int], source: int, tensor: Tensor) -> None:
        """Give a tensor of `source` to all `devices`, in place. Every one of them calls this in the same order."""
        ...


def make_transport(
    kind: TransportKind, reductions: Sequence[tuple[int, ...]], timeout: datetime.timedelta
) -> ProcessTransport:
    """Return a transport. All ranks must call this with the same arguments.

    Args:
        kind: Which one.
        reductions: The groups of devices that will sum gradients.
        timeout: After this long a wait raises.
    """
    match kind:
        case TransportKind.GLOO:
            return GlooTransport(reductions, timeout)
        case TransportKind.ORDERED:
            return OrderedTransport(reductions, timeout)
        case TransportKind.NCCL:
            return NcclTransport(reductions, timeout)


class _ProcessTransport:
    """Process groups and the works on their way, for any backend.

    Messages, and each group of devices that sum gradients, have a process group of their own: in a shared one, four
    bytes wait behind megabytes. Every `Work` is kept until it was waited for, once: gloo loses the message of a
    dropped one and a second wait blocks.
    """

    backend = "gloo"

    def __init__(self, reductions: Sequence[tuple[int, ...]], timeout: datetime.timedelta) -> None:
        everyone = tuple(range(dist.get_world_size()))
        self._timeout = timeout
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for devices in sorted({tuple(group) for group in reductions} | {everyone}):
            self._groups[devices] = self._new_group(devices)
        self._receiving: dict[tuple[int, Channel], dist.Work | None] = {}
        self._sending: dict[tuple[int, Channel], tuple[dist.Work | None, Tensor]] = {}

    def _new_group(self, devices: Sequence[int] | None = None) -> dist.ProcessGroup:
        """Return a group of these devices, by default of all. All ranks must call this."""
        members = range(dist.get_world_size()) if devices is None else devices
        group: dist.ProcessGroup = dist.new_group(list(members), timeout=self._timeout, backend=self.backend)
        return group

    def await_receive(self, message: Message, channel: Channel = Channel.TENSOR) -> None:
        """Return once the message is in its buffer."""
        work = self._receiving.pop((message.tag, channel))
        if work is not None:
            work.wait()

    def await_send(self, message: Message, channel: Channel = Channel.TENSOR) -> None:
        """Return once the tensor may change."""
        work, _ = self._sending.pop((message.tag, channel))
        if work is not None:
            work.wait()

    def start_all_reduce(self, devices: Sequence[int], tensor: Tensor) -> Pending:
        """Begin to sum a tensor over devices, in place."""
        return _sum(tensor, self._groups[tuple(devices)])

    def all_reduce(self, devices: Sequence[int], tensor: Tensor) -> None:
        """Sum a tensor over devices, in place."""
        self.start_all_reduce(devices, tensor).wait()

    def broadcast(self, devices: Sequence[int], source: int, tensor: Tensor) -> None:
        """Give a tensor of one device to all of a group that sums gradients, in place."""
        dist.broadcast(tensor, src=source, group=self._groups[tuple(devices)])


class GlooTransport(_ProcessTransport):
    """Messages over gloo, which matches them by tag, in any order, and moves them once the receive is posted.

    Forward and backward passes, and micro-batches in turn, have process groups of their own, which have connections of
    their own. A post holds the lock of a connection, and gloo's thread, where data come over that same one, tries the
    lock again and again instead of waiting: on a machine with few cores until the time slice ends, which is longer than
    many a task. What comes while a message is posted is mostly of the other pass or of the micro-batch beside.

    The groups are called without the wrappers of torch.distributed, which take as long as the rest of a small message.
    """

    def __init__(self, reductions: Sequence[tuple[int, ...]], timeout: datetime.timedelta) -> None:
        super().__init__(reductions, timeout)
        self._lanes = {(phase, parity): self._new_group() for phase in Phase for parity in range(2)}

    def _lane(self, message: Message) -> dist.ProcessGroup:
        return self._lanes[message.phase, message.target.micro_batch % 2]

    def post_receive(self, message: Message, buffer: Tensor, channel: Channel = Channel.TENSOR) -> None:
        """Let a message come into a contiguous buffer of its exact size."""
        work = self._lane(message).recv([_real(buffer)], message.source_device, 2 * message.tag + channel)
        self._receiving[message.tag, channel] = work

    def send(self, message: Message, tensor: Tensor, channel: Channel = Channel.TENSOR) -> None:
        """Let a contiguous tensor go."""
        work = self._lane(message).send([_real(tensor)], message.target_device, 2 * message.tag + channel)
        self._sending[message.tag, channel] = (work, tensor)


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


class NcclTransport(_ProcessTransport):
    """Messages over NCCL, which has no tags: both ends post them in the program's one order over all devices.

    A wait lets the current stream wait, not the host. A send waits for what the current stream was given before it, and
    so does a receive, whose buffer may have been another tensor's a moment ago. Tensors on the host, such as the number
    of samples that ranks compare, are summed over gloo.
    """

    backend = "nccl"

    def __init__(self, reductions: Sequence[tuple[int, ...]], timeout: datetime.timedelta) -> None:
        super().__init__(reductions, timeout)
        self._messages = self._new_group()
        everyone = tuple(range(dist.get_world_size()))
        self._host = dist.new_group(list(everyone), timeout=timeout, backend="gloo")

    def post_receive(self, message: Message, buffer: Tensor, channel: Channel = Channel.TENSOR) -> None:
        """Let a message come into a contiguous buffer of its exact size."""
        work = dist.irecv(buffer, src=message.source_device, group=self._messages)
        self._receiving[message.tag, channel] = work

    def send(self, message: Message, tensor: Tensor, channel: Channel = Channel.TENSOR) -> None:
        """Let a contiguous tensor go."""
        work = dist.isend(tensor, dst=message.target_device, group=self._messages)
        self._sending[message.tag, channel] = (work, tensor)

    def start_all_reduce(self, devices: Sequence[int], tensor: Tensor) -> Pending:
        """Begin to sum a tensor over devices, in place."""
        if tensor.device.type == "cpu" and len(devices) == dist.get_world_size():
            return _sum(tensor, self._host)
        return super().start_all_reduce(devices, tensor)


class OrderedTransport(_ProcessTransport):
    """NCCL's rules over gloo: no tags, and whatever this rank has begun waits for all that it has begun before.

    A thread does one thing after the other, as a stream of NCCL does, reductions included, and a send lasts until its
    receive is posted. An order that differs between two ranks hangs here as it does on GPUs, or is told: ahead of
    every message goes its number, which the receiver compares. gloo itself would take a message of another size in
    silence or crash.
    """

    def __init__(self, reductions: Sequence[tuple[int, ...]], timeout: datetime.timedelta) -> None:
        super().__init__(reductions, timeout)
        self._messages = self._new_group()
        self._stream = _Stream(timeout)
        self._begun: dict[tuple[int, Channel], _Begun] = {}

    def post_receive(self, message: Message, buffer: Tensor, channel: Channel = Channel.TENSOR) -> None:
        """Let a message come into a contiguous buffer of its exact size."""

        def receive() -> None:
            header = torch.empty(2, dtype=torch.int64)
            _finish(dist.irecv(header, src=message.source_device, group=self._messages))
            expected = [2 * message.tag + channel, buffer.nbytes]
            if header.tolist() != expected:
                raise GraphPipeError(
                    f"out of order: message number {header[0]} of {header[1]} bytes came where number {expected[0]} of "
                    f"{expected[1]} bytes is due: {message}"
                )
            _finish(dist.irecv(buffer, src=message.source_device, group=self._messages))

        self._begun[message.tag, channel] = self._stream.begin(receive)

    def await_receive(self, message: Message, channel: Channel = Channel.TENSOR) -> None:
        """Return once the message is in its buffer."""
        self._begun.pop((message.tag, channel)).wait()

    def send(self, message: Message, tensor: Tensor, channel: Channel = Channel.TENSOR) -> None:
        """Let a contiguous tensor go."""
        header = torch.tensor([2 * message.tag + channel, tensor.nbytes])

        def send() -> None:
            for part in (header, tensor):
                _finish(dist.isend(part, dst=message.target_device, group=self._messages))

        self._begun[message.tag, channel] = self._stream.begin(send)

    def await_send(self, message: Message, channel: Channel = Channel.TENSOR) -> None:
        """Return once the tensor may change."""
        self._begun.pop((message.tag, channel)).wait()

    def start_all_reduce(self, devices: Sequence[int], tensor: Tensor) -> Pending:
        """Begin to sum a tensor over devices, in place."""
        group = self._groups[tuple(devices)]
        return self._stream.begin(lambda: _finish(_sum(tensor, group)))

    def broadcast(self, devices: Sequence[int], source: int, tensor: Tensor) -> None:
        """Give a tensor of one device to all of a group that sums gradients, in place."""
        group = self._groups[tuple(devices)]
        self._stream.begin(lambda: _finish(dist.broadcast(tensor, src=source, group=group, async_op=True))).wait()


def _sum(tensor: Tensor, group: dist.ProcessGroup) -> dist.Work:
    work: dist.Work | None = dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=group, async_op=True)
    assert work is not None, "this rank is not in the group"
    return work


def _finish(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()


class _Stream:
    """Runs what it is given, one after the other, on a thread of its own."""

    def __init__(self, timeout: datetime.timedelta) -> None:
        self._timeout_s = timeout.total_seconds()
        self._queue: queue.SimpleQueue[_Begun] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="graphpipe-stream", daemon=True)
        self._thread.start()

    def begin(self, action: Callable[[], None]) -> _Begun:
        begun = _Begun(action, self._timeout_s)
        self._queue.put(begun)
        return begun

    def _run(self) -> None:
        failure: BaseException | None = None
        while True:
            begun = self._queue.get()
            if failure is None:
                try:
                    begun.action()
                except BaseException as error:
                    failure = error
            begun.failure = failure
            begun.over.set()
            del begun  # with the tensors that it holds


class _Begun:
    """Something that a stream was given."""

    def __init__(self, action: Callable[[], None], timeout_s: float) -> None:
        self.action = action
        self.over = threading.Event()
        self.failure: BaseException | None = None
        self._timeout_s = timeout_s

    def wait(self) -> None:
        """Return once it is over.

        Raises:
            ConnectionError: It failed, or one before it, or the time is up.
        """
        if not self.over.wait(self._timeout_s):
            raise ConnectionError(f"nothing arrived for {self._timeout_s:g} s")
        if self.failure is not None:
            raise ConnectionError(f"a transfer failed: {self.failure}") from self.failure
