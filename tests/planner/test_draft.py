"""From found stages to stages in order: batch-wise operators, late joins and early forks as stages of their own."""

from __future__ import annotations

from graphpipe.graph import ComputationGraph, Operator, Value
from graphpipe.planner.backtrack import Piece
from graphpipe.planner.costs import Choice
from graphpipe.planner.draft import Draft, DraftStage, Splitter, draft, stage_graph
from graphpipe.stage import Recompute
from tests.planner.models import towers

ONE = Choice(1, Recompute.NONE)


def parts(plan: Draft) -> list[tuple[tuple[int, ...], int]]:
    return [(stage.operators, stage.group) for stage in plan.stages]


def test_a_batch_wise_operator_takes_the_mini_batch_on_the_device_of_its_stage() -> None:
    problem = towers(2, 2, num_devices=2, is_batch_wise=True)
    recompute = Choice(1, Recompute.ALL)
    plan = draft(problem, [Piece((0, 1, 4), recompute), Piece((2, 3), ONE)], 8)
    assert [(s.operators, s.micro_batch_size, s.choice.recompute) for s in plan.stages] == [
        ((0, 1), 8, Recompute.ALL),
        ((2, 3), 8, Recompute.NONE),
        ((4,), 32, Recompute.NONE),
    ]
    stages = stage_graph(problem, plan)
    assert [stage.devices for stage in stages.stages] == [(0,), (1,), (0,)]


def test_a_late_join_is_a_stage_of_its_own() -> None:
    problem = towers(2, 2, num_devices=2)
    plan = draft(problem, [Piece((0, 1), ONE), Piece((2, 3, 4), ONE)], 8)
    assert parts(plan) == [((0, 1), 0), ((2, 3, 4), 1)]
    assert parts(Splitter(problem.graph).late_joins(plan)) == [((0, 1), 0), ((2, 3), 1), ((4,), 1)]
    assert Splitter(problem.graph).early_forks(plan) == plan


def test_an_early_fork_is_a_stage_of_its_own() -> None:
    # 0 feeds 1 and 2; the stage of 0 and 1 would keep 2 waiting for 1.
    values = (Value(name="v", producer="op0", consumers=("op1", "op2"), bytes_per_sample=4),)
    graph = ComputationGraph("fork", tuple(Operator(name=f"op{i}") for i in range(3)), values)
    plan = Draft((DraftStage((0, 1), 4, ONE, 0), DraftStage((2,), 4, ONE, 1)))
    assert parts(Splitter(graph).early_forks(plan)) == [((0,), 0), ((1,), 0), ((2,), 1)]
    assert Splitter(graph).late_joins(plan) == plan


def test_equal_plans_are_equal_drafts() -> None:
    problem = towers(2, 2, num_devices=2)
    pieces = [Piece((0, 1), ONE), Piece((2, 3), ONE), Piece((4,), ONE)]
    assert draft(problem, pieces, 8) == draft(problem, pieces[::-1], 8)
