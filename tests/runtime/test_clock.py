from __future__ import annotations

import resource
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from graphpipe.runtime.clock import StreamClock, WallClock, clock_for
from graphpipe.runtime.peak_memory import peak_memory_bytes


@dataclass
class FakeStream:
    """A stream whose events happen when the test says so."""

    now_ms: float = 0.0
    waits: list[float] = field(default_factory=list)

    def event(self) -> FakeEvent:
        return FakeEvent(self)


@dataclass
class FakeEvent:
    stream: FakeStream
    at_ms: float = -1.0

    def record(self) -> None:
        self.at_ms = self.stream.now_ms

    def synchronize(self) -> None:
        self.stream.waits.append(self.at_ms)

    def elapsed_time(self, end_event: FakeEvent) -> float:
        return end_event.at_ms - self.at_ms


def test_a_stream_clock_tells_the_times_of_the_stream() -> None:
    stream = FakeStream(now_ms=500.0)
    clock = StreamClock(stream.event)
    clock.start()
    assert stream.waits == [500.0]  # the host knows when this was
    stream.now_ms = 512.0
    first = clock.mark()
    stream.now_ms = 530.0
    second = clock.mark()
    # Marks cost no wait; reading them does.
    assert stream.waits == [500.0]
    assert clock.seconds_at(second) - clock.seconds_at(first) == pytest.approx(0.018)
    assert stream.waits == [500.0, 530.0, 512.0]


def test_a_device_has_its_clock() -> None:
    assert isinstance(clock_for(torch.device("cpu")), WallClock)
    assert isinstance(clock_for(torch.device("cuda", 1)), StreamClock)


def test_the_memory_peak_of_a_process_is_at_least_what_it_has_now() -> None:
    more = torch.ones(2**22)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    assert peak_memory_bytes(torch.device("cpu")) >= 0.95 * pages * resource.getpagesize() > more.nbytes
