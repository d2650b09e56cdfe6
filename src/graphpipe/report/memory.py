"""The peak memory of each device as a picture, by what it holds, against what there is."""

from __future__ import annotations

from collections.abc import Iterator

from graphpipe.cost import MemoryParts
from graphpipe.estimate import WORKSPACE_MARGIN, Estimate, format_bytes
from graphpipe.report import svg
from graphpipe.report.facts import DeviceFacts, device_facts
from graphpipe.report.labels import ranges
from graphpipe.report.palette import MEMORY_COLOURS
from graphpipe.report.units import format_share, round_ticks
from graphpipe.strategy import Strategy
from graphpipe.trace import Trace

WIDTH = 1160.0
_LEFT, _RIGHT = 150.0, 190.0
_TOP = 12.0
_LEAST_SHARE = 0.2
"""The bars are drawn against the available memory where the fullest device takes at least this share of it."""


def memory_svg(strategy: Strategy, estimate: Estimate, measured: Trace | None = None, *, width: float = WIDTH) -> str:
    """Return stacked bars of the predicted peak memory of each device.

    What a device has is marked with a line where that leaves the bars large enough to read, and given in words anyway.
    A diamond marks the measured peak where the trace has one.
    """
    facts = device_facts(strategy, estimate)
    peaks = _measured_peaks(measured, len(facts))
    fullest = max(device.peak_bytes for device in facts)
    against_available = any(d.peak_bytes >= _LEAST_SHARE * d.available_bytes for d in facts)
    shown = [fullest, *(peak for peak in peaks if peak is not None)]
    if against_available:
        shown += [float(device.available_bytes) for device in facts]
    end = max(shown) or 1.0
    pixels = (width - _LEFT - _RIGHT) / end
    row = 30.0 if len(facts) <= 24 else 17.0
    bar = row - 8 if row > 20 else row - 4
    bottom = _TOP + row * len(facts)
    body = []
    for tick in round_ticks(end, 8):
        x = _LEFT + tick * pixels
        body.append(svg.line(x, _TOP - 4, x, bottom + 2, "rule"))
        body.append(svg.label(x, bottom + 16, format_bytes(tick) if tick else "0", "mid muted", 10.5))
    for device, peak in zip(facts, peaks, strict=True):
        y = _TOP + row * device.device
        x = _LEFT + device.available_bytes * pixels
        if against_available:
            body.append(svg.rect(_LEFT, y, x - _LEFT, bar, "track"))
        body.extend(_row(device, peak, pixels, y, bar, width))
        if against_available:
            body.append(svg.line(x, y - 3, x, y + bar + 3, "limit"))
    has_measured = any(peak is not None for peak in peaks)
    body.extend(_key(bottom + 42, has_measured=has_measured, has_limit=against_available))
    return svg.document(
        width,
        bottom + 54,
        body,
        title=f"Predicted peak memory of {strategy.graph.name} by device",
        description=f"The fullest device takes {format_bytes(fullest)}.",
    )


def _measured_peaks(measured: Trace | None, count: int) -> list[int | None]:
    known = measured.peak_bytes if measured is not None else ()
    return [known[d] if d < len(known) and known[d] > 0 else None for d in range(count)]


def memory_parts(parts: MemoryParts) -> tuple[tuple[str, float], ...]:
    """Return the parts of a peak by name, with what the workspace margin adds last."""
    return (
        ("parameters", parts.parameters),
        ("gradients", parts.gradients),
        ("optimizer", parts.optimizer),
        ("activations", parts.activations),
        ("margin", parts.total * WORKSPACE_MARGIN),
    )


def _row(device: DeviceFacts, peak: int | None, pixels: float, y: float, bar: float, width: float) -> Iterator[str]:
    size = 11.0 if bar > 14 else 9.5
    base = y + bar / 2 + 0.36 * size
    held = f"stage{'s' if len(device.stages) > 1 else ''} {ranges(device.stages)}" if device.stages else "no stage"
    yield svg.label(6, base, svg.fit(device.name, 62, size), "strong", size)
    yield svg.label(_LEFT - 8, base, svg.fit(held, _LEFT - 82, size - 0.5), "end muted", size - 0.5)
    x = _LEFT
    for part, num_bytes in memory_parts(device.memory):
        if not num_bytes:
            continue
        title = f"{device.name}: {part} {format_bytes(num_bytes)}"
        yield svg.rect(x, y, num_bytes * pixels, bar, f"m-{part}", title=title)
        x += num_bytes * pixels
    if peak is not None:
        middle = y + bar / 2
        at = _LEFT + peak * pixels
        title = svg.title_of(f"{device.name}: measured peak {format_bytes(peak)}")
        points = f"{svg.number(at - 6)},{svg.number(middle)} {svg.number(at)},{svg.number(middle - 8)} "
        points += f"{svg.number(at + 6)},{svg.number(middle)} {svg.number(at)},{svg.number(middle + 8)}"
        yield svg.element("polygon", title, points=points, class_="mark")
    share = format_share(device.peak_bytes / device.available_bytes)
    text = f"{format_bytes(device.peak_bytes)} of {format_bytes(device.available_bytes)} ({share})"
    yield svg.label(width - 6, base, text, "end", size)


def _key(baseline: float, *, has_measured: bool, has_limit: bool) -> Iterator[str]:
    x = _LEFT
    for part in MEMORY_COLOURS:
        text = f"margin ({format_share(WORKSPACE_MARGIN)})" if part == "margin" else part
        yield svg.rect(x, baseline - 10, 16, 12, f"m-{part}")
        yield svg.label(x + 22, baseline, text, "muted", 10.5)
        x += 22 + svg.text_width(text, 10.5) + 16
    if has_limit:
        yield svg.line(x + 6, baseline - 11, x + 6, baseline + 3, "limit")
        yield svg.label(x + 14, baseline, "available", "muted", 10.5)
        x += 14 + svg.text_width("available", 10.5) + 16
    if has_measured:
        x += 4
        points = f"{svg.number(x)},{svg.number(baseline - 4)} {svg.number(x + 5)},{svg.number(baseline - 11)} "
        points += f"{svg.number(x + 10)},{svg.number(baseline - 4)} {svg.number(x + 5)},{svg.number(baseline + 3)}"
        yield svg.element("polygon", points=points, class_="mark")
        yield svg.label(x + 16, baseline, "measured peak", "muted", 10.5)
