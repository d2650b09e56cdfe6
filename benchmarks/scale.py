"""CPU seconds to plan for many devices and units, and to simulate a million events."""

from __future__ import annotations

import time

from benchmarks.common import Figure, Report, at_most, progress
from benchmarks.problems import OPTIMIZER, SAMPLES_PER_DEVICE, summit_problem
from graphpipe.cluster import Cluster
from graphpipe.cost import roofline_profile
from graphpipe.graph import ComputationGraph, Operator, Parameter, Value
from graphpipe.planner.graphpipe import GraphPipePlanner
from graphpipe.program import lower
from graphpipe.schedule import kfkb
from graphpipe.simulator import simulate
from graphpipe.stage import Stage, StageGraph
from graphpipe.strategy import Strategy

CLAIM = (
    "The paper's search takes under a minute everywhere, up to 32 GPUs; that of 1,024 devices and 1,000 units is our "
    "own goal, and so is a million simulated events in ten CPU seconds."
)
GRAPHS_REMARK = (
    "8 equal branches of CANDLE-Uno's feed-forward layers, and a light end, with the costs of a V100; the step "
    "is cut into 64 micro-batches, the only size that is searched"
)
BOUND_REMARK = "over_bound is the planned iteration over a lower bound that no plan can beat, and so at least 1"
EVENTS_REMARK = "an event is one instruction of a device: a pass, a message that is sent or awaited, a sum of gradients"
SIZES = ((64, 100), (64, 500), (64, 2000), (256, 100), (256, 1000), (1024, 100), (1024, 1000), (1024, 2000))
NUM_BRANCHES, NUM_MICRO_BATCHES, WIDTH = 8, 64, 4096
GOALS_S = {(1024, 1000): 60.0}
SIMULATED_STAGES, SIMULATED_MICRO_BATCHES, MILLION_EVENTS_GOAL_S = 32, 3200, 10.0


def run() -> Report:
    """Return the seconds of each size, how near its plan is to the lower bound, and the simulator's speed."""
    figures: list[Figure] = []
    for num_devices, num_units in SIZES:
        graph = branched(NUM_BRANCHES, num_units)
        batch = SAMPLES_PER_DEVICE["candle_uno"] * num_devices
        problem = summit_problem(graph, num_devices, batch, (batch // NUM_MICRO_BATCHES,))
        start_s = time.process_time()
        strategy = GraphPipePlanner().plan(problem)
        taken_s = time.process_time() - start_s
        prefix = f"scale/{num_devices}/{num_units}"
        goal_s = GOALS_S.get((num_devices, num_units))
        name = f"{prefix}/search_s"
        figures += [
            Figure(name=name, value=taken_s, unit="s") if goal_s is None else at_most(name, taken_s, "s", goal_s),
            Figure(name=f"{prefix}/over_bound", value=strategy.notes["certificate"]["ratio"], unit="ratio"),
        ]
        progress(f"{prefix}: {taken_s:.1f} s")
    seconds, num_events = simulated_events(SIMULATED_STAGES, SIMULATED_MICRO_BATCHES)
    figures += [
        at_most("scale/million_events_s", seconds / num_events * 1e6, "s", MILLION_EVENTS_GOAL_S),
        Figure(name="scale/events", value=num_events, unit="events"),
    ]
    return Report(claim=CLAIM, figures=tuple(figures), remarks=(GRAPHS_REMARK, BOUND_REMARK, EVENTS_REMARK))


def branched(num_branches: int, num_units: int) -> ComputationGraph:
    """Return equal branches of feed-forward layers with a light operator behind them.

    Args:
        num_branches: The branches; each has the same number of layers.
        num_units: The operators in all, at most.
    """
    flops, value_bytes = 2.0 * WIDTH * WIDTH, 4 * WIDTH
    length = (num_units - 1) // num_branches
    operators, values = [], []
    for branch in range(num_branches):
        for i in range(length):
            operators.append(
                Operator(
                    name=f"{branch}.{i}",
                    parameters=(Parameter(f"{branch}.{i}.weight", 4 * WIDTH * WIDTH),),
                    forward_flops=flops,
                    backward_flops=2 * flops,
                    moved_bytes=2 * value_bytes,
                    saved_bytes=value_bytes,
                )
            )
            reader = f"{branch}.{i + 1}" if i + 1 < length else "end"
            values.append(
                Value(
                    name=f"{branch}.{i}.output",
                    producer=f"{branch}.{i}",
                    consumers=(reader,),
                    bytes_per_sample=value_bytes,
                )
            )
    operators.append(Operator(name="end", moved_bytes=num_branches * value_bytes))
    return ComputationGraph("branched", tuple(operators), tuple(values))


def simulated_events(num_stages: int, num_micro_batches: int) -> tuple[float, int]:
    """Return the CPU seconds to simulate one step of a strategy, and how many instructions that were.

    Args:
        num_stages: Stages of one unit and one device each, in two branches, and a last one that joins them.
        num_micro_batches: Micro-batches of one sample.
    """
    graph = branched(2, num_stages + 1)
    cluster = Cluster.summit(len(graph.operators))
    stages = StageGraph(
        graph,
        tuple(
            Stage(operators=(operator.name,), micro_batch_size=1, devices=(device,))
            for device, operator in enumerate(graph.operators)
        ),
        num_micro_batches,
    )
    profile = roofline_profile(graph, cluster.devices[0].kind, (1,))
    strategy = Strategy(stages, kfkb(stages), profile, cluster, OPTIMIZER)
    program = lower(stages, strategy.schedule)
    start_s = time.process_time()
    trace = simulate(program, strategy.costs)
    taken_s = time.process_time() - start_s
    assert trace.makespan_s > 0
    return taken_s, sum(map(len, program.instructions))
