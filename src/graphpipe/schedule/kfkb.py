"""kFkB over stage graphs: k forward passes, then k backward passes, as early as the limits allow.

With k = 1 this is the synchronous 1F1B schedule. The order is found by playing the pipeline through with the tasks'
durations: whenever a device is free it runs a backward pass if one is ready, else a forward pass if the samples in
flight allow. What comes out is a static order for each device; the durations only decide ties and interleaving, never
correctness.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from graphpipe.errors import DeadlockError
from graphpipe.schedule.costs import TaskCosts, UniformCosts
from graphpipe.schedule.play import Play, TimedStages, play, timed_stages
from graphpipe.schedule.task import DeviceOrder, Phase, Schedule, Task, device_groups
from graphpipe.stage import StageGraph

# Makespans that differ by less are the same.
SAME = 1e-9


def in_flight_limits(stages: StageGraph, k: Sequence[int] | int = 1) -> tuple[int, ...]:
    """Return how many samples each stage may hold between their forward and backward passes.

    From the sinks back: a sink holds ``k b``; another stage holds what the stage after it holds plus
    ``max(k b, k' b')``, the larger of its own and the next stage's round, rounded up to whole micro-batches and never
    more than the mini-batch. For equal sizes that is ``k b`` times the stages on the longest path to a sink.

    Args:
        stages: The stage graph.
        k: Passes in a round, for every stage or one each.

    Returns:
        ``[stages]`` samples.

    Raises:
        ValueError: A round has less than one pass.

    Source:
        GraphPipe, section 5; the paper adds the larger round in the same way for unequal micro-batch sizes.
    """
    links = [(edge.source, edge.target) for edge in stages.edges]
    return limits_of(
        [stage.micro_batch_size for stage in stages.stages], links, stages.mini_batch_size, _rounds(stages, k)
    )


def limits_of(
    sizes: Sequence[int], links: Sequence[tuple[int, int]], mini_batch_size: int, rounds: Sequence[int]
) -> tuple[int, ...]:
    """Return what `in_flight_limits` does from micro-batch sizes, (source, target) pairs and rounds."""
    after: list[list[int]] = [[] for _ in sizes]
    for x, y in links:
        after[x].append(y)
    limits = [0] * len(sizes)
    for x in reversed(range(len(sizes))):
        size = sizes[x]
        own = rounds[x] * size
        need = own
        for y in after[x]:
            need = max(need, limits[y] + max(own, rounds[y] * sizes[y]))
        limits[x] = min(mini_batch_size, -(-need // size) * size)
    return tuple(limits)


def _rounds(stages: StageGraph, k: Sequence[int] | int) -> tuple[int, ...]:
    rounds = (k,) * len(stages.stages) if isinstance(k, int) else tuple(k)
    if len(rounds) != len(stages.stages) or min(rounds) < 1:
        raise ValueError(f"k needs at least 1 for each of {len(stages.stages)} stages, got {rounds}")
    return rounds


def kfkb(
    stages: StageGraph,
    costs: TaskCosts | None = None,
    *,
    k: Sequence[int] | int = 1,
    limits: Sequence[int] | None = None,
) -> Schedule:
    """Return the kFkB schedule of a stage graph.

    Args:
        stages: The stage graph.
        costs: Durations of tasks and messages; by default a forward pass takes 1 and a backward pass 2.
        k: Passes in a round, for every stage or one each. It may exceed the number of micro-batches.
        limits: ``[stages]`` samples in flight; by default those of `in_flight_limits`.

    Raises:
        ValueError: A round has less than one pass.
        DeadlockError: The limits let the pipeline stop before its end.
    """
    rounds = _rounds(stages, k)
    if limits is None:
        limits = in_flight_limits(stages, rounds)
    played = play(timed_stages(stages, costs or UniformCosts(1.0, 2.0)), rounds, limits)
    _check_complete(stages, played, rounds, limits)
    return Schedule(
        tuple(
            DeviceOrder(
                devices,
                tuple(Task(x, Phase.BACKWARD if is_backward else Phase.FORWARD, m) for x, is_backward, m in order),
            )
            for (devices, _), order in zip(device_groups(stages), played.orders, strict=True)
        )
    )


def _check_complete(stages: StageGraph, played: Play, rounds: Sequence[int], limits: Sequence[int]) -> None:
    for x in range(len(stages.stages)):
        count = stages.num_micro_batches(x)
        if played.forwards[x] < count or played.backwards[x] < count * stages.has_backward[x]:
            enough = in_flight_limits(stages, rounds)[x]
            raise DeadlockError(
                f"stage {x} stops after {played.forwards[x]} of {count} forward passes: its limit of {limits[x]} "
                f"samples in flight is too low; the least that is always enough is {enough}"
            )


def fitted_limits(
    timed: TimedStages, rounds: Sequence[int], most: Sequence[int] | None = None, played_tasks: float = math.inf
) -> tuple[int, ...]:
    """Return the smallest limits with which a pipeline is as fast as with the largest ones.

    The limits of `in_flight_limits` are just enough for equal stages that exchange messages in no time. Transfers,
    unequal stages and unequal micro-batches may need more, or get along with less. From the sinks back, each stage gets
    the smallest limit that keeps the makespan, until none can be lowered by a micro-batch.

    Args:
        timed: The stages.
        rounds: ``[stages]`` passes in a round.
        most: ``[stages]`` the largest limits that are possible; by default the whole mini-batch.
        played_tasks: After so many tasks have been played, limits are left as they are: large enough, maybe not the
            smallest.

    Returns:
        ``[stages]`` samples.
    """
    sizes, batch = timed.sizes, timed.mini_batch_size
    links = [(edge.source, edge.target) for edge in timed.edges]
    highest = [batch] * len(sizes) if most is None else list(most)
    goal_s = play(timed, rounds, highest).makespan_s
    closed = limits_of(sizes, links, batch, rounds)
    limits = [min(limit, high) for limit, high in zip(closed, highest, strict=True)]
    # Room may even be harmful: a forward pass starts just before a backward pass could.
    found_s = play(timed, rounds, limits).makespan_s
    more = 1
    while found_s > goal_s * (1 + SAME) and limits != highest:
        limits = [
            min(high, limit + more * k * size)
            for limit, high, k, size in zip(closed, highest, rounds, sizes, strict=True)
        ]
        found_s = play(timed, rounds, limits).makespan_s
        more *= 2

    def is_enough(x: int, limit: int) -> bool:
        played = play(timed, rounds, [*limits[:x], limit, *limits[x + 1 :]])
        return played.is_complete(timed) and played.makespan_s <= found_s * (1 + SAME)

    # Round and round, until every stage was tried since the last one was lowered.
    x, unchanged = len(sizes) - 1, 0
    while unchanged < len(sizes):
        unchanged += 1
        while limits[x] > rounds[x] * sizes[x]:
            played_tasks -= 2 * sum(timed.counts)
            lower = _lowered(limits[x], sizes[x])
            if played_tasks < 0 or not is_enough(x, lower):
                break
            limits[x], unchanged = lower, 1
        x = (x or len(sizes)) - 1
    return tuple(limits)


def _lowered(limit: int, size: int) -> int:
    """Return the next smaller limit that whole micro-batches can fill."""
    return (limit - 1) // size * size


def gpipe(stages: StageGraph, costs: TaskCosts | None = None) -> Schedule:
    """Return the GPipe schedule: all forward passes, then all backward passes."""
    return kfkb(
        stages,
        costs,
        k=[stages.num_micro_batches(x) for x in range(len(stages.stages))],
        limits=[stages.mini_batch_size] * len(stages.stages),
    )
