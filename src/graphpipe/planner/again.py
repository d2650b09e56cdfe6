"""A strategy for what is left of a cluster."""

from __future__ import annotations

from dataclasses import replace

from graphpipe.planner.base import Planner, PlanningProblem
from graphpipe.strategy import Strategy


def plan_again(strategy: Strategy, num_devices: int, planner: Planner) -> Strategy:
    """Return a strategy for the same model, mini-batch and optimizer on fewer devices.

    The graph and the profile are those that the strategy carries: nothing is captured or measured.

    Args:
        strategy: For more devices.
        num_devices: How many are left. They are taken to be the first ones of the cluster.
        planner: Finds the new strategy.

    Raises:
        PlanningError: The model does not fit on so few.
        ValueError: There are not fewer devices, or none.
    """
    if not 1 <= num_devices < len(strategy.cluster):
        raise ValueError(f"planning again is for 1 to {len(strategy.cluster) - 1} devices, not {num_devices}")
    problem = PlanningProblem(
        graph=strategy.graph,
        profile=strategy.profile,
        cluster=replace(strategy.cluster, devices=strategy.cluster.devices[:num_devices]),
        mini_batch_size=strategy.mini_batch_size,
        optimizer=strategy.optimizer,
    )
    return planner.plan(problem)
