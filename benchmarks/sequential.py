"""A Transformer without branches: GraphPipe is as good as the sequential planners, not better."""

from __future__ import annotations

from benchmarks import paper_models
from benchmarks.common import Figure, Report, at_least
from benchmarks.problems import PLANNERS, SAMPLES_PER_DEVICE, planned, samples_per_s, shape, summit_problem

CLAIM = "On a sequential Transformer GraphPipe is on a par with PipeDream and Piper."
DEVICES = (4, 8, 16, 32)


def run() -> Report:
    """Return the throughputs and their ratios."""
    figures: list[Figure] = []
    remarks: list[str] = []
    for num_devices in DEVICES:
        batch = SAMPLES_PER_DEVICE["mmt"] * num_devices
        problem = summit_problem(paper_models.sequential_transformer(), num_devices, batch)
        plans = [plan for planner in PLANNERS if (plan := planned(planner, problem)) is not None]
        rates = {plan.planner: samples_per_s(plan) for plan in plans}
        prefix = f"transformer/{num_devices}"
        figures += [
            Figure(name=f"{prefix}/{planner}_samples_per_s", value=rate, unit="samples/s")
            for planner, rate in rates.items()
        ]
        for planner in [planner for planner in rates if planner != "graphpipe"]:
            ratio = rates["graphpipe"] / rates[planner]
            figures.append(at_least(f"{prefix}/graphpipe_over_{planner}", ratio, "ratio", 1.0, paper=1.0))
        remarks += [f"{prefix}, {plan.planner}: {shape(plan)}" for plan in plans]
    remarks.append("above 1: a light loss may be a stage of its own on a device that holds another stage")
    return Report(claim=CLAIM, figures=tuple(figures), remarks=tuple(remarks))
