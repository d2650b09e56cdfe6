"""What every planner is given, and what it returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from graphpipe.cluster import Cluster
from graphpipe.cost import ADAM, CostModel, OptimizerCost, Profile
from graphpipe.errors import PlanningError
from graphpipe.graph import ComputationGraph
from graphpipe.schedule import ModelCosts, kfkb
from graphpipe.stage import Stage, StageGraph, StageOrder
from graphpipe.strategy import Strategy


@dataclass(frozen=True, kw_only=True)
class PlanningProblem:
    """A model, its costs, the devices, and the samples of a step.

    Attributes:
        graph: The computation graph.
        profile: What its operators cost on the cluster's devices.
        cluster: The devices and links.
        mini_batch_size: Samples a step.
        optimizer: What the optimizer keeps.
        micro_batch_sizes: The sizes to try; by default every power of two that divides the mini-batch, and the
            mini-batch itself. A stage that mixes samples takes the whole mini-batch whatever is tried.

    Raises:
        PlanningError: A micro-batch size does not divide the mini-batch.
    """

    graph: ComputationGraph
    profile: Profile
    cluster: Cluster
    mini_batch_size: int
    optimizer: OptimizerCost = ADAM
    micro_batch_sizes: tuple[int, ...] = field(default=())

    def __post_init__(self) -> None:
        if self.mini_batch_size < 1:
            raise PlanningError(f"a mini-batch has at least one sample, got {self.mini_batch_size}")
        if not self.micro_batch_sizes:
            object.__setattr__(self, "micro_batch_sizes", powers_of_two_dividing(self.mini_batch_size))
        check_sizes(self.mini_batch_size, self.micro_batch_sizes)

    @cached_property
    def cost_model(self) -> CostModel:
        """The costs of the operators on the cluster."""
        return CostModel(self.graph, self.profile, self.cluster, self.optimizer)


class Planner(Protocol):
    """Finds a strategy for a problem."""

    @property
    def name(self) -> str:
        """What tables call the planner."""
        ...

    def plan(self, problem: PlanningProblem, *, progress: Callable[[str], None] | None = None) -> Strategy:
        """Return the best strategy that the planner finds.

        Args:
            problem: What to plan for.
            progress: Called now and then with a line for people.

        Raises:
            PlanningError: Nothing fits; the message names what does not, and what would.
        """
        ...


def check_sizes(mini_batch_size: int, micro_batch_sizes: Sequence[int]) -> None:
    """Check that micro-batches of these sizes make up a mini-batch.

    Raises:
        PlanningError: One does not divide it; the message names those that do.
    """
    for size in micro_batch_sizes:
        if size < 1 or mini_batch_size % size:
            raise PlanningError(
                f"micro-batches of {size} do not divide a mini-batch of {mini_batch_size}; sizes that do: "
                f"{', '.join(map(str, divisors(mini_batch_size)))}"
            )


def divisors(number: int) -> tuple[int, ...]:
    """Return all divisors of a positive number, ascending."""
    return tuple(d for d in range(1, number + 1) if number % d == 0)


def powers_of_two_dividing(number: int) -> tuple[int, ...]:
    """Return the powers of two that divide a positive number, and the number itself, ascending."""
    found = {number}
    size = 1
    while number % size == 0:
        found.add(size)
        size *= 2
    return tuple(sorted(found))


def scheduled(
    problem: PlanningProblem,
    stages: Sequence[Stage],
    *,
    planner: str,
    k: int = 1,
    limits: Sequence[int] | None = None,
    order: StageOrder = StageOrder.GRAPH,
    notes: dict[str, object] | None = None,
) -> Strategy:
    """Return stages with their kFkB schedule as a strategy.

    Args:
        problem: What they were planned for.
        stages: In a topological order.
        planner: Who planned them.
        k: Passes in a round; 1 for 1F1B.
        limits: ``[stages]`` samples in flight; by default those of `graphpipe.schedule.in_flight_limits`.
        order: What stages wait for.
        notes: What the planner has to say.

    Raises:
        StrategyError: The stages are not a valid stage graph.
    """
    graph = StageGraph(problem.graph, tuple(stages), problem.mini_batch_size, order)
    return Strategy(
        stages=graph,
        schedule=kfkb(graph, ModelCosts(problem.cost_model, graph), k=k, limits=limits),
        profile=problem.profile,
        cluster=problem.cluster,
        optimizer=problem.optimizer,
        planner=planner,
        notes=notes or {},
    )
