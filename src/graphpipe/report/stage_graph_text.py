"""The stage graph for a terminal: boxes from top to bottom, branches side by side."""

from __future__ import annotations

from collections.abc import Sequence

from graphpipe.estimate import format_bytes
from graphpipe.report.facts import edge_bytes, edge_is_local
from graphpipe.report.labels import devices_label, ranges, stage_label
from graphpipe.report.layers import WAYPOINT, Layers, layered, places
from graphpipe.report.svg import shorten
from graphpipe.strategy import Strategy

MAX_WIDTH = 100
_MOST_BOX, _LEAST_BOX = 36, 13
_BOX_LINES = 5
_GAP = 2
_MOST_BOXES = 40

# What a cell of a line connects, as a set of up, right, down and left.
_UP, _RIGHT, _DOWN, _LEFT = 1, 2, 4, 8
_LINES = " ╵╶└╷│┌├╴┘─┴┐┤┬┼"


def stage_graph_text(strategy: Strategy, *, max_width: int = MAX_WIDTH) -> str:
    """Return a picture of the stage graph in box-drawing characters.

    Each box names its stage, what it holds, its devices, and micro-batch size times count. Lines run downwards;
    where one is interrupted it passes under another. A graph with more branches than fit side by side, or with more
    than forty stages, becomes a list.

    Args:
        strategy: What to draw.
        max_width: Columns at most.

    Raises:
        ValueError: `max_width` is less than 20.
    """
    if max_width < 20:
        raise ValueError(f"a picture of a stage graph needs at least 20 columns, got {max_width}")
    layers = layered(strategy.stages)
    if len(strategy.stages.stages) > _MOST_BOXES:
        return _listing(strategy, layers, max_width)
    most = max(len(line) for x in range(len(strategy.stages.stages)) for line in _box_text(strategy, x)) + 4
    for width in range(min(max(most, _LEAST_BOX), _MOST_BOX), _LEAST_BOX - 1, -1):
        columns = _columns(layers, width)
        right = max(columns[u] + (width + 1) // 2 for u in range(len(strategy.stages.stages)))
        if max(right, max(columns) + 1) <= max_width:
            picture = _Picture(strategy, layers, columns, width).text()
            # The label of an arrow may stand out beyond the boxes.
            if max(map(len, picture.split("\n"))) <= max_width:
                return picture
    return _listing(strategy, layers, max_width)


def _box_text(strategy: Strategy, x: int) -> tuple[str, str, str]:
    stage = strategy.stages.stages[x]
    where = devices_label(strategy.cluster, stage.devices)
    return (
        f"{x}: {stage_label(strategy.stages, x)}",
        f"{where} ({stage.num_replicas} replicas)" if stage.num_replicas > 1 else where,
        f"{stage.micro_batch_size} × {strategy.stages.num_micro_batches(x)}",
    )


def _columns(layers: Layers, width: int) -> list[int]:
    """Return the column of the middle of each node, for boxes of a width."""
    sizes = [1 if x == WAYPOINT else width for x in layers.stage_of]
    centres = places(layers, sizes, _GAP)
    columns = [0] * len(sizes)
    for nodes in layers.order:
        free = 0
        for u in nodes:
            before = 0 if layers.stage_of[u] == WAYPOINT else width // 2
            # Rounding must not let boxes touch.
            columns[u] = max(round(centres[u] - 0.5), free + before)
            free = columns[u] - before + int(sizes[u]) + _GAP
    return columns


class _Picture:
    """A grid of characters. Boxes stand on it; lines are kept apart until the end, since they may join or cross."""

    def __init__(self, strategy: Strategy, layers: Layers, columns: Sequence[int], width: int) -> None:
        self.strategy = strategy
        self.layers = layers
        self.columns = columns
        self.width = width
        self.characters: dict[tuple[int, int], str] = {}
        # For each cell, the sides that each line connects. A line starts at one node and may fork.
        self.lines: dict[tuple[int, int], dict[int, int]] = {}

    def text(self) -> str:
        row = 0
        for at, nodes in enumerate(self.layers.order):
            for u in nodes:
                self._box(u, row)
            row += _BOX_LINES
            if at + 1 < len(self.layers.order):
                row = self._connect(nodes, row)
        for cell, connected in self.lines.items():
            self.characters.setdefault(cell, _drawn(connected))
        height = 1 + max(r for r, _ in self.characters)
        width = 1 + max(c for _, c in self.characters)
        rows = ("".join(self.characters.get((r, c), " ") for c in range(width)) for r in range(height))
        return "\n".join(line.rstrip() for line in rows)

    def _box(self, u: int, row: int) -> None:
        if self.layers.stage_of[u] == WAYPOINT:
            self._vertical(u, self.columns[u], row, row + _BOX_LINES - 1)
            return
        inside = self.width - 2
        left = self.columns[u] - self.width // 2
        lines = [shorten(line, inside - 2).ljust(inside - 2) for line in _box_text(self.strategy, u)]
        bottom = ["─"] * inside
        if self.layers.neighbours[1][u]:
            bottom[self.columns[u] - left - 1] = "┬"
        box = [f"┌{'─' * inside}┐", *(f"│ {line} │" for line in lines), f"└{''.join(bottom)}┘"]
        for i, line in enumerate(box):
            for j, character in enumerate(line):
                self.characters[row + i, left + j] = character

    def _connect(self, nodes: Sequence[int], row: int) -> int:
        """Draw the lines from one layer to the next and return where the next one starts."""
        edges = [(u, v) for u in nodes for v in self.layers.neighbours[1][u]]
        line_of, port = _lines(edges, self.columns, self.width)
        # Where each line starts, and where it has to be in the end.
        tops: dict[int, set[int]] = {}
        ends: dict[int, set[int]] = {}
        for u, v in edges:
            if self.columns[u] != port[u, v]:
                tops.setdefault(line_of[u, v], set()).add(self.columns[u])
                ends.setdefault(line_of[u, v], set()).add(port[u, v])
        track = _tracks(tops, ends)
        num_tracks = 1 + max(track.values(), default=-1)
        end = row + (num_tracks + 2 if num_tracks else 1)
        for u, v in edges:
            line, start, stop = line_of[u, v], self.columns[u], port[u, v]
            if start == stop:
                self._vertical(line, start, row, end - 1)
            else:
                turn = row + 1 + track[line]
                self._vertical(line, start, row, turn, end=_UP)
                self._horizontal(line, turn, start, stop)
                self._vertical(line, stop, turn, end - 1, start=_DOWN)
            if self.layers.stage_of[v] != WAYPOINT:
                self.characters[end - 1, stop] = "▼"
        self._sizes(nodes, row)
        return end

    def _sizes(self, nodes: Sequence[int], row: int) -> None:
        """Write how many bytes leave each box, where all of its edges carry as many."""
        for u in nodes:
            edges = [] if self.layers.stage_of[u] == WAYPOINT else self.strategy.stages.outgoing[u]
            sizes = {edge_bytes(self.strategy, edge) for edge in edges}
            if len(sizes) != 1:
                continue
            text = f" {format_bytes(sizes.pop())}"
            room = self.width - self.width // 2 - 1
            if all(edge_is_local(self.strategy, edge) for edge in edges) and len(text) + 9 <= room:
                text += " in place"
            cells = [(row, self.columns[u] + 1 + i) for i in range(len(text))]
            if not any(cell in self.lines or cell in self.characters for cell in cells):
                self.characters.update(zip(cells, text, strict=True))

    def _vertical(
        self, u: int, column: int, top: int, bottom: int, *, start: int = _UP | _DOWN, end: int = _UP | _DOWN
    ) -> None:
        for r in range(top, bottom + 1):
            sides = start if r == top else end if r == bottom else _UP | _DOWN
            self._add((r, column), u, sides)

    def _horizontal(self, u: int, row: int, start: int, stop: int) -> None:
        low, high = sorted((start, stop))
        for c in range(low, high + 1):
            self._add((row, c), u, (_RIGHT if c < high else 0) | (_LEFT if c > low else 0))

    def _add(self, cell: tuple[int, int], line: int, sides: int) -> None:
        connected = self.lines.setdefault(cell, {})
        connected[line] = connected.get(line, 0) | sides


def _drawn(connected: dict[int, int]) -> str:
    """Return the character of a cell: lines that meet are joined, except that one passes under another."""
    sides = set(connected.values())
    if sides == {_UP | _DOWN, _LEFT | _RIGHT}:
        return "│"
    joined = 0
    for side in connected.values():
        joined |= side
    return _LINES[joined]


def _lines(
    edges: Sequence[tuple[int, int]], columns: Sequence[int], width: int
) -> tuple[dict[tuple[int, int], int], dict[tuple[int, int], int]]:
    """Return which edges share a line, and the column where each of them ends.

    The edges of a node with several share a line that forks; those of nodes with one edge share a line if they have the
    same end. Each line into a box has a column of its own there: if a line joined one that forks, nobody could tell
    which of its ends it leads to.
    """
    after: dict[int, list[int]] = {}
    for u, v in edges:
        after.setdefault(u, []).append(v)
    # A line is called by the node where it forks, or else by the complement of the node where it ends.
    line_of = {(u, v): u if len(after[u]) > 1 else ~v for u, v in edges}
    port = {}
    for v in sorted({v for _, v in edges}):
        into: dict[int, list[int]] = {}
        for u, w in edges:
            if w == v:
                into.setdefault(line_of[u, w], []).append(columns[u])
        # From left to right as they come, the straightest one in the middle of the box.
        coming = sorted(into, key=lambda line: (sum(into[line]) / len(into[line]), line))
        nearest = min(range(len(coming)), key=lambda i: min(abs(c - columns[v]) for c in into[coming[i]]))
        for u, w in edges:
            if w == v:
                away = 2 * (coming.index(line_of[u, w]) - nearest)
                port[u, w] = columns[v] + max(1 - width // 2, min(away, width // 2 - 1))
    return line_of, port


def _tracks(tops: dict[int, set[int]], ends: dict[int, set[int]]) -> dict[int, int]:
    """Return a row for the horizontal part of each line, such that no two lines lie on each other.

    A line that starts above the end of another must turn away before that one comes down, so it gets the higher row;
    where two start above each other's ends no order is right, and the later one gives way.

    Args:
        tops: For each line, the columns that it starts from.
        ends: For each line, the columns that it leads to.
    """
    spans = {line: (min(tops[line] | ends[line]), max(tops[line] | ends[line])) for line in tops}
    found: dict[int, int] = {}
    waiting = list(tops)
    while waiting:
        # A line may be placed once no waiting one starts where it ends.
        line = next((i for i in waiting if not any(tops[w] & ends[i] for w in waiting if w != i)), waiting[0])
        waiting.remove(line)
        left, right = spans[line]
        taken = {found[w] for w in found if spans[w][0] <= right + 1 and left <= spans[w][1] + 1}
        least = max((found[w] + 1 for w in found if tops[w] & ends[line]), default=0)
        found[line] = next(track for track in range(least, least + len(taken) + 1) if track not in taken)
    return found


def _listing(strategy: Strategy, layers: Layers, max_width: int) -> str:
    """Return the stages one a line, layer by layer, each with the stages that feed it."""
    lines = []
    for at, nodes in enumerate(layers.order):
        held = [layers.stage_of[u] for u in nodes if layers.stage_of[u] != WAYPOINT]
        for i, x in enumerate(held):
            branch = "─" if len(held) == 1 else "┌" if i == 0 else "└" if i == len(held) - 1 else "├"
            sources = ranges(edge.source for edge in strategy.stages.incoming[x])
            what, where, size = _box_text(strategy, x)
            tail = f" · {where} · {size}{f' ◀ {sources}' if sources else ''}"
            head = f"{at if i == 0 else '':>3} {branch} "
            tail = shorten(tail, max(0, max_width - len(head) - min(len(what), max_width // 2)))
            lines.append(f"{head}{shorten(what, max_width - len(head) - len(tail))}{tail}")
    return "\n".join(lines)
