"""All plans of a small problem, weighed one by one: whether any is better than what the search has found.

The operators are divided into stages in every way that feeds no stage in a circle, stages share devices in every way,
with every number of replicas. That holds what the search looks at and all changes of it. Most plans need no look: a
device has too much to do, or the plan's own bound is above what was found. The rest are simulated, so what is left in
the end is the best.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from graphpipe.cost.collectives import ring_all_reduce_s
from graphpipe.estimate import WORKSPACE_MARGIN
from graphpipe.planner.base import PlanningProblem
from graphpipe.planner.candidates import Candidate, Simulated, simulated
from graphpipe.planner.costs import Choice
from graphpipe.planner.draft import Draft, DraftStage, ordered
from graphpipe.planner.sketch import Sketcher
from graphpipe.stage import Recompute

# A graph with more operators has too many plans.
MOST_OPERATORS = 8
# What may be spent on the plans of one micro-batch size, about microseconds.
EFFORT = 100_000
# What is spent on an operator that is put into a stage, on a plan's bound, on its sketch, on its simulation and on each
# task of it.
STEP, BOUND, SKETCH, SIMULATION, TASK = 3, 25, 110, 200, 80
# A plan that is faster by less is no better.
SAME = 1e-10


class TooManyPlans(Exception):  # noqa: N818
    """There are more plans than may be weighed."""


class Effort:
    """What may still be spent.

    Args:
        left: In the unit of `EFFORT`.
        is_late: Whether there is no time left.
    """

    def __init__(self, left: int, is_late: Callable[[], bool]) -> None:
        self.left = left
        self.is_late = is_late

    def spend(self, cost: int) -> None:
        """Pay.

        Raises:
            TooManyPlans: Nothing is left.
        """
        self.left -= cost
        if self.left < 0 or (cost > STEP and self.is_late()):
            raise TooManyPlans


@dataclass(frozen=True)
class _StageTimes:
    """What a stage takes on its last replica, which has the largest share of every micro-batch.

    Attributes:
        local_size: Samples of a pass.
        count: Micro-batches.
        has_backward: Whether a gradient flows through.
        forward_s: Seconds of a forward pass.
        backward_s: Seconds of a backward pass, 0 without one.
        work_s: Seconds of all passes.
        reduce_s: Seconds that summing its gradients takes at least.
    """

    local_size: int
    count: int
    has_backward: bool
    forward_s: float
    backward_s: float
    work_s: float
    reduce_s: float


class Bounds:
    """Seconds that plans take at least, whatever the order of their tasks and the speed of messages.

    Args:
        problem: The problem.
    """

    def __init__(self, problem: PlanningProblem) -> None:
        self.problem = problem
        self._known: dict[tuple[tuple[int, ...], int, Choice], _StageTimes] = {}
        self.unshared_bytes = _unshared_bytes(problem)
        graph = problem.graph
        # A value that does not depend on the batch comes from the replica that has the first sample, so the last one
        # may have it sooner.
        self.reads = [
            (graph.index[value.producer], graph.index[c], v)
            for v, value in enumerate(graph.values)
            for c in value.consumers
            if value.bytes_per_sample > 0
        ]
        cluster = problem.cluster
        nodes = Counter(device.node for device in cluster.devices)
        is_used = len(nodes) < len(cluster), len(nodes) > 1
        links = [link for link, used in zip((cluster.inside_node, cluster.between_nodes), is_used, strict=True) if used]
        self.latency_s = min((link.latency_s for link in links), default=0.0)
        self.byte_s = min((1 / link.bandwidth_bytes_per_s for link in links), default=0.0)

    def least_s(self, plan: Draft) -> float:
        """Return the seconds that an iteration of a plan takes at least.

        A device cannot start before the first samples have come to one of its stages. Then it has its work to do, and
        after it the stages before have their last backward passes, and gradients are summed. The same holds for a stage
        alone, and its link has its messages to carry.

        Args:
            plan: Its stages are in a topological order.
        """
        stages, values = plan.stages, self.problem.graph.values
        times = [self._times(stage) for stage in stages]
        owner = {u: x for x, stage in enumerate(stages) for u in stage.operators}
        passed: dict[tuple[int, int], set[int]] = {}
        for made, read, v in self.reads:
            if owner[made] != owner[read]:
                passed.setdefault((owner[made], owner[read]), set()).add(v)
        start_s, finish_s = [0.0] * len(stages), [each.reduce_s for each in times]
        link_s = [0.0] * len(stages)
        for (x, y), vs in sorted(passed.items()):
            a, b = times[x], times[y]
            is_away = stages[x].group != stages[y].group
            sent = sum(values[v].bytes_per_sample for v in vs) * self.byte_s * is_away
            returned = sum(values[v].bytes_per_sample for v in vs if values[v].carries_gradient) * self.byte_s * is_away
            # How many passes of the stage before it a pass of the stage after it waits for, and samples that the last
            # replica of one has from that of the other.
            passes = max(1, stages[y].micro_batch_size // stages[x].micro_batch_size)
            shared = min(a.local_size, b.local_size)
            start_s[y] = max(start_s[y], start_s[x] + passes * a.forward_s + shared * sent + self.latency_s * is_away)
            link_s[x] += a.count * a.local_size * sent
            if a.has_backward and b.has_backward and any(values[v].carries_gradient for v in vs):
                hop_s = shared * returned + self.latency_s * is_away
                finish_s[y] = max(finish_s[y], hop_s + passes * a.backward_s + finish_s[x])
                link_s[y] += b.count * b.local_size * returned
        devices: dict[int, list[int]] = {}
        for x, stage in enumerate(stages):
            devices.setdefault(stage.group, []).append(x)
        parts = [*devices.values(), *([x] for x in range(len(stages)))]
        return max(
            min(start_s[x] for x in part)
            + max(sum(times[x].work_s for x in part) + min(finish_s[x] for x in part), sum(link_s[x] for x in part))
            for part in parts
        )

    def _times(self, stage: DraftStage) -> _StageTimes:
        key = stage.operators, stage.micro_batch_size, stage.choice
        if key not in self._known:
            self._known[key] = self._found(*key)
        return self._known[key]

    def _found(self, operators: tuple[int, ...], size: int, choice: Choice) -> _StageTimes:
        model, cluster = self.problem.cost_model, self.problem.cluster
        local = -(-size // choice.num_replicas)
        forward_s, backward_s, reduce_s = model.forward_s(operators, local), 0.0, 0.0
        has_backward = any(self.problem.graph.operators[u].has_backward for u in operators)
        if has_backward:
            backward_s = model.backward_s(operators, local) + forward_s * (choice.recompute is Recompute.ALL)
            num_bytes = sum(self.unshared_bytes[u] for u in operators)
            links = (cluster.inside_node, cluster.between_nodes)
            reduce_s = min(ring_all_reduce_s(num_bytes, choice.num_replicas, link) for link in links)
        count = -(-self.problem.mini_batch_size // size)
        return _StageTimes(
            local, count, has_backward, forward_s, backward_s, count * (forward_s + backward_s), reduce_s
        )


def _unshared_bytes(problem: PlanningProblem) -> list[float]:
    """Return ``[operators]`` the bytes of trainable parameters that no other operator reads."""
    readers = Counter(p.name for operator in problem.graph.operators for p in operator.parameters)
    return [
        float(sum(p.num_bytes for p in o.parameters if p.is_trainable and readers[p.name] == 1))
        for o in problem.graph.operators
    ]


class AllPlans:
    """All plans of one micro-batch size.

    Args:
        problem: The problem.
        micro_batch_size: Samples a micro-batch; what mixes samples takes the whole mini-batch.
        recompute: What stages may keep of their forward pass.
        effort: What may be spent on them.
    """

    def __init__(
        self, problem: PlanningProblem, micro_batch_size: int, recompute: Sequence[Recompute], effort: Effort
    ) -> None:
        self.problem = problem
        self.size = micro_batch_size
        self.recompute = recompute
        self.effort = effort
        self.graph = problem.graph
        self.is_batch_wise = [operator.is_batch_wise for operator in self.graph.operators]
        # ``[replicas][operators]`` seconds of a device on a mini-batch.
        most = min(micro_batch_size, len(problem.cluster))
        self.work_s = [[0.0] * len(self.is_batch_wise)] + [self._work_s(count) for count in range(1, most + 1)]
        # What a device holds at least: parameters, gradients and the optimizer's state.
        each = 2 + problem.optimizer.state_bytes_per_parameter_byte
        self.state_bytes = [num_bytes * each for num_bytes in _unshared_bytes(problem)]
        largest = max(device.memory_bytes for device in problem.cluster.devices)
        self.memory_bytes = largest / (1 + WORKSPACE_MARGIN) * (1 + SAME)

    def _work_s(self, num_replicas: int) -> list[float]:
        batch = self.problem.mini_batch_size
        own, whole = (self.problem.profile.at(size) for size in (-(-self.size // num_replicas), batch))
        found = []
        for u, operator in enumerate(self.graph.operators):
            costs, count = (whole, 1) if operator.is_batch_wise else (own, -(-batch // self.size))
            seconds = float(costs.forward_s[u]) + (float(costs.backward_s[u]) if operator.has_backward else 0.0)
            found.append(count * seconds)
        return found

    def below(self, limit_s: float) -> Iterator[Draft]:
        """Yield the plans of which no device works that long on a mini-batch, but for recomputation.

        Raises:
            TooManyPlans: There are too many.
        """
        graph, devices = self.graph, len(self.problem.cluster)
        count = len(graph.operators)
        owner = [0] * count
        # By stage: its operators and its group. By group: replicas, seconds of work, bytes.
        parts: list[list[int]] = []
        group_of: list[int] = []
        replicas: list[int] = []
        work_s: list[float] = []
        state_bytes: list[float] = []

        def go_on(u: int, after: list[int], free: int) -> Iterator[Draft]:
            """Put the operators from `u` on into stages; `after` are the stages that each leads to, a bit each."""
            if u == count:
                yield from self._drafts(parts, group_of, replicas)
                return
            needs = 0
            for p in graph.predecessors[u]:
                needs |= 1 << owner[p]
            for x, part in enumerate(parts):
                if self._may_join(part, u) and not after[x] & needs:
                    part.append(u)
                    yield from put(u, x, _linked(after, needs, x), free)
                    part.pop()
            x = len(parts)
            parts.append([u])
            group_of.append(0)
            linked = _linked([*after, 0], needs, x)
            for g in range(len(replicas)):
                group_of[x] = g
                yield from put(u, x, linked, free)
            group_of[x] = len(replicas)
            for number in range(1, min(free, self.size) + 1):
                replicas.append(number)
                work_s.append(0.0)
                state_bytes.append(0.0)
                yield from put(u, x, linked, free - number)
                replicas.pop()
                work_s.pop()
                state_bytes.pop()
            parts.pop()
            group_of.pop()

        def put(u: int, x: int, after: list[int], free: int) -> Iterator[Draft]:
            self.effort.spend(STEP)
            g = group_of[x]
            if replicas[g] > 1 and self.is_batch_wise[u]:
                return
            before = work_s[g], state_bytes[g]
            work_s[g] += self.work_s[replicas[g]][u]
            state_bytes[g] += self.state_bytes[u]
            if work_s[g] < limit_s and state_bytes[g] <= self.memory_bytes:
                owner[u] = x
                yield from go_on(u + 1, after, free)
            work_s[g], state_bytes[g] = before

        return go_on(0, [], devices)

    def _may_join(self, part: Sequence[int], u: int) -> bool:
        """Return whether an operator's micro-batches are those of a stage."""
        return self.size == self.problem.mini_batch_size or self.is_batch_wise[part[0]] == self.is_batch_wise[u]

    def _drafts(
        self, parts: Sequence[Sequence[int]], group_of: Sequence[int], replicas: Sequence[int]
    ) -> Iterator[Draft]:
        """Yield the plans that have these stages, with every choice of recomputation."""
        is_whole = [any(self.is_batch_wise[u] for u in part) for part in parts]
        for each in itertools.product(*((Recompute.NONE,) if whole else self.recompute for whole in is_whole)):
            stages = [
                DraftStage(
                    tuple(part), self.problem.mini_batch_size if whole else self.size, Choice(replicas[g], recompute), g
                )
                for part, whole, g, recompute in zip(parts, is_whole, group_of, each, strict=True)
            ]
            yield ordered(self.graph, stages)


def _linked(after: list[int], needs: int, x: int) -> list[int]:
    """Return the stages that each leads to when stage `x` needs some others too."""
    added = after[x] | 1 << x
    return [leads | added if y != x and (needs >> y & 1 or leads & needs) else leads for y, leads in enumerate(after)]


@dataclass(frozen=True)
class Judge:
    """What plans are judged by.

    Attributes:
        least_s: Returns what a plan is judged with at least.
        rank: Returns what candidates are sorted by, the likeliest first.
        value_s: Returns what a simulated plan is judged with.
    """

    least_s: Callable[[Draft], float]
    rank: Callable[[Candidate], tuple[float, float]]
    value_s: Callable[[Simulated], float]


def by_time(problem: PlanningProblem) -> Judge:
    """Judge by the seconds of a simulated iteration."""
    return Judge(
        Bounds(problem).least_s,
        lambda plan: (plan.predicted.iteration_s, plan.predicted.bottleneck_s),
        lambda found: found.estimate.iteration_s,
    )


def by_bottleneck(sketcher: Sketcher) -> Judge:
    """Judge by the seconds of the busiest device."""
    return Judge(
        lambda plan: sketcher.sketch(plan).predicted.bottleneck_s,
        lambda plan: (plan.predicted.bottleneck_s, plan.predicted.iteration_s),
        lambda found: found.candidate.predicted.bottleneck_s,
    )


class Weighing:
    """Weighs all plans of a problem.

    Args:
        sketcher: For sketches.
        planner: Who plans.
        recompute: What stages may keep of their forward pass.
        judge: What plans are judged by.
        is_late: Whether there is no time left.
    """

    def __init__(
        self,
        sketcher: Sketcher,
        planner: str,
        recompute: Sequence[Recompute],
        judge: Judge,
        is_late: Callable[[], bool],
    ) -> None:
        self.sketcher = sketcher
        self.problem = sketcher.problem
        self.planner = planner
        self.recompute = recompute
        self.judge = judge
        self.is_late = is_late
        self.num_simulations = 0

    def best(self, known: Simulated | None) -> tuple[Simulated | None, bool]:
        """Return a plan that is better than a known one, else that one, and whether none is better than it.

        Args:
            known: The best plan so far; None where none has fitted into memory.
        """
        is_best = len(self.problem.graph.operators) <= MOST_OPERATORS
        for size in self.problem.micro_batch_sizes if is_best else ():
            # A size whose plans are too many is left out as a whole: what is found does not depend on other sizes.
            try:
                known = self._best_of(size, known)
            except TooManyPlans:
                is_best = False
        return known, is_best

    def _best_of(self, size: int, known: Simulated | None) -> Simulated | None:
        effort = Effort(EFFORT, self.is_late)
        left: list[tuple[float, Candidate]] = []
        limit_s = self._limit_s(known)
        for plan in AllPlans(self.problem, size, self.recompute, effort).below(limit_s):
            effort.spend(BOUND)
            least_s = self.judge.least_s(plan)
            if least_s < limit_s:
                effort.spend(SKETCH)
                candidate = Candidate(self.sketcher.sketch(plan), size)
                left.append((least_s, candidate))
        # Likely ones first, so that the others' bounds are above them.
        for least_s, candidate in sorted(left, key=lambda each: self.judge.rank(each[1])):
            if least_s < self._limit_s(known):
                effort.spend(SIMULATION + TASK * 2 * sum(candidate.sketch.timed.counts))
                self.num_simulations += 1
                found = simulated(self.problem, candidate, self.planner, self.sketcher.k)
                if found is not None and self.judge.value_s(found) < self._limit_s(known):
                    known = found
        return known

    def _limit_s(self, known: Simulated | None) -> float:
        return float("inf") if known is None else self.judge.value_s(known) * (1 - SAME)
