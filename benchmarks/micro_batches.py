"""MMT on 8 V100s at each micro-batch size."""

from __future__ import annotations

from benchmarks import paper_models
from benchmarks.common import Figure, Report, at_least
from benchmarks.problems import planned, samples_per_s, shape, summit_problem
from graphpipe.planner.base import powers_of_two_dividing
from graphpipe.planner.graphpipe import GraphPipePlanner
from graphpipe.planner.pipedream import PipeDreamPlanner

CLAIM = (
    "At a fixed micro-batch size GraphPipe is ahead of the baselines at every size (MMT, 8 GPUs, mini-batch of 128)."
)
NUM_DEVICES, MINI_BATCH_SIZE = 8, 128


def run() -> Report:
    """Return the throughputs and their ratio for each micro-batch size."""
    figures: list[Figure] = []
    remarks: list[str] = []
    for size in powers_of_two_dividing(MINI_BATCH_SIZE):
        problem = summit_problem(paper_models.mmt(), NUM_DEVICES, MINI_BATCH_SIZE, (size,))
        plans = [planned(planner, problem) for planner in (GraphPipePlanner(), PipeDreamPlanner())]
        rates = {plan.planner: samples_per_s(plan) for plan in plans if plan is not None}
        prefix = f"mmt/{NUM_DEVICES}/micro-batches-of-{size}"
        figures += [
            Figure(name=f"{prefix}/{planner}_samples_per_s", value=rate, unit="samples/s")
            for planner, rate in rates.items()
        ]
        if len(rates) == len(plans):
            ratio = rates["graphpipe"] / rates["pipedream"]
            figures.append(at_least(f"{prefix}/graphpipe_over_pipedream", ratio, "ratio", 1.0))
        remarks += [f"{prefix}, {plan.planner}: {shape(plan)}" for plan in plans if plan is not None]
        if len(rates) < len(plans):
            remarks.append(f"{prefix}: only {', '.join(rates) or 'none'} fits into memory")
    return Report(claim=CLAIM, figures=tuple(figures), remarks=tuple(remarks))
