"""The time that an executor writes into its trace: the wall's, or the simulator's."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from graphpipe.program import Message, Reduction
from graphpipe.runtime.transport import Channel, Transport
from graphpipe.schedule import Task, TaskCosts
from graphpipe.simulator import OutgoingLinks


class Event(Protocol):
    """A point in the work of a GPU's stream, as `torch.cuda.Event` is one."""

    def record(self) -> object:
        """Put the point after all work that the current stream was given."""
        ...

    def synchronize(self) -> object:
        """Wait until the stream has passed the point."""
        ...

    def elapsed_time(self, end_event: Any, /) -> float:
        """Return the milliseconds from this point to a later one."""
        ...


Mark = float | Event


class Clock(Protocol):
    """Is told what an executor does and says when it happened."""

    def start(self) -> None:
        """Begin a mini-batch."""
        ...

    def mark(self) -> Mark:
        """Return what stands for this moment. It costs next to nothing."""
        ...

    def seconds_at(self, mark: Mark) -> float:
        """Return the time of a moment of the mini-batch that began last."""
        ...

    def computed(self, task: Task, num_samples: int) -> None:
        """A task has been run."""
        ...

    def posted(self, message: Message) -> None:
        """A receive has been posted."""
        ...

    def sent(self, message: Message) -> None:
        """A message has been sent."""
        ...

    def received(self, message: Message) -> None:
        """A message has been received."""
        ...

    def send_awaited(self, message: Message) -> None:
        """A send has been awaited."""
        ...

    def reduction_started(self, reduction: Reduction) -> None:
        """A reduction has been begun."""
        ...

    def reduced(self, reduction: Reduction) -> None:
        """A reduction has been awaited."""
        ...


class _NothingToHear:
    """What a clock that runs by itself does when it is told something."""

    def computed(self, task: Task, num_samples: int) -> None:
        """Do nothing."""

    def posted(self, message: Message) -> None:
        """Do nothing."""

    def sent(self, message: Message) -> None:
        """Do nothing."""

    def received(self, message: Message) -> None:
        """Do nothing."""

    def send_awaited(self, message: Message) -> None:
        """Do nothing."""

    def reduction_started(self, reduction: Reduction) -> None:
        """Do nothing."""

    def reduced(self, reduction: Reduction) -> None:
        """Do nothing."""


class WallClock(_NothingToHear):
    """Seconds of the machine's monotonic clock, which the processes of one machine share."""

    def start(self) -> None:
        """Do nothing: the time never stops."""

    def mark(self) -> float:
        """Return the time."""
        return time.perf_counter()

    def seconds_at(self, mark: Mark) -> float:
        """Return the mark."""
        assert isinstance(mark, float)
        return mark


class StreamClock(_NothingToHear):
    """When a GPU's stream comes to something, rather than when the host gives it the work.

    A moment is an event on the stream. Only the start of a mini-batch is a moment of both: the host waits until the
    stream is empty, so that the clocks of several GPUs of a machine can be put beside each other.

    Args:
        make_event: Makes an event that keeps the time; by default one of CUDA.
    """

    def __init__(self, make_event: Callable[[], Event] | None = None) -> None:
        self._make_event = make_event or _cuda_event
        self._start: Event

    def start(self) -> None:
        """Wait for the stream and remember what the host's clock says."""
        self._start = self._make_event()
        self._start.record()
        self._start.synchronize()
        self._start_s = time.perf_counter()

    def mark(self) -> Event:
        """Return an event at this point of the stream."""
        event = self._make_event()
        event.record()
        return event

    def seconds_at(self, mark: Mark) -> float:
        """Wait for the event and return its time."""
        assert not isinstance(mark, float)
        mark.synchronize()
        return self._start_s + self._start.elapsed_time(mark) / 1000


def _cuda_event() -> Event:
    event: Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    return event


def clock_for(device: torch.device) -> Clock:
    """Return the clock that tells the time of work on a torch device."""
    return StreamClock() if device.type == "cuda" else WallClock()


class VirtualClock:
    """The simulator's rules, followed while the executor really runs: each message carries the time of its arrival.

    The makespan under this clock equals the simulator's exactly when the executor waits for what the simulator waits
    for, which is what the tests of both want to know.

    Args:
        device: Whose clock this is.
        costs: What tasks, messages and reductions take.
        transport: Carries the times, on a channel of their own.
    """

    def __init__(self, device: int, costs: TaskCosts, transport: Transport) -> None:
        self._device = device
        self._costs = costs
        self._transport = transport
        self.start()

    def start(self) -> None:
        """Begin a mini-batch at zero."""
        self._now_s = 0.0
        self._link = OutgoingLinks(self._device, self._costs)
        self._stamps: dict[int, torch.Tensor] = {}
        self._begun_s: dict[Reduction, float] = {}
        self._reductions_free_s = 0.0

    def mark(self) -> float:
        """Return the virtual time."""
        return self._now_s

    def seconds_at(self, mark: Mark) -> float:
        """Return the mark."""
        assert isinstance(mark, float)
        return mark

    def computed(self, task: Task, num_samples: int) -> None:
        """Let the task's time pass."""
        self._now_s += self._costs.compute_s(task.stage, task.phase, num_samples)

    def posted(self, message: Message) -> None:
        """Let the time of the message's arrival come."""
        self._stamps[message.tag] = torch.zeros(1, dtype=torch.float64)
        self._transport.post_receive(message, self._stamps[message.tag], Channel.TIME)

    def sent(self, message: Message) -> None:
        """Tell the receiver when the message arrives."""
        arrival_s = self._link.arrival_s(self._now_s, message.target_device, message.num_bytes)
        stamp = torch.tensor([arrival_s], dtype=torch.float64)
        if message.is_local:
            self._stamps[message.tag] = stamp
        else:
            self._transport.send(message, stamp, Channel.TIME)

    def received(self, message: Message) -> None:
        """Wait, virtually, for the message's arrival."""
        if not message.is_local:
            self._transport.await_receive(message, Channel.TIME)
        self._now_s = max(self._now_s, float(self._stamps.pop(message.tag)))

    def send_awaited(self, message: Message) -> None:
        """Let go of the message's time."""
        self._transport.await_send(message, Channel.TIME)

    def reduction_started(self, reduction: Reduction) -> None:
        """Remember when."""
        self._begun_s[reduction] = self._now_s

    def reduced(self, reduction: Reduction) -> None:
        """Find out when the reduction ended: it starts at the latest time of its devices, after those before it."""
        devices: Sequence[int] = reduction.devices
        times = torch.zeros(len(devices), dtype=torch.float64)
        times[devices.index(self._device)] = max(self._begun_s.pop(reduction), self._reductions_free_s)
        self._transport.all_reduce(devices, times)
        self._reductions_free_s = float(times.max()) + self._costs.all_reduce_s(reduction.num_bytes, devices)
        self._now_s = max(self._now_s, self._reductions_free_s)
