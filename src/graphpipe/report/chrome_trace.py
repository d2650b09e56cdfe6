"""Traces in the Trace Event format, which Perfetto (https://ui.perfetto.dev) and chrome://tracing open."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from graphpipe.report.facts import stages_on
from graphpipe.report.labels import device_name, ranges, stage_label
from graphpipe.strategy import Strategy
from graphpipe.trace import Span, SpanKind, Trace, TraceSource

_PROCESS_NAMES = {TraceSource.SIMULATED: "predicted", TraceSource.MEASURED: "measured"}


def chrome_trace(trace: Trace, strategy: Strategy, *others: Trace) -> dict[str, Any]:
    """Return traces as one JSON object in the Trace Event format: a process a trace, a thread a device.

    A pass is named as in a schedule, ``2F0`` for the forward pass of micro-batch 0 on stage 2. Spans that overlap on
    one device, such as a sum of gradients beside a backward pass, go to a second thread of it, since the format only
    knows spans inside each other.

    Args:
        trace: What to show, predicted or measured.
        strategy: Whose stages and devices it is about.
        others: Further traces of the same strategy, to be compared.

    Source:
        Trace Event Format, Google, 2016: complete events ("X") and metadata events ("M"), times in microseconds.
    """
    labels = [stage_label(strategy.stages, x) for x in range(len(strategy.stages.stages))]
    events: list[dict[str, Any]] = []
    for process, shown in enumerate((trace, *others), start=1):
        events.append(_metadata("process_name", process, 0, {"name": _PROCESS_NAMES[shown.source]}))
        events.append(_metadata("process_sort_index", process, 0, {"sort_index": process}))
        for device in range(shown.num_devices):
            lanes = _lanes([span for span in shown.spans if span.device == device])
            held = stages_on(strategy, device)
            what = f" (stage{'s' if len(held) > 1 else ''} {ranges(held)})" if held else ""
            for i, lane in enumerate(lanes):
                thread = device + i * shown.num_devices
                name = f"{device_name(strategy.cluster, device)}{what}{' beside' if i else ''}"
                events.append(_metadata("thread_name", process, thread, {"name": name}))
                events.append(_metadata("thread_sort_index", process, thread, {"sort_index": device * 100 + i}))
                events.extend(_complete(lane, process, thread, labels))
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"model": strategy.graph.name}}


def _metadata(name: str, process: int, thread: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": process, "tid": thread, "args": args}


def _lanes(spans: list[Span]) -> list[list[Span]]:
    """Return the spans in as few lists as they need so that none overlaps another; at least one list."""
    lanes: list[list[Span]] = [[]]
    for span in sorted(spans, key=lambda s: (s.start_s, s.stop_s)):
        free = (lane for lane in lanes if not lane or _nanoseconds(lane[-1].stop_s) <= _nanoseconds(span.start_s))
        lane = next(free, None)
        if lane is None:
            lanes.append([span])
        else:
            lane.append(span)
    return lanes


def _nanoseconds(seconds: float) -> int:
    # Both ends are rounded alike, so that spans that touch still touch.
    return round(seconds * 1e9)


def _complete(spans: list[Span], process: int, thread: int, labels: list[str]) -> Iterator[dict[str, Any]]:
    for span in spans:
        start, stop = _nanoseconds(span.start_s), _nanoseconds(span.stop_s)
        args: dict[str, Any] = {}
        if span.stage >= 0:
            args["stage"] = span.stage
            if span.stage < len(labels):
                args["holds"] = labels[span.stage]
        if span.micro_batch >= 0:
            args["micro_batch"] = span.micro_batch
        yield {
            "name": _name(span),
            "cat": span.kind.value,
            "ph": "X",
            "ts": start / 1000,
            "dur": (stop - start) / 1000,
            "pid": process,
            "tid": thread,
            "args": args,
        }


def _name(span: Span) -> str:
    match span.kind:
        case SpanKind.FORWARD:
            return f"{span.stage}F{span.micro_batch}"
        case SpanKind.BACKWARD:
            return f"{span.stage}B{span.micro_batch}"
        case _:
            return span.kind.value
