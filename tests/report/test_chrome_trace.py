from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest

from graphpipe.estimate import estimate
from graphpipe.report import chrome_trace
from graphpipe.strategy import Strategy
from graphpipe.trace import Span, SpanKind, Trace, TraceSource
from tests.report.samples import diamond, measured_like


def complete(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in found["traceEvents"] if event["ph"] == "X"]


def check_threads(found: dict[str, Any]) -> None:
    threads = defaultdict(list)
    for event in complete(found):
        assert event["dur"] >= 0
        threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in threads.values():
        for (_, stop), (start, _) in pairwise(sorted(spans)):
            assert stop <= start + 1e-6


def test_every_span_is_an_event_of_its_length(strategy: Strategy) -> None:
    trace = estimate(strategy).trace
    found = chrome_trace(trace, strategy)
    events = complete(found)
    assert len(events) == len(trace.spans)
    assert sum(e["dur"] for e in events) == pytest.approx(1e6 * sum(s.duration_s for s in trace.spans), abs=1e-2)
    check_threads(found)
    assert json.loads(json.dumps(found)) == found


def test_a_pass_is_named_as_in_a_schedule_and_says_what_it_ran() -> None:
    strategy = diamond()
    events = complete(chrome_trace(estimate(strategy).trace, strategy))
    assert events[0] == {
        "name": "0F0",
        "cat": "forward",
        "ph": "X",
        "ts": 0.0,
        "dur": 2000.0,
        "pid": 1,
        "tid": 0,
        "args": {"stage": 0, "holds": "stem", "micro_batch": 0},
    }


def test_predicted_and_measured_are_two_processes() -> None:
    strategy = diamond()
    trace = estimate(strategy).trace
    found = chrome_trace(trace, strategy, measured_like(trace))
    names = {e["pid"]: e["args"]["name"] for e in found["traceEvents"] if e["name"] == "process_name"}
    assert names == {1: "predicted", 2: "measured"}
    assert len(complete(found)) == 2 * len(trace.spans)
    threads = [e["args"]["name"] for e in found["traceEvents"] if e["name"] == "thread_name" and e["pid"] == 2]
    assert threads == ["gpu0 (stage 0)", "gpu1 (stage 1)", "gpu2 (stage 2)", "gpu3 (stage 3)"]
    check_threads(found)


def test_spans_that_overlap_on_a_device_go_to_another_thread() -> None:
    spans = (
        Span(0, SpanKind.BACKWARD, 0.0, 2.0, 0, 0),
        Span(0, SpanKind.REDUCE, 1.0, 3.0),
        Span(0, SpanKind.BACKWARD, 2.0, 4.0, 0, 1),
    )
    found = chrome_trace(Trace(TraceSource.MEASURED, 4, spans), diamond())
    assert [(e["name"], e["tid"]) for e in complete(found)] == [("0B0", 0), ("0B1", 0), ("reduce", 4)]
    check_threads(found)


def test_spans_that_touch_still_touch_after_rounding() -> None:
    ends = [i / 3 * 1e-3 for i in range(50)]
    spans = tuple(Span(0, SpanKind.FORWARD, a, b, 0, i) for i, (a, b) in enumerate(pairwise(ends)))
    found = chrome_trace(Trace(TraceSource.MEASURED, 1, spans), diamond())
    assert {e["tid"] for e in complete(found)} == {0}
    check_threads(found)
