"""Plans on devices, what they are guessed to take, and the best of them by simulation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from graphpipe.errors import DeadlockError, PlanningError
from graphpipe.estimate import Estimate, check_memory, estimate
from graphpipe.planner.base import PlanningProblem, divisors, scheduled
from graphpipe.planner.draft import Draft, split_early_forks, split_late_joins, stage_graph
from graphpipe.planner.placement import place
from graphpipe.planner.predict import Prediction, predict
from graphpipe.stage import StageGraph
from graphpipe.strategy import Strategy


@dataclass(frozen=True, eq=False)
class Candidate:
    """A plan that may be the best.

    Attributes:
        plan: The stages without devices.
        stages: The stages on devices.
        predicted: What it is guessed to take.
        micro_batch_size: Samples a micro-batch, where a stage has no size of its own.
    """

    plan: Draft
    stages: StageGraph
    predicted: Prediction
    micro_batch_size: int

    @property
    def num_tasks(self) -> int:
        """Tasks in its schedule."""
        return sum(2 * self.stages.num_micro_batches(x) for x in range(len(self.stages.stages)))


def candidate(problem: PlanningProblem, plan: Draft, micro_batch_size: int, k: int) -> Candidate:
    """Return a draft on devices, with a guess of its time."""
    stages = stage_graph(problem, plan, place(problem.graph, problem.cluster, plan))
    return Candidate(plan, stages, predict(problem.cost_model, stages, k), micro_batch_size)


def variants(problem: PlanningProblem, plan: Draft, micro_batch_size: int, k: int) -> Iterator[Candidate]:
    """Yield a draft as it is, and with its late joins and early forks as stages of their own."""
    joins = split_late_joins(problem.graph, plan)
    forks = split_early_forks(problem.graph, plan)
    for variant in dict.fromkeys((plan, joins, forks, split_early_forks(problem.graph, joins))):
        yield candidate(problem, variant, micro_batch_size, k)


def correction(problem: PlanningProblem, plan: Candidate, k: int, num_micro_batches: int) -> float:
    """Return by how much a plan's guess is off, as a simulation of a mini-batch of fewer micro-batches shows.

    Args:
        problem: The problem.
        plan: The plan.
        k: Passes in a round.
        num_micro_batches: The micro-batches to simulate.
    """
    batch = plan.micro_batch_size * num_micro_batches
    shorter = replace(problem, mini_batch_size=batch, micro_batch_sizes=(plan.micro_batch_size,))
    stages = tuple(
        replace(stage, micro_batch_size=batch) if stage.micro_batch_size == problem.mini_batch_size else stage
        for stage in plan.stages.stages
    )
    graph = StageGraph(problem.graph, stages, batch)
    guess_s = predict(shorter.cost_model, graph, k).iteration_s
    return estimate(scheduled(shorter, stages, planner="", k=k)).iteration_s / guess_s if guess_s else 1.0


@dataclass(frozen=True, eq=False)
class Simulated:
    """A plan with its simulation."""

    candidate: Candidate
    strategy: Strategy
    estimate: Estimate


def simulated(problem: PlanningProblem, plan: Candidate, planner: str, k: int) -> Simulated | None:
    """Return a plan with its simulation, or None where a device lacks the memory for it."""
    try:
        strategy = scheduled(problem, plan.stages.stages, planner=planner, k=k)
        found = estimate(strategy)
        check_memory(strategy, found)
    except (PlanningError, DeadlockError):
        return None
    return Simulated(plan, strategy, found)


def with_sizes_of_stages(problem: PlanningProblem, plan: Candidate, k: int) -> Iterable[Candidate]:
    """Yield the plan with the micro-batch size of one group of stages changed to the next divisor up or down."""
    sizes = divisors(problem.mini_batch_size)
    for group in sorted({stage.group for stage in plan.plan.stages}):
        for step in (-1, 1):
            stages = []
            for stage in plan.plan.stages:
                # The whole mini-batch stays whole: an operator there may mix samples.
                at = sizes.index(stage.micro_batch_size) + step
                if stage.group == group and stage.micro_batch_size < problem.mini_batch_size and at >= 0:
                    stage = replace(stage, micro_batch_size=max(sizes[at], stage.choice.num_replicas))  # noqa: PLW2901
                stages.append(stage)
            changed = Draft(tuple(stages))
            if changed != plan.plan:
                yield candidate(problem, changed, plan.micro_batch_size, k)
