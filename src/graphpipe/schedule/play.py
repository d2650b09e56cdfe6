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


class _Player:
    def __init__(self, timed: TimedStages, rounds: Sequence[int], limits: Sequence[int]) -> None:
        self.timed = timed
        self.rounds = rounds
        self.limits = limits
        count = len(timed.sizes)
        self.forwards = [0] * count
        self.backwards = [0] * count
        # When the last backward pass ended.
        self.backward_end_s = [0.0] * count
        # When each forward pass ended: stages without a backward pass hold samples until others have used them.
        self.forward_end_s: list[list[float]] = [[] for _ in range(count)]
        self.free_s = [0.0] * len(timed.groups)
        self.link_free_s = [0.0] * len(timed.groups)
        # By edge, when what each pass sends is there.
        self.activation_s: list[list[float]] = [[] for _ in timed.edges]
        self.gradient_s: list[list[float]] = [[] for _ in timed.edges]
        batch = timed.mini_batch_size
        sizes = timed.sizes
        # What a stage waits for: (arrivals by pass of the other stage, which pass is the last that is needed).
        self.needs = [
            [(self.activation_s[e], last_needed(sizes[x], sizes[timed.edges[e].source], batch)) for e in edges]
            for x, edges in enumerate(timed.incoming)
        ]
        self.needs_back = [
            [
                (self.gradient_s[e], last_needed(sizes[x], sizes[timed.edges[e].target], batch))
                for e in edges
                if timed.edges[e].returns
            ]
            for x, edges in enumerate(timed.outgoing)
        ]
        self.events: list[tuple[float, int]] = [(0.0, g) for g in range(len(timed.groups))]

    def play(self) -> Play:
        timed, events, free_s = self.timed, self.events, self.free_s
        group_of, counts = timed.group_of, timed.counts
        orders: tuple[list[tuple[int, bool, int]], ...] = tuple([] for _ in timed.groups)
        held_last_first = [tuple(reversed(held)) for held in timed.groups]
        while events:
            now, g = heapq.heappop(events)
            if now < free_s[g]:
                continue
            chosen = self._choose(held_last_first[g], now)
            if chosen is None:
                continue
            x, is_backward = chosen
            done = self.backwards if is_backward else self.forwards
            m = done[x]
            done[x] = m + 1
            is_last = m + 1 == counts[x]
            finish_s = now + (timed.last_pass_s if is_last else timed.pass_s)[is_backward][x]
            free_s[g] = finish_s
            orders[g].append((x, is_backward, m))
            heapq.heappush(events, (finish_s, g))
            self._send(g, x, is_backward, finish_s)
            if is_backward and is_last:
                self.backward_end_s[x] = finish_s
            if not is_backward:
                self.forward_end_s[x].append(finish_s)
                # A stage before it may hold its samples only until now.
                for e in timed.incoming[x]:
                    source = timed.edges[e].source
                    if not timed.has_backward[source] and group_of[source] != g:
                        heapq.heappush(events, (finish_s, group_of[source]))
        return Play(orders, tuple(self.forwards), tuple(self.backwards), max(*free_s, *self._reduced_s()))

    def _reduced_s(self) -> Iterator[float]:
        """Yield when the gradients of each group are summed: beside other stages' work, those of later stages first."""
        for held in self.timed.groups:
            end_s = 0.0
            for x in reversed(held):
                if self.timed.reduce_s[x]:
                    end_s = max(end_s, self.backward_end_s[x]) + self.timed.reduce_s[x]
            yield end_s

    def _send(self, g: int, x: int, is_backward: bool, finish_s: float) -> None:
        """Let the messages of a pass go; a link carries one at a time."""
        timed = self.timed
        for e in timed.incoming[x] if is_backward else timed.outgoing[x]:
            edge = timed.edges[e]
            if is_backward and not edge.returns:
                continue
            seconds = edge.returned_s if is_backward else edge.sent_s
            arrival_s = finish_s
            if seconds or edge.latency_s:
                self.link_free_s[g] = max(finish_s, self.link_free_s[g]) + seconds
                arrival_s = self.link_free_s[g] + edge.latency_s
            (self.gradient_s if is_backward else self.activation_s)[e].append(arrival_s)
            other = timed.group_of[edge.source if is_backward else edge.target]
            if other != g and arrival_s >= self.free_s[other]:
                heapq.heappush(self.events, (arrival_s, other))

    def _choose(self, held: Sequence[int], now: float) -> tuple[int, bool] | None:
        """Return what a group runs next: backward before forward, later stages before earlier ones."""
        timed = self.timed
        for x in held:
            m = self.backwards[x]
            if m < self.forwards[x] and timed.has_backward[x] and self._round_is_forwarded(x, m):
                for arrivals, needed in self.needs_back[x]:
                    at = needed[m]
                    if at >= len(arrivals) or arrivals[at] > now:
                        break
                else:
                    return x, True
        for x in held:
            m = self.forwards[x]
            if m < timed.counts[x] and self._fits(x, m, now):
                for arrivals, needed in self.needs[x]:
                    at = needed[m]
                    if at >= len(arrivals) or arrivals[at] > now:
                        break
                else:
                    return x, False
        return None

    def _round_is_forwarded(self, x: int, m: int) -> bool:
        end_of_round = (m // self.rounds[x] + 1) * self.rounds[x]
        return self.forwards[x] >= min(self.timed.counts[x], end_of_round)

    def _fits(self, x: int, m: int, now: float) -> bool:
        size, batch = self.timed.sizes[x], self.timed.mini_batch_size
        stop = min((m + 1) * size, batch)
        if stop <= self.limits[x]:
            return True
        if self.timed.has_backward[x]:
            return stop - min(self.backwards[x] * size, batch) <= self.limits[x]
        return stop - self._passed_on(x, now) <= self.limits[x]

    def _passed_on(self, x: int, now: float) -> int:
        """Return the samples that a stage without a backward pass holds no more: the stages after it have used them."""
        batch, sizes = self.timed.mini_batch_size, self.timed.sizes
        targets = [self.timed.edges[e].target for e in self.timed.outgoing[x]]
        found = min(self.forwards[x] * sizes[x], batch)
        for y in targets:
            m = self.forwards[y]
            while m and self.forward_end_s[y][m - 1] > now:
                m -= 1
            found = min(found, m * sizes[y], batch)
        return found
