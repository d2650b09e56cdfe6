"""Stage graphs as drafts, and plans of long steps, for tests of what planners guess."""

from __future__ import annotations

from hypothesis import strategies as st

from graphpipe.cluster import Cluster
from graphpipe.cost import SGD
from graphpipe.planner.base import PlanningProblem
from graphpipe.planner.candidates import Candidate
from graphpipe.planner.costs import Choice
from graphpipe.planner.draft import Draft, DraftStage, ordered
from graphpipe.planner.sketch import Sketch, Sketcher
from graphpipe.schedule import device_groups
from graphpipe.stage import Recompute, StageGraph
from tests.strategies import LINKS, computation_graphs, partitions, profiles, random_edges


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


@st.composite
def long_plans(draw: st.DrawFn) -> tuple[PlanningProblem, Candidate]:
    """Up to three stages with many micro-batches of a sample, some on shared devices, with and without much memory."""
    graph = draw(computation_graphs(random_edges(5), may_mix_samples=False))
    stages: list[DraftStage] = []
    for part in draw(partitions(graph, 3)):
        group = draw(st.integers(0, 1 + max((stage.group for stage in stages), default=-1)))
        stages.append(DraftStage(part, 1, Choice(1, Recompute.NONE), group))
    problem = PlanningProblem(
        graph=graph,
        profile=draw(profiles(graph)),
        cluster=Cluster.uniform(
            3, memory_bytes=draw(st.sampled_from((2000, 10**9))), inside_node=draw(st.sampled_from(LINKS))
        ),
        mini_batch_size=draw(st.sampled_from((48, 80))),
        optimizer=SGD,
        micro_batch_sizes=(1,),
    )
    return problem, Candidate(Sketcher(problem).sketch(ordered(graph, stages)), 1)
