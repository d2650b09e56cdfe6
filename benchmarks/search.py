"""CPU seconds that planners search at 32 devices, without the interpreter's start and imports."""

from __future__ import annotations

import statistics
import time

from benchmarks import paper_models
from benchmarks.common import Figure, Report, at_most
from benchmarks.problems import PLANNERS, SAMPLES_PER_DEVICE, planned, summit_problem
from graphpipe.capture import Granularity
from graphpipe.graph import ComputationGraph
from graphpipe.planner.base import Planner

CLAIM = (
    "GraphPipe's search is 9 to 21 times faster than the baselines' and takes under a minute everywhere; Piper cannot "
    "finish DLRM and CANDLE-Uno."
)
RATIO_REMARK = (
    "our baselines share GraphPipe's vectorised search, bisection and guesses instead of the published recursions, so "
    "they are not slower by nature: the paper's ratios are those of implementations"
)
MEASURE_REMARK = (
    "medians of CPU time of the whole planner, simulation and improvement of its best plans included; no ratio for "
    "Piper means that it gave up at its limit on downsets"
)
NUM_DEVICES = 32
# One micro-batch size for all: the step in so many.
NUM_MICRO_BATCHES = 16
REPEATS = 3
# CPU seconds on one core, for one micro-batch size and for the sweep over all.
GOALS_S = {"mmt4": 0.15, "mmt2": 0.05, "dlrm": 0.03, "candle_uno": 0.03, "dlrm8": 0.03, "candle_uno8": 0.03}
SWEEP_GOAL_S = 2.0


def run() -> Report:
    """Return the seconds and their ratios."""
    samples = SAMPLES_PER_DEVICE
    cases = {
        "mmt4": (paper_models.mmt(4), samples["mmt"]),
        "mmt2": (paper_models.mmt(2), samples["mmt"]),
        "mmt2-layers": (paper_models.mmt(2, Granularity.BLOCK), samples["mmt"]),
        "dlrm": (paper_models.dlrm(7), samples["dlrm"]),
        "dlrm8": (paper_models.dlrm(8), samples["dlrm"]),
        "candle_uno": (paper_models.candle_uno(7), samples["candle_uno"]),
        "candle_uno8": (paper_models.candle_uno(8), samples["candle_uno"]),
    }
    figures: list[Figure] = []
    for name, (graph, per_device) in cases.items():
        prefix, batch = f"{name}/{NUM_DEVICES}", per_device * NUM_DEVICES
        one = (batch // NUM_MICRO_BATCHES,)
        seconds = {p.name: search_s(p, graph, batch, one) for p in PLANNERS}
        ours = seconds.pop("graphpipe")
        assert ours is not None, f"nothing fits for {name}"
        figures.append(_within(f"{prefix}/search_s", ours, GOALS_S.get(name)))
        for planner, taken in seconds.items():
            if taken is not None:
                figures.append(Figure(name=f"{prefix}/{planner}_search_s", value=taken, unit="s"))
                # The paper gives a range, and 9 is its lower end.
                figures.append(
                    Figure(name=f"{prefix}/{planner}_over_graphpipe", value=taken / ours, unit="ratio", paper=9)
                )
        sweep = search_s(PLANNERS[0], graph, batch, ())
        assert sweep is not None
        figures.append(_within(f"{prefix}/sweep_s", sweep, SWEEP_GOAL_S))
    return Report(claim=CLAIM, figures=tuple(figures), remarks=(RATIO_REMARK, MEASURE_REMARK))


def search_s(planner: Planner, graph: ComputationGraph, mini_batch_size: int, sizes: tuple[int, ...]) -> float | None:
    """Return the median CPU seconds of a planner, nothing remembered between runs, or None where it gives up."""
    taken = []
    for _ in range(REPEATS):
        fresh = ComputationGraph.from_json(graph.to_json())
        problem = summit_problem(fresh, NUM_DEVICES, mini_batch_size, sizes)
        start_s = time.process_time()
        if planned(planner, problem) is None:
            return None
        taken.append(time.process_time() - start_s)
    return statistics.median(taken)


def _within(name: str, value: float, goal: float | None) -> Figure:
    return Figure(name=name, value=value, unit="s") if goal is None else at_most(name, value, "s", goal)
