"""What a planner has to say about its plan, as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from graphpipe.estimate import Estimate
from graphpipe.graph.series_parallel import Knot
from graphpipe.planner.base import PlanningProblem
from graphpipe.planner.bounds import LowerBound
from graphpipe.strategy import Strategy

# A device that works this share of an iteration leaves nothing to gain from another order of tasks.
BUSY = 0.9


def plan_notes(
    problem: PlanningProblem,
    strategy: Strategy,
    found: Estimate,
    bound: LowerBound,
    by_size: Mapping[int, float],
    knots: Sequence[Knot] = (),
    is_best: bool | None = None,
) -> dict[str, Any]:
    """Return the notes of a plan.

    Args:
        problem: The problem.
        strategy: The plan.
        found: Its simulation.
        bound: What no plan can beat.
        by_size: Seconds of an iteration of the best plan of each micro-batch size that was not ruled out, by playing it
            through, and of the winner's size by simulation.
        knots: The parts of the graph that were put in line.
        is_best: Whether all plans were weighed and none is better; None where that is not known.
    """
    devices = problem.cluster.devices
    idle = [found.idle_share(d) for d in range(len(devices))]
    used = set(strategy.stages.devices)
    names = [operator.name for operator in problem.graph.operators]
    return {
        "iteration_s": found.iteration_s,
        "certificate": {
            "lower_bound_s": bound.seconds,
            "work_s": bound.work_s,
            "path_s": bound.path_s,
            "ratio": found.iteration_s / bound.seconds if bound.seconds else 1.0,
            "best_of_all_plans": is_best,
        },
        "why": _why(problem, strategy, found, idle),
        "iteration_s_by_micro_batch_size": {str(size): seconds for size, seconds in sorted(by_size.items())},
        "idle_share": [round(share, 4) for share in idle],
        "idle_devices": [device.name for d, device in enumerate(devices) if d not in used],
        "knots": [[names[u] for u in knot.operators] for knot in knots],
    }


def _why(problem: PlanningProblem, strategy: Strategy, found: Estimate, idle: Sequence[float]) -> str:
    """Return in a sentence what keeps the plan from being faster."""
    stages = strategy.stages
    busiest = min(stages.devices, key=lambda d: (idle[d], d))
    held = [x for x, stage in enumerate(stages.stages) if busiest in stage.devices]
    name = problem.cluster.devices[busiest].name
    busy = 1 - idle[busiest]
    least = min(stages.num_micro_batches(x) for x in range(len(stages.stages)))
    most = max(stages.num_micro_batches(x) for x in range(len(stages.stages)))
    if busy >= BUSY:
        others = [idle[d] for d in stages.devices if d != busiest]
        text = f"device {name} with stages {held} works {busy:.0%} of the iteration"
        if others and max(others) > 1 - BUSY:
            text += f"; the work does not divide better, others are idle up to {max(others):.0%}"
        return text
    if least == 1 < most:
        return (
            f"an operator takes the whole mini-batch, so every forward pass before it comes first; the busiest device, "
            f"{name}, works {busy:.0%} of the iteration"
        )
    reduce_s = sum(s.duration_s for s in found.trace.spans if s.device == busiest and s.kind == "reduce")
    if found.iteration_s and reduce_s > 0.5 * (1 - busy) * found.iteration_s:
        return (
            f"device {name} works {busy:.0%} of the iteration and sums gradients for {reduce_s / found.iteration_s:.0%}"
        )
    return (
        f"filling and draining a pipeline {stages.depth} stages deep with {most} micro-batches; the busiest device, "
        f"{name}, works {busy:.0%} of the iteration"
    )
