"""Tasks, who waits for whom, and the orders in which devices run tasks."""

from graphpipe.schedule.costs import ModelCosts, TaskCosts, UniformCosts
from graphpipe.schedule.dependencies import Piece, dependencies, pieces
from graphpipe.schedule.kfkb import fitted_limits, gpipe, in_flight_limits, kfkb, limits_of
from graphpipe.schedule.task import DeviceOrder, Phase, Schedule, Task, check_schedule, device_groups

__all__ = [
    "DeviceOrder",
    "ModelCosts",
    "Phase",
    "Piece",
    "Schedule",
    "Task",
    "TaskCosts",
    "UniformCosts",
    "check_schedule",
    "dependencies",
    "device_groups",
    "fitted_limits",
    "gpipe",
    "in_flight_limits",
    "kfkb",
    "limits_of",
    "pieces",
]
