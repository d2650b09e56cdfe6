"""Changes of a plan: each kind makes what it says, and nothing that is not a plan."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from graphpipe.planner.base import PlanningProblem
from graphpipe.planner.candidates import Candidate
from graphpipe.planner.costs import Choice
from graphpipe.planner.draft import Draft, DraftStage
from graphpipe.planner.improve import LOOK, Budget, changed
from graphpipe.planner.sketch import Sketcher
from graphpipe.stage import Recompute
from tests.planner.models import towers
from tests.planner.oracle import every_plan
from tests.strategies import computation_graphs, problems, random_edges

# The operators of a stage, its group and its replicas.
Plan = tuple[tuple[tuple[int, ...], int, int], ...]


def changes(problem: PlanningProblem, *stages: tuple[tuple[int, ...], int, int], size: int = 8) -> set[Plan]:
    """Return what the changes of some stages lead to."""
    drafted = Draft(
        tuple(DraftStage(part, size, Choice(count, Recompute.NONE), group) for part, group, count in stages)
    )
    sketcher = Sketcher(problem)
    found = changed(sketcher, Candidate(sketcher.sketch(drafted), size))
    return {tuple((s.operators, s.group, s.choice.num_replicas) for s in each.plan.stages) for each in found}


@given(problems(computation_graphs(random_edges(4)), max_devices=3), st.data())
@settings(max_examples=60, deadline=None)
def test_changes_are_plans_and_no_others(problem: PlanningProblem, data: st.DataObject) -> None:
    size = data.draw(st.sampled_from(problem.micro_batch_sizes))
    plans = list(every_plan(problem, size))
    sketcher = Sketcher(problem)
    plan = data.draw(st.sampled_from(plans))
    for change in changed(sketcher, Candidate(sketcher.sketch(plan), size)):
        assert change.plan in plans
        assert change.micro_batch_size == size


def test_free_devices_and_those_of_others_become_replicas() -> None:
    problem = towers(1, 3, num_devices=4)
    found = changes(problem, ((0, 1), 0, 1), ((2, 3), 1, 2))
    assert ((((0, 1), 0, 2), ((2, 3), 1, 2))) in found
    # A device of the second stage, and the free one.
    assert ((((0, 1), 0, 3), ((2, 3), 1, 1))) in found
    assert ((((0, 1), 0, 1), ((2, 3), 1, 3))) in found
    # Fewer replicas have less to sum.
    assert ((((0, 1), 0, 1), ((2, 3), 1, 1))) in found


def test_a_stage_never_has_more_replicas_than_samples() -> None:
    found = changes(towers(1, 3, num_devices=4), ((0, 1), 0, 1), ((2, 3), 1, 1), size=2)
    assert max(count for plan in found for _, _, count in plan) == 2


def test_a_stage_of_smaller_micro_batches_stays_off_more_devices_than_samples() -> None:
    problem = towers(1, 3, num_devices=5)
    stages = (DraftStage((0, 1), 3, Choice(1, Recompute.NONE), 0), DraftStage((2, 3), 4, Choice(4, Recompute.NONE), 1))
    sketcher = Sketcher(problem)
    for change in changed(sketcher, Candidate(sketcher.sketch(Draft(stages)), 4)):
        assert all(stage.choice.num_replicas <= stage.micro_batch_size for stage in change.plan.stages)


def test_an_operator_that_mixes_samples_keeps_one_device() -> None:
    problem = towers(1, 2, num_devices=4, is_batch_wise=True)
    found = changes(problem, ((0, 1), 0, 1), ((2,), 0, 1), size=32)
    assert {count for plan in found for part, _, count in plan if 2 in part} == {1}
    # The operators before it get free devices, up to the sizes that divide the work better.
    assert (((0, 1), 0, 4), ((2,), 1, 1)) not in found
    assert (((0, 1), 0, 3), ((2,), 1, 1)) in found


def test_stages_that_follow_each_other_are_merged_on_the_devices_of_both() -> None:
    found = changes(towers(1, 3, num_devices=3), ((0,), 0, 1), ((1,), 1, 1), ((2, 3), 2, 1))
    assert (((0, 1), 0, 2), ((2, 3), 1, 1)) in found
    assert (((0,), 0, 1), ((1, 2, 3), 1, 2)) in found
    # Stages that do not follow each other would make one that is not convex.
    assert not any((0, 2, 3) in (part for part, _, _ in plan) for plan in found)


def test_stages_move_to_devices_of_others_and_to_free_ones() -> None:
    problem = towers(2, 1, num_devices=3)
    found = changes(problem, ((0,), 0, 1), ((1,), 1, 1), ((2,), 1, 1))
    assert (((0,), 0, 1), ((1,), 1, 1), ((2,), 0, 1)) in found
    assert (((0,), 0, 1), ((1,), 1, 1), ((2,), 2, 1)) in found


def test_operators_move_over_a_border() -> None:
    found = changes(towers(1, 4, num_devices=2), ((0, 1), 0, 1), ((2, 3, 4), 1, 1))
    assert (((0,), 0, 1), ((1, 2, 3, 4), 1, 1)) in found
    assert (((0, 1, 2), 0, 1), ((3, 4), 1, 1)) in found


def test_an_operator_that_nothing_holds_moves_anywhere() -> None:
    # The second stage has a whole branch of two others.
    found = changes(towers(3, 1, num_devices=2), ((0,), 0, 1), ((1, 2), 1, 1), ((3,), 0, 1))
    assert (((0, 1), 0, 1), ((2,), 1, 1), ((3,), 0, 1)) in found
    assert (((0, 2), 0, 1), ((1,), 1, 1), ((3,), 0, 1)) in found


def test_a_budget_pays_for_looks() -> None:
    problem = towers(1, 3, num_devices=2)
    sketcher = Sketcher(problem)
    one, two = (
        Candidate(sketcher.sketch(Draft(tuple(DraftStage(p, 8, Choice(1, Recompute.NONE), 0) for p in parts))), 8)
        for parts in (((0, 1, 2, 3),), ((0, 1), (2, 3)))
    )
    budget = Budget(3 * LOOK)
    assert budget.spend(one)
    assert budget.spend(two)
    assert budget.left == LOOK - 2
    assert not budget.spend(one)
