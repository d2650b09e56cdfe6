"""A transport between threads of one process: for tests, and to try a strategy without starting processes."""

from __future__ import annotations

import copy
import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from graphpipe.capture.draws import Draws
from graphpipe.errors import GraphPipeError
from graphpipe.program import Matching, Message, Program
from graphpipe.runtime.clock import VirtualClock, WallClock
from graphpipe.runtime.executor import Executor
from graphpipe.runtime.in_process_ordered import OrderedHub, OrderedInProcessTransport, deliver
from graphpipe.runtime.stages import StageSource
from graphpipe.runtime.transport import Channel, Pending, Transport
from graphpipe.schedule import TaskCosts
from graphpipe.trace import Trace, TraceSource


class Hub:
    """What the threads share: a mailbox a message, and a meeting point a reduction.

    Args:
        timeout_s: After this long a wait raises, so that a bug does not hang.
    """

    def __init__(self, timeout_s: float = 30.0) -> None:
        self.timeout_s = timeout_s
        self._lock = threading.Lock()
        self._mailboxes: defaultdict[tuple[int, Channel], queue.Queue[Tensor]] = defaultdict(queue.Queue)
        self._sums: dict[tuple[tuple[int, ...], int], _Sum] = {}
        self._rounds: defaultdict[tuple[tuple[int, ...], int], int] = defaultdict(int)
        self._failed = threading.Event()

    def mailbox(self, message: Message, channel: Channel) -> queue.Queue[Tensor]:
        """Return the queue of a message and channel."""
        with self._lock:
            return self._mailboxes[message.tag, channel]

    def join_sum(self, devices: tuple[int, ...], device: int) -> _Sum:
        """Return the meeting point of the next reduction of a group of devices."""
        with self._lock:
            turn = self._rounds[devices, device]
            self._rounds[devices, device] += 1
            return self._sums.setdefault((devices, turn), _Sum(len(devices)))

    def fail(self) -> None:
        """Let every wait raise, since one thread has failed."""
        self._failed.set()

    def wait(self, arrived: Callable[[float], bool]) -> None:
        """Call `arrived` with short timeouts until it returns True.

        Raises:
            GraphPipeError: Another thread has failed, or the time is up.
        """
        waited = 0.0
        while not arrived(0.05):
            waited += 0.05
            if self._failed.is_set():
                raise GraphPipeError("another device has failed")
            if waited > self.timeout_s:
                raise GraphPipeError(f"nothing arrived for {self.timeout_s} s")


class _Sum:
    def __init__(self, count: int) -> None:
        self.count = count
        self.parts: dict[int, Tensor] = {}
        self.lock = threading.Lock()
        self.complete = threading.Event()


class InProcessTransport:
    """The transport of one device, run by one thread.

    Args:
        hub: Shared by all devices.
        device: Whose transport this is.
    """

    def __init__(self, hub: Hub, device: int) -> None:
        self._hub = hub
        self._device = device
        self._buffers: dict[tuple[int, Channel], Tensor] = {}

    def post_receive(self, message: Message, buffer: Tensor, channel: Channel = Channel.TENSOR) -> None:
        """Let a message come into a contiguous buffer of its exact size."""
        if not buffer.is_contiguous():
            raise ValueError(f"the buffer of {message} is not contiguous")
        self._buffers[message.tag, channel] = buffer

    def await_receive(self, message: Message, channel: Channel = Channel.TENSOR) -> None:
        """Return once the message is in its buffer."""
        mailbox = self._hub.mailbox(message, channel)
        found: list[Tensor] = []

        def arrived(timeout_s: float) -> bool:
            try:
                found.append(mailbox.get(timeout=timeout_s))
            except queue.Empty:
                return False
            return True

        self._hub.wait(arrived)
        deliver(message, found[0], self._buffers.pop((message.tag, channel)))

    def send(self, message: Message, tensor: Tensor, channel: Channel = Channel.TENSOR) -> None:
        """Let a contiguous tensor go."""
        if not tensor.is_contiguous():
            raise ValueError(f"{message} is not contiguous")
        self._hub.mailbox(message, channel).put(tensor.detach().clone())

    def await_send(self, message: Message, channel: Channel = Channel.TENSOR) -> None:
        """Return at once: `send` has copied the tensor."""

    def start_all_reduce(self, devices: Sequence[int], tensor: Tensor) -> Pending:
        """Begin to sum a tensor over devices, in place, in the order of the devices."""
        meeting = self._hub.join_sum(tuple(devices), self._device)
        with meeting.lock:
            meeting.parts[self._device] = tensor.detach().clone()
            if len(meeting.parts) == meeting.count:
                meeting.complete.set()
        return _PendingSum(self._hub, meeting, tensor)

    def all_reduce(self, devices: Sequence[int], tensor: Tensor) -> None:
        """Sum a tensor over devices, in place, in the order of the devices."""
        self.start_all_reduce(devices, tensor).wait()


@dataclass(frozen=True, slots=True)
class _PendingSum:
    hub: Hub
    meeting: _Sum
    tensor: Tensor

    def wait(self) -> None:
        self.hub.wait(self.meeting.complete.wait)
        parts = [self.meeting.parts[device] for device in sorted(self.meeting.parts)]
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        self.tensor.copy_(total)


@dataclass(frozen=True)
class InProcessResult:
    """What one mini-batch gave.

    Attributes:
        loss: Of the whole mini-batch.
        gradients: ``[devices]`` the gradients of each device's parameters by original name, None where there is none.
        trace: What happened when, by the clock that was asked for.
    """

    loss: float
    gradients: tuple[Mapping[str, Tensor | None], ...]
    trace: Trace


def run_in_process(
    source: StageSource,
    program: Program,
    batch: Any,
    costs: TaskCosts | None = None,
    *,
    timeout_s: float = 30.0,
    draws: Draws | None = None,
) -> InProcessResult:
    """Run one mini-batch of a program with a thread for each device, on copies of the model's parameters.

    Messages are matched as the program was written for: by tag, or strictly in order as NCCL does.

    Args:
        source: The captured model.
        program: What each device does.
        batch: The whole mini-batch.
        costs: Run under a virtual clock with these costs; by default under the wall's.
        timeout_s: How long a device waits for a message.
        draws: What random numbers follow from.

    Raises:
        GraphPipeError: A task failed on a device; the first failure is raised.
    """
    inputs = source.flatten_batch(batch)
    source = source.sized(inputs)
    hub = Hub(timeout_s) if program.matching is Matching.TAG else OrderedHub(len(program.instructions), timeout_s)
    executors = [_executor(source, program, hub, device, costs) for device in range(len(program.instructions))]
    for executor in executors:
        executor.draws = draws or executor.draws
    losses: dict[int, Tensor] = {}
    failures: list[BaseException] = []

    def work(device: int) -> None:
        try:
            losses[device] = executors[device].run(program, inputs)
        except BaseException as failure:
            failures.append(failure)
            hub.fail()

    threads = [threading.Thread(target=work, args=(device,), daemon=True) for device in range(len(executors))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    spans = tuple(span for executor in executors for span in executor.spans)
    return InProcessResult(
        loss=sum(float(losses[device]) for device in sorted(losses)),
        gradients=tuple({n: p.grad for n, p in executor.parameters.items()} for executor in executors),
        trace=Trace(TraceSource.MEASURED, len(executors), spans),
    )


def _executor(
    source: StageSource, program: Program, hub: Hub | OrderedHub, device: int, costs: TaskCosts | None
) -> Executor:
    """Return a device's executor with parameters of its own; stages that share one go on sharing its copy."""
    stages = program.stages.stages
    held = {x: source.stage_module(s.operators) for x, s in enumerate(stages) if device in s.devices}
    modules = copy.deepcopy(held)
    transport: Transport = (
        InProcessTransport(hub, device) if isinstance(hub, Hub) else OrderedInProcessTransport(hub, device)
    )
    clock = WallClock() if costs is None else VirtualClock(device, costs, transport)
    executor = Executor(device, source, modules, transport, clock)
    for parameter in executor.parameters.values():
        parameter.grad = None
    return executor
