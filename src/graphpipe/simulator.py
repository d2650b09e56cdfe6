"""Interprets a program with costs instead of tensors.

The model: a device does one thing at a time, in its program's order. A message leaves when it is sent and the device's
outgoing link is free; the link carries one message at a time, ``bytes / bandwidth`` seconds each, and what it carries
arrives after the latency. Receives are free, and a message that is here is here for good. A reduction goes on beside
the device's work: it starts when all of its devices have begun it and ended those that they began before, and its span
is the time for which a device does nothing but wait for it. The optimizer's own time is left out.

These are the rules that the runtime follows under a virtual clock (`graphpipe.runtime.clock`), where its makespan is
the same number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from graphpipe.program import (
    AwaitReceive,
    AwaitReduction,
    Compute,
    Program,
    Reduction,
    Send,
    StartReduction,
)
from graphpipe.schedule import Phase, TaskCosts
from graphpipe.trace import Span, SpanKind, Trace, TraceSource


class OutgoingLinks:
    """The outgoing link of one device: when does a message arrive that is sent now?"""

    def __init__(self, device: int, costs: TaskCosts) -> None:
        self.device = device
        self.costs = costs
        self.free_s = 0.0

    def arrival_s(self, now_s: float, target: int, num_bytes: int) -> float:
        """Occupy the link for a message that is sent at `now_s` and return when it arrives."""
        if target == self.device:
            return now_s
        link = self.costs.link(self.device, target)
        if link is None:
            return now_s
        start = max(now_s, self.free_s)
        self.free_s = start + num_bytes / link.bandwidth_bytes_per_s
        return self.free_s + link.latency_s


class _Reductions:
    """The reductions of all devices: when does each start and end?"""

    def __init__(self, costs: TaskCosts, num_devices: int) -> None:
        self.costs = costs
        self.begun_s: dict[tuple[Reduction, int], float] = {}
        self.start_s: dict[Reduction, float] = {}
        self.stop_s: dict[Reduction, float] = {}
        self.waiting: dict[Reduction, list[int]] = {}
        self._queues: list[deque[Reduction]] = [deque() for _ in range(num_devices)]
        self._free_s = [0.0] * num_devices

    def begin(self, reduction: Reduction, device: int, now_s: float) -> Iterable[int]:
        """Let a device begin a reduction; return the devices that may go on."""
        self.begun_s[reduction, device] = now_s
        self._queues[device].append(reduction)
        freed: list[int] = []
        candidates = [reduction]
        while candidates:
            found = candidates.pop()
            if any(not self._queues[d] or self._queues[d][0] != found for d in found.devices):
                continue
            start = max(max(self.begun_s[found, d], self._free_s[d]) for d in found.devices)
            stop = start + self.costs.all_reduce_s(found.num_bytes, found.devices)
            self.start_s[found], self.stop_s[found] = start, stop
            for d in found.devices:
                self._queues[d].popleft()
                self._free_s[d] = stop
                candidates.extend(list(self._queues[d])[:1])
            freed += self.waiting.pop(found, [])
        return freed


def simulate(program: Program, costs: TaskCosts) -> Trace:
    """Return what happens when on every device, for one mini-batch.

    Args:
        program: The instructions; free of deadlock, as `graphpipe.program.lower` returns them.
        costs: What tasks, messages and reductions take.
    """
    count = len(program.instructions)
    now = [0.0] * count
    position = [0] * count
    links = [OutgoingLinks(device, costs) for device in range(count)]
    arrival: dict[int, float] = {}
    waiting: dict[int, int] = {}
    reductions = _Reductions(costs, count)
    spans: list[Span] = []
    ready = list(range(count))
    while ready:
        device = ready.pop()
        instructions = program.instructions[device]
        while position[device] < len(instructions):
            match instructions[position[device]]:
                case AwaitReceive(message):
                    if message.tag not in arrival:
                        waiting[message.tag] = device
                        break
                    now[device] = max(now[device], arrival[message.tag])
                case Compute(task, _, samples):
                    start = now[device]
                    now[device] += costs.compute_s(task.stage, task.phase, len(samples))
                    kind = SpanKind.FORWARD if task.phase is Phase.FORWARD else SpanKind.BACKWARD
                    spans.append(Span(device, kind, start, now[device], task.stage, task.micro_batch))
                case Send(message):
                    arrival[message.tag] = links[device].arrival_s(
                        now[device], message.target_device, message.num_bytes
                    )
                    if message.tag in waiting:
                        ready.append(waiting.pop(message.tag))
                case StartReduction(reduction):
                    ready.extend(reductions.begin(reduction, device, now[device]))
                case AwaitReduction(reduction):
                    if reduction not in reductions.stop_s:
                        reductions.waiting.setdefault(reduction, []).append(device)
                        break
                    stop = max(now[device], reductions.stop_s[reduction])
                    start = min(stop, max(now[device], reductions.start_s[reduction]))
                    spans.append(Span(device, SpanKind.REDUCE, start, stop))
                    now[device] = stop
                case _:
                    pass
            position[device] += 1
    assert all(at == len(program.instructions[d]) for d, at in enumerate(position)), "the program was not checked"
    return Trace(TraceSource.SIMULATED, count, tuple(sorted(spans, key=lambda s: (s.device, s.start_s, s.stop_s))))
