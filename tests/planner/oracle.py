"""Slow and plain versions of what the planner does, to compare it with.

`covers` writes out every partition of a graph that the planner's shapes of stages allow, `Oracle` scores them one by
one. `every_plan` writes out all plans there are. None shares code with the planner but for the definition of the
problem.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from graphpipe.cost.collectives import ring_all_reduce_s
from graphpipe.estimate import WORKSPACE_MARGIN, Estimate
from graphpipe.planner.base import PlanningProblem
from graphpipe.planner.costs import Choice
from graphpipe.planner.draft import Draft, DraftStage, ordered
from graphpipe.planner.layout import Block, Chain
from graphpipe.schedule import Phase
from graphpipe.stage import Recompute, StageOrder
from graphpipe.strategy import Strategy

Part = frozenset[int]
Cover = tuple[Part, ...]


def _operators(chain: Chain, start: int, stop: int) -> Part:
    return frozenset(u for unit in chain.units[start:stop] for u in unit)


def covers(chain: Chain, start: int = 0, stop: int | None = None) -> Iterator[Cover]:
    """Yield all ways to cover some items of a chain with stages of the allowed shapes."""
    stop = len(chain.items) if stop is None else stop
    if start == stop:
        yield ()
        return
    for end in range(start + 1, stop + 1):
        for rest in covers(chain, end, stop):
            yield (_operators(chain, start, end), *rest)
    for at in range(start, stop):
        block = chain.items[at]
        if isinstance(block, Block):
            # A fork takes the items from `start` up to the block, a join those after it up to `end`.
            for end in range(at + 1, stop + 1):
                for rest in covers(chain, end, stop):
                    for inner in _through(chain, block, start, at, end):
                        yield (*inner, *rest)


def _through(chain: Chain, block: Block, start: int, at: int, end: int) -> Iterator[Cover]:
    branches = list(range(len(block.branches)))
    before, behind = _operators(chain, start, at), _operators(chain, at + 1, end)
    for q in branches if before else [None]:
        for p in branches if behind else [None]:
            if q == p and q is not None:
                continue
            others = [block.branches[i] for i in branches if i not in (q, p)]
            heads = [()] if q is None else list(_with_head(before, block.branches[q]))
            tails = [()] if p is None else list(_with_tail(block.branches[p], behind))
            for head, tail, rest in itertools.product(heads, tails, list(_side_by_side(others))):
                yield (*head, *rest, *tail)


def _with_head(before: Part, branch: Chain) -> Iterator[Cover]:
    for length in range(1, len(branch.items) + 1):
        for rest in covers(branch, length):
            yield (before | _operators(branch, 0, length), *rest)


def _with_tail(branch: Chain, behind: Part) -> Iterator[Cover]:
    for start in range(len(branch.items)):
        for rest in covers(branch, 0, start):
            yield (*rest, behind | _operators(branch, start, len(branch.items)))


def _side_by_side(branches: Sequence[Chain]) -> Iterator[Cover]:
    if not branches:
        yield ()
        return
    first, others = branches[0], branches[1:]
    for rest in _side_by_side(others):
        for cover in covers(first):
            yield (*cover, *rest)
    for count in range(1, len(others) + 1):
        for chosen in itertools.combinations(range(len(others)), count):
            group = frozenset(first.operators).union(*(others[i].operators for i in chosen))
            for rest in _side_by_side([b for i, b in enumerate(others) if i not in chosen]):
                yield (group, *rest)


def divisions(items: Sequence[int]) -> Iterator[Cover]:
    """Yield all ways to divide items into parts."""
    if not items:
        yield ()
        return
    first, others = items[0], items[1:]
    for count in range(len(others) + 1):
        for chosen in itertools.combinations(others, count):
            for rest in divisions([i for i in others if i not in chosen]):
                yield (frozenset((first, *chosen)), *rest)


def is_circular(problem: PlanningProblem, cover: Cover) -> bool:
    """Return whether parts feed each other in a circle: none is left that needs no other."""
    left = list(cover)
    while left:
        outside = [
            {p for u in part for p in problem.graph.predecessors[u]} & set().union(*left) - part for part in left
        ]
        free = [part for part, needs in zip(left, outside, strict=True) if not needs]
        if not free:
            return True
        left = [part for part in left if part not in free]
    return False


def every_plan(problem: PlanningProblem, size: int) -> Iterator[Draft]:
    """Yield every plan of one micro-batch size, with nothing recomputed: stages, shared devices, replicas."""
    operators, batch = problem.graph.operators, problem.mini_batch_size
    for cover in divisions(range(len(operators))):
        mixes = [{operators[u].is_batch_wise for u in part} for part in cover]
        if is_circular(problem, cover) or (size < batch and any(len(kinds) > 1 for kinds in mixes)):
            continue
        for groups in divisions(range(len(cover))):
            for replicas in itertools.product(range(1, len(problem.cluster) + 1), repeat=len(groups)):
                stages = [
                    DraftStage(
                        tuple(sorted(cover[x])), batch if True in mixes[x] else size, Choice(count, Recompute.NONE), g
                    )
                    for g, (group, count) in enumerate(zip(groups, replicas, strict=True))
                    for x in group
                ]
                most = [1 if True in mixes[x] else size for group in groups for x in group]
                fits = all(stage.choice.num_replicas <= each for stage, each in zip(stages, most, strict=True))
                if sum(replicas) <= len(problem.cluster) and fits:
                    yield ordered(problem.graph, stages)


def loads(problem: PlanningProblem, plan: Draft) -> dict[int, float]:
    """Return by group the seconds that its busiest device computes for a mini-batch."""
    found: dict[int, float] = {}
    for stage in plan.stages:
        costs = problem.profile.at(-(-stage.micro_batch_size // stage.choice.num_replicas))
        operators = list(stage.operators)
        seconds = float(costs.forward_s[operators].sum() + costs.backward_s[operators].sum())
        passes = problem.mini_batch_size // stage.micro_batch_size
        found[stage.group] = found.get(stage.group, 0.0) + passes * seconds
    return found


def bottleneck_s(problem: PlanningProblem, plan: Draft) -> float:
    """Return the seconds of the busiest device, or its outgoing link, on a mini-batch, with its sums of gradients.

    All devices are in one node. A value is sent once to each stage that reads it.
    """
    graph, link = problem.graph, problem.cluster.inside_node
    owner = {u: stage for stage in plan.stages for u in stage.operators}
    link_s = dict.fromkeys((stage.group for stage in plan.stages), 0.0)
    reduce_s = dict(link_s)
    has_backward = {stage: any(graph.operators[u].has_backward for u in stage.operators) for stage in plan.stages}
    for value in graph.values:
        maker = owner[graph.index[value.producer]]
        for reader in {owner[graph.index[c]] for c in value.consumers}:
            if reader.group == maker.group:
                continue
            both = [(maker, True), (reader, value.carries_gradient and has_backward[maker] and has_backward[reader])]
            for sender, sends in both:
                passes = problem.mini_batch_size // sender.micro_batch_size
                num_bytes = passes * value.num_bytes(sender.micro_batch_size) / sender.choice.num_replicas
                link_s[sender.group] += sends * num_bytes / link.bandwidth_bytes_per_s
    for stage in plan.stages:
        # Every reader of a parameter counts it.
        trainable = sum(graph.operators[u].trainable_bytes for u in stage.operators)
        reduce_s[stage.group] += ring_all_reduce_s(trainable, stage.choice.num_replicas, link)
    return max(max(load_s, link_s[g]) + reduce_s[g] for g, load_s in loads(problem, plan).items())


class Oracle:
    """Scores partitions for one micro-batch size, with 1F1B and nothing recomputed."""

    def __init__(self, problem: PlanningProblem, micro_batch_size: int) -> None:
        self.problem = problem
        self.size = micro_batch_size
        self.graph = problem.graph
        self.count = -(-problem.mini_batch_size // micro_batch_size)

    def stage_s(self, part: Part, replicas: int) -> float:
        """Return the seconds a micro-batch of the busier of processor and link, with its share of the reduction."""
        batch = self.problem.mini_batch_size
        compute_s = link_bytes = 0.0
        for u in part:
            whole = self.graph.operators[u].is_batch_wise
            costs = self.problem.profile.at(batch if whole else -(-self.size // replicas))
            seconds = float(costs.forward_s[u] + costs.backward_s[u])
            compute_s += seconds / self.count if whole else seconds
        for value in self.graph.values:
            made = self.graph.index[value.producer] in part
            outside = any(self.graph.index[c] not in part for c in value.consumers)
            read = any(self.graph.index[c] in part for c in value.consumers)
            if (made and outside) or (not made and read and value.carries_gradient):
                link_bytes += value.num_bytes(self.size)
        cluster = self.problem.cluster
        slowest = cluster.slowest_link(range(len(cluster)))
        ring = cluster.inside_node if replicas <= cluster.devices_per_node else slowest
        # Every reader of a parameter counts it.
        trainable = sum(self.graph.operators[u].trainable_bytes for u in part)
        link_s = link_bytes / replicas / slowest.bandwidth_bytes_per_s
        return max(compute_s, link_s) + ring_all_reduce_s(trainable, replicas, ring) / self.count

    def levels(self, cover: Cover) -> list[int]:
        """Return the micro-batches that each stage holds: its longest way to a sink, in stages."""
        owner = {u: x for x, part in enumerate(cover) for u in part}
        found: dict[int, int] = {}

        def level(x: int) -> int:
            if x not in found:
                after = {owner[v] for u in cover[x] for v in self.graph.successors[u]} - {x}
                mixes = any(self.graph.operators[u].is_batch_wise for u in cover[x])
                found[x] = self.count if mixes else min(self.count, 1 + max((level(y) for y in after), default=0))
            return found[x]

        return [level(x) for x in range(len(cover))]

    def fits(self, part: Part, replicas: int, level: int) -> bool:
        """Return whether a replica of a stage has the memory for `level` micro-batches."""
        state = sum(
            p.num_bytes
            + (p.num_bytes * (1 + self.problem.optimizer.state_bytes_per_parameter_byte) if p.is_trainable else 0)
            for u in part
            for p in self.graph.operators[u].parameters
        )
        saved = received = returned = awaited = 0.0
        for u in part:
            whole = self.graph.operators[u].is_batch_wise
            costs = self.problem.profile.at(self.problem.mini_batch_size if whole else -(-self.size // replicas))
            saved += float(costs.saved_bytes[u]) / (self.count if whole else 1)
        for value in self.graph.values:
            made = self.graph.index[value.producer] in part
            num_bytes = value.num_bytes(self.size) / replicas
            if made and any(self.graph.index[c] not in part for c in value.consumers):
                awaited += num_bytes if value.carries_gradient else 0
            if not made and any(self.graph.index[c] in part for c in value.consumers):
                received += num_bytes
                returned += num_bytes if value.carries_gradient else 0
        if any(self.graph.operators[u].has_backward for u in part):
            held = level * saved + min(self.count, level + 2) * received
        else:
            held = saved + min(self.count, 3) * received
        buffers = min(self.count, 5) * returned + min(self.count, 2) * awaited
        available = min(d.memory_bytes for d in self.problem.cluster.devices) / (1 + WORKSPACE_MARGIN)
        return state + held + buffers <= available

    def least_target_s(self, chain: Chain, replicas: Sequence[int]) -> float:
        """Return the least seconds a micro-batch of the busiest stage, over all covers; infinite where nothing fits."""
        return min((self._best(cover, replicas) for cover in covers(chain)), default=float("inf"))

    def _best(self, cover: Cover, replicas: Sequence[int]) -> float:
        levels = self.levels(cover)
        alone = [any(self.graph.operators[u].is_batch_wise for u in part) for part in cover]
        options = [
            [(r, self.stage_s(part, r)) for r in replicas if self.fits(part, r, level) and (r == 1 or not single)]
            for part, level, single in zip(cover, levels, alone, strict=True)
        ]
        return min(
            (
                max(seconds for _, seconds in choice)
                for choice in itertools.product(*options)
                if sum(r for r, _ in choice) <= len(self.problem.cluster)
            ),
            default=float("inf"),
        )


def check_strategy(strategy: Strategy, found: Estimate) -> None:
    """Check a strategy without the package's own checks: conditions C1 to C4, devices, memory, and claimed figures."""
    graph, stages = strategy.graph, strategy.stages.stages
    # C1: the stages partition the operators, and each is convex.
    names = [name for stage in stages for name in stage.operators]
    assert sorted(names) == sorted(o.name for o in graph.operators)
    assert all(stage.operators for stage in stages)
    owner = {name: x for x, stage in enumerate(stages) for name in stage.operators}
    reach: dict[int, set[int]] = {}
    for u in reversed(range(len(graph.operators))):
        reach[u] = {u}.union(*(reach[v] for v in graph.successors[u]))
    for stage in stages:
        inside = {graph.index[name] for name in stage.operators}
        after = set().union(*(reach[u] for u in inside))
        assert all(not (reach[u] & inside) for u in after - inside), "a path leaves a stage and comes back"
    # C2: operators that feed another stage make an edge, and all edges lead forward. In a chain each stage also follows
    # the one before it.
    wanted = {(owner[v.producer], owner[c]) for v in graph.values for c in v.consumers}
    edges = {(e.source, e.target) for e in strategy.stages.edges}
    turns = set(itertools.pairwise(range(len(stages)))) if strategy.stages.order is StageOrder.CHAIN else set()
    assert edges == {(x, y) for x, y in wanted if x != y} | turns
    assert all(x < y for x, y in edges)
    # C3: devices exist, and two stages share all of theirs or none.
    for stage in stages:
        assert set(stage.devices) <= set(range(len(strategy.cluster)))
        assert 1 <= len(set(stage.devices)) == len(stage.devices) <= stage.micro_batch_size
        assert all(set(s.devices) == set(stage.devices) or not set(s.devices) & set(stage.devices) for s in stages)
        if any(graph.operators[graph.index[name]].is_batch_wise for name in stage.operators):
            assert stage.micro_batch_size == strategy.mini_batch_size
            assert len(stage.devices) == 1
    # C4: every task once, in sequence, forward before backward.
    for order in strategy.schedule.orders:
        done: dict[tuple[int, Phase], int] = {}
        for task in order.tasks:
            key = (task.stage, task.phase)
            assert task.micro_batch == done.get(key, 0)
            done[key] = task.micro_batch + 1
            if task.phase is Phase.BACKWARD:
                assert done[task.stage, Phase.FORWARD] > task.micro_batch
        for x, stage in enumerate(stages):
            if stage.devices == order.devices:
                count = -(-strategy.mini_batch_size // stage.micro_batch_size)
                assert done[x, Phase.FORWARD] == count
                backward = any(graph.operators[graph.index[name]].has_backward for name in stage.operators)
                assert done.get((x, Phase.BACKWARD), 0) == (count if backward else 0)
    for device, peak in enumerate(found.peak_bytes):
        assert peak <= strategy.cluster.devices[device].memory_bytes
    assert strategy.notes["iteration_s"] == found.iteration_s
