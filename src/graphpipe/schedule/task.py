"""Tasks, and the static order in which each group of devices runs them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from graphpipe.errors import StrategyError
from graphpipe.stage import StageGraph


class Phase(StrEnum):
    """The two passes of a stage over a micro-batch."""

    FORWARD = "F"
    BACKWARD = "B"


@dataclass(frozen=True, slots=True)
class Task:
    """One pass of one micro-batch on one stage. Written ``2F0``: stage 2, forward, micro-batch 0."""

    stage: int
    phase: Phase
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.phase.value}{self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> Task:
        """Return the task that `str` wrote.

        Raises:
            StrategyError: The text is not a task.
        """
        match = re.fullmatch(r"([0-9]{1,9})([FB])([0-9]{1,9})", text)
        if match is None:
            raise StrategyError(f"{text!r} is not a task; one looks like 2F0: stage 2, forward, micro-batch 0")
        return cls(int(match[1]), Phase(match[2]), int(match[3]))


@dataclass(frozen=True, slots=True)
class DeviceOrder:
    """The order of tasks on devices that hold the same stages, each device a replica of every one of them.

    Attributes:
        devices: The devices; device ``devices[i]`` runs replica ``i``.
        tasks: All tasks of all stages on these devices, in the order in which each of them runs its part.
    """

    devices: tuple[int, ...]
    tasks: tuple[Task, ...]


@dataclass(frozen=True, slots=True)
class Schedule:
    """The static order of tasks on every device.

    ``str`` writes one line a group of devices: ``0F0 0F1 0B0 0B1``.
    """

    orders: tuple[DeviceOrder, ...]

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, order.tasks)) for order in self.orders)


def tasks_of(stages: StageGraph, x: int) -> tuple[Task, ...]:
    """Return every task that stage `x` must run, forwards first."""
    count = stages.num_micro_batches(x)
    phases = (Phase.FORWARD, Phase.BACKWARD) if stages.has_backward[x] else (Phase.FORWARD,)
    return tuple(Task(x, phase, m) for phase in phases for m in range(count))


def device_groups(stages: StageGraph) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
    """Return the groups of devices that hold the same stages: pairs of (devices, stages), by their first stage."""
    held: dict[tuple[int, ...], list[int]] = {}
    for x, stage in enumerate(stages.stages):
        held.setdefault(stage.devices, []).append(x)
    return tuple((devices, tuple(held_stages)) for devices, held_stages in held.items())


def check_schedule(schedule: Schedule, stages: StageGraph) -> None:
    """Check condition C4 of the paper: each stage's tasks are complete and in sequence, forward before its backward.

    Raises:
        StrategyError: They are not; the message names the first task that is out of place.
    """
    expected = dict(device_groups(stages))
    if sorted(order.devices for order in schedule.orders) != sorted(expected):
        raise StrategyError(
            f"the schedule orders devices {[list(o.devices) for o in schedule.orders]}, "
            f"the stages are on {[list(d) for d in expected]}"
        )
    for order in schedule.orders:
        held = expected[order.devices]
        next_forward = dict.fromkeys(held, 0)
        next_backward = dict.fromkeys(held, 0)
        for task in order.tasks:
            if task.stage not in next_forward:
                raise StrategyError(f"task {task} is ordered on devices {list(order.devices)}, which lack its stage")
            due = (next_forward if task.phase is Phase.FORWARD else next_backward)[task.stage]
            if task.micro_batch != due:
                raise StrategyError(f"task {task} is out of sequence: micro-batch {due} of its stage is due")
            if task.phase is Phase.BACKWARD:
                if not stages.has_backward[task.stage]:
                    raise StrategyError(f"task {task} is a backward pass of a stage that nothing trainable precedes")
                if task.micro_batch >= next_forward[task.stage]:
                    raise StrategyError(f"task {task} comes before its forward pass")
                next_backward[task.stage] += 1
            else:
                next_forward[task.stage] += 1
        for x in held:
            count = stages.num_micro_batches(x)
            want = (count, count if stages.has_backward[x] else 0)
            if (next_forward[x], next_backward[x]) != want:
                raise StrategyError(
                    f"stage {x} has {next_forward[x]} forward and {next_backward[x]} backward tasks; "
                    f"it needs {want[0]} and {want[1]}"
                )
