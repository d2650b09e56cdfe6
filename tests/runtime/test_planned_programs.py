"""Strategies of all planners train a model with the loss and gradients of one process."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpipe.cluster import Cluster
from graphpipe.cost import SGD, Profile
from graphpipe.errors import PlanningError
from graphpipe.planner.base import Planner, PlanningProblem
from graphpipe.planner.graphpipe import GraphPipePlanner
from graphpipe.planner.pipedream import PipeDreamPlanner
from graphpipe.planner.piper import PiperPlanner
from graphpipe.program import lower
from graphpipe.stage import Recompute
from graphpipe.strategy import Strategy
from tests.graph_models import GraphModel, OperatorShape, make_batch
from tests.runtime.agreement import assert_as_one_process
from tests.runtime.test_random_programs import graph_models

PLANNERS = (GraphPipePlanner(), PipeDreamPlanner(), PiperPlanner())


def problem_of(model: GraphModel, num_devices: int, memory_bytes: int, saved_bytes: float) -> PlanningProblem:
    ones = np.ones((1, len(model.graph.operators)))
    return PlanningProblem(
        graph=model.graph,
        profile=Profile(tuple(o.name for o in model.graph.operators), (1,), ones, 2 * ones, saved_bytes * ones),
        cluster=Cluster.uniform(num_devices, memory_bytes=memory_bytes),
        mini_batch_size=8,
        micro_batch_sizes=(2, 4),
        optimizer=SGD,
    )


def check_training(model: GraphModel, strategy: Strategy) -> None:
    program = lower(strategy.stages, strategy.schedule, num_devices=len(strategy.cluster))
    assert_as_one_process(model, program, make_batch(strategy.mini_batch_size), strategy.costs)


@pytest.mark.parametrize("planner", PLANNERS, ids=lambda planner: planner.name)
@settings(max_examples=15, deadline=None)
@given(model=graph_models(), num_devices=st.integers(1, 4), saved_bytes=st.sampled_from((10.0, 10_000.0)))
def test_strategies_train_as_one_process(
    planner: Planner, model: GraphModel, num_devices: int, saved_bytes: float
) -> None:
    try:
        strategy = planner.plan(problem_of(model, num_devices, 150_000, saved_bytes))
    except PlanningError:
        return
    check_training(model, strategy)


def test_piper_trains_with_recomputation_where_memory_is_scarce() -> None:
    chain = GraphModel([OperatorShape(reads=(i - 1,) if i else ()) for i in range(6)], seed=0)
    # Two operators a device keep 80 kB of a micro-batch of four; the first stage would hold three of them.
    problem = replace(problem_of(chain, 3, 100_000, 10_000.0), micro_batch_sizes=(4,))
    with pytest.raises(PlanningError):
        PipeDreamPlanner().plan(problem)
    strategy = PiperPlanner().plan(problem)
    assert any(stage.recompute is Recompute.ALL for stage in strategy.stages.stages)
    check_training(chain, strategy)
