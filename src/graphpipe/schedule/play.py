"""Plays a pipeline through with the durations of its tasks: who runs what when, under given limits.

This is the scheduler's own quick simulation. It knows groups of devices instead of single replicas, and of every pass
its longest replica; `graphpipe.simulator` plays the program that comes out of it with every message. Where replicas
share micro-batches evenly, both find the same times.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from graphpipe.cluster import Link
from graphpipe.schedule.costs import TaskCosts
from graphpipe.schedule.dependencies import last_needed
from graphpipe.schedule.task import Phase, device_groups
from graphpipe.stage import StageGraph


@dataclass(frozen=True, slots=True)
class TimedEdge:
    """What passes from one stage to another, in seconds of the sender's outgoing link.

    Attributes:
        source: The stage before.
        target: The stage after.
        sent_s: Seconds that what one forward pass of `source` sends takes on the link of each of its replicas.
        returned_s: Seconds that the gradient from one backward pass of `target` takes on the link of its replicas.
        latency_s: Seconds until the first byte arrives.
        returns: Whether a gradient comes back.
    """

    source: int
    target: int
    sent_s: float
    returned_s: float
    latency_s: float
    returns: bool


@dataclass(frozen=True)
class TimedStages:
    """A stage graph reduced to what its schedule depends on.

    Attributes:
        mini_batch_size: Samples a step.
        sizes: ``[stages]`` samples of a micro-batch.
        groups: The stages of each group of devices, ascending.
        has_backward: ``[stages]`` whether a gradient flows through.
        pass_s: By phase, ``[stages]`` seconds of a pass over a whole micro-batch.
        last_pass_s: By phase, ``[stages]`` seconds of the pass over the last micro-batch, which may be smaller.
        edges: By ascending source, then target.
        reduce_s: ``[stages]`` seconds to sum the gradients over the replicas, after the last backward pass.
    """

    mini_batch_size: int
    sizes: Sequence[int]
    groups: Sequence[Sequence[int]]
    has_backward: Sequence[bool]
    pass_s: tuple[Sequence[float], Sequence[float]]
    last_pass_s: tuple[Sequence[float], Sequence[float]]
    edges: Sequence[TimedEdge]
    reduce_s: Sequence[float]

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """``[stages]`` micro-batches, the smaller last one included."""
        return tuple(-(-self.mini_batch_size // size) for size in self.sizes)

    @cached_property
    def outgoing(self) -> tuple[tuple[int, ...], ...]:
        """``[stages]`` the positions of the edges out of each stage."""
        found: list[list[int]] = [[] for _ in self.sizes]
        for e, edge in enumerate(self.edges):
            found[edge.source].append(e)
        return tuple(map(tuple, found))

    @cached_property
    def incoming(self) -> tuple[tuple[int, ...], ...]:
        """``[stages]`` the positions of the edges into each stage."""
        found: list[list[int]] = [[] for _ in self.sizes]
        for e, edge in enumerate(self.edges):
            found[edge.target].append(e)
        return tuple(map(tuple, found))

    @cached_property
    def group_of(self) -> tuple[int, ...]:
        """``[stages]`` the group of devices of each stage."""
        found = {x: g for g, held in enumerate(self.groups) for x in held}
        return tuple(found[x] for x in range(len(self.sizes)))


def exchange_s(
    a: Sequence[int], b: Sequence[int], link: Callable[[int, int], Link | None]
) -> tuple[float, float, float]:
    """Return what messages between two groups of devices take.

    Each replica sends the samples that it has to the replicas that take them.

    Args:
        a: Devices, none of them in `b`.
        b: Devices.
        link: Returns the link between two devices, or None where messages are free.

    Returns:
        Seconds until the first byte arrives, on the slowest link; seconds on the busiest link of a sender for each byte
        that all replicas of `a` together send to `b`; and the same for `b` and `a`.
    """
    out, back = [0.0] * len(a), [0.0] * len(b)
    latency_s = 0.0
    i = j = start = 0
    # Shares of the samples are counted in parts of len(a) * len(b).
    while i < len(a):
        stop = min((i + 1) * len(b), (j + 1) * len(a))
        used = link(a[i], b[j])
        if used is not None:
            seconds = (stop - start) / (len(a) * len(b) * used.bandwidth_bytes_per_s)
            out[i] += seconds
            back[j] += seconds
            latency_s = max(latency_s, used.latency_s)
        i, j, start = i + (stop == (i + 1) * len(b)), j + (stop == (j + 1) * len(a)), stop
    return latency_s, max(out), max(back)


def timed_stages(stages: StageGraph, costs: TaskCosts) -> TimedStages:
    """Return a stage graph reduced to what its schedule depends on. Reductions are left out."""
    indices = range(len(stages.stages))
    groups = device_groups(stages)

    def pass_s(phase: Phase, micro_batch: int) -> list[float]:
        found = []
        for x in indices:
            m = micro_batch % stages.num_micro_batches(x)
            share = -(-len(stages.micro_batch(x, m)) // stages.stages[x].num_replicas)  # The largest.
            found.append(costs.compute_s(x, phase, share))
        return found

    edges = []
    for edge in stages.edges:
        a, b = stages.stages[edge.source].devices, stages.stages[edge.target].devices
        sent_s = returned_s = latency_s = 0.0
        if a != b:
            latency_s, out_share, back_share = exchange_s(a, b, costs.link)
            source, target = stages.stages[edge.source], stages.stages[edge.target]
            sent_s = out_share * sum(value.num_bytes(source.micro_batch_size) for value in edge.values)
            returned_s = back_share * sum(value.num_bytes(target.micro_batch_size) for value in edge.returned)
        edges.append(TimedEdge(edge.source, edge.target, sent_s, returned_s, latency_s, bool(edge.returned)))
    return TimedStages(
        mini_batch_size=stages.mini_batch_size,
        sizes=[stage.micro_batch_size for stage in stages.stages],
        groups=[held for _, held in groups],
        has_backward=stages.has_backward,
        pass_s=(pass_s(Phase.FORWARD, 0), pass_s(Phase.BACKWARD, 0)),
        last_pass_s=(pass_s(Phase.FORWARD, -1), pass_s(Phase.BACKWARD, -1)),
        edges=edges,
        reduce_s=[0.0 for _ in indices],
    )


@dataclass(frozen=True)
class Play:
    """What happened.

    Attributes:
        orders: ``[groups]`` the tasks in the order in which they ran: (stage, whether backward, micro-batch).
        forwards: ``[stages]`` forward passes that ran; fewer than there are where the pipeline stopped.
        backwards: ``[stages]`` backward passes that ran.
        makespan_s: When the last group ended, its reduction included.
    """

    orders: tuple[list[tuple[int, bool, int]], ...]
    forwards: tuple[int, ...]
    backwards: tuple[int, ...]
    makespan_s: float

    def is_complete(self, timed: TimedStages) -> bool:
        """Return whether every pass of these stages ran."""
        return all(
            f == count and b == count * has_backward
            for f, b, count, has_backward in zip(
                self.forwards, self.backwards, timed.counts, timed.has_backward, strict=True
            )
        )


def play(timed: TimedStages, rounds: Sequence[int], limits: Sequence[int]) -> Play:
    """Play a pipeline through once: each group of devices runs one task at a time, as early as it may.

    A group that is free runs a backward pass if one is ready, else a forward pass if the samples in flight allow it,
    of its last stage first.

    Args:
        timed: The stages.
        rounds: ``[stages]`` passes in a round.
        limits: ``[stages]`` samples that may be between their forward and backward passes.
    """
    return _Player(timed, rounds, limits).play()


class _Stage:
    """A stage in play: what it does, and how far it is.

    Attributes:
        index: Its position among the stages.
        pass_s: By phase, seconds of a pass.
        last_pass_s: By phase, seconds of the last pass.
        count: Its micro-batches.
        has_backward: Whether a gradient flows through.
        round: Passes in a round.
        window: How many whole micro-batches may be between their passes.
        last_waits: How many backward passes must have ended before the last forward pass.
        done: By phase, the passes that were started.
        needs: By phase, what it waits for: when passes of other stages arrive, and which of them is the last that each
            pass needs.
        sends: By phase, what it sends: where arrivals are noted, seconds on the link, seconds until the first byte
            arrives, and the group that takes it.
        backward_end_s: When its last backward pass ended.
        forward_end_s: When each forward pass ended: stages without a backward pass hold samples until others have used
            them.
        held_by: The groups of the stages without a backward pass before it: they may hold their samples until a forward
            pass of this one ends.
    """

    __slots__ = (
        "backward_end_s",
        "count",
        "done",
        "forward_end_s",
        "has_backward",
        "held_by",
        "index",
        "last_pass_s",
        "last_waits",
        "needs",
        "pass_s",
        "round",
        "sends",
        "window",
    )

    def __init__(self, timed: TimedStages, x: int, num_rounds: int, limit: int) -> None:
        self.index = x
        self.pass_s = (timed.pass_s[0][x], timed.pass_s[1][x])
        self.last_pass_s = (timed.last_pass_s[0][x], timed.last_pass_s[1][x])
        self.count = timed.counts[x]
        self.has_backward = timed.has_backward[x]
        self.round = num_rounds
        self.window = limit // timed.sizes[x]
        self.last_waits = -(-(timed.mini_batch_size - limit) // timed.sizes[x])
        self.done = [0, 0]
        self.needs: tuple[list[_Need], list[_Need]] = ([], [])
        self.sends: tuple[list[_Message], list[_Message]] = ([], [])
        self.backward_end_s = 0.0
        self.forward_end_s: list[float] = []
        self.held_by: list[int] = []


# When passes of another stage arrive, and which of them is the last that each pass needs.
_Need = tuple[list[float], Sequence[int]]
# Where arrivals are noted, seconds on the link, seconds until the first byte arrives, and the group that takes it.
_Message = tuple[list[float], float, float, int]


class _Player:
    def __init__(self, timed: TimedStages, rounds: Sequence[int], limits: Sequence[int]) -> None:
        self.timed = timed
        self.limits = limits
        self.stages = [_Stage(timed, x, rounds[x], limits[x]) for x in range(len(timed.sizes))]
        self.free_s = [0.0] * len(timed.groups)
        self.link_free_s = [0.0] * len(timed.groups)
        self.events: list[tuple[float, int]] = [(0.0, g) for g in range(len(timed.groups))]
        sizes, batch, group_of = timed.sizes, timed.mini_batch_size, timed.group_of
        for edge in timed.edges:
            x, y = edge.source, edge.target
            source, target = self.stages[x], self.stages[y]
            arrival_s: list[float] = []
            source.sends[0].append((arrival_s, edge.sent_s, edge.latency_s, group_of[y]))
            target.needs[0].append((arrival_s, last_needed(sizes[y], sizes[x], batch)))
            if edge.returns:
                arrival_s = []
                target.sends[1].append((arrival_s, edge.returned_s, edge.latency_s, group_of[x]))
                source.needs[1].append((arrival_s, last_needed(sizes[x], sizes[y], batch)))
            if not source.has_backward and group_of[x] != group_of[y]:
                target.held_by.append(group_of[x])

    def play(self) -> Play:
        timed, events, free_s = self.timed, self.events, self.free_s
        orders: tuple[list[tuple[int, bool, int]], ...] = tuple([] for _ in timed.groups)
        last_first = [tuple(self.stages[x] for x in reversed(held)) for held in timed.groups]
        pop, push = heapq.heappop, heapq.heappush
        while events:
            now, g = pop(events)
            if now < free_s[g]:
                continue
            chosen = self._choose(last_first[g], now)
            if chosen is None:
                continue
            stage, is_backward = chosen
            m = stage.done[is_backward]
            stage.done[is_backward] = m + 1
            is_last = m + 1 == stage.count
            finish_s = now + (stage.last_pass_s if is_last else stage.pass_s)[is_backward]
            free_s[g] = finish_s
            orders[g].append((stage.index, is_backward, m))
            push(events, (finish_s, g))
            self._send(g, stage.sends[is_backward], finish_s)
            if is_backward:
                if is_last:
                    stage.backward_end_s = finish_s
            else:
                stage.forward_end_s.append(finish_s)
                # A stage before it may hold its samples only until now.
                for other in stage.held_by:
                    push(events, (finish_s, other))
        forwards, backwards = (tuple(stage.done[phase] for stage in self.stages) for phase in (0, 1))
        return Play(orders, forwards, backwards, max(*free_s, *self._reduced_s()))

    def _reduced_s(self) -> Iterator[float]:
        """Yield when the gradients of each group are summed: beside other stages' work, those of later stages first."""
        for held in self.timed.groups:
            end_s = 0.0
            for x in reversed(held):
                if self.timed.reduce_s[x]:
                    end_s = max(end_s, self.stages[x].backward_end_s) + self.timed.reduce_s[x]
            yield end_s

    def _send(self, g: int, messages: Sequence[_Message], finish_s: float) -> None:
        """Let the messages of a pass go; a link carries one at a time."""
        for arrivals, seconds, latency_s, other in messages:
            arrival_s = finish_s
            if seconds or latency_s:
                self.link_free_s[g] = free_s = max(finish_s, self.link_free_s[g]) + seconds
                arrival_s = free_s + latency_s
            arrivals.append(arrival_s)
            if other != g and arrival_s >= self.free_s[other]:
                heapq.heappush(self.events, (arrival_s, other))

    def _choose(self, held: Sequence[_Stage], now: float) -> tuple[_Stage, bool] | None:
        """Return what a group runs next: backward before forward, later stages before earlier ones."""
        for stage in held:
            forwards, m = stage.done
            if m < forwards and stage.has_backward and (stage.round == 1 or _round_is_forwarded(stage)):
                for arrivals, needed in stage.needs[1]:
                    at = needed[m]
                    if at >= len(arrivals) or arrivals[at] > now:
                        break
                else:
                    return stage, True
        for stage in held:
            m, backwards = stage.done
            if m == stage.count:
                continue
            if stage.has_backward:
                if m - backwards >= stage.window and (m + 1 < stage.count or backwards < stage.last_waits):
                    continue
            elif not self._has_room(stage, now):
                continue
            for arrivals, needed in stage.needs[0]:
                at = needed[m]
                if at >= len(arrivals) or arrivals[at] > now:
                    break
            else:
                return stage, False
        return None

    def _has_room(self, stage: _Stage, now: float) -> bool:
        """Return whether a stage without a backward pass has room: the stages after it have used what it held."""
        batch, size, x = self.timed.mini_batch_size, self.timed.sizes[stage.index], stage.index
        stop = min((stage.done[0] + 1) * size, batch)
        if stop <= self.limits[x]:
            return True
        found = min(stage.done[0] * size, batch)
        for e in self.timed.outgoing[x]:
            y = self.timed.edges[e].target
            after = self.stages[y]
            m = after.done[0]
            while m and after.forward_end_s[m - 1] > now:
                m -= 1
            found = min(found, m * self.timed.sizes[y], batch)
        return stop - found <= self.limits[x]


def _round_is_forwarded(stage: _Stage) -> bool:
    end_of_round = (stage.done[1] // stage.round + 1) * stage.round
    return stage.done[0] >= min(stage.count, end_of_round)
