"""The search for one micro-batch size: the least target that the devices can keep, and the plans near it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from graphpipe.planner.backtrack import Piece, stages_of
from graphpipe.planner.costs import Choice, Setting, StageTables
from graphpipe.planner.layout import Chain
from graphpipe.planner.operators import OperatorTable
from graphpipe.planner.space import ChainSpace
from graphpipe.planner.tables import ChainTables
from graphpipe.stage import Recompute

# A guess of a plan's time may be this far off: plans whose guess is further from the best one are not looked at.
DOUBT = 0.15
# How well the least target is known in the end: where it is the objective, and where it only says where to look.
PRECISION = 1e-3
COARSE_PRECISION = 5e-3
# The first target that is tried is above the lower bound by this share.
FIRST_STEP = 0.05
# Targets above the least one at which plans are collected: a slower bottleneck may allow fewer stages.
SLACKS = (1.0, 1.02, 1.05, 1.1, 1.18, 1.3, 1.5, 1.8, 2.3, 3.0)


@dataclass(frozen=True)
class Found:
    """Stages that keep to a target.

    Attributes:
        target_s: Seconds a micro-batch of the busiest stage, at most.
        pieces: The stages.
    """

    target_s: float
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Solution:
    """What a target takes.

    Attributes:
        fewest: ``[levels]`` the fewest devices by the highest level of the first stages.
        stages: Returns the stages for a level whose devices are fewer than `NEVER`.
    """

    fewest: NDArray[np.int32]
    stages: Callable[[int], tuple[Piece, ...]]


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
        """``[choices, n + 1, n + 1]`` what stages from one position to another take."""

    @property
    @abstractmethod
    def operators(self) -> tuple[int, ...]:
        """All operators."""

    def single_stages(self) -> Iterator[tuple[Piece, ...]]:
        """Yield the whole graph as one stage: a single device, and data parallelism, where it fits."""
        for choice, level in zip(self.setting.choices, self.tables.levels[:, 0, -1], strict=True):
            if level:
                yield (Piece(tuple(sorted(self.operators)), choice),)

    def slowest_s(self) -> float:
        """Return a target that every plan keeps."""
        runs = self.tables.seconds
        return float(np.where(np.isfinite(runs), runs, 0.0).max())

    def fewest_devices(self, target_s: float) -> int:
        """Return how many devices keep to a target; `NEVER` or more where none do."""
        return int(self.solve(target_s).fewest[-1])

    def least_target_s(self, low_s: float, high_s: float, precision: float = PRECISION) -> float | None:
        """Return the least target that the devices can keep, between two bounds.

        Args:
            low_s: No plan is faster.
            high_s: Slower ones are of no interest.
            precision: The share up to which the target is to be known.

        Returns:
            Seconds a micro-batch, or None where even `high_s` cannot be kept.
        """
        available = self.setting.table.num_devices
        step = FIRST_STEP
        tried_s = low_s * (1 + step)
        # Most plans come close to the lower bound, so the way up is short.
        while low_s > 0 and tried_s < high_s:
            needed = self.fewest_devices(tried_s)
            if needed <= available:
                high_s = tried_s
                break
            step *= 2
            # Twice the devices need about half the target.
            low_s, tried_s = tried_s, tried_s * max(1 + step, min(needed / available, 2.0))
        else:
            if self.fewest_devices(high_s) > available:
                return None
        while high_s - low_s > precision * high_s:
            middle_s = (low_s + high_s) / 2
            if self.fewest_devices(middle_s) <= available:
                high_s = middle_s
            else:
                low_s = middle_s
        return high_s

    def near(
        self, target_s: float, worth: Callable[[float], bool], slacks: Sequence[float] = SLACKS
    ) -> Iterator[Found]:
        """Yield the plans near the least target, at each slack.

        Args:
            target_s: The least target.
            worth: Whether plans with such a target are worth a look.
            slacks: By how much more than the least target.
        """
        known: set[tuple[Piece, ...]] = set()
        for slack in slacks:
            if not worth(target_s * slack):
                return
            solution = self.solve(target_s * slack)
            fits = np.flatnonzero(solution.fewest <= self.setting.table.num_devices)
            # The shallowest plan that the devices allow, and the one with the fewest devices.
            for level in sorted({int(fits[0]), self.setting.num_levels}):
                pieces = solution.stages(level)
                if pieces not in known:
                    known.add(pieces)
                    yield Found(target_s * slack, pieces)


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
    def operators(self) -> tuple[int, ...]:
        """All operators."""
        return self.chain.operators

    def solve(self, target_s: float) -> Solution:
        """Return the fewest devices for a target."""
        tables = ChainTables(self.space, target_s)
        return Solution(tables.suffix[0, :, 0], lambda level: stages_of(tables, self.chain, level))
