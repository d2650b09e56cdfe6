"""A strategy for a mini-batch of another size, such as the last one of an epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from graphpipe.errors import BatchError, PlanningError
from graphpipe.estimate import check_memory, estimate
from graphpipe.schedule import ModelCosts, Phase, Schedule, Task, in_flight_limits, kfkb
from graphpipe.stage import StageGraph
from graphpipe.strategy import Strategy


def resized(strategy: Strategy, mini_batch_size: int) -> tuple[StageGraph, Schedule]:
    """Return the stages and schedule of a strategy for a mini-batch of another size.

    A stage with an operator that mixes samples takes the whole mini-batch; the others keep their micro-batch size, and
    the last micro-batch is smaller. Passes in a round and samples in flight are those of the strategy's schedule.

    Raises:
        BatchError: A stage has more replicas than there are samples, or a larger batch does not fit into memory.
    """
    if mini_batch_size == strategy.mini_batch_size:
        return strategy.stages, strategy.schedule
    stages = []
    for x, stage in enumerate(strategy.stages.stages):
        operators = [strategy.graph.operators[i] for i in strategy.stages.operator_positions[x]]
        mixes = any(operator.is_batch_wise for operator in operators)
        size = mini_batch_size if mixes else min(stage.micro_batch_size, mini_batch_size)
        if stage.num_replicas > size:
            raise BatchError(
                f"a batch of {mini_batch_size} samples cannot be split over the {stage.num_replicas} replicas of stage "
                f"{x}; drop the last batch or give it at least {stage.num_replicas} samples"
            )
        stages.append(replace(stage, micro_batch_size=size))
    graph = StageGraph(strategy.graph, tuple(stages), mini_batch_size, strategy.stages.order)
    k = _passes_in_a_round(strategy)
    limits = [
        max(least, min(mini_batch_size, most)) if has_backward else least
        for least, most, has_backward in zip(
            in_flight_limits(graph, k), _most_in_flight(strategy), graph.has_backward, strict=True
        )
    ]
    schedule = kfkb(graph, ModelCosts(strategy.cost_model, graph), k=k, limits=limits)
    if mini_batch_size > strategy.mini_batch_size:
        larger = replace(strategy, stages=graph, schedule=schedule)
        try:
            check_memory(larger, estimate(larger))
        except PlanningError as error:
            raise BatchError(
                f"a batch of {mini_batch_size} samples is larger than the {strategy.mini_batch_size} that the strategy "
                f"was planned for, and does not fit: {error}"
            ) from error
    return graph, schedule


def _passes_in_a_round(strategy: Strategy) -> int:
    """Return how many forward passes a stage that waits for no other one runs before its first backward pass."""
    found = []
    for x in range(len(strategy.stages.stages)):
        waits = any(edge.returned for edge in strategy.stages.outgoing[x])
        if strategy.stages.has_backward[x] and not waits:
            phases = [task.phase for task in _tasks(strategy, x)]
            found.append(phases.index(Phase.BACKWARD))
    return min(found, default=1)


def _most_in_flight(strategy: Strategy) -> list[int]:
    """Return ``[stages]`` the most samples between their forward and backward passes."""
    found = []
    for x in range(len(strategy.stages.stages)):
        held = most = 0
        for task in _tasks(strategy, x):
            samples = len(strategy.stages.micro_batch(x, task.micro_batch))
            held += samples if task.phase is Phase.FORWARD else -samples
            most = max(most, held)
        found.append(most)
    return found


def _tasks(strategy: Strategy, x: int) -> Sequence[Task]:
    return [task for order in strategy.schedule.orders for task in order.tasks if task.stage == x]
