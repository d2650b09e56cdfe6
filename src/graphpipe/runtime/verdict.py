"""Which rank a failed job failed on first: what the watchdogs have seen goes in, a verdict comes out.

Nothing here talks to a process. `graphpipe.runtime.watch` collects what `judge` needs, and acts on what it returns.

A failed rank takes others with it: its peers lose their connections within milliseconds, and the launcher ends the
rest. What was seen is therefore ranked before it is ordered in time: an exception in a task or a process that is gone
is a cause; a lost connection is an echo, which counts only where no cause is found.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum


class PlaceKind(StrEnum):
    """What a rank does at a place of its program."""

    WORK = "work"
    """It computes; other ranks may wait for it."""
    WAIT = "wait"
    """It exchanges something with other ranks: an error here is most likely another rank's."""
    OUTSIDE = "outside"
    """It is in the user's own code, between two steps."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where in its program a rank is.

    Attributes:
        kind: What it does there.
        text: The task, message or reduction, for people.
        limit_s: How long it may take where that is not `Limits.progress_s`, in seconds: files are slower than tasks.
    """

    kind: PlaceKind
    text: str
    limit_s: float | None = None


OUTSIDE = Place(PlaceKind.OUTSIDE, "the code between two steps")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """What is known of a living rank.

    Attributes:
        rank: Which one.
        place: Where it is.
        operation: How many joint operations (steps, gathers, checks) it has begun. Ranks begin them in the same order.
        refused: The number of the joint operation that it left last with an error, which mostly all ranks see.
        step: The step that it is in, or was in last, counted from 1.
        idle_s: Seconds since it came to its place.
        usual_s: The longest that it was ever at its place before; None for a place that it has not been through often.
        silent_s: Seconds since its heartbeat: with a beat, its interpreter works.
        writes: Whether a thread writes files, in which it may let no other run.
        is_stopped: The operating system has stopped the process (SIGSTOP).
        unheard_s: Seconds since its watchdog was heard.
        has_come: Whether its watchdog has ever been heard.
    """

    rank: int
    place: Place = OUTSIDE
    operation: int = 0
    refused: int = 0
    step: int = 0
    idle_s: float = 0.0
    usual_s: float | None = None
    silent_s: float = 0.0
    writes: bool = False
    is_stopped: bool = False
    unheard_s: float = 0.0
    has_come: bool = True


class SignKind(StrEnum):
    """What can be seen of a failure."""

    FAILED = "failed"
    """A task or another part of a step raised an exception."""
    DIED = "died"
    """The process is gone and had not taken its leave."""
    LEFT = "left"
    """The process took its leave and ends, by itself or by an exception outside of a step."""
    ENDED = "ended"
    """The launcher has ended the process."""
    ECHO = "echo"
    """A message or reduction failed: most likely another rank did."""
    UNHEARD = "unheard"
    """The connection to the rank's watchdog broke."""


# Writing or moving the state of a large model takes minutes, and the fastest rank waits for the slowest.
FILES_S = 1800.0
_CAUSES = (SignKind.FAILED, SignKind.DIED, SignKind.UNHEARD)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """One thing that was seen of a rank.

    Attributes:
        kind: What.
        state: The rank's last state.
        message: The exception, where there is one.
        age_s: Seconds since it was seen.
    """

    kind: SignKind
    state: RankState
    message: str = ""
    age_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long what is normal may take, in seconds.

    Attributes:
        progress_s: One task, or the user's code between two steps while others wait.
        stall_s: In a step, an interpreter that runs no other thread, or a task that takes `stall_factor` times as long
            as it ever has.
        stall_factor: See `stall_s`.
        files_s: The writing or moving of a large model's state.
        stopped_s: For how long a process may be stopped.
        unheard_s: For how long a watchdog may not be heard.
        come_s: For how long a watchdog may not be heard for the first time.
        echo_s: After a lost connection, for how long a cause is looked for.
    """

    progress_s: float
    stall_s: float = 7.0
    stall_factor: float = 5.0
    files_s: float = FILES_S
    stopped_s: float = 2.0
    unheard_s: float = 6.0
    come_s: float = 30.0
    echo_s: float = 1.0

    def of(self, state: RankState) -> float:
        """Return how long a rank may be where it is, in seconds."""
        if state.place.limit_s is not None:
            return state.place.limit_s
        if state.usual_s is None or state.place.kind is not PlaceKind.WORK:
            return self.progress_s
        return min(self.progress_s, max(self.stall_s, self.stall_factor * state.usual_s))

    def silence_of(self, state: RankState) -> float:
        """Return how long a rank in a step may run no other thread, in seconds."""
        return state.place.limit_s or (self.files_s if state.writes else self.stall_s)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why the job ends.

    Attributes:
        rank: Where the first cause is.
        message: For people: the first cause first.
    """

    rank: int
    message: str


def judge(states: Mapping[int, RankState], signs: Sequence[Sign], limits: Limits) -> Verdict | None:
    """Return why the job has to end, or None while there is nothing wrong, or not for long enough.

    Args:
        states: Of every rank that lives and has not taken its leave.
        signs: In the order in which they were seen.
        limits: How long things may take.
    """
    cause = _cause(states, signs, limits)
    if cause is None:
        return None
    rank, message = cause
    return Verdict(rank, message + _consequences(rank, states, signs))


def _cause(states: Mapping[int, RankState], signs: Sequence[Sign], limits: Limits) -> tuple[int, str] | None:
    for sign in signs:
        if sign.kind in _CAUSES or (sign.kind is SignKind.LEFT and _is_missed(sign, states.values(), limits)):
            return sign.state.rank, _describe(sign)
    has_echo = any(sign.kind is SignKind.ECHO for sign in signs)
    found = _unwell(states, limits, has_echo=has_echo)
    if found is not None:
        return found
    for sign in signs:
        if sign.kind is SignKind.ECHO and sign.age_s >= limits.echo_s:
            return sign.state.rank, _describe(sign)
    return None


def _unwell(states: Mapping[int, RankState], limits: Limits, *, has_echo: bool) -> tuple[int, str] | None:
    """Return the rank that is stopped, silent or stuck, and what to say of it. After an echo there is less patience."""
    ordered = sorted(states.values(), key=lambda state: (-state.silent_s, -state.idle_s, state.rank))
    matters = [
        s
        for s in ordered
        if s.place.kind is not PlaceKind.OUTSIDE or _is_awaited(s, ordered) or _has_refused(s, ordered)
    ]
    for state in ordered:
        if not state.has_come and state.unheard_s >= limits.come_s:
            return state.rank, (
                f"rank {state.rank} has not joined the others for {state.unheard_s:.0f} s, before the first step; its "
                "process may be stopped, or the network may keep its watchdog from rank 0"
            )
        if state.has_come and state.unheard_s >= limits.unheard_s:
            return state.rank, (
                f"rank {state.rank} and its watchdog have not answered for {state.unheard_s:.1f} s; it was last at "
                f"{_where(state)}. Its machine or the network may be down"
            )
    for state in ordered:
        if state.is_stopped and (state.silent_s >= limits.stopped_s or has_echo):
            return state.rank, (
                f"rank {state.rank} has been stopped (SIGSTOP) for {state.silent_s:.1f} s, at {_where(state)}"
            )
    for state in matters:
        is_inside = state.place.kind is not PlaceKind.OUTSIDE
        if state.silent_s >= (limits.silence_of(state) if is_inside else limits.progress_s):
            return state.rank, (
                f"rank {state.rank} has not answered for {state.silent_s:.1f} s, at {_where(state)}: its process runs "
                "and lets no other thread run, as in a loop of a C extension; if one may do so for so long, raise "
                f"the stall timeout ({limits.stall_s:g} s)"
            )
    # Ranks that wait are not to blame as long as one works.
    late = [s for s in matters if s.idle_s >= limits.of(s) and s.place.kind is not PlaceKind.WAIT]
    if late:
        state = max(late, key=lambda s: (s.idle_s, -s.rank))
        return state.rank, _too_long(state, limits)
    if states and all(s.place.kind is PlaceKind.WAIT and s.idle_s >= limits.of(s) for s in states.values()):
        state = max(states.values(), key=lambda s: (s.idle_s, -s.rank))
        raises = "" if state.place.limit_s else f"; if it may take so long, raise the timeout ({limits.progress_s:g} s)"
        return state.rank, (
            f"all ranks have waited for each other for {limits.of(state):g} s and more: rank {state.rank} at "
            f"{_where(state)}{raises}"
        )
    return None


def _too_long(state: RankState, limits: Limits) -> str:
    text = f"rank {state.rank} has made no progress for {state.idle_s:.1f} s, at {_where(state)}"
    if state.usual_s is not None and limits.of(state) < limits.progress_s:
        return (
            f"{text}, where it was never for more than {state.usual_s:.1f} s before; if it may take so long, raise the "
            f"stall timeout ({limits.stall_s:g} s)"
        )
    return f"{text}; if it may take so long, raise the timeout ({limits.of(state):g} s)"


def _is_awaited(state: RankState, others: Collection[RankState]) -> bool:
    """Return whether another rank is in a joint operation that this one has not begun."""
    return any(s.place.kind is not PlaceKind.OUTSIDE and s.operation > state.operation for s in others)


def _has_refused(state: RankState, others: Collection[RankState]) -> bool:
    """Return whether another rank is still in a joint operation that this one has left with an error."""
    inside = (s for s in others if s.place.kind is not PlaceKind.OUTSIDE)
    return state.refused == state.operation > 0 and any(s.operation >= state.operation for s in inside)


def _is_missed(sign: Sign, others: Collection[RankState], limits: Limits) -> bool:
    """Return whether others wait for a rank that has left; an error that it left with may be on its way to them too."""
    return _is_awaited(sign.state, others) or (sign.age_s >= limits.echo_s and _has_refused(sign.state, others))


def _where(state: RankState) -> str:
    return f"{state.place.text} in step {state.step}" if state.step else f"{state.place.text} before the first step"


def _describe(sign: Sign) -> str:
    rank, where = sign.state.rank, _where(sign.state)
    match sign.kind:
        case SignKind.FAILED:
            return f"rank {rank} failed at {where}: {sign.message}"
        case SignKind.DIED:
            return f"rank {rank} died at {where}: its process was killed or ended without a word"
        case SignKind.LEFT if sign.message:
            return f"rank {rank} left the job while others go on, after step {sign.state.step}: {sign.message}"
        case SignKind.LEFT:
            return (
                f"rank {rank} left the job after step {sign.state.step} while others go on; every rank needs as many "
                "steps"
            )
        case SignKind.UNHEARD:
            return f"rank {rank} and its watchdog are gone; it was last at {where}"
        case _:
            return f"rank {rank} could not go on at {where}: {sign.message}"


def _consequences(first: int, states: Mapping[int, RankState], signs: Sequence[Sign], limit: int = 4) -> str:
    """Return what followed from the first cause: at most `limit` other ranks, those with signs of their own first."""
    verbs = {SignKind.FAILED: "failed", SignKind.DIED: "died", SignKind.ECHO: "lost its connection"}
    told = {s.state.rank: f"rank {s.state.rank} {verbs[s.kind]} at {_where(s.state)}" for s in signs if s.kind in verbs}
    seen = {**states, **{s.state.rank: s.state for s in signs}}
    for state in sorted(states.values(), key=lambda s: s.rank):
        # A state may be a moment old: what a rank did before the first one came here is not a consequence.
        if state.place.kind is PlaceKind.WAIT and state.operation >= seen[first].operation:
            told.setdefault(state.rank, f"rank {state.rank} waits at {_where(state)}")
    told.pop(first, None)
    if not told:
        return ""
    more = f"; {len(told) - limit} more ranks likewise" if len(told) > limit else ""
    return f". Then: {'; '.join(list(told.values())[:limit])}{more}"
