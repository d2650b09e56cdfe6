from __future__ import annotations

import pytest

from graphpipe.estimate import estimate
from graphpipe.report import timeline_svg
from graphpipe.strategy import Strategy
from graphpipe.trace import Span, SpanKind, Trace, TraceSource
from tests.report.pictures import SVG, box_of, canvas, parse, texts, titles, with_class
from tests.report.samples import chain, crowded, diamond, multi_modal, two_towers


def spans_in(picture: str) -> list[tuple[str, float, float]]:
    """Return the title, left end and width of every drawn span."""
    found = []
    for rect in parse(picture).iter(f"{SVG}rect"):
        title = rect.find(f"{SVG}title")
        if title is not None:
            found.append((title.text or "", float(rect.attrib["x"]), float(rect.attrib["width"])))
    return found


def test_every_span_is_drawn_in_its_place(strategy: Strategy) -> None:
    trace = estimate(strategy).trace
    found = spans_in(timeline_svg(trace, strategy))
    assert len(found) == len(trace.spans)
    root = parse(timeline_svg(trace, strategy))
    for rect in root.iter(f"{SVG}rect"):
        if rect.find(f"{SVG}title") is not None:
            assert canvas(root).holds(box_of(rect))
            # Rows are 30 pixels high and begin at 12.
            device = int((box_of(rect).top - 12) / 30)
            assert f" on {strategy.cluster.devices[device].name}\n" in titles(rect)[0]
    longest = max(trace.spans, key=lambda s: s.duration_s)
    # 942 pixels for the whole; borders and seams take 2 at most.
    drawn = max(width for _, _, width in found)
    assert drawn == pytest.approx(942 * longest.duration_s / trace.makespan_s, abs=2)


def test_two_traces_can_share_a_scale() -> None:
    strategy = diamond()
    trace = estimate(strategy).trace
    whole = spans_in(timeline_svg(trace, strategy))
    half = spans_in(timeline_svg(trace, strategy, end_s=2 * trace.makespan_s))
    assert [title for title, _, _ in whole] == [title for title, _, _ in half]
    assert half[-1][1] - 150 == pytest.approx((whole[-1][1] - 150) / 2, abs=1)


def test_sums_of_gradients_and_the_optimizer_are_drawn() -> None:
    strategy = diamond()
    spans = (
        Span(0, SpanKind.FORWARD, 0.0, 1.0, 0, 0),
        Span(0, SpanKind.REDUCE, 1.0, 2.0),
        Span(0, SpanKind.OPTIMIZER, 2.0, 3.0),
    )
    root = parse(timeline_svg(Trace(TraceSource.MEASURED, 4, spans), strategy))
    assert any(title.startswith("sum of gradients on gpu0\n1 s, from 1 s to 2 s") for title in titles(root))
    assert any(title.startswith("optimizer step on gpu0") for title in titles(root))
    assert texts(root).count("100 % idle") == 3


def test_stages_on_one_device_are_told_apart() -> None:
    strategy = two_towers()
    root = parse(timeline_svg(estimate(strategy).trace, strategy))
    assert "0B3" in texts(root)  # Device 0 holds two stages, so a pass there is called as in a schedule.
    assert "stages 0,2" in texts(root)
    assert {g.attrib["data-stage"] for g in root.iter(f"{SVG}g")} == {"0", "1", "2"}
    assert with_class(root, "rect", "texture")


def test_a_huge_trace_stays_small_and_keeps_its_shares() -> None:
    strategy = multi_modal()
    few, many = (timeline_svg(crowded(strategy, count), strategy) for count in (500, 5000))
    assert len(few) < 1_500_000
    assert len(many) < 1_500_000
    assert "30 % idle" in texts(parse(many))  # Each span fills 0.7 of its slot.
    root = parse(timeline_svg(crowded(chain(2), 5000), chain(2)))
    forward, backward = (painted(root, f"gpu0: {n} spans") for n in (3334, 1666))
    # Two forward passes for each backward pass, of 942 by 22 pixels.
    assert forward == pytest.approx(942 * 22 * 0.7 * 2 / 3, rel=0.05)
    assert backward == pytest.approx(942 * 22 * 0.7 / 3, rel=0.05)


def painted(root: object, title: str) -> float:
    """Return the area of a path of rectangles."""
    import re

    for path in root.iter(f"{SVG}path"):  # type: ignore[attr-defined]
        found = path.find(f"{SVG}title")
        if found is not None and title in (found.text or ""):
            return sum(float(w) * float(h) for w, h in re.findall(r"h([\d.]+)v([\d.]+)h-", path.attrib["d"]))
    raise AssertionError(title)


def test_a_cluster_of_hundreds_of_devices_stays_small() -> None:
    trace = crowded(chain(2), 20)
    spans = tuple(Span(d, s.kind, s.start_s, s.stop_s, 0, 0) for d in range(512) for s in trace.spans[:20])
    text = timeline_svg(Trace(TraceSource.SIMULATED, 512, spans), chain(2))
    assert len(text) < 2_500_000
    assert canvas(parse(text)).bottom < 3500


def test_an_empty_trace_is_a_picture_too() -> None:
    root = parse(timeline_svg(Trace(TraceSource.MEASURED, 4, ()), diamond()))
    assert "0" in texts(root)


def test_an_axis_without_length_is_refused() -> None:
    with pytest.raises(ValueError, match="must end after 0 s, got 0"):
        timeline_svg(Trace(TraceSource.MEASURED, 4, ()), diamond(), end_s=0.0)


def test_the_picture_is_the_same_each_time(strategy: Strategy) -> None:
    trace = estimate(strategy).trace
    assert timeline_svg(trace, strategy) == timeline_svg(trace, strategy)
