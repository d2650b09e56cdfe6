"""From what a search found to stages: the parts of a stage that share its devices, and their order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from graphpipe.graph import ComputationGraph
from graphpipe.graph.dag import topological_order
from graphpipe.planner.backtrack import Piece
from graphpipe.planner.base import PlanningProblem
from graphpipe.planner.costs import Choice
from graphpipe.stage import Recompute, Stage, StageGraph


@dataclass(frozen=True, slots=True)
class DraftStage:
    """A stage that has no devices yet.

    Attributes:
        operators: Positions in the graph, ascending.
        micro_batch_size: Samples a micro-batch.
        choice: Replicas and recomputation.
        group: Stages with the same number share their devices.
    """

    operators: tuple[int, ...]
    micro_batch_size: int
    choice: Choice
    group: int

    def in_group(self, group: int) -> DraftStage:
        """Return the stage in a group."""
        return self if group == self.group else replace(self, group=group)


@dataclass(frozen=True)
class Draft:
    """Stages in a topological order, without devices."""

    stages: tuple[DraftStage, ...]

    @property
    def num_devices(self) -> int:
        """How many devices it takes."""
        return sum({stage.group: stage.choice.num_replicas for stage in self.stages}.values())


def draft(problem: PlanningProblem, pieces: Iterable[Piece], micro_batch_size: int) -> Draft:
    """Return the stages of a search, in a topological order."""
    return ordered(problem.graph, draft_in_sequence(problem, pieces, micro_batch_size).stages)


def draft_in_sequence(problem: PlanningProblem, pieces: Iterable[Piece], micro_batch_size: int) -> Draft:
    """Return the stages of a search, in the order in which they are given.

    An operator that mixes samples takes the whole mini-batch, so where the others of its stage do not, it becomes a
    stage of its own on their device.
    """
    graph = problem.graph
    found: list[DraftStage] = []
    for group, piece in enumerate(pieces):
        for operators, is_batch_wise in _layers(graph, piece.operators):
            size = problem.mini_batch_size if is_batch_wise else micro_batch_size
            choice = Choice(piece.choice.num_replicas, Recompute.NONE) if is_batch_wise else piece.choice
            found.append(DraftStage(operators, size, choice, group))
    return Draft(tuple(found))


def _layers(graph: ComputationGraph, operators: Sequence[int]) -> list[tuple[tuple[int, ...], bool]]:
    """Return operators split by the batch-wise ones that come before them, so that each part is convex."""
    if not any(graph.operators[u].is_batch_wise for u in operators):
        return [(tuple(sorted(operators)), False)]
    inside = set(operators)
    layer: dict[int, int] = {}
    for u in sorted(operators):
        parity = int(graph.operators[u].is_batch_wise)
        before = max((layer[p] for p in graph.predecessors[u] if p in inside), default=0)
        layer[u] = before if before % 2 == parity else before + 1
    return [
        (tuple(u for u in sorted(operators) if layer[u] == each), each % 2 == 1) for each in sorted(set(layer.values()))
    ]


def ordered(graph: ComputationGraph, stages: Sequence[DraftStage]) -> Draft:
    """Return stages in a topological order, by their first operators where it leaves a choice.

    Groups are numbered in the order of their first stages, so that equal drafts compare equal.

    Raises:
        ValueError: The stages feed each other in a circle.
    """
    owner = {u: x for x, stage in enumerate(stages) for u in stage.operators}
    after: list[set[int]] = [set() for _ in stages]
    for u, v in graph.edges:
        if owner[u] != owner[v]:
            after[owner[u]].add(owner[v])
    order = topological_order([sorted(out) for out in after], lambda x: stages[x].operators[0])
    number: dict[int, int] = {}
    for x in order:
        number.setdefault(stages[x].group, len(number))
    return Draft(tuple(stages[x].in_group(number[stages[x].group]) for x in order))


class Splitter:
    """Makes late joins and early forks stages of their own. One for each graph: it remembers what it has seen.

    Args:
        graph: The graph.
    """

    def __init__(self, graph: ComputationGraph) -> None:
        self.graph = graph
        self._components: dict[tuple[int, ...], tuple[tuple[int, ...], ...]] = {}
        self._joins = _Direction(graph.predecessors, is_descending=False)
        self._forks = _Direction(graph.successors, is_descending=True)

    def components(self, plan: Draft) -> Draft:
        """Return a draft in which the parts of a stage that do not exchange anything are stages of their own.

        A stage that holds parts of two branches waits for both before it does anything. On the same devices, but as two
        stages, load and memory are the same, and neither branch waits for the other.
        """
        return self._divided(plan, [self._connected(stage.operators) for stage in plan.stages])

    def _connected(self, operators: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        if operators not in self._components:
            left, found = set(operators), []
            for u in operators:
                if u in left:
                    left.remove(u)
                    part, frontier = [u], [u]
                    while frontier:
                        v = frontier.pop()
                        near = left & {*self.graph.successors[v], *self.graph.predecessors[v]}
                        left -= near
                        part += near
                        frontier += near
                    found.append(tuple(sorted(part)))
            self._components[operators] = tuple(found)
        return self._components[operators]

    def late_joins(self, plan: Draft) -> Draft:
        """Return a draft in which no stage waits for an input before it has work that needs it.

        The operators of a stage that need all of the stages before it become a stage of their own on the same devices,
        where others need only some of them: the tail of a branch and the join behind it. Load and memory are the same,
        the other branches no longer wait for each other.
        """
        return self._split(plan, self._joins)

    def early_forks(self, plan: Draft) -> Draft:
        """Return a draft in which no stage keeps what others wait for until it has done work that they don't need.

        The mirror image of `late_joins`: a fork, and the head of one branch behind it.
        """
        return self._split(plan, self._forks)

    def _split(self, plan: Draft, direction: _Direction) -> Draft:
        owner = [0] * len(self.graph.operators)
        for x, stage in enumerate(plan.stages):
            for u in stage.operators:
                owner[u] = x
        return self._divided(plan, [direction.parts(stage.operators, owner) for stage in plan.stages])

    def _divided(self, plan: Draft, parts: Sequence[Sequence[tuple[int, ...]]]) -> Draft:
        if all(len(each) == 1 for each in parts):
            return plan
        found = [
            replace(stage, operators=part) for stage, each in zip(plan.stages, parts, strict=True) for part in each
        ]
        return ordered(self.graph, found)


class _Direction:
    """Splits stages by what their operators need, or by what needs them.

    Args:
        linked: ``[operators]`` what each operator needs, or what needs it.
        is_descending: Whether what an operator needs comes after it.
    """

    def __init__(self, linked: Sequence[Sequence[int]], *, is_descending: bool) -> None:
        self.linked = linked
        self.is_descending = is_descending
        # By operators of a stage: the others that they need.
        self._outside: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._parts: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], ...]] = {}

    def parts(self, operators: tuple[int, ...], owner: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Return the operators of a stage in one part or two.

        Args:
            operators: The operators, ascending.
            owner: ``[operators]`` the stage of each operator of the graph.
        """
        if operators not in self._outside:
            inside = set(operators)
            self._outside[operators] = tuple({p for u in operators for p in self.linked[u] if p not in inside})
        outside = self._outside[operators]
        owners = [owner[p] for p in outside]
        # Which stages they are makes no difference, only which of them are the same.
        names = {x: n for n, x in enumerate(dict.fromkeys(owners))}
        key = (operators, tuple(names[x] for x in owners))
        if key not in self._parts:
            self._parts[key] = self._divided(operators, dict(zip(outside, key[1], strict=True)))
        return self._parts[key]

    def _divided(self, operators: tuple[int, ...], stage: Mapping[int, int]) -> tuple[tuple[int, ...], ...]:
        # The other stages that each operator needs, a bit each.
        needs: dict[int, int] = {}
        everything = 0
        for u in sorted(operators, reverse=self.is_descending):
            needs[u] = 0
            for p in self.linked[u]:
                needs[u] |= needs[p] if p in needs else 1 << stage[p]
            everything |= needs[u]
        shared = tuple(u for u in operators if needs[u] == everything)
        single = tuple(u for u in operators if needs[u] != everything)
        # Two stages that do not depend on each other would be neither a join nor a fork.
        is_linked = any(p in needs and needs[p] != everything for u in shared for p in self.linked[u])
        return (single, shared) if single and is_linked else (operators,)


def stage_graph(
    problem: PlanningProblem, plan: Draft, devices: Mapping[int, tuple[int, ...]] | None = None
) -> StageGraph:
    """Return a draft on devices.

    Args:
        problem: The problem.
        plan: The draft.
        devices: By group; by default they are numbered as the groups come.
    """
    by_group: dict[int, tuple[int, ...]] = {}
    used = 0
    for stage in plan.stages:
        if stage.group not in by_group:
            replicas = stage.choice.num_replicas
            by_group[stage.group] = devices[stage.group] if devices else tuple(range(used, used + replicas))
            used += replicas
    names = [operator.name for operator in problem.graph.operators]
    stages = tuple(
        Stage(
            operators=tuple(names[u] for u in stage.operators),
            micro_batch_size=stage.micro_batch_size,
            devices=by_group[stage.group],
            recompute=stage.choice.recompute,
        )
        for stage in plan.stages
    )
    return StageGraph(problem.graph, stages, problem.mini_batch_size)
