"""Piper's planner: stages are differences of downsets, in sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphpipe.errors import PlanningError
from graphpipe.graph import ComputationGraph
from graphpipe.graph.dag import bits, members
from graphpipe.planner.backtrack import Found, Piece
from graphpipe.planner.base import PlanningProblem
from graphpipe.planner.bounds import lower_bound, nothing_fits
from graphpipe.planner.costs import Setting, StageTables, Sums, stage_tables
from graphpipe.planner.layout import line
from graphpipe.planner.operators import Floats, OperatorTable
from graphpipe.planner.search import Solution, TargetSearch, make_setting
from graphpipe.planner.sequential import SequentialPlanning
from graphpipe.planner.tables import NEVER, StageDevices, least
from graphpipe.stage import Recompute
from graphpipe.strategy import Strategy


@dataclass(frozen=True, kw_only=True)
class PiperPlanner:
    """Cuts the graph into a sequence of stages, each between two downsets, with replicas and recomputation of its own.

    A downset holds, with an operator, all operators before it. Their number grows exponentially with the branches of
    a graph, which limits what this planner can do.

    Attributes:
        max_downsets: The search ends with an error where there are more.

    Source:
        Tarnawski, Narayanan and Phanishayee, Piper: Multidimensional Planner for DNN Parallelization, NeurIPS 2021. We
        leave it in that replicas share each micro-batch instead of taking whole ones in turn, that the bottleneck is
        found by bisection, and that there is no tensor parallelism. As there, a stage passes on everything that is
        alive between its neighbours.
    """

    max_downsets: int = 2000

    @property
    def name(self) -> str:
        """What tables call the planner."""
        return "piper"

    def plan(self, problem: PlanningProblem, *, progress: Callable[[str], None] | None = None) -> Strategy:
        """Return the best strategy that the planner finds.

        Args:
            problem: What to plan for.
            progress: Called now and then with a line for people.

        Raises:
            PlanningError: There are too many downsets, or nothing fits; the message says what would.
        """
        table = OperatorTable(problem)
        downsets = Downsets(table, enumerate_downsets(problem.graph, self.max_downsets))
        chain = line(range(len(problem.graph.operators)))
        planning = SequentialPlanning(problem, self.name)
        for size in problem.micro_batch_sizes:
            setting = make_setting(table, chain, size, (Recompute.NONE, Recompute.ALL), 1)
            planning.search(DownsetSearch(setting, downsets), lower_bound(table).work_s, progress)
        strategy = planning.strategy(table)
        if strategy is None:
            raise nothing_fits(table, (chain,), (Recompute.NONE, Recompute.ALL))
        return strategy


def enumerate_downsets(graph: ComputationGraph, limit: int) -> tuple[int, ...]:
    """Return all downsets of a graph as bit sets, smaller ones first.

    Raises:
        PlanningError: There are more than `limit`.
    """
    before = [bits(found) for found in graph.predecessors]
    found = {0}
    # By downset the operators that it may grow by.
    frontier = {0: bits(u for u, needed in enumerate(before) if not needed)}
    while frontier:
        grown: dict[int, int] = {}
        for downset, ready in frontier.items():
            for u in members(ready):
                larger = downset | 1 << u
                if larger not in grown:
                    after = (v for v in graph.successors[u] if not before[v] & ~larger)
                    grown[larger] = ready ^ 1 << u | bits(after)
        found.update(grown)
        if len(found) > limit:
            raise PlanningError(
                f"{graph.name!r} has more than {limit} downsets, the limit of Piper's planner, at {len(before)} "
                "operators: their number grows exponentially with the branches; raise max_downsets, or use graphpipe"
            )
        frontier = grown
    return tuple(sorted(found, key=lambda downset: (downset.bit_count(), downset)))


def few_downsets(table: OperatorTable, limit: int) -> Downsets | None:
    """Return the downsets of a graph, or None where there are more than `limit`."""
    try:
        return Downsets(table, enumerate_downsets(table.problem.graph, limit))
    except PlanningError:
        return None


class Downsets:
    """The downsets of a graph, as positions at which a sequence of stages may be cut.

    Args:
        table: The operators.
        sets: All downsets, smaller ones first.
    """

    def __init__(self, table: OperatorTable, sets: Sequence[int]) -> None:
        self.table = table
        self.sets = sets

    @cached_property
    def holds(self) -> Floats:
        """``[downsets, operators]`` 1 where a downset holds an operator."""
        count = len(self.table.problem.graph.operators)
        found = np.zeros((len(self.sets), count))
        for at, downset in enumerate(self.sets):
            found[at, list(members(downset))] = 1.0
        return found

    @cached_property
    def pairs(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """``[pairs]`` the positions of two downsets of which the second holds the first, and more; by the first."""
        sizes = self.holds.sum(axis=1)
        shared = self.holds @ self.holds.T
        starts, stops = np.nonzero((shared == sizes[:, None]) & (sizes[None, :] > sizes[:, None]))
        return starts, stops

    @cached_property
    def rows(self) -> NDArray[np.int64]:
        """``[downsets]`` where the pairs with each downset as the first start; the last one has none."""
        return np.searchsorted(self.pairs[0], np.arange(len(self.sets)))

    def live_bytes(self, num_samples: int, *, with_gradient: bool) -> Floats:
        """Return ``[downsets]`` the bytes that are made in a downset and read outside of it."""
        index = self.table.problem.graph.index
        found = np.zeros(len(self.sets))
        for value in self.table.problem.graph.values:
            if value.carries_gradient or not with_gradient:
                made = self.holds[:, index[value.producer]] > 0
                unread = (self.holds[:, [index[c] for c in value.consumers]] == 0).any(axis=1)
                found[made & unread] += value.num_bytes(num_samples)
        return found

    def tables(self, setting: Setting) -> StageTables:
        """Return ``[choices, pairs]`` what every pair of downsets takes as a stage."""
        sizes = setting.local_sizes
        return stage_tables(setting, self._sums(setting, sizes), sizes)

    def _sums(self, setting: Setting, sizes: Sequence[int]) -> Sums:
        table, profile = self.table, self.table.problem.profile
        alone, share = table.is_batch_wise, 1.0 / setting.num_micro_batches
        whole = profile.at(table.problem.mini_batch_size)
        costs = [profile.at(size) for size in sizes]
        live = self.live_bytes(setting.micro_batch_size, with_gradient=False)
        returning = self.live_bytes(setting.micro_batch_size, with_gradient=True)
        starts, stops = self.pairs
        return Sums(
            state_bytes=self._between(table.state_bytes),
            trainable_bytes=self._between(table.trainable_bytes),
            has_backward=self._between(table.has_backward) > 0,
            is_batch_wise=self._between(alone) > 0,
            received_bytes=live[starts],
            returned_bytes=returning[starts],
            sent_bytes=live[stops],
            awaited_bytes=returning[stops],
            forward_s=np.stack([self._between(np.where(alone, whole.forward_s * share, c.forward_s)) for c in costs]),
            backward_s=np.stack(
                [self._between(np.where(alone, whole.backward_s * share, c.backward_s)) for c in costs]
            ),
            saved_bytes=np.stack(
                [self._between(np.where(alone, whole.saved_bytes * share, c.saved_bytes)) for c in costs]
            ),
            batch_wise_forward_s=self._between(np.where(alone, whole.forward_s * share, 0.0)),
            batch_wise_saved_bytes=self._between(np.where(alone, whole.saved_bytes * share, 0.0)),
        )

    def _between(self, of_operator: NDArray[Any]) -> Floats:
        total = self.holds @ np.asarray(of_operator, dtype=np.float64)
        starts, stops = self.pairs
        return np.asarray(np.maximum(total[stops] - total[starts], 0.0), dtype=np.float64)


class DownsetSearch(TargetSearch):
    """The search of one micro-batch size over sequences of downsets."""

    def __init__(self, setting: Setting, downsets: Downsets) -> None:
        super().__init__(setting)
        self.downsets = downsets
        self._tables = downsets.tables(setting)

    @property
    def tables(self) -> StageTables:
        """``[choices, pairs]`` what pairs of downsets take as stages."""
        return self._tables

    @property
    def whole(self) -> tuple[int, ...]:
        """The pair of no operators and all of them."""
        return (int(self.downsets.rows[1]) - 1,)

    @property
    def operators(self) -> tuple[int, ...]:
        """All operators."""
        return tuple(members(self.downsets.sets[-1]))

    def solve(self, target_s: float) -> Solution:
        """Return the fewest devices for a target."""
        stages = StageDevices(self.setting, self._tables, target_s)
        last, count = self.setting.num_levels, len(self.downsets.sets)
        # ``[levels, downsets]`` fewest devices for what a downset leaves.
        found = np.full((last + 1, count), NEVER, dtype=np.int32)
        found[:, -1] = 0
        stops, rows = self.downsets.pairs[1], self.downsets.rows
        for level in range(1, last):
            now, before = found[level], found[level - 1]
            sums = stages.at(level) + before[stops]
            self.setting.tally.transitions += sums.size
            np.minimum(before[:-1], np.minimum.reduceat(sums, rows[:-1]), out=now[:-1])
            if np.array_equal(now, before):
                # More samples in flight are of no use: higher levels allow no other stages.
                found[level + 1 : last] = now
                break
        now = found[last]
        np.minimum(now, found[last - 1], out=now)
        for start in reversed(range(count - 1)):
            row = slice(rows[start], rows[start + 1])
            now[start] = min(now[start], least(self.setting, stages.at(last)[row] + now[stops[row]], 0))
        return Solution(found[:, 0], lambda level: self._stages(stages, found, level))

    def _stages(self, stages: StageDevices, found: NDArray[np.int32], level: int) -> Found:
        last, sets = self.setting.num_levels, self.downsets.sets
        stops, rows = self.downsets.pairs[1], self.downsets.rows
        start, pieces, slowest_s = 0, [], 0.0
        while start < len(sets) - 1:
            while level and found[level - 1, start] == found[level, start]:
                level -= 1
            before = level if level == last else level - 1
            row = slice(rows[start], rows[start + 1])
            hits = np.flatnonzero(stages.at(level)[row] + found[before, stops[row]] == found[level, start])
            pair = int(rows[start] + hits[-1])
            stop = int(stops[pair])
            choice = stages.choice(level, pair)
            pieces.append(Piece(tuple(members(sets[stop] & ~sets[start])), self.setting.choices[choice]))
            slowest_s = max(slowest_s, float(self._tables.seconds[choice, pair]))
            start, level = stop, before
        return Found(slowest_s, tuple(pieces))
