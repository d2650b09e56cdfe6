"""What happened when, on every device: written by the simulator and by the runtime in one schema."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

from graphpipe.errors import GraphPipeError


class SpanKind(StrEnum):
    """What a device did during a span."""

    FORWARD = "forward"
    BACKWARD = "backward"
    REDUCE = "reduce"
    OPTIMIZER = "optimizer"


class TraceSource(StrEnum):
    """Who wrote a trace."""

    SIMULATED = "simulated"
    MEASURED = "measured"


@dataclass(frozen=True, slots=True)
class Span:
    """One piece of work on one device.

    Attributes:
        device: Where.
        kind: What.
        start_s: Seconds from the start of the mini-batch.
        stop_s: Seconds from the start of the mini-batch.
        stage: The stage, or -1 where it is about the whole device.
        micro_batch: The micro-batch, or -1.
    """

    device: int
    kind: SpanKind
    start_s: float
    stop_s: float
    stage: int = -1
    micro_batch: int = -1

    @property
    def duration_s(self) -> float:
        """How long it took."""
        return self.stop_s - self.start_s


@dataclass(frozen=True)
class Trace:
    """The spans of one mini-batch, by device and start.

    Attributes:
        source: Who wrote it.
        num_devices: All devices, idle ones included.
        spans: The work.
        peak_bytes: ``[devices]`` the most memory in use, where it is known; else empty.
    """

    source: TraceSource
    num_devices: int
    spans: tuple[Span, ...]
    peak_bytes: tuple[int, ...] = ()

    @cached_property
    def makespan_s(self) -> float:
        """Seconds from the start of the mini-batch to the end of the last span."""
        return max((span.stop_s for span in self.spans), default=0.0)

    def busy_s(self, device: int) -> float:
        """Return the seconds that a device spends in passes, and in the optimizer where that was measured."""
        return self._busy_s.get(device, 0.0)

    @cached_property
    def _busy_s(self) -> Mapping[int, float]:
        found: dict[int, float] = {}
        for span in self.spans:
            if span.kind in {SpanKind.FORWARD, SpanKind.BACKWARD, SpanKind.OPTIMIZER}:
                found[span.device] = found.get(span.device, 0.0) + span.duration_s
        return found

    def to_json(self) -> dict[str, Any]:
        """Return the trace as plain data."""
        return {
            "kind": "graphpipe-trace",
            "source": self.source.value,
            "num_devices": self.num_devices,
            "peak_bytes": list(self.peak_bytes),
            "spans": [[s.device, s.kind.value, s.start_s, s.stop_s, s.stage, s.micro_batch] for s in self.spans],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Trace:
        """Return the trace that `to_json` wrote.

        Raises:
            GraphPipeError: It is damaged.
        """
        try:
            spans = tuple(
                Span(int(d), SpanKind(kind), float(start), float(stop), int(stage), int(m))
                for d, kind, start, stop, stage, m in data["spans"]
            )
            return cls(
                source=TraceSource(data["source"]),
                num_devices=int(data["num_devices"]),
                spans=spans,
                peak_bytes=tuple(int(b) for b in data["peak_bytes"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise GraphPipeError(f"the trace is damaged: {error}") from error
