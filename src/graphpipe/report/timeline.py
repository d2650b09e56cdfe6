"""What every device does when, as a picture: a row a device, time to the right."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from graphpipe.report import svg
from graphpipe.report.facts import stages_on
from graphpipe.report.labels import device_name, ranges
from graphpipe.report.palette import StagePaint, stage_paints
from graphpipe.report.units import format_seconds, format_share, format_ticks, round_ticks
from graphpipe.strategy import Strategy
from graphpipe.trace import Span, SpanKind, Trace

WIDTH = 1160.0
_LEFT, _RIGHT = 150.0, 68.0
_TOP, _BOTTOM = 12.0, 58.0
_MOST_SINGLE_SPANS = 2500
_MOST_CELLS = 24_000
_TASK_KINDS = (SpanKind.FORWARD, SpanKind.BACKWARD)


def timeline_svg(
    trace: Trace, strategy: Strategy, *, end_s: float | None = None, width: float = WIDTH, prefix: str = "gp-time-"
) -> str:
    """Return a Gantt chart of a trace.

    A forward pass has the tint of its stage, a backward pass the full colour, and both the number of their
    micro-batch where it fits; on a device with several stages the stage's number and the phase come before it, as in
    ``2F0``. What is left empty is idle. With thousands of spans, every column of pixels is filled from the top
    in proportion to what runs during it.

    Args:
        trace: What to draw, predicted or measured.
        strategy: Whose stages and devices it is about.
        end_s: Where the time axis ends, so that two charts have one scale; by default where the trace does.
        width: In pixels.
        prefix: What the ids in the picture start with. Two pictures in one page need two.

    Raises:
        ValueError: `end_s` is not positive.
    """
    if end_s is not None and end_s <= 0:
        raise ValueError(f"the time axis of a timeline must end after 0 s, got {end_s}")
    end_s = end_s or trace.makespan_s or 1e-6
    rows = _Rows.of(trace.num_devices)
    scale = _Scale((width - _LEFT - _RIGHT) / end_s, width - _RIGHT)
    paints = stage_paints(strategy.stages)
    spans: list[list[Span]] = [[] for _ in range(trace.num_devices)]
    for span in trace.spans:
        spans[span.device].append(span)
    plot = width - _LEFT - _RIGHT
    body = [svg.rect(_LEFT, rows.y(device), plot, rows.bar, "track") for device in range(trace.num_devices)]
    body.extend(_axis(end_s, scale, rows))
    merged = len(trace.spans) > _MOST_SINGLE_SPANS
    cell = max(1.0, trace.num_devices * plot / _MOST_CELLS)
    for device, found in enumerate(spans):
        name = device_name(strategy.cluster, device)
        held = stages_on(strategy, device)
        body.append(_row_head(rows, device, name, held))
        if merged:
            body.extend(_merged(found, paints, scale, rows.y(device), rows.bar, cell, name, prefix))
        else:
            several = len(held) > 1
            body.extend(_single(s, paints, scale, rows, several=several, name=name, prefix=prefix) for s in found)
        if rows.has_label(device):
            busy = trace.busy_s(device) / trace.makespan_s if trace.makespan_s else 0.0
            text = f"{format_share(1 - busy)} idle"
            body.append(svg.label(width - 6, rows.baseline(device), text, "end muted", rows.text))
    body.extend(_key(trace, rows.end + 50))
    return svg.document(
        width,
        rows.end + _BOTTOM,
        body,
        title=f"{trace.source.value.capitalize()} timeline of {strategy.graph.name}",
        description=f"{trace.num_devices} devices, {len(trace.spans)} spans, {format_seconds(trace.makespan_s)}.",
        definitions=svg.textures(prefix, paints),
        paints=paints,
    )


@dataclass(frozen=True, slots=True)
class _Rows:
    """Where the rows are: lower with many devices, each labelled only while there is room."""

    count: int
    height: float
    bar: float
    text: float

    @classmethod
    def of(cls, count: int) -> _Rows:
        if count <= 24:
            return cls(count, 30.0, 22.0, 11.0)
        return cls(count, 16.0, 12.0, 9.5) if count <= 80 else cls(count, 6.0, 5.0, 9.0)

    @property
    def end(self) -> float:
        return _TOP + self.count * self.height

    def y(self, device: int) -> float:
        return _TOP + device * self.height

    def baseline(self, device: int) -> float:
        return self.y(device) + self.bar / 2 + 0.36 * self.text

    def has_label(self, device: int) -> bool:
        return device % max(1, -int(-12 // self.height)) == 0


@dataclass(frozen=True, slots=True)
class _Scale:
    """From seconds to pixels."""

    pixels_per_s: float
    end: float

    def x(self, seconds: float) -> float:
        return min(max(_LEFT + seconds * self.pixels_per_s, _LEFT), self.end)


def _axis(end_s: float, scale: _Scale, rows: _Rows) -> Iterator[str]:
    ticks = round_ticks(end_s, 10)
    for tick, text in zip(ticks, format_ticks(ticks), strict=True):
        x = scale.x(tick)
        yield svg.line(x, _TOP - 4, x, rows.end + 2, "rule")
        yield svg.label(x, rows.end + 16, text, "mid muted", 10.5)


def _row_head(rows: _Rows, device: int, name: str, held: Sequence[int]) -> str:
    if not rows.has_label(device):
        return ""
    what = f"stage{'s' if len(held) > 1 else ''} {ranges(held)}" if held else "no stage"
    shown = svg.fit(name, 62, rows.text)
    what = svg.fit(what, _LEFT - 82, rows.text - 0.5)
    base = rows.baseline(device)
    return svg.label(6, base, shown, "strong", rows.text) + svg.label(
        _LEFT - 8, base, what, "end muted", rows.text - 0.5
    )


def _classes(span: Span, paints: Sequence[StagePaint]) -> tuple[str, str]:
    """Return the class of a span's shape and that of the text on it."""
    if span.kind in _TASK_KINDS and 0 <= span.stage < len(paints):
        hue = paints[span.stage].hue
        if span.kind is SpanKind.FORWARD:
            return f"t{hue}", f"nt{hue}"
        return f"s{hue}", f"ns{hue}"
    if span.kind is SpanKind.OPTIMIZER:
        return "optimizer", "on-optimizer"
    return "reduce", "on-reduce"


def _words(span: Span) -> str:
    match span.kind:
        case SpanKind.REDUCE:
            return "sum of gradients"
        case SpanKind.OPTIMIZER:
            return "optimizer step"
        case _:
            return f"stage {span.stage} {span.kind.value}"


def _short(span: Span, *, several: bool) -> str:
    match span.kind:
        case SpanKind.REDUCE:
            return "sum"
        case SpanKind.OPTIMIZER:
            return "opt"
        case _:
            phase = "F" if span.kind is SpanKind.FORWARD else "B"
            return f"{span.stage}{phase}{span.micro_batch}" if several else str(span.micro_batch)


def _single(
    span: Span,
    paints: Sequence[StagePaint],
    scale: _Scale,
    rows: _Rows,
    *,
    several: bool,
    name: str,
    prefix: str,
) -> str:
    x, y = scale.x(span.start_s), rows.y(span.device)
    width = max(scale.x(span.stop_s) - x, 0.3)
    shape, on = _classes(span, paints)
    which = f", micro-batch {span.micro_batch}" if span.micro_batch >= 0 else ""
    title = (
        f"{_words(span)}{which} on {name}\n{format_seconds(span.duration_s)}, from {format_seconds(span.start_s)} to "
        f"{format_seconds(span.stop_s)}"
    )
    # A fine seam tells neighbours apart.
    seam = 0.6 if width > 3 else 0.0
    if span.kind is SpanKind.FORWARD and width > 3:
        shape += f" o{paints[span.stage].hue} thin" if 0 <= span.stage < len(paints) else ""
        parts = svg.rect(x + 0.5, y + 0.5, width - seam - 1, rows.bar - 1, shape, title=title)
    else:
        parts = svg.rect(x, y, width - seam, rows.bar, shape, title=title)
    texture = _texture(span, paints)
    if texture:
        parts += svg.element(
            "rect",
            x=x,
            y=y + rows.bar * 0.72,
            width=width - seam,
            height=rows.bar * 0.28,
            class_="texture",
            fill=f"url(#{prefix}{texture})",
        )
    text = _short(span, several=several)
    if svg.text_width(text, 10) + 4 <= width and rows.bar >= 12:
        lift = 2.0 if texture else 0.0
        parts += svg.label(x + width / 2, rows.baseline(span.device) - lift, text, f"mid {on}", 10)
    if span.stage < 0:
        return parts
    return svg.element("g", parts, data_stage=str(span.stage))


def _merged(
    spans: Sequence[Span],
    paints: Sequence[StagePaint],
    scale: _Scale,
    y: float,
    height: float,
    cell: float,
    name: str,
    prefix: str,
) -> Iterator[str]:
    """Yield a shape for each stage and kind on a device, made of columns that are `cell` pixels wide.

    A span that fills its columns looks as it would alone; where several share a column, they are stacked in it, and
    what is left at the bottom is idle.
    """
    shares: dict[tuple[int, SpanKind], dict[int, float]] = {}
    counts: Counter[tuple[int, SpanKind]] = Counter()
    for span in spans:
        key = (span.stage, span.kind)
        counts[key] += 1
        columns = shares.setdefault(key, {})
        start, stop = ((scale.x(at) - _LEFT) / cell for at in (span.start_s, span.stop_s))
        for column in range(int(start), math.ceil(stop)):
            columns[column] = columns.get(column, 0.0) + min(stop, column + 1) - max(start, column)
    filled: dict[int, float] = {}
    for key in sorted(shares):
        outline = []
        runs: list[tuple[int, int, float, float]] = []  # First column, end, top, bottom.
        for column in sorted(shares[key]):
            top = filled.get(column, 0.0)
            bottom = min(height, round(top + shares[key][column] * height, 1))
            filled[column] = bottom
            if runs and runs[-1][1:] == (column, top, bottom):
                runs[-1] = (runs[-1][0], column + 1, top, bottom)
            elif bottom > top:
                runs.append((column, column + 1, top, bottom))
        for first, end, top, bottom in runs:
            across, down = svg.number((end - first) * cell), svg.number(bottom - top)
            outline.append(f"M{svg.number(_LEFT + first * cell)} {svg.number(y + top)}h{across}v{down}h-{across}z")
        example = Span(0, key[1], 0.0, 0.0, key[0])
        title = svg.title_of(f"{_words(example)} on {name}: {counts[key]} spans")
        shape = "".join(outline)
        parts = svg.element("path", title, d=shape, class_=_classes(example, paints)[0])
        texture = _texture(example, paints)
        if texture:
            parts += svg.element("path", d=shape, class_="texture", fill=f"url(#{prefix}{texture})")
        yield svg.element("g", parts, data_stage=str(key[0])) if key[0] >= 0 else parts


def _texture(span: Span, paints: Sequence[StagePaint]) -> int:
    return paints[span.stage].texture if span.kind in _TASK_KINDS and 0 <= span.stage < len(paints) else 0


def _key(trace: Trace, baseline: float) -> Iterator[str]:
    """Yield the legend: only what the trace has."""
    kinds = {span.kind for span in trace.spans}
    entries = [
        ("t0 o0 thin", "forward (tint)", SpanKind.FORWARD),
        ("s0", "backward (full colour)", SpanKind.BACKWARD),
        ("reduce", "sum of gradients", SpanKind.REDUCE),
        ("optimizer", "optimizer step", SpanKind.OPTIMIZER),
    ]
    x = _LEFT
    for style, text, kind in entries:
        if kind in kinds:
            yield svg.rect(x, baseline - 10, 20, 12, style)
            yield svg.label(x + 26, baseline, text, "muted", 10.5)
            x += 26 + svg.text_width(text, 10.5) + 22
    yield svg.rect(x, baseline - 10, 20, 12, "track")
    yield svg.label(x + 26, baseline, "idle", "muted", 10.5)
