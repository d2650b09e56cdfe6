"""A strategy for a mini-batch of another size, such as the last one of an epoch."""

from __future__ import annotations

from dataclasses import replace

from graphpipe.errors import BatchError
from graphpipe.schedule import ModelCosts, Schedule, kfkb
from graphpipe.stage import StageGraph
from graphpipe.strategy import Strategy


def resized(strategy: Strategy, mini_batch_size: int) -> tuple[StageGraph, Schedule]:
    """Return the stages and schedule of a strategy for a mini-batch of another size.

    A stage that takes the whole mini-batch goes on doing so; the others keep their micro-batch size, and the last
    micro-batch is smaller.

    Raises:
        BatchError: A stage has more replicas than there are samples.
    """
    if mini_batch_size == strategy.mini_batch_size:
        return strategy.stages, strategy.schedule
    stages = []
    for x, stage in enumerate(strategy.stages.stages):
        takes_all = stage.micro_batch_size == strategy.mini_batch_size
        size = mini_batch_size if takes_all else min(stage.micro_batch_size, mini_batch_size)
        if stage.num_replicas > size:
            raise BatchError(
                f"a batch of {mini_batch_size} samples cannot be split over the {stage.num_replicas} replicas of stage "
                f"{x}; drop the last batch or give it at least {stage.num_replicas} samples"
            )
        stages.append(replace(stage, micro_batch_size=size))
    graph = StageGraph(strategy.graph, tuple(stages), mini_batch_size, strategy.stages.order)
    return graph, kfkb(graph, ModelCosts(strategy.cost_model, graph))
