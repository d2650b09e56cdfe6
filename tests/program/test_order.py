from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from graphpipe.program.order import task_order
from graphpipe.schedule import Task, UniformCosts, dependencies, kfkb
from tests.stage_graphs import DIAMOND, make_stages
from tests.strategies import stage_graphs


def test_tasks_are_ordered_by_the_time_at_which_they_end() -> None:
    stages = make_stages([(0, 1)], mini_batch_size=2)
    order = task_order(stages, kfkb(stages), UniformCosts(1.0, 3.0))
    # stage 0: F0 F1 .  .  .  B0 B0 B0 B1 B1 B1
    # stage 1: .  F0 B0 B0 B0 F1 B1 B1 B1
    assert [str(task) for task in order] == ["0F0", "0F1", "1F0", "1B0", "1F1", "0B0", "1B1", "0B1"]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_task_comes_after_all_that_it_waits_for(data: st.DataObject) -> None:
    stages = data.draw(stage_graphs())
    schedule = kfkb(stages)
    # Also where some or all tasks take no time, so that the times say nothing.
    costs = UniformCosts(*data.draw(st.tuples(*[st.sampled_from([0.0, 1.0, 2.5])] * 4)))
    position = task_order(stages, schedule, costs)
    assert sorted(position.values()) == list(range(len(position)))
    for order in schedule.orders:
        assert [position[task] for task in order.tasks] == sorted(position[task] for task in order.tasks)
    for task, at in position.items():
        assert all(position[needed] < at for needed in dependencies(task, stages))


def test_branches_alternate() -> None:
    stages = make_stages(DIAMOND, mini_batch_size=2)
    order = task_order(stages, kfkb(stages), UniformCosts(1.0, 2.0))
    assert abs(order[Task.parse("1F0")] - order[Task.parse("2F0")]) == 1
