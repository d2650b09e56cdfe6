"""Drafts reduced to numbers, quickly: what a plan is guessed to take, and what playing its schedule through shows.

A search looks at hundreds of plans and keeps one. A stage graph with all of its checks, and a program with all of its
messages, are made for the few that are worth it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from graphpipe.cost.collectives import ring_all_reduce_s
from graphpipe.graph import Value
from graphpipe.planner.base import PlanningProblem
from graphpipe.planner.costs import RECEIVE_BUFFERS, SEND_BUFFERS
from graphpipe.planner.draft import Draft, Splitter
from graphpipe.planner.operators import Floats, OperatorTable
from graphpipe.planner.placement import Traffic, place
from graphpipe.planner.predict import Prediction, predict
from graphpipe.schedule import fitted_limits, limits_of
from graphpipe.schedule.play import TimedEdge, TimedStages, exchange_s, play
from graphpipe.stage import Recompute, StageOrder, turn

Ints = NDArray[np.int64]

# Of a long schedule, as many micro-batches as fill its longest path are played, this many times, and twice as many.
PLAYED_ROUNDS = 3
# Samples in flight are reduced to what is needed while no more tasks than this are played for it.
FITTED_TASKS = 200_000


@dataclass(frozen=True, eq=False)
class Sketch:
    """A draft reduced to numbers.

    Attributes:
        plan: The draft.
        devices: The devices of each group of stages.
        timed: Its tasks and messages.
        limits: ``[stages]`` samples in flight that are just enough for equal stages.
        most: ``[stages]`` samples in flight that memory allows, about; at least the limits.
        is_too_large: Whether a device lacks the memory for the limits, about.
        rounds: ``[stages]`` passes in a round.
        predicted: What it is guessed to take.
    """

    plan: Draft
    devices: dict[int, tuple[int, ...]]
    timed: TimedStages
    limits: tuple[int, ...]
    most: tuple[int, ...]
    is_too_large: bool
    rounds: tuple[int, ...]
    predicted: Prediction

    @cached_property
    def links(self) -> tuple[tuple[int, int], ...]:
        """The pairs of stages between which something passes."""
        return tuple((edge.source, edge.target) for edge in self.timed.edges)

    @cached_property
    def depth(self) -> int:
        """The stages on the longest path."""
        longest = [1] * len(self.timed.sizes)
        for x, y in sorted(self.links, key=lambda pair: pair[1]):
            longest[y] = max(longest[y], longest[x] + 1)
        return max(longest)

    @cached_property
    def played_s(self) -> float:
        """Seconds of an iteration when its schedule is played through, with as many samples in flight as it likes.

        A long schedule repeats itself once the pipeline is full, so only its beginning is played, twice, and the rest
        is what the longer one took more, and no less than what the busiest device has to do.
        """
        batch, short = self.timed.mini_batch_size, self._shortened
        if short is None:
            return self._play_s(batch)
        first_s, second_s = self._play_s(short // 2), self._play_s(short)
        each_s = max((second_s - first_s) / (short - short // 2), self.predicted.load_s / batch)
        return second_s + each_s * (batch - short)

    @cached_property
    def fitted(self) -> tuple[int, ...]:
        """``[stages]`` the smallest limits with which it is as fast as with `most`."""
        batch = self._shortened or self.timed.mini_batch_size
        return fitted_limits(self._of(batch), self.rounds, [min(batch, limit) for limit in self.most], FITTED_TASKS)

    def _play_s(self, mini_batch_size: int) -> float:
        timed = self._of(mini_batch_size)
        return play(timed, self.rounds, [min(mini_batch_size, limit) for limit in self.most]).makespan_s

    @cached_property
    def _shortened(self) -> int | None:
        """The mini-batch that is played instead of a long one."""
        batch = self.timed.mini_batch_size
        if batch in self.timed.sizes:
            # A stage that takes everything at once ends no sooner for fewer samples.
            return None
        short = math.lcm(*self.timed.sizes) * 2 * PLAYED_ROUNDS * self.depth * max(self.rounds)
        return short if short * 2 <= batch else None

    def _of(self, mini_batch_size: int) -> TimedStages:
        """Return the stages with a shorter mini-batch."""
        if mini_batch_size == self.timed.mini_batch_size:
            return self.timed
        return replace(self.timed, mini_batch_size=mini_batch_size, last_pass_s=self.timed.pass_s)

    @property
    def played_tasks(self) -> int:
        """How many tasks are played for `played_s`."""
        whole = 2 * sum(self.timed.counts)
        batch, short = self.timed.mini_batch_size, self._shortened
        return whole if short is None else round(whole * 1.5 * short / batch)


@dataclass(frozen=True, slots=True)
class _State:
    """What a stage keeps between steps.

    Attributes:
        has_backward: Whether a gradient flows through it.
        trainable_bytes: Parameters with a gradient.
        state_bytes: Parameters, gradients, optimizer state.
    """

    has_backward: bool
    trainable_bytes: float
    state_bytes: float


@dataclass(frozen=True, slots=True)
class _Pass:
    """What the passes of a stage over some samples take.

    Attributes:
        forward_s: Seconds of the forward pass.
        backward_s: Seconds of the backward pass, without computing anything again.
        saved_bytes: What is kept from one to the other.
    """

    forward_s: float
    backward_s: float
    saved_bytes: float


@dataclass(slots=True)
class _Passed:
    """What passes from one stage to another: bytes a sample, and bytes that do not depend on the batch."""

    sent: float = 0.0
    sent_fixed: float = 0.0
    returned: float = 0.0
    returned_fixed: float = 0.0
    returns: bool = False

    def add(self, value: Value) -> None:
        self.sent += value.bytes_per_sample
        self.sent_fixed += value.fixed_bytes
        if value.carries_gradient:
            self.returned += value.bytes_per_sample
            self.returned_fixed += value.fixed_bytes
            self.returns = True


class Sketcher:
    """Makes sketches of one problem.

    Args:
        problem: The problem.
        k: Passes in a round.
        order: What stages wait for.
    """

    def __init__(self, problem: PlanningProblem, k: int = 1, order: StageOrder = StageOrder.GRAPH) -> None:
        self.problem = problem
        self.k = k
        self.order = order
        graph, index = problem.graph, problem.graph.index
        self.splitter = Splitter(graph)
        self.table = OperatorTable(problem)
        self._costs: dict[int, tuple[Floats, Floats, Floats]] = {}
        self._states: dict[tuple[int, ...], _State] = {}
        self._known_passes: dict[tuple[tuple[int, ...], int], _Pass] = {}
        self._known_shares: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[float, float, float]] = {}
        reads = [(v, index[value.producer], index[c]) for v, value in enumerate(graph.values) for c in value.consumers]
        self.value = [v for v, _, _ in reads]
        self.maker: Ints = np.array([made for _, made, _ in reads], dtype=np.int64)
        self.reader: Ints = np.array([read for _, _, read in reads], dtype=np.int64)

    def sketch(self, plan: Draft) -> Sketch:
        """Return a draft reduced to numbers. Its stages are in a topological order."""
        problem, stages = self.problem, plan.stages
        count = len(stages)
        owner = np.empty(len(problem.graph.operators), dtype=np.int64)
        for x, stage in enumerate(stages):
            owner[list(stage.operators)] = x
        sizes = [stage.micro_batch_size for stage in stages]
        counts = [-(-problem.mini_batch_size // size) for size in sizes]
        state = [self._state(stage.operators) for stage in stages]
        has_backward = [each.has_backward for each in state]
        local = [-(-stage.micro_batch_size // stage.choice.num_replicas) for stage in stages]
        rest = [
            -(-(problem.mini_batch_size - (n - 1) * stage.micro_batch_size) // stage.choice.num_replicas)
            for n, stage in zip(counts, stages, strict=True)
        ]
        passed = self._passed(owner, count)
        devices = place(problem.cluster, plan, self._traffic(plan, passed))
        reduce_s = [
            ring_all_reduce_s(
                each.trainable_bytes, stage.choice.num_replicas, problem.cluster.slowest_link(devices[stage.group])
            )
            for each, stage in zip(state, stages, strict=True)
        ]
        held: dict[int, list[int]] = {}
        for x, stage in enumerate(stages):
            held.setdefault(stage.group, []).append(x)
        groups = list(held.values())
        pass_s = self._passes(plan, local)
        timed = TimedStages(
            mini_batch_size=problem.mini_batch_size,
            sizes=sizes,
            groups=groups,
            has_backward=has_backward,
            pass_s=pass_s,
            last_pass_s=pass_s if rest == local else self._passes(plan, rest),
            edges=self._edges(plan, passed, devices, has_backward),
            reduce_s=reduce_s,
        )
        rounds = (self.k,) * count
        links = [(edge.source, edge.target) for edge in timed.edges]
        limits = limits_of(sizes, links, problem.mini_batch_size, rounds)
        most, is_too_large = self._most(plan, state, timed, limits, passed)
        return Sketch(plan, devices, timed, limits, most, is_too_large, rounds, predict(timed, most))

    def _most(
        self,
        plan: Draft,
        state: Sequence[_State],
        timed: TimedStages,
        limits: Sequence[int],
        passed: Mapping[tuple[int, int], _Passed],
    ) -> tuple[tuple[int, ...], bool]:
        """Return how many samples in flight memory allows, and whether it does not even allow the limits.

        What a group of devices has left is spent on more of all of its stages' micro-batches alike.
        """
        stages, count = plan.stages, len(plan.stages)
        replicas = [stage.choice.num_replicas for stage in stages]
        held, once = [0.0] * count, [0.0] * count
        for x, stage in enumerate(stages):
            saved = self._pass(stage.operators, -(-stage.micro_batch_size // replicas[x])).saved_bytes
            if stage.choice.recompute is Recompute.ALL:
                once[x] = saved
            else:
                held[x] = saved
        for (x, y), each in passed.items():
            received = (each.sent * timed.sizes[y] + each.sent_fixed) / replicas[y]
            held[y] += received
            once[y] += RECEIVE_BUFFERS * received
            for z, buffers in ((y, SEND_BUFFERS), (x, RECEIVE_BUFFERS)):
                num_bytes = (each.returned * timed.sizes[z] + each.returned_fixed) / replicas[z]
                once[z] += min(timed.counts[z], buffers) * num_bytes
        most = list(limits)
        is_too_large = False
        for group in timed.groups:
            free = self.table.memory_bytes - sum(state[x].state_bytes + once[x] for x in group)
            needed = sum(limits[x] / timed.sizes[x] * held[x] for x in group)
            is_too_large |= free < needed
            for x in group:
                more = int(limits[x] * free / needed) if needed > 0 else timed.mini_batch_size
                most[x] = min(timed.mini_batch_size, max(limits[x], more // timed.sizes[x] * timed.sizes[x]))
        return tuple(most), is_too_large

    def _at(self, size: int) -> tuple[Floats, Floats, Floats]:
        """Return the seconds of both passes over `size` samples and the bytes that they keep, by operator."""
        if size not in self._costs:
            costs = self.problem.profile.at(size)
            self._costs[size] = (costs.forward_s, costs.backward_s, costs.saved_bytes)
        return self._costs[size]

    def _state(self, operators: tuple[int, ...]) -> _State:
        """Return what a stage of some operators keeps. Plans have most of their stages in common."""
        if operators not in self._states:
            table, chosen = self.table, list(operators)
            self._states[operators] = _State(
                has_backward=bool(table.has_backward[chosen].any()),
                trainable_bytes=sum(table.trainable_bytes[chosen].tolist()),
                state_bytes=sum(table.state_bytes[chosen].tolist()),
            )
        return self._states[operators]

    def _pass(self, operators: tuple[int, ...], size: int) -> _Pass:
        """Return what the passes of a stage of some operators over `size` samples take."""
        if (operators, size) not in self._known_passes:
            forward_s, backward_s, saved_bytes = (each[list(operators)] for each in self._at(size))
            self._known_passes[operators, size] = _Pass(
                forward_s=sum(forward_s.tolist()),
                backward_s=sum(backward_s.tolist()),
                saved_bytes=float(saved_bytes.sum()),
            )
        return self._known_passes[operators, size]

    def _passes(self, plan: Draft, local: Sequence[int]) -> tuple[list[float], list[float]]:
        """Return the seconds of a forward and of a backward pass of each stage."""
        passes = [self._pass(stage.operators, size) for stage, size in zip(plan.stages, local, strict=True)]
        forward, backward = [each.forward_s for each in passes], [each.backward_s for each in passes]
        for x, stage in enumerate(plan.stages):
            if stage.choice.recompute is Recompute.ALL:
                backward[x] += forward[x]
        return forward, backward

    def _passed(self, owner: Ints, count: int) -> dict[tuple[int, int], _Passed]:
        """Return what passes between stages, by (source, target), sorted."""
        source, target = owner[self.maker], owner[self.reader]
        crosses = np.flatnonzero(source != target)
        found: dict[tuple[int, int], _Passed] = {}
        # Each value once for each stage that reads it.
        known: set[tuple[int, int]] = set()
        for read, x, y in zip(crosses.tolist(), source[crosses].tolist(), target[crosses].tolist(), strict=True):
            v = self.value[read]
            if (v, y) not in known:
                known.add((v, y))
                found.setdefault((x, y), _Passed()).add(self.problem.graph.values[v])
        if self.order is StageOrder.CHAIN:
            for x in range(count - 1):
                names = (self.problem.graph.operators[0].name, self.problem.graph.operators[-1].name)
                found.setdefault((x, x + 1), _Passed()).add(turn(x, *names))
        return dict(sorted(found.items()))

    @staticmethod
    def _traffic(plan: Draft, passed: Mapping[tuple[int, int], _Passed]) -> Traffic:
        """Return by group the bytes that it exchanges with each other group for one sample."""
        found: Traffic = {stage.group: {} for stage in plan.stages}
        for (x, y), each in passed.items():
            a, b = plan.stages[x].group, plan.stages[y].group
            if a != b:
                num_bytes = each.sent + each.sent_fixed + each.returned + each.returned_fixed
                found[a][b] = found[a].get(b, 0) + num_bytes
                found[b][a] = found[b].get(a, 0) + num_bytes
        return found

    def _edges(
        self,
        plan: Draft,
        passed: Mapping[tuple[int, int], _Passed],
        devices: Mapping[int, tuple[int, ...]],
        has_backward: Sequence[bool],
    ) -> list[TimedEdge]:
        found = []
        for (x, y), each in passed.items():
            a, b = plan.stages[x], plan.stages[y]
            sent_s = returned_s = latency_s = 0.0
            returns = each.returns and has_backward[x] and has_backward[y]
            if a.group != b.group:
                latency_s, out_share, back_share = self._shares(devices[a.group], devices[b.group])
                sent_s = (each.sent * a.micro_batch_size + each.sent_fixed) * out_share
                if returns:
                    returned_s = (each.returned * b.micro_batch_size + each.returned_fixed) * back_share
            found.append(TimedEdge(x, y, sent_s, returned_s, latency_s, returns))
        return found

    def _shares(self, a: tuple[int, ...], b: tuple[int, ...]) -> tuple[float, float, float]:
        """Return what `exchange_s` does, quickly where all links are alike."""
        if (a, b) not in self._known_shares:
            cluster = self.problem.cluster
            nodes_a, nodes_b = ({cluster.devices[d].node for d in group} for group in (a, b))
            if len(nodes_a | nodes_b) == 1 or not nodes_a & nodes_b:
                link = cluster.slowest_link((a[0], b[0]))
                out_share, back_share = (1 / (len(group) * link.bandwidth_bytes_per_s) for group in (a, b))
                self._known_shares[a, b] = (link.latency_s, out_share, back_share)
            else:
                self._known_shares[a, b] = exchange_s(a, b, cluster.link)
        return self._known_shares[a, b]
