"""The paper's case study: eight equal stages as two branches of four, and as a chain of eight, on 8 V100s.

A stage is an attention and two linear layers, as in a Transformer layer of MMT. The stages are given, not planned; only
the micro-batch size is chosen, for each order the best one. The light concatenation and what follows it is a stage of
its own beside the last layer.
"""

from __future__ import annotations

from benchmarks import paper_models
from benchmarks.common import Figure, Report, at_least
from benchmarks.problems import SAMPLES_PER_DEVICE, shape, summit_problem
from graphpipe.errors import PlanningError
from graphpipe.estimate import check_memory, estimate
from graphpipe.planner.base import PlanningProblem
from graphpipe.schedule import ModelCosts, kfkb
from graphpipe.stage import Stage, StageGraph, StageOrder
from graphpipe.strategy import Strategy

CLAIM = (
    "Two branches of four, 8 devices: depth 4 instead of 8 and micro-batches of 4 instead of 2 make 20 % more samples "
    "a second, half of it from each."
)
NUM_BRANCHES, NUM_LAYERS, NUM_DEVICES = 2, 4, 8
REMARKS = (
    "the sizes are MMT's and the mini-batch has 16 samples a device: our choice",
    "memory is far from full, so the micro-batch size only balances filling against efficiency, and matters less",
    "the light end of the model is a stage of its own, which makes each depth one more than the layers'",
)


def run() -> Report:
    """Return what the shape of a graph gains alone, and with a micro-batch size of its own."""
    graph = paper_models.mmt(NUM_BRANCHES, num_layers=NUM_LAYERS)
    problem = summit_problem(graph, NUM_DEVICES, SAMPLES_PER_DEVICE["mmt"] * NUM_DEVICES)
    plans = {
        (order, size): strategy(problem, order, size) for order in StageOrder for size in problem.micro_batch_sizes
    }
    rates = {key: rate for key, plan in plans.items() if (rate := fitting_samples_per_s(plan))}
    best = {order: max((k for k in rates if k[0] is order), key=rates.__getitem__) for order in StageOrder}
    chain, ours = best[StageOrder.CHAIN], best[StageOrder.GRAPH]
    same_size = (StageOrder.GRAPH, chain[1])
    figures = [
        Figure(name="case-study/graph_depth", value=plans[ours].stages.depth, unit="stages", paper=4),
        Figure(name="case-study/chain_depth", value=plans[chain].stages.depth, unit="stages", paper=8),
        Figure(name="case-study/graph_micro_batch_size", value=ours[1], unit="samples", paper=4),
        Figure(name="case-study/chain_micro_batch_size", value=chain[1], unit="samples", paper=2),
        at_least("case-study/graph_over_chain", rates[ours] / rates[chain], "ratio", 1.0, paper=1.2),
        Figure(
            name="case-study/graph_over_chain_at_its_size",
            value=rates[same_size] / rates[chain],
            unit="ratio",
            paper=1.1,
        ),
    ]
    remarks = [f"{order.value}: {shape(plans[best[order]])}" for order in StageOrder]
    return Report(claim=CLAIM, figures=tuple(figures), remarks=(*REMARKS, *remarks))


def strategy(problem: PlanningProblem, order: StageOrder, micro_batch_size: int) -> Strategy:
    """Return a layer a device, and the end of the model beside the last layer."""
    names = [operator.name for operator in problem.graph.operators]
    prefixes = [f"towers.{b}.layers.{layer}." for b in range(NUM_BRANCHES) for layer in range(NUM_LAYERS)]
    layers = [tuple(name for name in names if name.startswith(prefix)) for prefix in prefixes]
    end = tuple(name for name in names if not name.startswith("towers."))
    parts = [(layer, device) for device, layer in enumerate(layers)] + [(end, NUM_DEVICES - 1)]
    stages = StageGraph(
        problem.graph,
        tuple(Stage(operators=part, micro_batch_size=micro_batch_size, devices=(d,)) for part, d in parts),
        problem.mini_batch_size,
        order,
    )
    schedule = kfkb(stages, ModelCosts(problem.cost_model, stages))
    return Strategy(stages, schedule, problem.profile, problem.cluster, problem.optimizer)


def fitting_samples_per_s(plan: Strategy) -> float | None:
    """Return the simulated throughput, or None where memory does not suffice."""
    found = estimate(plan)
    try:
        check_memory(plan, found)
    except PlanningError:
        return None
    return found.samples_per_s
