"""The search for one micro-batch size: the least target that the devices can keep, and the plans near it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphpipe.planner.backtrack import Found, Piece, stages_of
from graphpipe.planner.costs import Choice, Setting, StageTables
from graphpipe.planner.layout import Chain
from graphpipe.planner.operators import OperatorTable
from graphpipe.planner.space import ChainSpace
from graphpipe.planner.tables import ChainTables
from graphpipe.stage import Recompute

# A guess of a plan's time may be this far off: plans whose guess is further from the best one are not looked at.
DOUBT = 0.15
# How well the least target is known in the end.
PRECISION = 1e-3
# The first target that is tried is above the lower bound by this share.
FIRST_STEP = 0.05
# Bounds of the least target are near each other when they differ by this share.
NEAR = 0.05
# Targets above the least one at which plans are collected: a slower bottleneck may allow fewer stages.
SLACKS = (1.0, 1.02, 1.05, 1.1, 1.18, 1.3, 1.5, 1.8, 2.3, 3.0)
# How well the least target of each depth between them is known.
DEPTH_PRECISION = 2e-3


@dataclass(frozen=True)
class Solution:
    """What a target takes.

    Attributes:
        fewest: ``[levels]`` the fewest devices by the highest level of the first stages.
        stages: Returns the stages for a level whose devices are fewer than `NEVER`.
    """

    fewest: NDArray[np.int32]
    stages: Callable[[int], Found]


def replica_counts(micro_batch_size: int, num_devices: int) -> tuple[int, ...]:
    """Return the numbers of replicas to try, ascending.

    Replicas beyond the samples of a micro-batch would be idle, and so would those that leave the largest share as it
    is. Above eight, powers of two and three halves of them are enough.
    """
    found: list[int] = []
    most = min(micro_batch_size, num_devices)
    for count in range(1, most + 1):
        is_round = count.bit_count() == 1 or (count % 3 == 0 and (count // 3).bit_count() == 1)
        is_tried = is_round or count <= 8 or count == most
        if is_tried and (count == 1 or -(-micro_batch_size // count) < -(-micro_batch_size // found[-1])):
            found.append(count)
    return tuple(found)


def make_setting(
    table: OperatorTable, chain: Chain, micro_batch_size: int, recompute: Sequence[Recompute], k: int
) -> Setting:
    """Return what the search of one micro-batch size holds fixed."""
    count = -(-table.problem.mini_batch_size // micro_batch_size)
    rounds = -(-count // k)
    choices = tuple(
        Choice(replicas, each) for replicas in replica_counts(micro_batch_size, table.num_devices) for each in recompute
    )
    # Each stage of a path has a device. One level more, for stages that hold the whole mini-batch at any depth.
    longest = min(chain.depth, table.num_devices)
    return Setting(table, micro_batch_size, max(1, min(rounds, longest + 1)), choices, k)


class TargetSearch(ABC):
    """The search of one micro-batch size over anything that can be cut into stages.

    Attributes:
        setting: What is held fixed.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    @abstractmethod
    def solve(self, target_s: float) -> Solution:
        """Return the fewest devices for a target."""

    @property
    @abstractmethod
    def tables(self) -> StageTables:
        """``[choices, ...]`` what stages take."""

    @property
    @abstractmethod
    def whole(self) -> tuple[int, ...]:
        """Where the stage of all operators is in the tables."""

    @property
    @abstractmethod
    def operators(self) -> tuple[int, ...]:
        """All operators."""

    def single_stages(self) -> list[Found]:
        """Return the whole graph as one stage: a single device, and data parallelism, where it fits; fastest first."""
        operators = tuple(sorted(self.operators))
        index: Any = (slice(None), *self.whole)
        levels, seconds = self.tables.levels[index], self.tables.seconds[index]
        runs = zip(self.setting.choices, levels, seconds, strict=True)
        found = [Found(float(taken_s), (Piece(operators, choice),)) for choice, level, taken_s in runs if level]
        return sorted(found, key=lambda each: each.slowest_s)

    def slowest_s(self) -> float:
        """Return a target that every plan keeps."""
        runs = self.tables.seconds
        return float(runs.max(where=np.isfinite(runs), initial=0.0))

    def fewest_devices(self, target_s: float) -> int:
        """Return how many devices keep to a target; `NEVER` or more where none do."""
        return int(self.solve(target_s).fewest[-1])

    def least_target_s(self, low_s: float, high_s: float, precision: float = PRECISION) -> float | None:
        """Return the seconds of the busiest stage of a plan that the devices can keep, the least up to a precision.

        Args:
            low_s: No plan is faster.
            high_s: Slower ones are of no interest.
            precision: The share by which a plan may be faster than the one that is returned.

        Returns:
            Seconds a micro-batch, or None where even `high_s` cannot be kept.
        """
        available = self.setting.table.num_devices
        step = FIRST_STEP
        tried_s = low_s * (1 + step)
        # Most plans come close to the lower bound, so the way up is short.
        while low_s > 0 and tried_s < high_s:
            needed, slowest_s = self._keep(tried_s)
            if needed <= available:
                high_s = slowest_s
                break
            step *= 2
            # Twice the devices need about half the target.
            low_s, tried_s = tried_s, tried_s * max(1 + step, min(needed / available, 2.0))
        else:
            needed, high_s = self._keep(high_s)
            if needed > available:
                return None
        return self._narrowed(low_s, high_s, precision)

    def better_target_s(self, low_s: float, high_s: float, precision: float = PRECISION) -> float | None:
        """Return what `least_target_s` does, where it is likely that even `high_s` cannot be kept."""
        needed, slowest_s = self._keep(high_s)
        return None if needed > self.setting.table.num_devices else self._narrowed(low_s, slowest_s, precision)

    def _narrowed(self, low_s: float, high_s: float, precision: float) -> float:
        """Return the least target up to a precision, from one that cannot be kept and what a plan takes."""
        is_below = False
        while high_s - low_s > precision * high_s:
            # There are few different plans near the least target, and the best one so far is likely to be the best. So
            # every other target is just below what it takes.
            is_below = not is_below and high_s - low_s < NEAR * high_s
            tried_s = high_s * (1 - precision) if is_below else (low_s + high_s) / 2
            needed, slowest_s = self._keep(tried_s)
            if needed <= self.setting.table.num_devices:
                high_s = slowest_s
            elif is_below:
                break
            else:
                low_s = tried_s
        return high_s

    def _keep(self, target_s: float) -> tuple[int, float]:
        """Return how many devices keep to a target, and the seconds of the busiest stage if there are so many."""
        solution = self.solve(target_s)
        needed = int(solution.fewest[-1])
        if needed > self.setting.table.num_devices:
            return needed, float("inf")
        return needed, solution.stages(self.setting.num_levels).slowest_s

    def near(
        self, target_s: float, worth: Callable[[float], bool], slacks: Sequence[float] = SLACKS
    ) -> Iterator[Found]:
        """Yield the plans near the least target: at each slack, and the fastest of each depth in between.

        Args:
            target_s: The least target.
            worth: Whether plans with such a target are worth a look.
            slacks: By how much more than the least target.
        """
        known: set[tuple[Piece, ...]] = set()
        before: _Tried | None = None
        for slack in slacks:
            if not worth(target_s * slack):
                return
            now = self._tried(target_s * slack)
            between = () if before is None else self._shallower(before, now)
            # The shallowest plan that the devices allow, and the one with the fewest devices.
            here = (now.solution.stages(level) for level in sorted({now.level, self.setting.num_levels}))
            for found in (*between, *here):
                if found.pieces not in known:
                    known.add(found.pieces)
                    yield found
            before = now

    def _tried(self, target_s: float) -> _Tried:
        solution = self.solve(target_s)
        return _Tried(target_s, solution, int(np.argmax(solution.fewest <= self.setting.table.num_devices)))

    def _shallower(self, low: _Tried, high: _Tried) -> Iterator[Found]:
        """Yield for each level below that of a target, down to that of a higher one, about the fastest plan at it."""
        if low.level <= high.level:
            return
        found = high.solution.stages(high.level)
        if found.slowest_s - low.target_s <= DEPTH_PRECISION * found.slowest_s:
            yield found
            return
        middle = self._tried((low.target_s + found.slowest_s) / 2)
        yield from self._shallower(low, middle)
        yield from self._shallower(middle, replace(high, target_s=found.slowest_s))


@dataclass(frozen=True)
class _Tried:
    """A target that the devices can keep.

    Attributes:
        target_s: Seconds a micro-batch of the busiest stage, at most.
        solution: What it takes.
        level: The lowest level of the first stages that the devices allow.
    """

    target_s: float
    solution: Solution
    level: int


class Search(TargetSearch):
    """The search of one micro-batch size over one layout of the graph."""

    def __init__(self, setting: Setting, chain: Chain) -> None:
        super().__init__(setting)
        self.chain = chain
        self.space = ChainSpace(setting, chain)

    @property
    def tables(self) -> StageTables:
        """``[choices, n + 1, n + 1]`` what runs of the chain's items take as stages."""
        return self.space.tables

    @property
    def whole(self) -> tuple[int, ...]:
        """The run of all items."""
        return (0, -1)

    @property
    def operators(self) -> tuple[int, ...]:
        """All operators."""
        return self.chain.operators

    def solve(self, target_s: float) -> Solution:
        """Return the fewest devices for a target."""
        tables = ChainTables(self.space, target_s)
        return Solution(tables.suffix[0, :, 0], cache(lambda level: stages_of(tables, self.chain, level)))
