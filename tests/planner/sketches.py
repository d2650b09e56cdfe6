"""Stage graphs as drafts, for tests of what planners guess."""

from __future__ import annotations

from graphpipe.planner.base import PlanningProblem
from graphpipe.planner.costs import Choice
from graphpipe.planner.draft import Draft, DraftStage
from graphpipe.planner.sketch import Sketch, Sketcher
from graphpipe.schedule import device_groups
from graphpipe.stage import StageGraph


def drafted(stages: StageGraph) -> Draft:
    """Return stages as a draft."""
    group = {x: g for g, (_, held) in enumerate(device_groups(stages)) for x in held}
    return Draft(
        tuple(
            DraftStage(
                stages.operator_positions[x],
                stage.micro_batch_size,
                Choice(stage.num_replicas, stage.recompute),
                group[x],
            )
            for x, stage in enumerate(stages.stages)
        )
    )


def sketch(problem: PlanningProblem, stages: StageGraph, k: int = 1) -> Sketch:
    """Return the sketch of stages; their devices are chosen by the planner."""
    return Sketcher(problem, k).sketch(drafted(stages))
