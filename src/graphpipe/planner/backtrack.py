"""The stages behind an entry of the tables of fewest devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from graphpipe.planner.costs import Choice
from graphpipe.planner.layout import Block, Chain
from graphpipe.planner.tables import NEVER, BlockTables, ChainTables, StageDevices, Transit


@dataclass(frozen=True, slots=True)
class Piece:
    """A stage as the search found it.

    Attributes:
        operators: Positions in the graph.
        choice: How it runs.
    """

    operators: tuple[int, ...]
    choice: Choice


@dataclass(frozen=True)
class Found:
    """Stages that cover a graph.

    Attributes:
        slowest_s: Seconds a micro-batch of the busiest one.
        pieces: The stages.
    """

    slowest_s: float
    pieces: tuple[Piece, ...]


def stages_of(tables: ChainTables, chain: Chain, level: int) -> Found:
    """Return the stages that cover a whole graph with fewest devices.

    Args:
        tables: Its tables, with nothing after it.
        chain: The graph.
        level: The highest level of its first stages; some stages must keep to the target with it.
    """
    assert tables.suffix[0, level, 0] < NEVER, "no stages keep to the target"
    found = _Backtrack()
    found.suffix(tables, chain, 0, level, 0)
    return Found(found.slowest_s, tuple(found.pieces))


class _Backtrack:
    """Walks from an entry to the entries that it was made of, and collects the stages on the way.

    Tables belong to one branch of a kind; `chain` is the branch that is covered.
    """

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.slowest_s = 0.0

    def _add(self, stages: StageDevices, operators: Sequence[int], level: int, *where: int) -> None:
        choice = stages.choice(level, *where)
        self.pieces.append(Piece(tuple(sorted(operators)), stages.setting.choices[choice]))
        self.slowest_s = max(self.slowest_s, float(stages.tables.seconds[choice, *where]))

    def suffix(self, tables: ChainTables, chain: Chain, after: int, level: int, start: int) -> None:
        """Cover the items from `start` on. `after` is a column."""
        n, last = tables.space.num_items, tables.setting.num_levels
        values = tables.suffix[after]
        while start < n:
            best = int(values[level, start])
            while level and values[level - 1, start] == best:
                level -= 1
            before = level if level == last else level - 1
            transit = self._suffix_transit(tables, values, level, start)
            if transit is not None:
                way, column = transit
                self._transit(way, chain, level, column)
                start, level = way.stop, int(way.block.afters[column])
                continue
            stops = np.flatnonzero(tables.stages.at(level)[start] + values[before] == best)
            stop = int(stops[-1])
            self._add(tables.stages, [i for unit in chain.units[start:stop] for i in unit], level, start, stop)
            start, level = stop, before

    @staticmethod
    def _suffix_transit(tables: ChainTables, values: np.ndarray, level: int, start: int) -> tuple[Transit, int] | None:
        last = tables.setting.num_levels
        for way in tables.transits:
            if way.start == start:
                count = int(np.searchsorted(way.block.afters, last + 1 if level == last else level))
                sums = way.devices[level, :count] + values[way.block.afters[:count], way.stop]
                hits = np.flatnonzero(sums == values[level, start])
                if len(hits):
                    return way, int(hits[0])
        return None

    def prefix(self, tables: ChainTables, chain: Chain, first: int, after: int, stop: int) -> None:
        """Cover the items up to `stop`, with level `after` after them."""
        assert tables.prefix is not None
        last = tables.setting.num_levels
        values = tables.prefix[first]
        while stop:
            best = int(values[after, stop])
            while after < last and values[after + 1, stop] == best:
                after += 1
            hit = self._prefix_transit(tables, values, after, stop)
            if hit is not None:
                way, column, level = hit
                self._transit(way, chain, level, column)
                stop, after = way.start, level
                continue
            level = tables.setting.above(after)
            starts = np.flatnonzero(values[level] + tables.stages.at(level)[:, stop] == best)
            start = int(starts[0])
            self._add(tables.stages, [i for unit in chain.units[start:stop] for i in unit], level, start, stop)
            stop, after = start, level

    @staticmethod
    def _prefix_transit(
        tables: ChainTables, values: np.ndarray, after: int, stop: int
    ) -> tuple[Transit, int, int] | None:
        for way in tables.transits:
            if way.stop == stop and after in way.block.space.afters:
                column = way.block.space.afters.index(after)
                hits = np.flatnonzero(values[:, way.start] + way.devices[:, column] == values[after, stop])
                if len(hits):
                    return way, column, int(hits[-1])
        return None

    def _transit(self, way: Transit, chain: Chain, level: int, column: int) -> None:
        tables = way.block
        at = tables.space.position
        block = chain.items[at]
        assert isinstance(block, Block)
        cover = _CoverBlock(self, tables, chain, block)
        best = int(way.devices[level, column])
        if not way.fork and not way.join:
            cover.state(len(tables.space.state_counts) - 1, level, column)
        elif not way.fork:
            for q in range(len(tables.space.kinds)):
                if tables.join_ways(way.join, q)[level, column] == best:
                    above = int(tables.above[column])
                    cover.tail(q, way.join, level, column)
                    cover.state(tables.space.without(q), level, above)
                    return
            raise AssertionError("no join makes the entry")
        else:
            self._fork(cover, way, level, column, best)

    @staticmethod
    def _fork(cover: _CoverBlock, way: Transit, level: int, column: int, best: int) -> None:
        tables = way.block
        last = tables.setting.num_levels
        for q, p in tables.space.pairs if way.join else [(q, -1) for q in range(len(tables.space.kinds))]:
            ways = tables.fork_and_join_ways(way.fork, way.join, q, p) if way.join else tables.fork_ways(way.fork, q)
            highest = last if level == last else level - 1
            hits = np.flatnonzero(ways[: highest + 1, column] == best)
            if not len(hits):
                continue
            first = int(hits[0])
            after = int(tables.above[column]) if way.join else column
            cover.head(q, way.fork, first, after)
            if way.join:
                cover.tail(p, way.join, first, column)
            cover.state(tables.space.without(q, p) if way.join else tables.space.without(q), first, after)
            return
        raise AssertionError("no fork makes the entry")


class _CoverBlock:
    """Covers the branches of one block, taking the next branch of a kind each time."""

    def __init__(self, backtrack: _Backtrack, tables: BlockTables, chain: Chain, block: Block) -> None:
        self.backtrack = backtrack
        self.tables = tables
        self.chain = chain
        self.left = [list(block.branches_of(q)) for q in range(len(block.kinds))]

    def head(self, q: int, fork: int, first: int, after: int) -> None:
        """Cover a fork with a branch of kind `q`, and the rest of the branch, whose first stage has level `first`."""
        tables, kind, branch = self.tables, self.tables.space.kinds[q], self.left[q].pop(0)
        level = tables.setting.above(first)
        start = kind.before - fork
        row = tables.merged[q].at(level)[start, kind.before + 1 : kind.before + kind.length + 1]
        rest = tables.branches[q].suffix[after, first, 1:]
        hits = np.flatnonzero(row + rest == tables.heads[q][first, after, fork - 1])
        length = int(hits[0]) + 1
        at = tables.space.position
        units = (*self.chain.units[at - fork : at], *branch.units[:length])
        self.backtrack._add(tables.merged[q], [i for unit in units for i in unit], level, start, kind.before + length)
        self.backtrack.suffix(tables.branches[q], branch, after, first, length)

    def tail(self, p: int, join: int, first: int, column: int) -> None:
        """Cover a branch of kind `p` whose tail joins items after the block; `column` is the level after the join."""
        tables, kind, branch = self.tables, self.tables.space.kinds[p], self.left[p].pop(0)
        level = tables.setting.above(tables.space.afters[column])
        stop = kind.before + kind.length + join
        joins = tables.merged[p].at(level)[kind.before : kind.before + kind.length, stop]
        prefix = tables.branches[p].prefix
        assert prefix is not None
        hits = np.flatnonzero(prefix[first, level, : kind.length] + joins == tables.tails[p][first, column, join - 1])
        start = int(hits[-1])
        at = tables.space.position
        units = (*branch.units[start:], *self.chain.units[at + 1 : at + 1 + join])
        self.backtrack.prefix(tables.branches[p], branch, first, level, start)
        self.backtrack._add(tables.merged[p], [i for unit in units for i in unit], level, kind.before + start, stop)

    def state(self, state: int, first: int, after: int) -> None:
        """Cover some branches, whole; `after` is a column."""
        tables, space = self.tables, self.tables.space
        while state:
            parts, rests, _ = space.ways.of(state, state + 1)
            ways = tables.parts[parts, first, after] + tables.states[rests, first, after]
            # One branch where that is as good as a group.
            hit = int(np.flatnonzero(ways == tables.states[state, first, after])[0])
            part, state = int(parts[hit]), int(rests[hit])
            counts = space.parts[part].tolist()
            taken = [self.left[q].pop(0) for q, count in enumerate(counts) for _ in range(count)]
            group = part - len(space.kinds)
            if group < 0:
                self.backtrack.suffix(tables.branches[part], taken[0], after, first, 0)
                continue
            level = tables.setting.above(int(space.afters[after]))
            if tables.parts[part, first, after] != tables.groups.at(level)[group]:
                level = tables.setting.num_levels
            self.backtrack._add(tables.groups, [i for branch in taken for i in branch.operators], level, group)
