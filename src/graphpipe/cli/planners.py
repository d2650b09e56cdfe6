"""The planners by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from graphpipe.planner.base import Planner
from graphpipe.planner.graphpipe import GraphPipePlanner
from graphpipe.planner.pipedream import PipeDreamPlanner
from graphpipe.planner.piper import PiperPlanner

PLANNERS: Mapping[str, Callable[[], Planner]] = {
    "graphpipe": GraphPipePlanner,
    "pipedream": PipeDreamPlanner,
    "piper": PiperPlanner,
}


def make_planner(name: str) -> Planner:
    """Return a planner with its default options."""
    return PLANNERS[name]()
