from __future__ import annotations

import pytest

from graphpipe.errors import PlanningError
from graphpipe.planner.again import plan_again
from graphpipe.planner.graphpipe import GraphPipePlanner
from tests.stage_graphs import DIAMOND, make_stages, make_strategy


def test_a_strategy_for_fewer_devices_trains_the_same() -> None:
    strategy = make_strategy(make_stages(DIAMOND, mini_batch_size=8, sizes=2))
    for count in (3, 2, 1):
        again = plan_again(strategy, count, GraphPipePlanner())
        again.check_model(strategy.graph)
        again.check_world_size(count)
        assert again.mini_batch_size == strategy.mini_batch_size
        assert again.optimizer == strategy.optimizer


def test_what_does_not_fit_is_said() -> None:
    strategy = make_strategy(make_stages(DIAMOND, mini_batch_size=8, sizes=2))
    tight = type(strategy)(
        stages=strategy.stages,
        schedule=strategy.schedule,
        profile=strategy.profile,
        cluster=strategy.cluster.with_memory(1),
        optimizer=strategy.optimizer,
    )
    with pytest.raises(PlanningError):
        plan_again(tight, 2, GraphPipePlanner())


@pytest.mark.parametrize("count", [0, 4, 5])
def test_planning_again_is_for_fewer_devices(count: int) -> None:
    strategy = make_strategy(make_stages(DIAMOND, mini_batch_size=8, sizes=2))
    with pytest.raises(ValueError, match=f"1 to 3 devices, not {count}"):
        plan_again(strategy, count, GraphPipePlanner())
