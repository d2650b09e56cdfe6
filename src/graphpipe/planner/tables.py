"""Fewest devices: the dynamic program of the partitioner, for one target of seconds a micro-batch.

A stage at *level* ``l`` holds ``l`` rounds of micro-batches in flight; it is one level above the stage after it, or at
the last level, which stands for the whole mini-batch. For every part of the graph there is a table

    ``devices[first, after]``: the fewest devices that cover the part such that its first stages have at most level
    ``first`` when the stage after it has level ``after``,

with every stage within the target and within memory. Chains minimise over where a stage stops and over its replicas;
blocks add over their branches, which share ``first`` and ``after``. The stages that a chain can be made of are

* a run of its items, whole blocks included;
* a group of whole branches of a block (chosen by how many of each kind of equal branches);
* the items before a block with the head of one of its branches (a *fork*);
* the tail of one branch with the items after the block (a *join*).

A fork and a join of one block are in different branches.

Source:
    GraphPipe, section 5, turned round: the paper fixes the devices and minimises the samples in flight, and forms forks
    and joins from shared sources and sinks. Here tables hold small integers that fall with `first` and grow with
    `after`, and every step is a (min, +) product of arrays.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphpipe.planner.costs import Setting, StageTables
from graphpipe.planner.space import BlockSpace, ChainSpace

Devices = NDArray[np.int32]

# More devices than any cluster has; a thousand of them still fit into 32 bits.
NEVER = np.int32(1 << 20)
# So many positions of a chain are done together where one depends on the next.
NEIGHBOURS = 32


def least(setting: Setting, sums: Devices, axis: int) -> Devices:
    """Return the least of the ways to go on along an axis, and count them."""
    setting.tally.transitions += sums.size
    found: Devices = np.minimum.reduce(sums, axis=axis, initial=NEVER)
    return found


def _least(ways: Sequence[Devices]) -> Devices:
    """Return the least of some ways of equal shapes."""
    return reduce(np.minimum, ways)


class StageDevices:
    """The fewest devices of stages by level, for one target.

    Args:
        setting: The search.
        tables: ``[choices, ...]`` what the stages take.
        target_s: Seconds a micro-batch.
    """

    def __init__(self, setting: Setting, tables: StageTables, target_s: float) -> None:
        self.setting = setting
        self.tables = tables
        # ``[choices, ...]`` the highest level of a choice that keeps to the target, or of one with fewer devices.
        self.levels = tables.levels * (tables.seconds <= target_s).view(np.int8)
        for fewer, more in pairwise(self.levels):
            np.maximum(more, fewer, out=more)
        replicas = [choice.num_replicas for choice in setting.choices]
        self._devices = np.array([*replicas, NEVER], dtype=np.int32)
        self._known: dict[tuple[int, bool], Devices] = {}

    def at(self, level: int) -> Devices:
        """Return ``[...]`` the fewest devices at a level, `NEVER` where there is no choice."""
        is_last = level == self.setting.num_levels
        # All levels between two steps allow the same choices.
        step = bisect_left(self.tables.steps, level)
        if (step, is_last) not in self._known:
            # As many choices as are at a lower level come before the first one that is possible.
            found = self._devices.take((self.levels < level).view(np.uint8).sum(axis=0, dtype=np.uint8))
            if not is_last and self.tables.mixes:
                found[self.tables.only_last] = NEVER
            self._known[step, is_last] = found
        return self._known[step, is_last]

    def choice(self, level: int, *where: int) -> int:
        """Return which choice `at` takes for one stage."""
        index: Any = (slice(None), *where)
        return int(np.flatnonzero(self.levels[index] >= level)[0])


@dataclass(frozen=True)
class Transit:
    """A way through a block, from a position of its chain to a later one.

    Attributes:
        start: Items of the chain before it.
        stop: Items of the chain before what follows it.
        fork: How many items before the block share a stage with the head of a branch; 0 for no fork.
        join: How many items after the block share a stage with the tail of a branch; 0 for no join.
        devices: ``[levels, afters]`` fewest devices.
        block: The block's tables.
    """

    start: int
    stop: int
    fork: int
    join: int
    devices: Devices
    block: BlockTables


class Passages:
    """All ways through a block, to look at together.

    Attributes:
        block: The block's tables.
        devices: ``[levels, afters, ways]`` fewest devices, ways by start.
        starts: The items of the chain before them, each number once.
        firsts: Where the ways of each start begin, and how many ways there are.
        stops: ``[ways]`` the items of the chain before what follows them.
        settled: From this level to the one before the last, all levels are the same.
    """

    def __init__(self, block: BlockTables, transits: Sequence[Transit]) -> None:
        self.block = block
        ways = sorted(transits, key=lambda way: way.start)
        self.devices = np.stack([way.devices for way in ways], axis=2)
        self.stops = np.array([way.stop for way in ways])
        self.starts = sorted({way.start for way in ways})
        self.firsts = [bisect_left(ways, start, key=lambda way: way.start) for start in self.starts] + [len(ways)]
        last = block.setting.num_levels
        changes = np.flatnonzero((self.devices[1:last] != self.devices[: last - 1]).any(axis=(1, 2)))
        within = bisect_left(block.space.afters, last)
        self.settled = max(block.space.afters[within - 1] + 1, int(changes[-1]) + 1 if len(changes) else 0)

    def best(self, found: Devices, level: int) -> Devices:
        """Return ``[..., starts]`` the fewest devices of ways whose first stages are at a level below the last.

        Args:
            found: ``[..., levels, n + 1]`` fewest devices of what follows.
            level: The level.
        """
        count = bisect_left(self.block.space.afters, level)
        sums = found[:, self.block.afters[:count, None], self.stops] + self.devices[level, :count]
        return np.minimum.reduceat(least(self.block.setting, sums, 1), self.firsts[:-1], axis=1)

    def best_at_last(self, found: Devices, start: int) -> Devices:
        """Return ``[...]`` the fewest devices of the ways from a start whose first stages are at the last level."""
        at = self.starts.index(start)
        here = slice(self.firsts[at], self.firsts[at + 1])
        sums = found[:, self.block.afters[:, None], self.stops[here]] + self.devices[-1, :, here]
        return least(self.block.setting, sums.reshape(len(found), -1), 1)


class ChainTables:
    """Fewest devices for the ends, and on request the beginnings, of a chain.

    Attributes:
        suffix: ``[afters, levels, n + 1]`` for the items from a position on.
        prefix: ``[levels, levels, n + 1]`` for the items up to a position: by first level, then level after.
    """

    def __init__(self, space: ChainSpace, target_s: float) -> None:
        self.space = space
        self.setting = space.setting
        self.stages = StageDevices(space.setting, space.tables, target_s)
        self.transits: list[Transit] = []
        self.passages: list[Passages] = []
        for each in space.blocks:
            block = BlockTables(each, target_s)
            transits = block.transits(space.num_items)
            if transits:
                self.transits += transits
                self.passages.append(Passages(block, transits))
        self.suffix = self._suffix()
        self.prefix = self._prefix() if space.needs_prefix else None

    def _suffix(self) -> Devices:
        last, n = self.setting.num_levels, self.space.num_items
        afters = self.space.afters
        reach = max((after for after in afters if after < last), default=0)
        settled = max([reach, *(ways.settled for ways in self.passages)])
        found = np.full((len(afters), last + 1, n + 1), NEVER, dtype=np.int32)
        for a, after in enumerate(afters):
            found[a, after:, n] = 0
        for level in range(1, last):
            now, before = found[:, level], found[:, level - 1]
            np.minimum(now, before, out=now)
            np.minimum(now, least(self.setting, self.stages.at(level) + before[:, None, :], 2), out=now)
            for ways in self.passages:
                now[:, ways.starts] = np.minimum(now[:, ways.starts], ways.best(found, level))
            if level > settled and (now == before).all():
                # More samples in flight are of no use: higher levels allow no other stages.
                found[:, level + 1 : last] = now[:, None]
                if afters[-1] < last and not self.stages.tables.mixes and not self.passages:
                    found[:, last] = now
                    return found
                break
        # At the last level a stage may follow one of the same level, so positions come one after the other.
        now = found[:, last]
        np.minimum(now, found[:, last - 1], out=now)
        stages = self.stages.at(last)
        if not self.passages:
            self._follow(now, stages)
            return np.minimum(found, NEVER, out=found)
        for start in reversed(range(n)):
            np.minimum(now[:, start], least(self.setting, stages[start] + now, 1), out=now[:, start])
            for ways in self.passages:
                if start in ways.starts:
                    now[:, start] = np.minimum(now[:, start], ways.best_at_last(found, start))
        return np.minimum(found, NEVER, out=found)

    def _follow(self, now: Devices, stages: Devices) -> None:
        """Let stages of the last level follow each other, the last ones first.

        Positions that are near each other are done together, again and again until nothing changes: few stages follow
        each other within them.

        Args:
            now: ``[..., n + 1]`` fewest devices from each position on, changed in place.
            stages: ``[n + 1, n + 1]`` the devices of each run.
        """
        for stop in range(self.space.num_items, 0, -NEIGHBOURS):
            here = slice(max(0, stop - NEIGHBOURS), stop)
            part, inner = now[:, here], stages[here, here]
            best = least(self.setting, stages[here, stop:] + now[:, None, stop:], 2)
            np.minimum(part, best, out=part)
            best = least(self.setting, inner + part[:, None], 2)
            while (best < part).any():
                np.minimum(part, best, out=part)
                best = least(self.setting, inner + part[:, None], 2)

    def _prefix(self) -> Devices:
        last, n = self.setting.num_levels, self.space.num_items
        found = np.full((last + 1, last + 1, n + 1), NEVER, dtype=np.int32)
        for after in range(last + 1):
            found[after:, after, 0] = 0
        now = found[last:, last]
        stages = self.stages.at(last)
        if self.transits:
            for stop in range(1, n + 1):
                np.minimum(now[:, stop], least(self.setting, now + stages[:, stop], 1), out=now[:, stop])
                self._pass_blocks(found, last, stop)
        else:
            self._follow(now[:, ::-1], stages.T[::-1, ::-1])
        top = last
        for after in reversed(range(last)):
            # The first stages are above what comes after them.
            now, above = found[after + 1 : top + 1, after], found[after + 1 : top + 1, after + 1]
            np.minimum(now, above, out=now)
            stages = self.stages.at(after + 1)
            np.minimum(now, least(self.setting, above[:, :, None] + stages, 1), out=now)
            if self.transits:
                for stop in {transit.stop for transit in self.transits}:
                    self._pass_blocks(found, after, stop)
                continue
            found[top + 1 :, after] = found[top, after]
            # A first level that is of no use here is of no use to what is made of this.
            while top > after + 1 and (found[top, after] == found[top - 1, after]).all():
                top -= 1
        return np.minimum(found, NEVER, out=found)

    def _pass_blocks(self, found: Devices, after: int, stop: int) -> None:
        for transit in self.transits:
            if transit.stop == stop and after in transit.block.space.afters:
                ways = transit.devices[:, transit.block.space.afters.index(after)]
                best = least(self.setting, found[:, :, transit.start] + ways, 1)
                found[:, after, stop] = np.minimum(found[:, after, stop], best)


class BlockTables:
    """Fewest devices for the branches of a block, and for the ways through it.

    Attributes:
        parts: ``[kinds + groups, levels, afters]`` for a branch of each kind, and for a group of branches as a stage.
        states: ``[states, levels, afters]`` for a choice of branches, by how many of each kind.
        heads: By kind, ``[levels, afters, before]``: a fork of so many items before the block with the best head of a
            branch of that kind, and the rest of that branch, whose first stage has at most the given level.
        tails: By kind, ``[levels, afters, behind]``: the beginning of a branch, and the best join of its tail with so
            many items after the block; the level after is that of what follows the join.
    """

    def __init__(self, space: BlockSpace, target_s: float) -> None:
        self.space = space
        self.setting = space.setting
        self.afters = np.array(space.afters)
        self.branches = [ChainTables(kind.branch, target_s) for kind in space.kinds]
        self.merged = [StageDevices(space.setting, kind.merged, target_s) for kind in space.kinds]
        self.groups = StageDevices(space.setting, space.groups, target_s)
        self.parts = np.concatenate([self._singles(), self._group_ways()])
        self.states = self._states()
        self.above = np.array([space.column(self.setting.above(after)) for after in space.afters])
        self.heads = [self._heads(q) for q in range(len(space.kinds))]
        self.tails = [self._tails(q) for q in range(len(space.kinds))]

    def _singles(self) -> Devices:
        """Return ``[kinds, levels, afters]``: a branch of its own stages."""
        return np.stack([tables.suffix[:, :, 0].T for tables in self.branches])

    def _group_ways(self) -> Devices:
        """Return ``[groups, levels, afters]``: a stage of whole branches."""
        last = self.setting.num_levels
        shape = (len(self.space.group_counts), last + 1, len(self.afters))
        found = np.full(shape, NEVER, dtype=np.int32)
        for a, after in enumerate(self.space.afters):
            level = self.setting.above(after)
            found[:, level:, a] = self.groups.at(level)[:, None]
            # A group that mixes samples is at the last level, whatever comes after it.
            found[:, last, a] = np.minimum(found[:, last, a], self.groups.at(last))
        return found

    def _states(self) -> Devices:
        space = self.space
        shape = (len(space.state_counts), self.setting.num_levels + 1, len(self.afters))
        found = np.full(shape, NEVER, dtype=np.int32)
        # No branches at all: what follows is the first.
        for a, after in enumerate(space.afters):
            found[0, after:, a] = 0
        # What is left without a branch of the first kind has fewer of that kind, or none: a lower number.
        for stride, count in reversed(list(zip(space.strides.tolist(), space.block.kinds, strict=True))):
            for start in range(stride, stride * (count + 1), stride):
                parts, rests, starts = space.ways.of(start, start + stride)
                sums = self.parts[parts] + found[rests]
                self.setting.tally.transitions += sums.size
                best = np.minimum.reduceat(sums, starts, axis=0)
                np.minimum(best, NEVER, out=found[start : start + stride])
        return found

    def _heads(self, q: int) -> Devices:
        kind, last = self.space.kinds[q], self.setting.num_levels
        found = np.full((last + 1, len(self.afters), kind.before), NEVER, dtype=np.int32)
        inside = slice(kind.before + 1, kind.before + kind.length + 1)
        suffix = self.branches[q].suffix
        for level in range(last + 1 if kind.before else 0):
            # ``[before, length]``, the number of items before the block falling.
            forks = self.merged[q].at(self.setting.above(level))[: kind.before, inside]
            found[level] = least(self.setting, forks[None] + suffix[:, level, None, 1:], 2)
        return np.minimum(found[:, :, ::-1], NEVER)

    def _tails(self, q: int) -> Devices:
        kind, last = self.space.kinds[q], self.setting.num_levels
        found = np.full((last + 1, len(self.afters), kind.behind), NEVER, dtype=np.int32)
        prefix = self.branches[q].prefix
        if prefix is None:
            return found
        inside = slice(kind.before, kind.before + kind.length)
        for a, after in enumerate(self.space.afters):
            level = self.setting.above(after)
            joins = self.merged[q].at(level)[inside, kind.before + kind.length + 1 :]
            found[:, a] = least(self.setting, prefix[:, level, : kind.length, None] + joins[None], 1)
        return np.minimum(found, NEVER)

    def transits(self, num_items: int) -> list[Transit]:
        """Return all ways through the block."""
        at = self.space.position
        before = self.space.kinds[0].before
        behind = self.space.kinds[0].behind
        found = [Transit(at, at + 1, 0, 0, self.states[-1], self)]
        for fork in range(1, before + 1):
            found.append(Transit(at - fork, at + 1, fork, 0, self._forked(fork), self))
        for join in range(1, behind + 1):
            found.append(Transit(at, at + 1 + join, 0, join, self._joined(join), self))
            for fork in range(1, before + 1):
                found.append(Transit(at - fork, at + 1 + join, fork, join, self._forked_and_joined(fork, join), self))
        return [transit for transit in found if transit.devices.min() < NEVER]

    def fork_ways(self, fork: int, q: int) -> Devices:
        """Return ``[levels, afters]``: a fork with a branch of kind `q`, by the level of what comes after the fork."""
        return np.asarray(self.heads[q][:, :, fork - 1] + self.states[self.space.without(q)], dtype=np.int32)

    def join_ways(self, join: int, q: int) -> Devices:
        """Return ``[levels, afters]``: a join with a branch of kind `q`, by the level after the join."""
        return np.asarray(
            self.tails[q][:, :, join - 1] + self.states[self.space.without(q)][:, self.above], dtype=np.int32
        )

    def fork_and_join_ways(self, fork: int, join: int, q: int, p: int) -> Devices:
        """Return ``[levels, afters]``: a fork with a branch of kind `q` and a join with another one of kind `p`."""
        others = self.states[self.space.without(q, p)]
        return np.asarray(
            self.heads[q][:, self.above, fork - 1] + self.tails[p][:, :, join - 1] + others[:, self.above],
            dtype=np.int32,
        )

    def _forked(self, fork: int) -> Devices:
        return self._after_fork(_least([self.fork_ways(fork, q) for q in range(len(self.space.kinds))]))

    def _joined(self, join: int) -> Devices:
        ways = _least([self.join_ways(join, q) for q in range(len(self.space.kinds))])
        return np.minimum(ways, NEVER, out=ways)

    def _forked_and_joined(self, fork: int, join: int) -> Devices:
        return self._after_fork(_least([self.fork_and_join_ways(fork, join, q, p) for q, p in self.space.pairs]))

    def _after_fork(self, ways: Devices) -> Devices:
        """Return ``[levels, afters]`` by the level of the fork, which is one above what comes after it."""
        last = self.setting.num_levels
        best = np.minimum.accumulate(ways, axis=0)
        found = np.full_like(best, NEVER)
        found[1:] = best[:-1]
        found[last] = best[last]
        return np.minimum(found, NEVER)
