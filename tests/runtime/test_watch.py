"""The watchdog's own side: what it sees of a rank, whom it expects, and whom it ends."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace

import pytest

from graphpipe.runtime import watch
from graphpipe.runtime.coordinator import Coordinator
from graphpipe.runtime.local_process import LocalProcess
from graphpipe.runtime.verdict import Limits, Place, PlaceKind, RankState, Sign, SignKind
from graphpipe.runtime.watch import TICK_S, Cell, Cells, WatchedRank
from graphpipe.runtime.watchdog import _shared_memory

LIMITS = Limits(progress_s=60.0)
TASK = Place(PlaceKind.WORK, "task 0F0")


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, in seconds, which tests move."""
    found = [1000.0]
    monkeypatch.setattr(watch.time, "monotonic", lambda: found[0])
    return found


def test_a_rank_that_never_comes_ends_the_job_and_the_watchdog(now: list[float]) -> None:
    coordinator = Coordinator(3, LIMITS)
    coordinator.expect([1, 2])
    coordinator.hear(RankState(rank=0))
    coordinator.hear(RankState(rank=1))
    # Rank 0 has ended already, and would wait for the others as long as they live.
    coordinator.see(Sign(kind=SignKind.LEFT, state=RankState(rank=0)))
    for _ in range(int(LIMITS.come_s / TICK_S)):
        assert coordinator.decide() is None
        assert not coordinator.is_done()
        now[0] += TICK_S
        coordinator.hear(RankState(rank=1))
    verdict = coordinator.decide()
    assert verdict is not None
    assert verdict.rank == 2
    now[0] += 2.0
    assert coordinator.may_end_all(own_is_alive=False)
    coordinator.end_all()
    assert coordinator.is_done()


def test_what_was_not_heard_while_this_process_slept_is_not_held_against_anybody(now: list[float]) -> None:
    coordinator = Coordinator(2, LIMITS)
    coordinator.hear(RankState(rank=1))
    now[0] += 100.0
    coordinator.excuse()
    assert coordinator.decide() is None
    now[0] += LIMITS.unheard_s
    assert coordinator.decide() is not None


@pytest.fixture
def cells() -> Iterator[tuple[WatchedRank, Cells]]:
    memory = _shared_memory()
    rank = WatchedRank(0, os.getpid(), memory)
    rank.places.append(TASK)
    yield rank, memoryview(mmap.mmap(memory, mmap.PAGESIZE)).cast("q")
    os.close(memory)


def test_how_long_a_place_takes_is_known_after_some_runs(now: list[float], cells: tuple[WatchedRank, Cells]) -> None:
    rank, memory = cells

    def look(place: int, seconds: float) -> RankState:
        memory[Cell.PLACE] = place
        state = rank.look()
        for _ in range(round(seconds / TICK_S)):
            memory[Cell.BEAT] += 1
            now[0] += TICK_S
            state = rank.look()
        return state

    assert look(0, 0.5).usual_s is None
    assert look(1, 4.0).usual_s is None  # The first run is no measure.
    look(0, 0.5)
    memory[Cell.RUNS] = 1
    assert look(1, 1.5).usual_s is None
    assert look(1, 0.0).idle_s == pytest.approx(1.5)
    look(0, 0.5)
    memory[Cell.RUNS] = 2
    state = look(1, 0.5)
    assert state.place == TASK
    assert state.idle_s == pytest.approx(0.5)
    assert state.usual_s == pytest.approx(1.5 + TICK_S)  # As long as it may have been, not less.
    assert LIMITS.of(state) == pytest.approx(5 * (1.5 + TICK_S))
    assert LIMITS.of(replace(state, place=Place(PlaceKind.OUTSIDE, ""))) == LIMITS.progress_s


def test_time_in_which_nobody_looked_is_not_the_ranks(now: list[float], cells: tuple[WatchedRank, Cells]) -> None:
    rank, memory = cells
    memory[Cell.PLACE] = 1
    rank.look()
    now[0] += 3600.0
    state = rank.look()
    assert (state.idle_s, state.silent_s) == (0.0, 0.0)


@pytest.mark.parametrize("changed", ["machine", "born"])
def test_only_the_process_that_was_meant_is_killed(changed: str) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    meant = LocalProcess.of(process.pid)
    assert LocalProcess(**asdict(meant)) == meant
    replace(meant, **{changed: "another"}).kill()
    time.sleep(0.1)
    assert process.poll() is None
    meant.kill()
    assert process.wait(10) == -9
