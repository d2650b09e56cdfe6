"""CANDLE-Uno with more and more branches, on 4 to 16 V100s."""

from __future__ import annotations

from itertools import pairwise

from benchmarks import paper_models
from benchmarks.common import Figure, Report, at_least, progress
from benchmarks.problems import SAMPLES_PER_DEVICE, planned, samples_per_s, shape, summit_problem
from graphpipe.planner.graphpipe import GraphPipePlanner
from graphpipe.planner.pipedream import PipeDreamPlanner

CLAIM = (
    "With more branches of CANDLE-Uno the gain over a chain grows, up to 2 times at 16 branches. (The paper "
    "has 4, 8 and 16 branches on as many GPUs.)"
)
BRANCHES = (2, 4, 8, 16)
DEVICES = (4, 8, 16)
PAPER_AT_16 = 2.0


def run() -> Report:
    """Return the gain for each number of branches and devices."""
    figures: list[Figure] = []
    remarks: list[str] = []
    for num_devices in DEVICES:
        gains: list[float] = []
        for num_branches in BRANCHES:
            batch = SAMPLES_PER_DEVICE["candle_uno"] * num_devices
            problem = summit_problem(paper_models.candle_uno(num_branches), num_devices, batch)
            ours, theirs = planned(GraphPipePlanner(), problem), planned(PipeDreamPlanner(), problem)
            prefix = f"candle_uno/{num_devices}/{num_branches}-branches"
            if ours is None or theirs is None:
                remarks.append(f"{prefix}: nothing fits for {'graphpipe' if ours is None else 'pipedream'}")
                continue
            gains.append(samples_per_s(ours) / samples_per_s(theirs))
            paper = PAPER_AT_16 if num_branches == max(BRANCHES) and num_devices == max(DEVICES) else None
            figures.append(at_least(f"{prefix}/graphpipe_over_pipedream", gains[-1], "ratio", 1.0, paper))
            remarks += [f"{prefix}, {plan.planner}: {shape(plan)}" for plan in (ours, theirs)]
        if all(more >= fewer for fewer, more in pairwise(gains)):
            remarks.append(f"{num_devices} devices: the gain grows with the branches, as in the paper")
        else:
            listed = ", ".join(f"{gain:.2f}" for gain in gains)
            remarks.append(f"{num_devices} devices: unlike in the paper, the gain does not grow at each step: {listed}")
        progress(f"{num_devices} devices are planned")
    return Report(claim=CLAIM, figures=tuple(figures), remarks=tuple(remarks))
