"""Collects what all watchdogs see, and decides when the job has to end and in which order its ranks do."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace

from graphpipe.runtime.lines import Lines
from graphpipe.runtime.local_process import LocalProcess
from graphpipe.runtime.verdict import Limits, RankState, Sign, SignKind, Verdict, judge

# What a rank that raised an exception has for its own clean-up, and how long others wait so that the launcher sees the
# first cause end first.
GRACE_S = 4.0
HEAD_START_S = 1.5


class Coordinator:
    """Collects what all watchdogs see and decides. It lives in the watchdog of rank 0.

    Args:
        world_size: The ranks of the job.
        limits: How long things may take.
    """

    def __init__(self, world_size: int, limits: Limits) -> None:
        self.world_size = world_size
        self.limits = limits
        self.verdict: Verdict | None = None
        self.peers: dict[int, Lines] = {}
        self.processes: dict[int, list[LocalProcess]] = {}
        self.gone: set[int] = set()
        self._states: dict[int, tuple[RankState, float]] = {}
        self._signs: list[tuple[Sign, float]] = []
        self._decided_s = 0.0
        self._has_ended = False

    def expect(self, ranks: Iterable[int]) -> None:
        """Take note that these ranks are to come."""
        for rank in ranks:
            self.hear(RankState(rank=rank, has_come=False))

    def excuse(self) -> None:
        """Count the time anew in which ranks were not heard: this process did not listen."""
        self._states = {rank: (state, time.monotonic()) for rank, (state, _) in self._states.items()}

    def hear(self, state: RankState) -> None:
        """Take the state of a rank."""
        if state.rank not in self.gone:
            self._states[state.rank] = (state, time.monotonic())

    def see(self, sign: Sign) -> None:
        """Take what has happened to a rank."""
        rank = sign.state.rank
        if rank in self.gone:
            return
        self._signs.append((sign, time.monotonic()))
        if sign.kind not in (SignKind.FAILED, SignKind.ECHO):
            self.gone.add(rank)
            self._states.pop(rank, None)

    def lose(self, rank: int) -> None:
        """Take note that a rank's watchdog has closed its connection."""
        self.peers.pop(rank, None)
        if rank not in self.gone:
            state, _ = self._states.get(rank, (RankState(rank=rank), 0.0))
            self.see(Sign(kind=SignKind.UNHEARD, state=state))

    def decide(self) -> Verdict | None:
        """Return the verdict, once there is one."""
        if self.verdict is None:
            now_s = time.monotonic()
            states = {rank: replace(state, unheard_s=now_s - s) for rank, (state, s) in self._states.items()}
            signs = [replace(sign, age_s=now_s - s) for sign, s in self._signs]
            self.verdict = judge(states, signs, self.limits)
            self._decided_s = now_s
            if self.verdict is not None:
                self._end_the_unheard(self.verdict.rank, states)
                for peer in list(self.peers.values()):
                    peer.send(verdict=asdict(self.verdict))
        return self.verdict

    def _end_the_unheard(self, rank: int, states: Mapping[int, RankState]) -> None:
        """End the rank to blame at once where its own watchdog does not answer; it would be waited for in vain."""
        if rank in states and states[rank].unheard_s >= self.limits.unheard_s:
            for process in self.processes.get(rank, ()):
                process.kill()

    def may_end_all(self, *, own_is_alive: bool) -> bool:
        """Return whether the other ranks may be ended: the first one has ended, or had its time.

        Args:
            own_is_alive: Whether rank 0 lives.
        """
        if self.verdict is None:
            return False
        first = self.verdict.rank
        has_ended = first in self.gone and not (own_is_alive if first == 0 else first in self.peers)
        # One that has left still cleans up; the launcher is to see it end first.
        patience_s = GRACE_S if first in self.gone else HEAD_START_S
        return has_ended or time.monotonic() - self._decided_s > patience_s

    def end_all(self) -> None:
        """Let every watchdog end its rank; where one does not, end both, if they are on this machine."""
        if not self._has_ended:
            self._has_ended = True
            for peer in list(self.peers.values()):
                peer.send(end=True)
        if self._is_overdue():
            for rank in self.peers:
                for process in self.processes[rank]:
                    process.kill()

    def is_done(self) -> bool:
        """Return whether no other watchdog needs this one."""
        if self._is_overdue():
            return True
        return not self.peers and (self._has_ended or len(self.gone) == self.world_size)

    def _is_overdue(self) -> bool:
        return self._has_ended and time.monotonic() - self._decided_s > HEAD_START_S + GRACE_S + 1.0
