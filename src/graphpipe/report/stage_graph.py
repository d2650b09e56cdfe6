"""The stage graph as a picture: what runs beside what, where, and how much passes between.

It runs from left to right. A graph that is deep goes on in further rows below, like text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from graphpipe.estimate import Estimate, format_bytes
from graphpipe.report import svg
from graphpipe.report.facts import StageFacts, edge_bytes, edge_is_local, stage_facts
from graphpipe.report.layers import WAYPOINT, Layers, layered, places
from graphpipe.report.palette import StagePaint, stage_paints
from graphpipe.report.units import format_seconds, format_share
from graphpipe.stage import Recompute, StageEdge
from graphpipe.strategy import Strategy

_LAYERS_A_ROW = 5
_MARGIN = 14.0
_BOX_HEIGHT = 82.0
_BADGE_WIDTH = 30.0
_LEAST_BOX, _MOST_BOX = 150.0, 236.0
_LANE_HEIGHT = 16.0  # Of an edge that passes a layer.
_LANE_GAP = 18.0
_LAYER_GAP = 84.0
_TRACK = 14.0  # Between two edges that go on in the next row.
_TEXT = 11.5
_SMALL = 10.5

_HEAD = (
    '<marker id="gp-head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path d="M0 .6L7.5 4L0 7.4z" class="head"/></marker>'
)


def stage_graph_svg(strategy: Strategy, estimate: Estimate) -> str:
    """Return a picture of the stage graph.

    A box is a stage, coloured by its devices; an edge is labelled with the bytes that pass for one micro-batch of the
    stage that it comes from. What passes between stages on one device is handed over in place, and dashed.
    """
    facts = stage_facts(strategy)
    paints = stage_paints(strategy.stages)
    geometry = _geometry(layered(strategy.stages), _box_width(facts))
    edges = strategy.stages.edges
    body = [_edge_line(strategy, geometry, i) for i in range(len(edges))]
    for x, stage in enumerate(facts):
        idle = [estimate.idle_share(d) for d in strategy.stages.stages[x].devices]
        body.append(_box(stage, paints[x], geometry, sum(idle) / len(idle)))
    body += [_edge_label(strategy, geometry, i) for i in range(len(edges))]
    key = "On an arrow: bytes for one micro-batch of the stage it leaves."
    if any(edge_is_local(strategy, edge) for edge in edges):
        key += " Dashed: handed over on the same device."
    if edges:
        body.append(svg.label(_MARGIN, geometry.height - 8, key, "muted", _SMALL))
    return svg.document(
        max(geometry.width, svg.text_width(key, _SMALL) + 2 * _MARGIN),
        geometry.height if edges else geometry.height - 20,
        body,
        title=f"Stage graph of {strategy.graph.name}",
        description=f"{len(facts)} stages, at most {strategy.stages.depth} in sequence.",
        definitions=svg.textures("gp-graph-", paints) + _HEAD,
        paints=paints,
    )


@dataclass(frozen=True)
class _Geometry:
    """Where everything is, in pixels.

    Attributes:
        layers: The nodes.
        box_width: Of every box.
        x: ``[nodes]`` left ends.
        y: ``[nodes]`` centres.
        row: ``[nodes]`` rows, from the top.
        width: Of the picture.
        height: Of the picture.
        paths: ``[edges]`` what to draw.
        labels: ``[edges]`` where the centre of the label goes.
    """

    layers: Layers
    box_width: float
    x: list[float]
    y: list[float]
    row: list[int]
    width: float
    height: float
    paths: list[str]
    labels: list[tuple[float, float]]


def _box_lines(stage: StageFacts, idle: float) -> tuple[str, ...]:
    count = f"{stage.num_operators} operator{'s' if stage.num_operators != 1 else ''}"
    replicas = f" · {stage.num_replicas} replicas" if stage.num_replicas > 1 else ""
    backward = f" · B {format_seconds(stage.backward_s)}" if stage.backward_s else ""
    recompute = " · recompute" if stage.recompute is Recompute.ALL else ""
    return (
        stage.label,
        f"{count} · {format_bytes(stage.parameter_bytes)}",
        f"{stage.devices}{replicas} · idle {format_share(idle)}",
        f"{stage.micro_batch_size} samples × {stage.num_micro_batches}{recompute}",
        f"F {format_seconds(stage.forward_s)}{backward}",
    )


def _box_width(facts: Sequence[StageFacts]) -> float:
    widest = max(
        max(svg.text_width(line, _TEXT, mono=i == 0) for i, line in enumerate(_box_lines(stage, 0.88)))
        for stage in facts
    )
    return min(max(widest + _BADGE_WIDTH + 16, _LEAST_BOX), _MOST_BOX)


def _box(stage: StageFacts, paint: StagePaint, geometry: _Geometry, idle: float) -> str:
    x, middle = geometry.x[stage.stage], geometry.y[stage.stage]
    y = middle - _BOX_HEIGHT / 2
    width = geometry.box_width
    lines = _box_lines(stage, idle)
    inside = [
        svg.title_of("\n".join((f"Stage {stage.stage}: {stage.label}", *lines[1:]))),
        svg.rect(x, y, width, _BOX_HEIGHT, f"box t{paint.hue} o{paint.hue}", radius=5),
        svg.rect(x, y, _BADGE_WIDTH, _BOX_HEIGHT, f"s{paint.hue}", radius=5),
    ]
    if paint.texture:
        texture = svg.rect(x, y, _BADGE_WIDTH, _BOX_HEIGHT, "texture", radius=5)
        # The number stays readable on its own patch.
        inside.append(texture.replace("/>", f' fill="url(#gp-graph-{paint.texture})"/>'))
        inside.append(svg.rect(x + 4, middle - 11, _BADGE_WIDTH - 8, 20, f"s{paint.hue}", radius=3))
    number = svg.fit(str(stage.stage), _BADGE_WIDTH - 4, 13)
    inside.append(svg.label(x + _BADGE_WIDTH / 2, middle + 3.5, number, f"strong mid ns{paint.hue}", 13))
    room = width - _BADGE_WIDTH - 14
    for i, line in enumerate(lines):
        size = _TEXT if i == 0 else _SMALL
        shown = svg.fit(line, room, size, mono=i == 0)
        style = f"{'mono strong ' if i == 0 else ''}nt{paint.hue}"
        inside.append(svg.label(x + _BADGE_WIDTH + 7, y + 17 + 14.5 * i, shown, style, size))
    return svg.element("g", "".join(inside), class_="stage", data_stage=str(stage.stage))


def _edge_line(strategy: Strategy, geometry: _Geometry, i: int) -> str:
    edge = strategy.stages.edges[i]
    style = "edge local" if edge_is_local(strategy, edge) else "edge"
    title = svg.title_of(_edge_title(strategy, edge))
    return svg.element("path", title, d=geometry.paths[i], class_=style, marker_end="url(#gp-head)")


def _edge_title(strategy: Strategy, edge: StageEdge) -> str:
    samples = strategy.stages.stages[edge.source].micro_batch_size
    names = [value.name for value in edge.values]
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    back = "" if edge.returned else "; no gradient comes back"
    return (
        f"Stage {edge.source} to stage {edge.target}: {format_bytes(edge_bytes(strategy, edge))} for {samples} samples "
        f"({shown}){back}"
    )


def _edge_label(strategy: Strategy, geometry: _Geometry, i: int) -> str:
    x, y = geometry.labels[i]
    text = format_bytes(edge_bytes(strategy, strategy.stages.edges[i]))
    return svg.label(x, y + 3.5, text, "halo mid", _SMALL)


def _geometry(layers: Layers, box_width: float) -> _Geometry:
    depth = len(layers.order)
    num_rows = -(-depth // _LAYERS_A_ROW)
    per_row = -(-depth // num_rows)
    row = [at // per_row for at in layers.layer_of]
    sizes = [_LANE_HEIGHT if x == WAYPOINT else _BOX_HEIGHT for x in layers.stage_of]
    y = list(places(layers, sizes, _LANE_GAP))
    # Edges from the end of one row to the start of the next, from the top, so that their tracks can nest.
    turning: list[list[tuple[int, int]]] = [[] for _ in range(num_rows)]
    for path in layers.paths:
        for u, v in pairwise(path):
            if row[u] != row[v]:
                turning[row[u]].append((u, v))
    tracks = max(map(len, turning), default=0)
    left = _MARGIN + (_TRACK * tracks + 18 if tracks else 0)
    x = [left + at % per_row * (box_width + _LAYER_GAP) for at in layers.layer_of]
    top = _MARGIN
    track_y: list[float] = []
    for r in range(num_rows):
        nodes = [u for u in range(len(y)) if row[u] == r]
        lowest = min(y[u] - sizes[u] / 2 for u in nodes)
        for u in nodes:
            y[u] += top - lowest
        bottom = max(y[u] + sizes[u] / 2 for u in nodes)
        track_y.append(bottom + 20)
        top = bottom + (26 + _TRACK * len(turning[r]) + 14 if turning[r] else 24)
    right = left + per_row * box_width + (per_row - 1) * _LAYER_GAP
    router = _Router(layers, box_width, x, y, _sorted_turns(turning, y), track_y, left, right)
    paths, labels = router.route()
    width = right + (_TRACK * tracks + 18 if tracks else 0) + _MARGIN
    return _Geometry(layers, box_width, x, y, row, width, top + 10, paths, labels)


def _sorted_turns(
    turning: list[list[tuple[int, int]]], y: Sequence[float]
) -> dict[tuple[int, int], tuple[int, int, int]]:
    """Return, for each edge between rows, its row, its rank from the inner track and the number of tracks."""
    return {
        pair: (r, rank, len(pairs))
        for r, pairs in enumerate(turning)
        for rank, pair in enumerate(sorted(pairs, key=lambda p: (y[p[0]], y[p[1]], p)))
    }


class _Router:
    """Draws each edge as one path through its waypoints."""

    def __init__(
        self,
        layers: Layers,
        box_width: float,
        x: Sequence[float],
        y: Sequence[float],
        turns: dict[tuple[int, int], tuple[int, int, int]],
        track_y: Sequence[float],
        left: float,
        right: float,
    ) -> None:
        self.layers = layers
        self.box_width = box_width
        self.x = x
        self.y = y
        self.turns = turns
        self.track_y = track_y
        self.left = left
        self.right = right
        self.out_port = self._ports(layers.neighbours[1])
        self.in_port = self._ports(layers.neighbours[0])

    def _ports(self, neighbours: Sequence[Sequence[int]]) -> dict[tuple[int, int], float]:
        """Return where on the side of a box each of its edges is, for pairs (node, neighbour)."""
        found = {}
        for u, near in enumerate(neighbours):
            ordered = sorted(near, key=lambda v: (self.y[v], v))
            step = 0.0 if self.layers.stage_of[u] == WAYPOINT else min(14.0, 0.7 * _BOX_HEIGHT / max(len(near), 1))
            for i, v in enumerate(ordered):
                found[u, v] = self.y[u] + step * (i - (len(ordered) - 1) / 2)
        return found

    def route(self) -> tuple[list[str], list[tuple[float, float]]]:
        """Return the path and the place of the label of each edge."""
        paths = []
        labels = []
        for path in self.layers.paths:
            start = (self.x[path[0]] + self.box_width, self.out_port[path[0], path[1]])
            parts = [f"M{svg.number(start[0])} {svg.number(start[1])}"]
            between: list[tuple[float, float]] = []
            lanes: list[tuple[float, float]] = []
            for u, v in pairwise(path):
                begin = (self.x[u] + self.box_width, self.out_port[u, v])
                end = (self.x[v], self.in_port[v, u])
                turn = self.turns.get((u, v))
                if turn is not None:
                    parts.append(self._turn(turn, begin, end))
                    between.append(((self.left + self.right) / 2, self._across(turn)))
                else:
                    parts.append(_curve(begin, end))
                    between.append(((begin[0] + end[0]) / 2, (begin[1] + end[1]) / 2))
                if self.layers.stage_of[v] == WAYPOINT:
                    parts.append(f"H{svg.number(self.x[v] + self.box_width)}")
                    lanes.append((self.x[v] + self.box_width / 2, self.y[v]))
            paths.append("".join(parts))
            # A long edge is labelled on a waypoint, where it has a lane of its own.
            labels.append((lanes or between)[len(lanes or between) // 2])
        return paths, labels

    def _across(self, turn: tuple[int, int, int]) -> float:
        row, rank, count = turn
        return self.track_y[row] + _TRACK * (count - 1 - rank)

    def _turn(self, turn: tuple[int, int, int], begin: tuple[float, float], end: tuple[float, float]) -> str:
        """Return the way from the end of a row to the start of the next; tracks of several edges don't cross."""
        _, rank, count = turn
        outer = self.right + 16 + _TRACK * (count - 1 - rank)
        across = self._across(turn)
        inner = self.left - 26 - _TRACK * rank
        corners = [(outer, begin[1]), (outer, across), (inner, across), (inner, end[1]), end]
        return _rounded(begin, corners)


def _curve(begin: tuple[float, float], end: tuple[float, float]) -> str:
    if abs(begin[1] - end[1]) < 0.5:
        return f"L{svg.number(end[0])} {svg.number(end[1])}"
    middle = (begin[0] + end[0]) / 2
    coordinates = (middle, begin[1], middle, end[1], *end)
    return "C" + " ".join(map(svg.number, coordinates))


def _rounded(begin: tuple[float, float], corners: Sequence[tuple[float, float]], radius: float = 6) -> str:
    """Return a way around right-angled corners to the last of them."""
    parts = []
    here = begin
    for corner, after in pairwise(corners):
        into = _towards(corner, here, radius)
        out = _towards(corner, after, radius)
        parts.append(f"L{svg.number(into[0])} {svg.number(into[1])}")
        parts.append("Q" + " ".join(map(svg.number, (*corner, *out))))
        here = out
    parts.append(f"L{svg.number(corners[-1][0])} {svg.number(corners[-1][1])}")
    return "".join(parts)


def _towards(start: tuple[float, float], end: tuple[float, float], distance: float) -> tuple[float, float]:
    dx, dy = end[0] - start[0], end[1] - start[1]
    length = abs(dx) + abs(dy)
    share = min(distance, length / 2) / length if length else 0.0
    return start[0] + dx * share, start[1] + dy * share
