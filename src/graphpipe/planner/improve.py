"""Small changes of a plan, for what the tables of fewest devices do not see.

They know the busiest stage and the depth, not how long a sample takes to come through. With few micro-batches that is
what counts, so the best plans are tried with more replicas, fewer stages, and operators moved to the next stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from graphpipe.planner.base import PlanningProblem
from graphpipe.planner.candidates import Candidate, variants
from graphpipe.planner.costs import Choice
from graphpipe.planner.draft import Draft, DraftStage, ordered
from graphpipe.planner.search import replica_counts
from graphpipe.planner.sketch import Sketcher

# A look at a plan costs `LOOK`, and 1 for each pair of its stages, in the unit of `Budget.left`.
LOOK = 16
# In a plan of more stages a change of one makes little difference.
MOST_STAGES = 16


@dataclass
class Budget:
    """How much may still be spent on changes.

    Attributes:
        left: In looks, see `LOOK`.
    """

    left: int

    def spend(self, plan: Candidate) -> bool:
        """Pay for a look at a plan; return whether anything is left."""
        self.left -= LOOK + len(plan.plan.stages) ** 2 // 2
        return self.left > 0


def changed(sketcher: Sketcher, plan: Candidate) -> Iterator[Candidate]:
    """Yield the plans that one change leads to."""
    for kind in (_replicas, _regrouped, _merged, _moved):
        for change in kind(sketcher.problem, plan):
            if _is_valid(sketcher.problem, change):
                try:
                    drafted = ordered(sketcher.problem.graph, change.stages)
                except ValueError:
                    # A stage is not convex.
                    continue
                yield from variants(sketcher, drafted, plan.micro_batch_size)


def _is_valid(problem: PlanningProblem, plan: Draft) -> bool:
    """Return whether stages have operators, as many samples as replicas, and what mixes samples on one device."""
    for stage in plan.stages:
        if not stage.operators or stage.choice.num_replicas > stage.micro_batch_size:
            return False
        is_whole = stage.choice.num_replicas == 1 and stage.micro_batch_size == problem.mini_batch_size
        if not is_whole and any(problem.graph.operators[u].is_batch_wise for u in stage.operators):
            return False
    return True


def _groups(plan: Draft) -> dict[int, list[DraftStage]]:
    found: dict[int, list[DraftStage]] = {}
    for stage in plan.stages:
        found.setdefault(stage.group, []).append(stage)
    return found


def _most_replicas(problem: PlanningProblem, stages: list[DraftStage], available: int) -> int:
    """Return the most replicas that stages on the same devices can use, up to a number of devices."""
    mixes = any(problem.graph.operators[u].is_batch_wise for stage in stages for u in stage.operators)
    size = 1 if mixes else min(stage.micro_batch_size for stage in stages)
    return replica_counts(size, available)[-1] if available else 0


def _with_replicas(plan: Draft, group: int, num_replicas: int) -> Draft:
    return Draft(
        tuple(
            replace(stage, choice=Choice(num_replicas, stage.choice.recompute)) if stage.group == group else stage
            for stage in plan.stages
        )
    )


def _replicas(problem: PlanningProblem, plan: Candidate) -> Iterator[Draft]:
    """Give a group devices that are free, or those of another group, or leave one of its own idle."""
    groups = _groups(plan.plan)
    free = len(problem.cluster) - plan.plan.num_devices
    for group, stages in groups.items():
        now = stages[0].choice.num_replicas
        most = _most_replicas(problem, stages, now + free)
        if most > now:
            yield _with_replicas(plan.plan, group, most)
        if now > 1:
            # Fewer replicas sum their gradients sooner.
            yield _with_replicas(plan.plan, group, now - 1)
        for other, others in groups.items():
            fewer = others[0].choice.num_replicas - 1
            if other != group and fewer:
                more = _most_replicas(problem, stages, now + free + 1)
                if more > now:
                    yield _with_replicas(_with_replicas(plan.plan, other, fewer), group, more)


def _regrouped(problem: PlanningProblem, plan: Candidate) -> Iterator[Draft]:
    """Move a stage to the devices of another group, or from shared devices to free ones."""
    groups = _groups(plan.plan)
    free = len(problem.cluster) - plan.plan.num_devices
    for at, stage in enumerate(plan.plan.stages):
        is_shared = len(groups[stage.group]) > 1
        for group, others in groups.items():
            count = others[0].choice.num_replicas
            if group != stage.group and (is_shared or count >= stage.choice.num_replicas):
                yield _with_stage(
                    plan.plan, at, replace(stage, group=group, choice=replace(stage.choice, num_replicas=count))
                )
        count = _most_replicas(problem, [stage], free)
        if is_shared and count:
            alone = replace(stage, group=len(groups), choice=replace(stage.choice, num_replicas=count))
            yield _with_stage(plan.plan, at, alone)


def _with_stage(plan: Draft, at: int, stage: DraftStage) -> Draft:
    return Draft((*plan.stages[:at], stage, *plan.stages[at + 1 :]))


def _merged(problem: PlanningProblem, plan: Candidate) -> Iterator[Draft]:
    """Make one stage of two that follow each other, on the devices of both."""
    free = len(problem.cluster) - plan.plan.num_devices
    for source, target in plan.sketch.links:
        x, y = plan.plan.stages[source], plan.plan.stages[target]
        if x.group == y.group or x.micro_batch_size != y.micro_batch_size:
            continue
        both = tuple(sorted((*x.operators, *y.operators)))
        rest = [stage for stage in plan.plan.stages if stage not in (x, y)]
        held = [replace(stage, group=x.group) if stage.group == y.group else stage for stage in rest]
        merged = replace(x, operators=both)
        members = [stage for stage in held if stage.group == x.group] + [merged]
        available = x.choice.num_replicas + y.choice.num_replicas + free
        count = _most_replicas(problem, members, available)
        if count:
            yield _with_replicas(Draft((*held, merged)), x.group, count)


def _moved(problem: PlanningProblem, plan: Candidate) -> Iterator[Draft]:
    """Move an operator over the border between two stages, or one that nothing holds in its stage to any other."""
    graph = problem.graph
    stages = plan.plan.stages
    for at, giver in enumerate(stages):
        for u in giver.operators if len(giver.operators) > 1 else ():
            if not {*graph.successors[u], *graph.predecessors[u]} & set(giver.operators):
                for to, taker in enumerate(stages):
                    if at != to and giver.micro_batch_size == taker.micro_batch_size:
                        yield _with_moved(plan.plan, at, to, u)
    for source, target in plan.sketch.links:
        x, y = stages[source], stages[target]
        if x.micro_batch_size != y.micro_batch_size:
            continue
        # The only operator that the rest of its stage leads to, or starts from.
        last = [u for u in x.operators if not set(graph.successors[u]) & set(x.operators)]
        first = [u for u in y.operators if not set(graph.predecessors[u]) & set(y.operators)]
        if len(last) == 1 < len(x.operators):
            yield _with_moved(plan.plan, source, target, last[0])
        if len(first) == 1 < len(y.operators):
            yield _with_moved(plan.plan, target, source, first[0])


def _with_moved(plan: Draft, giver: int, taker: int, operator: int) -> Draft:
    stages = list(plan.stages)
    left = tuple(u for u in stages[giver].operators if u != operator)
    stages[giver] = replace(stages[giver], operators=left)
    stages[taker] = replace(stages[taker], operators=tuple(sorted((*stages[taker].operators, operator))))
    return Draft(tuple(stages))
