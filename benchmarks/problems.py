"""The paper's cluster and steps as planning problems, and what planners make of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graphpipe.cluster import Cluster
from graphpipe.cost import SGD, roofline_profile
from graphpipe.errors import PlanningError
from graphpipe.estimate import check_memory, estimate
from graphpipe.graph import ComputationGraph
from graphpipe.planner.base import Planner, PlanningProblem, powers_of_two_dividing
from graphpipe.planner.graphpipe import GraphPipePlanner
from graphpipe.planner.pipedream import PipeDreamPlanner
from graphpipe.planner.piper import PiperPlanner
from graphpipe.strategy import Strategy

# The settings below were fixed before any result was looked at.
#
# The mini-batch grows with the devices. The paper names one size in its text, 128 samples on 8 devices for MMT, so MMT
# and the Transformer have 16 samples a device. For DLRM and CANDLE-Uno its text names none, only that they come close
# to the memory limit. The system that it is built on, FlexFlow, ships a script for DLRM on Summit, with tables of the
# paper's size and 512 samples a device (examples/cpp/DLRM/run_summit.sh); we take that for both models of feed-forward
# layers.
SAMPLES_PER_DEVICE: Mapping[str, int] = {"mmt": 16, "dlrm": 512, "candle_uno": 512}
# The paper names no optimizer. FlexFlow's example of CANDLE-Uno has plain SGD, which keeps no state.
OPTIMIZER = SGD

PLANNERS: tuple[Planner, ...] = (GraphPipePlanner(), PipeDreamPlanner(), PiperPlanner())


def summit_problem(
    graph: ComputationGraph, num_devices: int, mini_batch_size: int, micro_batch_sizes: Sequence[int] = ()
) -> PlanningProblem:
    """Return a problem on the paper's cluster, with costs known at every size that a replica can meet.

    Args:
        graph: The model.
        num_devices: The V100s.
        mini_batch_size: Samples a step.
        micro_batch_sizes: Those to try; by default the powers of two that divide the mini-batch.
    """
    cluster = Cluster.summit(num_devices)
    sizes = tuple(micro_batch_sizes) or powers_of_two_dividing(mini_batch_size)
    local = {-(-size // replicas) for size in sizes for replicas in range(1, num_devices + 1)} | {mini_batch_size}
    return PlanningProblem(
        graph=graph,
        profile=roofline_profile(graph, cluster.devices[0].kind, sorted(local)),
        cluster=cluster,
        mini_batch_size=mini_batch_size,
        optimizer=OPTIMIZER,
        micro_batch_sizes=sizes,
    )


def planned(planner: Planner, problem: PlanningProblem) -> Strategy | None:
    """Return a planner's strategy, or None where it gives up or nothing fits."""
    try:
        return planner.plan(problem)
    except PlanningError:
        return None


def samples_per_s(strategy: Strategy) -> float:
    """Return the simulated throughput, whoever planned it; a strategy that does not fit is a bug of its planner."""
    found = estimate(strategy)
    check_memory(strategy, found)
    return found.samples_per_s


def shape(strategy: Strategy) -> str:
    """Return a strategy's size in words."""
    stages = strategy.stages
    full = max(
        peak / device.memory_bytes
        for peak, device in zip(estimate(strategy).peak_bytes, strategy.cluster.devices, strict=True)
    )
    sizes = sorted({stage.micro_batch_size for stage in stages.stages})
    return (
        f"{len(stages.stages)} stages, depth {stages.depth}, micro-batches of {', '.join(map(str, sizes))}, "
        f"memory {full:.0%} full"
    )
