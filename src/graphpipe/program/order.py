"""One order over all devices in which both ends of every message are posted."""

from __future__ import annotations

from collections import deque

from graphpipe.schedule import Schedule, Task, TaskCosts, dependencies
from graphpipe.stage import StageGraph


def task_order(stages: StageGraph, schedule: Schedule, costs: TaskCosts) -> dict[Task, int]:
    """Return the position of every task when all are sorted by the time at which they end, messages being free.

    A task comes after all that it depends on and after those before it on its devices, also where tasks take no time.
    The schedule must have no circle of waits.
    """
    before: dict[Task, list[Task]] = {}
    for order in schedule.orders:
        for i, task in enumerate(order.tasks):
            before[task] = [*dependencies(task, stages), *order.tasks[max(0, i - 1) : i]]
    after: dict[Task, list[Task]] = {}
    missing = {task: len(needed) for task, needed in before.items()}
    for task, needed in before.items():
        for other in needed:
            after.setdefault(other, []).append(task)
    end_s: dict[Task, float] = {}
    ready = deque(task for task, count in missing.items() if not count)
    while ready:
        task = ready.popleft()
        start_s = max((end_s[other] for other in before[task]), default=0.0)
        end_s[task] = start_s + costs.compute_s(task.stage, task.phase, _largest_share(stages, task))
        for other in after.get(task, ()):
            missing[other] -= 1
            if not missing[other]:
                ready.append(other)
    assert len(end_s) == len(before), "the schedule has a circle"
    # `end_s` lists tasks after those that they need, and sorting keeps that order among equals.
    return {task: i for i, task in enumerate(sorted(end_s, key=lambda t: end_s[t]))}


def _largest_share(stages: StageGraph, task: Task) -> int:
    """Return the most samples that one replica takes of the task's micro-batch."""
    return -(-len(stages.micro_batch(task.stage, task.micro_batch)) // stages.stages[task.stage].num_replicas)
