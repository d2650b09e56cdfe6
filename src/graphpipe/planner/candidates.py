"""Plans that may be the best, and their simulation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from graphpipe.errors import PlanningError
from graphpipe.estimate import Estimate, check_memory, estimate
from graphpipe.planner.base import PlanningProblem, divisors, scheduled
from graphpipe.planner.draft import Draft, stage_graph
from graphpipe.planner.predict import Prediction
from graphpipe.planner.sketch import Sketch, Sketcher
from graphpipe.schedule.play import play
from graphpipe.stage import StageOrder
from graphpipe.strategy import Strategy

# So many plans are simulated at most, once one fits into memory.
SIMULATED_PLANS = 4
# A simulation that takes longer by less than this share is as it was played.
AS_PLAYED = 1e-3
# Of a plan with more tasks, the whole is not played to see whether limits that were fitted on its beginning are enough.
WIDENED_TASKS = 20_000


@dataclass(frozen=True, eq=False)
class Candidate:
    """A plan that may be the best.

    Attributes:
        sketch: The stages on devices, as numbers.
        micro_batch_size: Samples a micro-batch, where a stage has no size of its own.
    """

    sketch: Sketch
    micro_batch_size: int

    @property
    def plan(self) -> Draft:
        """The stages."""
        return self.sketch.plan

    @property
    def predicted(self) -> Prediction:
        """What it is guessed to take."""
        return self.sketch.predicted


def variants(sketcher: Sketcher, plan: Draft, micro_batch_size: int) -> Iterator[Candidate]:
    """Yield a draft as it is, and with its late joins and early forks as stages of their own."""
    splitter = sketcher.splitter
    joins, forks = splitter.late_joins(plan), splitter.early_forks(plan)
    # Mostly there is nothing to split, and the same plan comes back.
    both = forks if joins is plan else splitter.early_forks(joins)
    for variant in dict.fromkeys((plan, joins, forks, both)):
        yield Candidate(sketcher.sketch(variant), micro_batch_size)


@dataclass(frozen=True, eq=False)
class Simulated:
    """A plan with its simulation."""

    candidate: Candidate
    strategy: Strategy
    estimate: Estimate


def simulated(
    problem: PlanningProblem, plan: Candidate, planner: str, k: int, order: StageOrder = StageOrder.GRAPH
) -> Simulated | None:
    """Return a plan with its simulation, or None where a device lacks the memory for it.

    Where more samples in flight make it faster, it gets as many as that takes and memory allows.

    Args:
        problem: The problem.
        plan: The plan.
        planner: Who made it.
        k: Passes in a round.
        order: What its stages wait for.
    """
    sketch = plan.sketch
    stages = stage_graph(problem, plan.plan, sketch.devices).stages
    steps = zip(sketch.limits, sketch.fitted, sketch.timed.sizes, strict=True)
    wide = _wide_enough(sketch)
    between = tuple(least + max(0, most - least) // 2 // size * size for least, most, size in steps)
    smallest = tuple(map(min, sketch.fitted, sketch.limits))
    for limits in dict.fromkeys((wide, sketch.fitted, between, sketch.limits, smallest)):
        strategy = scheduled(problem, stages, planner=planner, k=k, limits=limits, order=order)
        found = estimate(strategy)
        try:
            check_memory(strategy, found)
        except PlanningError:
            continue
        return Simulated(plan, strategy, found)
    return None


def _wide_enough(sketch: Sketch) -> tuple[int, ...]:
    """Return limits with which the whole mini-batch is as fast as with the largest ones.

    Those of a long mini-batch were fitted on its beginning, which may end before samples in flight run short.
    """
    tasks = 2 * sum(sketch.timed.counts)
    if sketch.played_tasks == tasks or tasks > WIDENED_TASKS:
        return sketch.fitted
    goal_s = play(sketch.timed, sketch.rounds, sketch.most).makespan_s * (1 + AS_PLAYED)
    limits = sketch.fitted
    while limits != sketch.most and play(sketch.timed, sketch.rounds, limits).makespan_s > goal_s:
        limits = tuple(max(limit, min(2 * limit, most)) for limit, most in zip(limits, sketch.most, strict=True))
    return limits


def best_simulated(
    problem: PlanningProblem,
    ranked: Iterable[Candidate],
    planner: str,
    k: int,
    order: StageOrder = StageOrder.GRAPH,
) -> Simulated | None:
    """Return the best of some plans by simulation, or None where none fits into memory.

    Args:
        problem: The problem.
        ranked: The plans, best first.
        planner: Who made them.
        k: Passes in a round.
        order: What their stages wait for.
    """
    best: Simulated | None = None
    left = SIMULATED_PLANS
    for plan in ranked:
        if best is not None:
            if left <= 0:
                break
            # What memory allows may be slower than what was played. If it is not, the order of the plans is right.
            is_as_played = best.estimate.iteration_s <= best.candidate.sketch.played_s * (1 + AS_PLAYED)
            goal_s = best.candidate.sketch.played_s if is_as_played else best.estimate.iteration_s
            if plan.predicted.iteration_s >= goal_s or plan.sketch.played_s >= goal_s:
                continue
        found = simulated(problem, plan, planner, k, order)
        left -= found is not None
        if found is not None and (best is None or found.estimate.iteration_s < best.estimate.iteration_s):
            best = found
    return best


def with_sizes_of_stages(sketcher: Sketcher, plan: Candidate) -> Iterator[Candidate]:
    """Yield the plan with the micro-batch size of one group of stages changed to the next divisor up or down."""
    batch = sketcher.problem.mini_batch_size
    sizes = divisors(batch)
    for group in sorted({stage.group for stage in plan.plan.stages}):
        for step in (-1, 1):
            stages = []
            for stage in plan.plan.stages:
                # The whole mini-batch stays whole: an operator there may mix samples.
                at = sizes.index(stage.micro_batch_size) + step
                if stage.group == group and stage.micro_batch_size < batch and at >= 0:
                    # There are at least as many samples as replicas.
                    size = next(s for s in sizes if s >= max(sizes[at], stage.choice.num_replicas))
                    stage = replace(stage, micro_batch_size=size)  # noqa: PLW2901
                stages.append(stage)
            changed = Draft(tuple(stages))
            if changed != plan.plan:
                yield Candidate(sketcher.sketch(changed), plan.micro_batch_size)
