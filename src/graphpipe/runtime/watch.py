"""The watchdog process of one rank: sees how its rank is, tells the others, and ends it when the job has failed.

It is a process of its own because a rank cannot watch itself: one that is stopped, or that holds the interpreter, runs
no thread, and one that is blocked in a collective cannot be interrupted. It imports nothing heavy. The rank writes
where it is into shared memory (`Cell`) and tells the rest as lines of JSON over a socket; see
`graphpipe.runtime.watchdog` for that side.

The watchdog of rank 0 is the coordinator: the others connect to it over TCP, tell it their rank's state four times a
second and what happens at once, and do what it decides. The decision itself is `graphpipe.runtime.verdict.judge`.
"""

from __future__ import annotations

import json
import mmap
import os
import selectors
import signal
import socket
import sys
import time
from dataclasses import asdict
from enum import IntEnum
from typing import Any, Protocol

from graphpipe.runtime.coordinator import GRACE_S, Coordinator
from graphpipe.runtime.failure_report import expect_no_launcher, expect_no_verdict, expect_verdict, report_verdict
from graphpipe.runtime.lines import MAX_LINE_BYTES, Lines
from graphpipe.runtime.local_process import LocalProcess, kill, parent_of, state_of
from graphpipe.runtime.verdict import OUTSIDE, Limits, Place, PlaceKind, RankState, Sign, SignKind, Verdict

TICK_S = 0.25
# This process did not run for so long: the machine slept, or all of the job was stopped.
_PAUSE_S = 8 * TICK_S
# What a rank's tasks usually take is known once it has run a program so often. The first run, which is slower, is no
# measure.
_KNOWN_AFTER = 2
# Until it has shown that it belongs to the job.
_MAX_GREETING_BYTES = 4096


class Cell(IntEnum):
    """The 64-bit integers that a rank shares with its watchdog."""

    PLACE = 0
    """A position in the table of places."""
    OPERATION = 1
    """How many joint operations have begun."""
    STEP = 2
    """The number of the step, from 1."""
    BEAT = 3
    """Counted up by a thread."""
    RUNS = 4
    """How often the program has been run to its end before."""
    WRITES = 5
    """How many threads write files, in which no other thread may run."""
    REFUSED = 6
    """The last joint operation that has ended with an error of GraphPipe's own."""


class Cells(Protocol):
    """Integers by `Cell`: a list, or shared memory."""

    def __getitem__(self, cell: int, /) -> int: ...
    def __setitem__(self, cell: int, value: int, /) -> None: ...


class WatchedRank:
    """The rank's process as its watchdog sees it."""

    def __init__(self, rank: int, pid: int, shared_memory: int) -> None:
        self.rank = rank
        self.pid = pid
        self.is_alive = True
        self.places: list[Place] = [OUTSIDE]
        self._memory = mmap.mmap(shared_memory, mmap.PAGESIZE)
        self._cells = memoryview(self._memory).cast("q")
        self._seen = self._beat = -1
        self._progress: tuple[int, ...] = ()
        self._longest_s: dict[int, float] = {}
        self._moved_s = self._beat_s = self._looked_s = time.monotonic()
        self.process = os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None
        self._launcher = parent_of(pid) if "TORCHELASTIC_RUN_ID" in os.environ else None

    def look(self) -> RankState:
        """Return the rank's state."""
        now_s = time.monotonic()
        if now_s - self._looked_s > _PAUSE_S:
            self._moved_s = self._beat_s = now_s  # Nothing can be said of the rank.
        progress = (self._cells[Cell.PLACE], self._cells[Cell.OPERATION])
        if progress != self._progress:
            for place in self._progress[:1] if self._cells[Cell.RUNS] else ():
                # It left between two looks: no sooner than this after it came.
                self._longest_s[place] = max(self._longest_s.get(place, 0.0), self._looked_s - self._moved_s)
            self._progress, self._moved_s = progress, now_s
        self._looked_s = now_s
        if self._cells[Cell.BEAT] != self._beat:
            self._beat, self._beat_s = self._cells[Cell.BEAT], now_s
        place, operation = progress
        is_known = self._cells[Cell.RUNS] >= _KNOWN_AFTER
        return RankState(
            rank=self.rank,
            place=self.places[place] if 0 <= place < len(self.places) else OUTSIDE,
            operation=operation,
            refused=self._cells[Cell.REFUSED],
            step=self._cells[Cell.STEP],
            idle_s=now_s - self._moved_s,
            # A place that was never met was left within a tick of coming there; one that was, within one more.
            usual_s=self._longest_s.get(place, 0.0) + TICK_S if is_known else None,
            silent_s=now_s - self._beat_s,
            writes=self._cells[Cell.WRITES] > 0,
            is_stopped=now_s - self._beat_s > 2 * TICK_S and state_of(self.pid) == "T",
        )

    def check_alive(self) -> bool:
        """Return whether the process is there."""
        if self.process is None:
            try:
                os.kill(self.pid, 0)
            except ProcessLookupError:
                self.is_alive = False
        return self.is_alive

    def has_lost_its_launcher(self) -> bool:
        """Return whether the torchrun that started the rank is gone; nobody else would end it then."""
        return self._launcher is not None and parent_of(self.pid) not in (self._launcher, None)

    def kill(self) -> None:
        """End the process: SIGKILL also ends one that is stopped."""
        if self.is_alive:
            kill(self.pid)


class Watch:
    """The watchdog's loop."""

    def __init__(self, rank: int, world_size: int, limits: Limits, pid: int, shared_memory: int, control: int) -> None:
        self.rank = WatchedRank(rank, pid, shared_memory)
        self.control = Lines(socket.socket(fileno=control))
        self.limits = limits
        self.coordinator = Coordinator(world_size, limits) if rank == 0 else None
        self.uplink: Lines | None = None
        self._coordinator_processes: list[LocalProcess] = []
        self.was_told_to_end = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(self.control.socket, selectors.EVENT_READ, self._from_rank)
        if self.rank.process is not None:
            self._selector.register(self.rank.process, selectors.EVENT_READ, self._on_end)
        self._has_failed = self._has_left = self._has_verdict = False
        self._deadline_s: float | None = None
        self._heard_s = time.monotonic()
        self._token = ""

    # ---- what is seen here

    def run(self) -> None:
        """Watch until the rank has ended and nobody needs this process."""
        tick_s, before_s = 0.0, time.monotonic()
        while True:
            events = self._selector.select(TICK_S)
            if time.monotonic() - before_s > _PAUSE_S:
                self._heard_s = time.monotonic()
                if self.coordinator is not None:
                    self.coordinator.excuse()
            before_s = time.monotonic()
            for key, _ in events:
                key.data(key)
            if not self.rank.check_alive():
                self._ended()
            now_s = time.monotonic()
            if now_s >= tick_s:
                tick_s = now_s + TICK_S
                self._report_state()
                if self.rank.is_alive and self._deadline_s is None and self.rank.has_lost_its_launcher():
                    self._sign(SignKind.FAILED, "its launcher is gone")
                    self._end(0.0)
            self._act(now_s)
            if not self.rank.is_alive and (self.coordinator is None or self.coordinator.is_done()):
                return

    def _report_state(self) -> None:
        state = self.rank.look()
        if self.coordinator is not None:
            self.coordinator.hear(state)
            for peer in list(self.coordinator.peers.values()):
                peer.send(beat=True)
        elif self.uplink is not None:
            self.uplink.send(state=asdict(state))

    def _sign(self, kind: SignKind, message: str = "") -> None:
        sign = Sign(kind=kind, state=self.rank.look(), message=message)
        if self.coordinator is not None:
            self.coordinator.see(sign)
        elif self.uplink is not None:
            self.uplink.send(sign=asdict(sign))

    def _on_end(self, _: selectors.SelectorKey) -> None:
        assert self.rank.process is not None
        self._selector.unregister(self.rank.process)
        self.rank.is_alive = False
        self._ended()

    def _ended(self) -> None:
        """The process is gone: take in its last words, and see whether the launcher ended it."""
        if self.control.is_open:
            self.control.socket.setblocking(False)
            for message in self.control.receive():
                self._obey(message)
            self._close_control()
        if not self._has_left:
            self._has_left = True
            if not self.was_told_to_end:
                time.sleep(0.05)  # The launcher's signal comes to the rank and to this process, in any order.
            failed_before = self._has_failed or self._has_verdict
            self._sign(SignKind.ENDED if self.was_told_to_end or failed_before else SignKind.DIED)

    def _from_rank(self, _: selectors.SelectorKey) -> None:
        for message in self.control.receive():
            self._obey(message)
        if not self.control.is_open:
            self._close_control()
            if self.rank.process is None:
                self.rank.is_alive = False

    def _close_control(self) -> None:
        self.control.is_open = False
        self._selector.unregister(self.control.socket)
        self.control.socket.close()

    def _obey(self, message: dict[str, Any]) -> None:
        match message:
            case {"limits": limits}:
                self.limits = Limits(**limits)
                if self.coordinator is not None:
                    self.coordinator.limits = self.limits
            case {"places": places}:
                self.rank.places += [Place(PlaceKind(kind), *rest) for kind, *rest in places]
            case {"failed": text, "kind": kind}:
                self._has_failed = kind == SignKind.FAILED
                self._sign(SignKind(kind), text)
            case {"leave": text}:
                self._has_left = True
                self._sign(SignKind.LEFT, text)
            case {"serve": address, "token": token}:
                self._serve(address, token)
            case {"connect": [host, port], "token": token}:
                self._connect(host, port, token)
            case _:
                raise AssertionError(message)

    # ---- the others

    def _serve(self, address: str, token: str) -> None:
        assert self.coordinator is not None
        self._token = token
        self.coordinator.expect(range(1, self.coordinator.world_size))
        server = socket.create_server((address, 0), backlog=self.coordinator.world_size)
        self._selector.register(server, selectors.EVENT_READ, self._on_connection)
        self.control.send(port=server.getsockname()[1])

    def _on_connection(self, key: selectors.SelectorKey) -> None:
        assert isinstance(key.fileobj, socket.socket)
        connection, _ = key.fileobj.accept()
        peer, known = Lines(connection), list[int]()
        peer.max_line_bytes = _MAX_GREETING_BYTES
        self._selector.register(connection, selectors.EVENT_READ, lambda _: self._from_peer(peer, known))

    def _from_peer(self, peer: Lines, known: list[int]) -> None:
        """Take what another watchdog says; `known` holds its rank once it has shown the token."""
        assert self.coordinator is not None
        for message in peer.receive():
            match message:
                case {"hello": rank, "token": self._token, "processes": processes}:
                    known.append(rank)
                    peer.max_line_bytes = MAX_LINE_BYTES
                    own = [asdict(LocalProcess.of(pid)) for pid in (self.rank.pid, os.getpid())]
                    peer.send(processes=own)
                    self.coordinator.peers[rank] = peer
                    self.coordinator.processes[rank] = [LocalProcess(**process) for process in processes]
                    self.coordinator.hear(RankState(rank=rank))
                case {"state": fields} if known:
                    self.coordinator.hear(_state(fields))
                case {"sign": fields} if known:
                    self.coordinator.see(Sign(**{**fields, **_typed(fields)}))
                case _:
                    peer.is_open = False
        if not peer.is_open:
            self._selector.unregister(peer.socket)
            peer.socket.close()
            for rank in known:
                self.coordinator.lose(rank)

    def _connect(self, host: str, port: int, token: str) -> None:
        try:
            uplink = Lines(socket.create_connection((host, port), timeout=10.0))
        except OSError as error:
            self.control.send(error=f"{error.strerror or error}")
            return
        processes = [asdict(LocalProcess.of(pid)) for pid in (self.rank.pid, os.getpid())]
        uplink.send(hello=self.rank.rank, token=token, processes=processes)
        self._heard_s = time.monotonic()
        self._selector.register(uplink.socket, selectors.EVENT_READ, self._from_coordinator)
        self.uplink = uplink
        self.control.send(connected=True)

    def _from_coordinator(self, _: selectors.SelectorKey) -> None:
        assert self.uplink is not None
        self._heard_s = time.monotonic()
        for message in self.uplink.receive():
            match message:
                case {"verdict": fields}:
                    self._take(Verdict(**fields))
                case {"end": True}:
                    self._end(0.0)
                case {"processes": processes}:
                    self._coordinator_processes = [LocalProcess(**process) for process in processes]
                case _:
                    pass
        if not self.uplink.is_open:
            self._selector.unregister(self.uplink.socket)
            if not self._has_verdict and not self._has_left:
                self._lose_coordinator("is gone")
            self._end(0.0 if not self._has_left else None)

    def _lose_coordinator(self, how: str) -> None:
        """End without a coordinator, and end rank 0 if it is on this machine: nobody else would."""
        is_here = any(process.is_here for process in self._coordinator_processes)
        why = "its process was killed or stopped" if is_here else "its machine or the network may be down"
        self._take(Verdict(0, f"the watchdog of rank 0 {how}: {why}"), reporter="1" if is_here else "0")
        for process in self._coordinator_processes:
            process.kill()

    # ---- what follows

    def _act(self, now_s: float) -> None:
        if self.coordinator is not None:
            verdict = self.coordinator.decide()
            if verdict is not None:
                self._take(verdict)
            if self.coordinator.may_end_all(own_is_alive=self.rank.is_alive):
                self.coordinator.end_all()
                self._end(0.0)
        elif self.uplink is not None and now_s - self._heard_s > self.limits.unheard_s and not self._has_left:
            self._lose_coordinator(f"has not answered for {self.limits.unheard_s:g} s")
            self._end(0.0)
        if self._deadline_s is not None and now_s >= self._deadline_s:
            self.rank.kill()

    def _take(self, verdict: Verdict, reporter: str = "0") -> None:
        """Take the verdict: say it once a machine, and end this rank first if it was the first to fail.

        Args:
            verdict: Why the job ends.
            reporter: The local rank whose watchdog says it.
        """
        if self._has_verdict:
            return
        self._has_verdict = True
        if os.environ.get("LOCAL_RANK", str(self.rank.rank)) == reporter:
            if self.rank.has_lost_its_launcher():
                expect_no_launcher()
            report_verdict(verdict.message, verdict.rank)
        if verdict.rank == self.rank.rank:
            self._end(0.0)

    def _end(self, patience_s: float | None) -> None:
        """End the rank; one that raised an exception has a grace to end by itself."""
        if patience_s is not None and self._deadline_s is None:
            self._deadline_s = time.monotonic() + (GRACE_S if self._has_failed or self._has_left else patience_s)


def _typed(fields: dict[str, Any]) -> dict[str, Any]:
    return {"kind": SignKind(fields["kind"]), "state": _state(fields["state"])}


def _state(fields: dict[str, Any]) -> RankState:
    place = fields["place"]
    return RankState(**{**fields, "place": Place(**{**place, "kind": PlaceKind(place["kind"])})})


def main() -> None:
    """Watch a rank: ``RANK WORLD_SIZE LIMITS PID SHARED_MEMORY CONTROL``, the last two being file descriptors."""
    rank, world_size, limits, pid, shared_memory, control = sys.argv[1:]
    watch = Watch(int(rank), int(world_size), Limits(**json.loads(limits)), int(pid), int(shared_memory), int(control))

    def note_the_end(*_: object) -> None:
        watch.was_told_to_end = True

    for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(name, note_the_end)
    if watch.coordinator is not None:
        expect_verdict()
    try:
        watch.run()
    finally:
        if watch.coordinator is not None:
            expect_no_verdict()
