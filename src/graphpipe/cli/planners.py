"""The planners by name."""

from __future__ import annotations

from graphpipe.planner.base import Planner
from graphpipe.planner.graphpipe import GraphPipePlanner
from graphpipe.planner.pipedream import PipeDreamPlanner
from graphpipe.planner.piper import PiperPlanner


def make_planner(name: str) -> Planner:
    """Return a planner with its default options."""
    planners: dict[str, Planner] = {
        "graphpipe": GraphPipePlanner(),
        "pipedream": PipeDreamPlanner(),
        "piper": PiperPlanner(),
    }
    return planners[name]
