"""The quick guess of an iteration against the simulation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpipe.cluster import Cluster, Link
from graphpipe.cost import Profile
from graphpipe.estimate import estimate
from graphpipe.graph import ComputationGraph, Operator, Value
from graphpipe.planner.base import PlanningProblem, scheduled
from graphpipe.planner.predict import Prediction, predict
from graphpipe.stage import Stage, StageGraph
from tests.planner.sketches import sketch


def pipeline(depth: int, mini_batch_size: int, latency_s: float = 0.0) -> tuple[PlanningProblem, StageGraph]:
    """A chain of equal stages, one sample at a time: forward 1 s, backward 2 s."""
    operators = tuple(Operator(name=f"op{i}") for i in range(depth))
    values = tuple(
        Value(name=f"v{i}", producer=f"op{i}", consumers=(f"op{i + 1}",), bytes_per_sample=1) for i in range(depth - 1)
    )
    graph = ComputationGraph("chain", operators, values)
    ones = np.ones((1, depth))
    link = Link(latency_s=latency_s, bandwidth_bytes_per_s=1e12)
    problem = PlanningProblem(
        graph=graph,
        profile=Profile(tuple(o.name for o in operators), (1,), ones, 2 * ones, 0 * ones),
        cluster=Cluster.uniform(depth, memory_bytes=10**9, inside_node=link),
        mini_batch_size=mini_batch_size,
    )
    stages = tuple(Stage(operators=(f"op{i}",), micro_batch_size=1, devices=(i,)) for i in range(depth))
    return problem, StageGraph(graph, stages, mini_batch_size)


def guess(problem: PlanningProblem, stages: StageGraph) -> Prediction:
    found = sketch(problem, stages)
    return predict(found.timed, found.limits)


@given(st.integers(1, 5), st.integers(1, 12))
@settings(deadline=None)
def test_balanced_chains_are_guessed_exactly(depth: int, count: int) -> None:
    problem, stages = pipeline(depth, count)
    guessed = guess(problem, stages)
    assert guessed.iteration_s == pytest.approx(3 * (count + depth - 1))
    assert guessed.bottleneck_s == pytest.approx(3 * count)
    simulated = estimate(scheduled(problem, stages.stages, planner="test"))
    assert guessed.iteration_s == pytest.approx(simulated.iteration_s)


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_latency_limits_what_comes_back_from_a_round_trip(depth: int) -> None:
    problem, stages = pipeline(depth, 40, latency_s=0.5)
    guess_s = guess(problem, stages).iteration_s
    simulated = estimate(scheduled(problem, stages.stages, planner="test"))
    # Without latency the guess would be 3 * (40 + depth - 1).
    assert simulated.iteration_s > 3 * (40 + depth - 1) * 1.1
    assert guess_s == pytest.approx(simulated.iteration_s, rel=0.1)
