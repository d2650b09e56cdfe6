"""What a search knows before it has a target: the stages that parts of the graph can be made of, and what they take."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from graphpipe.planner.costs import Setting, StageTables, stage_tables
from graphpipe.planner.layout import Block, Chain, merged_items
from graphpipe.planner.spans import Line, SharedInput, combine


class ChainSpace:
    """A chain, and what all runs of its items take as stages.

    Attributes:
        tables: ``[choices, n + 1, n + 1]`` what each run takes.
        afters: The levels that what follows the chain may have, ascending.
        needs_prefix: Whether somebody asks for the beginnings of the chain.
        blocks: Its blocks.

    Args:
        setting: The search.
        chain: The chain.
        reach: The highest level of what follows, but for the last level, which is always possible; by default nothing
            follows.
        tables: What its runs take, where that is known.
        needs_prefix: Whether somebody asks for the beginnings of the chain.
    """

    def __init__(
        self,
        setting: Setting,
        chain: Chain,
        reach: int | None = None,
        tables: StageTables | None = None,
        *,
        needs_prefix: bool = False,
    ) -> None:
        self.setting = setting
        self.chain = chain
        self.afters = (0,) if reach is None else afters(setting, reach)
        self.needs_prefix = needs_prefix
        if tables is None:
            line, sizes = Line.of(setting.table, chain.units), setting.local_sizes
            tables = line.tables(setting, line.sums(setting, sizes), sizes)
        self.tables = tables
        self.blocks = [
            BlockSpace(setting, chain, at, reach or 0) for at, item in enumerate(chain.items) if isinstance(item, Block)
        ]

    @property
    def num_items(self) -> int:
        """The items of the chain."""
        return len(self.chain.items)


def afters(setting: Setting, reach: int) -> tuple[int, ...]:
    """Return the levels from 0 to `reach`, and the last one."""
    levels = range(min(reach, setting.num_levels) + 1)
    return tuple(levels) if reach >= setting.num_levels else (*levels, setting.num_levels)


@dataclass(frozen=True)
class KindSpace:
    """A kind of equal branches.

    Attributes:
        branch: One of them.
        merged: ``[choices, m + 1, m + 1]`` what the runs take of some items before the block, the branch, and some
            items after the block, in line.
        before: Items before the block in that line.
        length: Items of the branch.
        behind: Items after the block in that line.
    """

    branch: ChainSpace
    merged: StageTables
    before: int
    length: int
    behind: int


@dataclass(frozen=True)
class Ways:
    """How to cover some branches: by a part with a branch of the first kind that is left, then the rest.

    Attributes:
        parts: ``[ways]`` the parts, those of the first state first.
        rests: ``[ways]`` the state without the part.
        starts: ``[states + 1]`` where the ways of each state start; the first state, no branches, has none.
    """

    parts: NDArray[np.int64]
    rests: NDArray[np.int64]
    starts: NDArray[np.int64]

    def of(self, start: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return the parts and rests of some states that follow each other, and where those of each state start."""
        inside = slice(int(self.starts[start]), int(self.starts[stop]))
        return self.parts[inside], self.rests[inside], self.starts[start:stop] - self.starts[start]


class BlockSpace:
    """A block within its chain.

    Attributes:
        position: Its place among the chain's items.
        afters: The levels that what follows the block may have, ascending.
        kinds: Its branches by kind.
        state_counts: ``[states, kinds]`` choices of branches; the first is none, the last all of them.
        group_counts: ``[groups, kinds]`` the groups of branches that may form a stage.
        groups: ``[choices, groups]`` what they take.
        parts: ``[kinds + groups, kinds]`` what branches may be covered by: one of a kind, stage by stage, or a group.
        ways: By state, how to cover it.
        pairs: The kinds of two different branches.
    """

    def __init__(self, setting: Setting, chain: Chain, position: int, reach: int) -> None:
        block = chain.items[position]
        assert isinstance(block, Block)
        self.setting = setting
        self.position = position
        self.block = block
        following = sum(1 if isinstance(item, int) else item.depth for item in chain.items[position + 1 :])
        self.afters = afters(setting, reach + following)
        table = setting.table
        limit = merged_items(table)
        before = min(position, limit)
        behind = min(len(chain.items) - position - 1, limit)
        self.kinds = []
        whole = []
        sizes = setting.local_sizes
        for q in range(len(block.kinds)):
            branch = block.branches_of(q)[0]
            around = chain.units
            units = (
                *around[position - before : position],
                *branch.units,
                *around[position + 1 : position + 1 + behind],
            )
            merged = Line.of(table, units)
            sums = merged.sums(setting, sizes)
            tables = merged.tables(setting, sums, sizes)
            inner = slice(before, before + len(branch.items) + 1)
            own = tables.sliced(inner, inner)
            space = ChainSpace(setting, branch, reach + following, own, needs_prefix=behind > 0)
            self.kinds.append(KindSpace(space, tables, before, len(branch.items), behind))
            whole.append(sums.at(before, before + len(branch.items)))
        states = itertools.product(*(range(count + 1) for count in block.kinds))
        self.state_counts = np.array(list(states), dtype=np.int64)
        # All branches at once are a run of the chain.
        several = self.state_counts.sum(axis=1) > 1
        several[-1] = False
        self.group_counts = self.state_counts[several]
        self.groups = stage_tables(setting, combine(whole, self.group_counts, self._shared_inputs()), sizes)
        self.parts = np.concatenate([np.eye(len(self.kinds), dtype=np.int64), self.group_counts])
        self.ways = self._ways()

    @cached_property
    def pairs(self) -> list[tuple[int, int]]:
        """The kinds of two different branches."""
        kinds = range(len(self.kinds))
        return [(q, p) for q in kinds for p in kinds if q != p or self.block.kinds[q] > 1]

    def column(self, after: int) -> int:
        """Return which entry of `afters` a level is; what is above the others counts as the last one."""
        return self.afters.index(after) if after in self.afters else len(self.afters) - 1

    def _shared_inputs(self) -> list[SharedInput]:
        """Return what several branches read from outside the block. Branches of a kind are taken to read the same."""
        owner = {u: i for i, branch in enumerate(self.block.branches) for u in branch.operators}
        firsts = [self.block.branches.index(kind.branch.chain) for kind in self.kinds]
        found = []
        for value, made, read in self.setting.table.values_of(self.block.operators):
            readers = {owner[u] for u in read if u in owner}
            if made not in owner and len(readers) > 1:
                num_bytes = value.num_bytes(self.setting.micro_batch_size)
                is_read = tuple(first in readers for first in firsts)
                found.append(SharedInput(num_bytes, value.carries_gradient, is_read))
        return found

    def _ways(self) -> Ways:
        first = np.argmax(self.state_counts > 0, axis=1)
        # ``[states, parts]``
        is_within = (self.parts <= self.state_counts[:, None]).all(axis=2)
        states, parts = np.nonzero(is_within & (self.parts.T[first] > 0))
        starts = np.searchsorted(states, np.arange(len(self.state_counts) + 1))
        return Ways(parts, states - (self.parts @ self.strides)[parts], starts)

    @cached_property
    def strides(self) -> NDArray[np.int64]:
        """``[kinds]`` by how much one more branch of a kind moves a state."""
        sizes = [count + 1 for count in self.block.kinds]
        return np.array([math.prod(sizes[q + 1 :]) for q in range(len(sizes))], dtype=np.int64)

    def without(self, *kinds: int) -> int:
        """Return the state of all branches but one of each of these kinds."""
        return len(self.state_counts) - 1 - sum(int(self.strides[q]) for q in kinds)
