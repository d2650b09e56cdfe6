"""kFkB over stage graphs: k forward passes, then k backward passes, as early as the limits allow.

With k = 1 this is the synchronous 1F1B schedule. The order is found by playing the pipeline through with the tasks'
durations: whenever a device is free it runs a backward pass if one is ready, else a forward pass if the samples in
flight allow. What comes out is a static order for each device; the durations only decide ties and interleaving, never
correctness.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from graphpipe.errors import DeadlockError
from graphpipe.schedule.costs import TaskCosts, UniformCosts
from graphpipe.schedule.dependencies import dependencies
from graphpipe.schedule.task import DeviceOrder, Phase, Schedule, Task, device_groups, tasks_of
from graphpipe.stage import StageGraph


def in_flight_limits(stages: StageGraph, k: Sequence[int] | int = 1) -> tuple[int, ...]:
    """Return how many samples each stage may hold between their forward and backward passes.

    From the sinks back: a sink holds ``k b``; another stage holds what the stage after it holds plus
    ``max(k b, k' b')``, the larger of its own and the next stage's round, rounded up to whole micro-batches and never
    more than the mini-batch. For equal sizes that is ``k b`` times the stages on the longest path to a sink.

    Args:
        stages: The stage graph.
        k: Passes in a round, for every stage or one each.

    Returns:
        ``[stages]`` samples.

    Raises:
        ValueError: A round has less than one pass.

    Source:
        GraphPipe, section 5; the paper adds the larger round in the same way for unequal micro-batch sizes.
    """
    rounds = _rounds(stages, k)
    limits = [0] * len(stages.stages)
    for x in reversed(range(len(stages.stages))):
        size = stages.stages[x].micro_batch_size
        own = rounds[x] * size
        need = own
        for edge in stages.outgoing[x]:
            y = edge.target
            need = max(need, limits[y] + max(own, rounds[y] * stages.stages[y].micro_batch_size))
        limits[x] = min(stages.mini_batch_size, -(-need // size) * size)
    return tuple(limits)


def _rounds(stages: StageGraph, k: Sequence[int] | int) -> tuple[int, ...]:
    rounds = (k,) * len(stages.stages) if isinstance(k, int) else tuple(k)
    if len(rounds) != len(stages.stages) or min(rounds) < 1:
        raise ValueError(f"k needs at least 1 for each of {len(stages.stages)} stages, got {rounds}")
    return rounds


def kfkb(
    stages: StageGraph,
    costs: TaskCosts | None = None,
    *,
    k: Sequence[int] | int = 1,
    limits: Sequence[int] | None = None,
) -> Schedule:
    """Return the kFkB schedule of a stage graph.

    Args:
        stages: The stage graph.
        costs: Durations of tasks and messages; by default a forward pass takes 1 and a backward pass 2.
        k: Passes in a round, for every stage or one each. It may exceed the number of micro-batches.
        limits: ``[stages]`` samples in flight; by default those of `in_flight_limits`.

    Raises:
        ValueError: A round has less than one pass.
        DeadlockError: The limits let the pipeline stop before its end.
    """
    rounds = _rounds(stages, k)
    if limits is None:
        limits = in_flight_limits(stages, rounds)
    return _Player(stages, costs or UniformCosts(1.0, 2.0), rounds, limits).play()


class _Player:
    """Plays the pipeline through once. Time only moves forward; a group of devices runs one task at a time."""

    def __init__(self, stages: StageGraph, costs: TaskCosts, rounds: Sequence[int], limits: Sequence[int]) -> None:
        self.stages = stages
        self.costs = costs
        self.rounds = rounds
        self.limits = limits
        self.groups = device_groups(stages)
        self.group_of = {x: g for g, (_, held) in enumerate(self.groups) for x in held}
        count = len(stages.stages)
        self.counts = [stages.num_micro_batches(x) for x in range(count)]
        self.next_forward = [0] * count
        self.next_backward = [0] * count
        self.finish_s: dict[Task, float] = {}
        self.orders: list[list[Task]] = [[] for _ in self.groups]
        self.delay_s = {(e.source, e.target): self._edge_delay_s(e.source, e.target) for e in stages.edges}
        # Which groups may have new work once a task of a stage ends.
        self.listeners = [
            sorted(
                {self.group_of[e.target] for e in stages.outgoing[x]}
                | {self.group_of[e.source] for e in stages.incoming[x]}
                | {self.group_of[x]}
            )
            for x in range(count)
        ]
        self.waking_s: list[set[float]] = [set() for _ in self.groups]

    def _edge_delay_s(self, source: int, target: int) -> float:
        a, b = self.stages.stages[source].devices, self.stages.stages[target].devices
        if a == b:
            return 0.0
        link = max(
            (self.costs.link(d, e) for d in (a[0], a[-1]) for e in (b[0], b[-1]) if d != e),
            key=lambda found: found.transfer_s(1e6) if found else 0.0,
            default=None,
        )
        if link is None:
            return 0.0
        samples = min(self.stages.local_size(source), self.stages.local_size(target))
        edge = next(e for e in self.stages.outgoing[source] if e.target == target)
        return link.transfer_s(sum(value.num_bytes(samples) for value in edge.values))

    def play(self) -> Schedule:
        events: list[tuple[float, int]] = []
        free_s = [0.0] * len(self.groups)
        for g in range(len(self.groups)):
            self._wake(events, 0.0, g)
        while events:
            now, g = heapq.heappop(events)
            self.waking_s[g].discard(now)
            if now < free_s[g]:
                continue
            task = self._choose(g, now)
            if task is None:
                continue
            whole = len(self.stages.micro_batch(task.stage, task.micro_batch))
            samples = -(-whole // self.stages.stages[task.stage].num_replicas)  # The largest share.
            finish = now + self.costs.compute_s(task.stage, task.phase, samples)
            free_s[g] = finish
            self.finish_s[task] = finish
            self.orders[g].append(task)
            if task.phase is Phase.FORWARD:
                self.next_forward[task.stage] += 1
            else:
                self.next_backward[task.stage] += 1
            self._wake(events, finish, g)
            for listener in self.listeners[task.stage]:
                self._wake(events, finish, listener)
            for edge in (*self.stages.outgoing[task.stage], *self.stages.incoming[task.stage]):
                other = edge.target if edge.source == task.stage else edge.source
                self._wake(events, finish + self.delay_s[edge.source, edge.target], self.group_of[other])
        self._check_complete()
        return Schedule(
            tuple(DeviceOrder(devices, tuple(self.orders[g])) for g, (devices, _) in enumerate(self.groups))
        )

    def _wake(self, events: list[tuple[float, int]], when_s: float, g: int) -> None:
        if when_s not in self.waking_s[g]:
            self.waking_s[g].add(when_s)
            heapq.heappush(events, (when_s, g))

    def _choose(self, g: int, now: float) -> Task | None:
        """Return what group `g` runs next: backward before forward, later stages before earlier ones."""
        held = self.groups[g][1]
        for x in reversed(held):
            task = Task(x, Phase.BACKWARD, self.next_backward[x])
            if self._round_is_forwarded(x) and self._ready(task, now):
                return task
        for x in reversed(held):
            task = Task(x, Phase.FORWARD, self.next_forward[x])
            if self.next_forward[x] < self.counts[x] and self._fits(x, now) and self._ready(task, now):
                return task
        return None

    def _round_is_forwarded(self, x: int) -> bool:
        m = self.next_backward[x]
        if not self.stages.has_backward[x] or m >= self.counts[x]:
            return False
        end_of_round = min(self.counts[x], (m // self.rounds[x] + 1) * self.rounds[x])
        return self.next_forward[x] >= end_of_round

    def _fits(self, x: int, now: float) -> bool:
        stop = self.stages.micro_batch(x, self.next_forward[x]).stop
        return stop - self._released(x, now) <= self.limits[x]

    def _released(self, x: int, now: float) -> int:
        """Return the samples that stage `x` holds no more: they came back or, without a backward pass, went on."""
        if self.stages.has_backward[x]:
            return self._finished(x, Phase.BACKWARD, now)
        after = [self._finished(edge.target, Phase.FORWARD, now) for edge in self.stages.outgoing[x]]
        return min(after, default=self._finished(x, Phase.FORWARD, now))

    def _finished(self, x: int, phase: Phase, now: float) -> int:
        m = self.next_forward[x] if phase is Phase.FORWARD else self.next_backward[x]
        while m and self.finish_s[Task(x, phase, m - 1)] > now:
            m -= 1
        return self.stages.micro_batch(x, m - 1).stop if m else 0

    def _ready(self, task: Task, now: float) -> bool:
        for needed in dependencies(task, self.stages):
            finish = self.finish_s.get(needed)
            if finish is None:
                return False
            pair = (needed.stage, task.stage) if task.phase is Phase.FORWARD else (task.stage, needed.stage)
            if finish + self.delay_s.get(pair, 0.0) > now:
                return False
        return True

    def _check_complete(self) -> None:
        for x in range(len(self.stages.stages)):
            done = self.next_forward[x] + self.next_backward[x]
            if done < len(tasks_of(self.stages, x)):
                raise DeadlockError(
                    f"stage {x} stops after {self.next_forward[x]} of {self.counts[x]} forward passes: its limit of "
                    f"{self.limits[x]} samples in flight is too low; the least that is always enough is "
                    f"{in_flight_limits(self.stages, self.rounds)[x]}"
                )


def gpipe(stages: StageGraph, costs: TaskCosts | None = None) -> Schedule:
    """Return the GPipe schedule: all forward passes, then all backward passes."""
    return kfkb(
        stages,
        costs,
        k=[stages.num_micro_batches(x) for x in range(len(stages.stages))],
        limits=[stages.mini_batch_size] * len(stages.stages),
    )
