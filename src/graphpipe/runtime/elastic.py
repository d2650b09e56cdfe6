"""Goes on with the processes that are left."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable

import torch.distributed as dist

from graphpipe.errors import GraphPipeError, PlanningError
from graphpipe.runtime.process_group import DEFAULT_TIMEOUT, connect, rank, world_size
from graphpipe.strategy import Strategy


def strategy_for_this_job(
    strategy: Strategy, plan: Callable[[int], Strategy], timeout: datetime.timedelta = DEFAULT_TIMEOUT
) -> Strategy:
    """Return the strategy, or another one where the job has fewer processes than it has devices.

    Rank 0 plans and the others get its answer: planners with a time limit may not find the same twice. All ranks must
    call this.

    Args:
        strategy: For all devices.
        plan: Returns a strategy for so many devices.
        timeout: How long the others wait for rank 0.

    Raises:
        PlanningError: There is none.
        StrategyError: The job has more processes than the strategy has devices.
    """
    count = world_size()
    if count >= len(strategy.cluster):
        strategy.check_world_size(count)
        return strategy
    connect(timeout)
    answer = [""]
    if rank() == 0:
        try:
            answer = [json.dumps(plan(count).to_json())]
        except GraphPipeError as error:
            answer = [f"!{error}"]
    dist.broadcast_object_list(answer, src=0)
    if answer[0].startswith("!"):
        raise PlanningError(f"for the {count} processes that are left: {answer[0][1:]}")
    return Strategy.from_json(json.loads(answer[0]))
