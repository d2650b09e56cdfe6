"""The shape of a model as a picture: what follows what from top to bottom, branches side by side."""

from __future__ import annotations

from dataclasses import dataclass

from graphpipe.graph import ComputationGraph
from graphpipe.report import svg
from graphpipe.report.outline import Part, PartKind, knots, outline
from graphpipe.report.outline_text import facts, summary, title
from graphpipe.report.palette import StagePaint
from graphpipe.report.units import format_share

_MARGIN = 16.0
_BOX_WIDTH, _BOX_HEIGHT = 232.0, 66.0
_DOWN_GAP = 26.0
_SIDE_GAP = 18.0
_FORK = 14.0  # Above and below branches, for the line that they share.
_TITLE, _TEXT, _SMALL = 13.0, 11.5, 10.5
_TRUNK = 0  # The hue of what is in no branch.
_NUM_HUES = 8

_HEAD = (
    '<marker id="gp-outline-head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path d="M0 .6L7.5 4L0 7.4z" class="head"/></marker>'
)


def outline_svg(graph: ComputationGraph, *, every_operator: bool = False) -> str:
    """Return a picture of the shape of a model.

    A box is a part whose operators are in line; its bar is its share of the work. The branches of the outermost fork
    have a hue each. The box of a knot is dashed; its tooltip says what caused it.

    Args:
        graph: The model.
        every_operator: Give each operator a box of its own.
    """
    root = outline(graph, every_operator=every_operator)
    picture = _Picture()
    size = _size(root)
    heading = summary(graph, root)
    key = (
        "Dashed: a knot, neither in line nor branches; planned in line. " if knots(root) else ""
    ) + "A bar is the share of the work: floating-point operations, forward and backward."
    width = max(size.width, svg.text_width(heading, _SMALL), svg.text_width(key, _SMALL)) + 2 * _MARGIN
    top = _MARGIN + 40
    picture.draw(root, (width - size.width) / 2, top, None)
    height = top + size.height + 30
    body = [
        svg.label(_MARGIN, _MARGIN + 8, svg.fit(graph.name, width - 2 * _MARGIN, _TITLE), "strong", _TITLE),
        svg.label(_MARGIN, _MARGIN + 24, heading, "muted", _SMALL),
        *picture.elements,
        svg.label(_MARGIN, height - 10, key, "muted", _SMALL),
    ]
    return svg.document(
        width,
        height,
        body,
        title=f"Shape of {graph.name}",
        description=heading,
        definitions=_HEAD,
        paints=tuple(StagePaint(hue, 0) for hue in sorted(picture.hues)),
    )


@dataclass(frozen=True)
class _Size:
    """Pixels that a part takes."""

    width: float
    height: float


def _size(part: Part) -> _Size:
    sizes = [_size(child) for child in part.children]
    match part.kind:
        case PartKind.SERIES:
            height = sum(size.height for size in sizes) + _DOWN_GAP * (len(sizes) - 1)
            return _Size(max(size.width for size in sizes), height)
        case PartKind.BRANCHES:
            width = sum(size.width for size in sizes) + _SIDE_GAP * (len(sizes) - 1)
            return _Size(width, max(size.height for size in sizes) + 2 * (_FORK + _DOWN_GAP / 2))
        case PartKind.LINE | PartKind.KNOT:
            return _Size(_BOX_WIDTH, _BOX_HEIGHT)


class _Picture:
    """Collects the elements of a picture."""

    def __init__(self) -> None:
        self.elements: list[str] = []
        self.hues: set[int] = set()

    def draw(self, part: Part, left: float, top: float, hue: int | None) -> None:
        """Draw a part into the rectangle of its size at (left, top); `hue` is that of its branch, if it is in one."""
        size = _size(part)
        middle = left + size.width / 2
        match part.kind:
            case PartKind.SERIES:
                for i, child in enumerate(part.children):
                    inner = _size(child)
                    self.draw(child, middle - inner.width / 2, top, hue)
                    top += inner.height
                    if i + 1 < len(part.children):
                        self._arrow(f"M{svg.number(middle)} {svg.number(top)}V{svg.number(top + _DOWN_GAP)}")
                        top += _DOWN_GAP
            case PartKind.BRANCHES:
                self._branches(part, left, top, hue)
            case PartKind.LINE | PartKind.KNOT:
                self._box(part, left, top, _TRUNK if hue is None else hue)

    def _branches(self, part: Part, left: float, top: float, hue: int | None) -> None:
        size = _size(part)
        middle = left + size.width / 2
        bottom = top + size.height
        for i, child in enumerate(part.children):
            inner = _size(child)
            at = left + inner.width / 2
            start = top + _FORK + _DOWN_GAP / 2
            stop = start + inner.height
            y = svg.number
            self._arrow(f"M{y(middle)} {y(top)}V{y(top + _FORK / 2)}H{y(at)}V{y(start)}")
            self._line(f"M{y(at)} {y(stop)}V{y(bottom - _FORK / 2)}H{y(middle)}V{y(bottom)}")
            self.draw(child, left, start, 1 + i % (_NUM_HUES - 1) if hue is None else hue)
            left += inner.width + _SIDE_GAP

    def _arrow(self, path: str) -> None:
        self.elements.append(svg.element("path", d=path, class_="edge", marker_end="url(#gp-outline-head)"))

    def _line(self, path: str) -> None:
        self.elements.append(svg.element("path", d=path, class_="edge"))

    def _box(self, part: Part, left: float, top: float, hue: int) -> None:
        self.hues.add(hue)
        is_knot = part.kind is PartKind.KNOT
        room = _BOX_WIDTH - 16
        bar = room - 46
        tooltip = f"{title(part)}\n{facts(part)}" + (f"\nbecause {part.cause}" if part.cause else "")
        style = f"box t{hue} o{hue}" + (" local" if is_knot else "")
        inside = [
            svg.title_of(tooltip),
            svg.rect(left, top, _BOX_WIDTH, _BOX_HEIGHT, style, radius=5),
            svg.label(left + 8, top + 17, svg.fit(title(part), room, _TEXT, mono=True), f"mono strong nt{hue}", _TEXT),
            svg.label(left + 8, top + 33, svg.fit(facts(part), room, _SMALL), f"nt{hue}", _SMALL),
            svg.rect(left + 8, top + 47, bar, 8, "track", radius=2),
            svg.label(left + _BOX_WIDTH - 8, top + 55, format_share(part.share), f"end nt{hue}", _SMALL),
        ]
        if part.share > 0:
            inside.append(svg.rect(left + 8, top + 47, max(bar * part.share, 1), 8, f"s{hue}", radius=2))
        self.elements.append(svg.element("g", "".join(inside), class_="part"))
