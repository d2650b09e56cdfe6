"""What is said about a plan, and why it is as slow as it is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from graphpipe.cluster import Cluster, Link
from graphpipe.estimate import estimate
from graphpipe.graph.series_parallel import Knot
from graphpipe.planner.base import PlanningProblem, scheduled
from graphpipe.planner.bounds import LowerBound
from graphpipe.planner.notes import plan_notes
from graphpipe.stage import Stage
from tests.planner.models import towers


def notes(
    problem: PlanningProblem,
    *stages: tuple[tuple[int, ...], int, tuple[int, ...]],
    bound: LowerBound | None = None,
    knots: tuple[Knot, ...] = (),
) -> dict[str, Any]:
    """Return the notes of some stages: operators, micro-batch size and devices."""
    names = [operator.name for operator in problem.graph.operators]
    made = [
        Stage(operators=tuple(names[u] for u in part), micro_batch_size=size, devices=devices)
        for part, size, devices in stages
    ]
    strategy = scheduled(problem, made, planner="test")
    found = estimate(strategy)
    return plan_notes(
        problem, strategy, found, bound or LowerBound(found.iteration_s / 2, 0.0), {16: 2.0, 8: 1.0}, knots
    )


def test_figures_are_those_of_the_simulation_beside_the_bound() -> None:
    problem = towers(1, 2, num_devices=3, parameter_bytes=0)
    found = notes(problem, ((0, 1, 2), 32, (1,)), knots=(Knot((0, 1)),))
    # 2.05 operators forward and backward over 32 samples.
    taken_s = 2.05 * 3 * (32e-3 + 3e-4)
    assert found["iteration_s"] == pytest.approx(taken_s)
    assert found["certificate"] == {
        "lower_bound_s": pytest.approx(taken_s / 2),
        "work_s": pytest.approx(taken_s / 2),
        "path_s": 0.0,
        "ratio": pytest.approx(2.0),
        "best_of_all_plans": None,
    }
    assert list(found["iteration_s_by_micro_batch_size"].items()) == [("8", 1.0), ("16", 2.0)]
    assert found["idle_share"] == [1.0, 0.0, 1.0]
    assert found["idle_devices"] == ["cpu0", "cpu2"]
    assert found["knots"] == [["tower0.0", "tower0.1"]]


def test_without_work_every_plan_is_as_good_as_the_bound() -> None:
    problem = towers(1, 1, num_devices=1, parameter_bytes=0, seconds=0.0, overhead_s=0.0)
    found = notes(problem, ((0, 1), 32, (0,)), bound=LowerBound(0.0, 0.0))
    assert found["certificate"]["ratio"] == 1.0


def test_a_device_that_always_works_limits_the_plan() -> None:
    problem = towers(1, 4, num_devices=2, parameter_bytes=0)
    assert (
        notes(problem, ((0, 1, 2, 3, 4), 8, (1,)))["why"] == "device cpu1 with stages [0] works 100% of the iteration"
    )
    uneven = notes(problem, ((0, 1, 2), 1, (0,)), ((3, 4), 1, (1,)))["why"]
    # One operator of three for a third of the time.
    assert uneven == (
        "device cpu0 with stages [0] works 98% of the iteration; the work does not divide better, others are idle up "
        "to 66%"
    )


def test_an_operator_that_takes_the_whole_mini_batch_limits_the_plan() -> None:
    problem = towers(1, 2, num_devices=2, is_batch_wise=True)
    found = notes(problem, ((0,), 8, (0,)), ((1,), 8, (1,)), ((2,), 32, (1,)))["why"]
    assert found.startswith("an operator takes the whole mini-batch, so every forward pass before it comes first")
    assert "cpu1, works" in found


def test_sums_of_gradients_limit_the_plan() -> None:
    problem = towers(1, 2, num_devices=2)
    slow = Link(latency_s=0.0, bandwidth_bytes_per_s=1e8)
    problem = replace(problem, cluster=Cluster.uniform(2, memory_bytes=10**9, inside_node=slow))
    found = notes(problem, ((0, 1, 2), 32, (0, 1)))
    # 8 MB over a ring of two take 80 ms, and the work of 16 samples takes 100 ms.
    assert found["why"] == "device cpu0 works 56% of the iteration and sums gradients for 44%"


def test_filling_and_draining_limits_the_plan() -> None:
    problem = towers(1, 3, num_devices=3, parameter_bytes=0, value_bytes=4)
    found = notes(problem, ((0,), 16, (0,)), ((1,), 16, (1,)), ((2, 3), 16, (2,)))
    # Two micro-batches and two more for the other stages.
    assert found["why"] == (
        "filling and draining a pipeline 3 stages deep with 2 micro-batches; the busiest device, cpu2, works 51% of "
        "the iteration"
    )
