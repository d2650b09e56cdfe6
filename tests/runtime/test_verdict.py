"""The first cause is named first, whatever came in first; nothing is said of a job that is well."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from graphpipe.runtime.verdict import Limits, Place, PlaceKind, RankState, Sign, SignKind, Verdict, judge

LIMITS = Limits(progress_s=60.0)
TASK = Place(PlaceKind.WORK, "task 1F2 (stage 1, micro-batch 2)")
RECEIVE = Place(PlaceKind.WAIT, "the receive of h from task 1F2")


def judged(*states: RankState, signs: Sequence[Sign] = (), limits: Limits = LIMITS) -> Verdict | None:
    by_rank: Mapping[int, RankState] = {state.rank: state for state in states}
    return judge(by_rank, signs, limits)


def working(rank: int, *, idle_s: float = 0.0, silent_s: float = 0.0, is_stopped: bool = False) -> RankState:
    return RankState(
        rank=rank, place=TASK, operation=8, step=3, idle_s=idle_s, silent_s=silent_s, is_stopped=is_stopped
    )


def waiting(rank: int, *, idle_s: float = 0.0, operation: int = 8) -> RankState:
    return RankState(rank=rank, place=RECEIVE, operation=operation, step=3, idle_s=idle_s)


def test_a_job_that_is_well_goes_on() -> None:
    assert judged(working(0), waiting(1, idle_s=59.0)) is None
    assert judged(RankState(rank=0), RankState(rank=1)) is None


def test_a_long_task_is_no_failure_before_the_limit_of_progress() -> None:
    assert judged(working(0, idle_s=59.0), waiting(1, idle_s=59.0)) is None
    verdict = judged(working(0, idle_s=61.0), waiting(1, idle_s=61.5))
    assert verdict is not None
    assert verdict.rank == 0
    assert verdict.message == (
        "rank 0 has made no progress for 61.0 s, at task 1F2 (stage 1, micro-batch 2) in step 3; if it may take so "
        "long, raise the timeout (60 s). Then: rank 1 waits at the receive of h from task 1F2 in step 3"
    )


@pytest.mark.parametrize("kind", [SignKind.FAILED, SignKind.DIED, SignKind.UNHEARD])
def test_a_cause_comes_before_the_echo_that_was_seen_first(kind: SignKind) -> None:
    echo = Sign(kind=SignKind.ECHO, state=waiting(0), message="Connection closed by peer", age_s=0.1)
    cause = Sign(kind=kind, state=working(1), message="ValueError: no", age_s=0.0)
    assert judged(waiting(0), working(1), signs=[echo]) is None  # Not yet: the cause may come.
    verdict = judged(waiting(0), signs=[echo, cause])
    assert verdict is not None
    assert verdict.rank == 1
    assert "task 1F2 (stage 1, micro-batch 2) in step 3" in verdict.message.partition("Then:")[0]
    assert verdict.message.endswith("Then: rank 0 lost its connection at the receive of h from task 1F2 in step 3")


def test_of_two_causes_the_first_is_named_first() -> None:
    signs = [Sign(kind=SignKind.DIED, state=working(r)) for r in (2, 1)]
    verdict = judged(waiting(0), signs=signs)
    assert verdict is not None
    assert verdict.rank == 2
    assert "Then: rank 1 died" in verdict.message


def test_an_echo_without_a_cause_is_told_in_the_end() -> None:
    echo = Sign(kind=SignKind.ECHO, state=waiting(0), message="a cable", age_s=LIMITS.echo_s)
    verdict = judged(waiting(0), working(1), signs=[echo])
    assert verdict is not None
    assert verdict.message == "rank 0 could not go on at the receive of h from task 1F2 in step 3: a cable"


def test_a_stopped_rank_explains_an_echo_at_once() -> None:
    echo = Sign(kind=SignKind.ECHO, state=waiting(0))
    verdict = judged(waiting(0), working(1, silent_s=0.6, is_stopped=True), signs=[echo])
    assert verdict is not None
    assert verdict.message.startswith("rank 1 has been stopped (SIGSTOP) for 0.6 s, at task 1F2")


def test_a_stopped_or_silent_rank_is_told_apart() -> None:
    assert judged(working(0, silent_s=1.9, is_stopped=True)) is None
    stopped = judged(working(0, silent_s=2.0, is_stopped=True), waiting(1))
    assert stopped is not None
    assert "rank 0 has been stopped (SIGSTOP) for 2.0 s" in stopped.message
    outside = RankState(rank=0, silent_s=2.0, is_stopped=True)
    assert judged(outside, RankState(rank=1)) is not None  # Not only in a step: it may be saving a checkpoint.
    assert judged(working(0, silent_s=6.9), waiting(1)) is None
    silent = judged(working(0, silent_s=7.0), waiting(1))
    assert silent is not None
    assert "lets no other thread run" in silent.message
    assert "raise the stall timeout (7 s)" in silent.message


def test_a_task_that_has_been_run_before_has_less_time() -> None:
    def known(idle_s: float, usual_s: float) -> RankState:
        return replace(working(0, idle_s=idle_s), usual_s=usual_s)

    assert judged(known(6.9, 0.1), waiting(1)) is None
    stalled = judged(known(7.0, 0.1), waiting(1))
    assert stalled is not None
    assert stalled.message.startswith(
        "rank 0 has made no progress for 7.0 s, at task 1F2 (stage 1, micro-batch 2) in step 3, where it was never for "
        "more than 0.1 s before; if it may take so long, raise the stall timeout (7 s)"
    )
    assert judged(known(14.9, 3.0), waiting(1)) is None  # Five times three.
    assert judged(known(15.0, 3.0), waiting(1)) is not None
    assert judged(known(59.0, 30.0), waiting(1)) is None
    longest = judged(known(60.0, 30.0), waiting(1))
    assert longest is not None
    assert "raise the timeout (60 s)" in longest.message  # Never more than that.
    assert judged(replace(waiting(1, idle_s=50.0), usual_s=0.1), working(0)) is None  # Nor is who waits to blame.


def test_a_rank_that_writes_files_may_be_silent() -> None:
    assert judged(replace(working(0, silent_s=50.0), writes=True), waiting(1)) is None
    assert judged(replace(working(0, silent_s=LIMITS.files_s), writes=True), waiting(1)) is not None


def test_what_takes_its_time_has_a_limit_of_its_own() -> None:
    saving = Place(PlaceKind.WAIT, "the saving of a checkpoint", 1800.0)
    states = [RankState(rank=r, place=saving, operation=8, step=3, idle_s=1799.0, silent_s=20.0) for r in (0, 1)]
    assert judged(*states) is None
    verdict = judged(*(replace(state, idle_s=1800.0) for state in states))
    assert verdict is not None
    assert verdict.message.startswith("all ranks have waited for each other for 1800 s and more: rank 0 at the saving")


def test_a_rank_that_never_came_is_named() -> None:
    expected = RankState(rank=2, has_come=False, unheard_s=29.0)
    assert judged(waiting(0), waiting(1), expected) is None
    verdict = judged(waiting(0), waiting(1), replace(expected, unheard_s=30.0))
    assert verdict is not None
    assert verdict.message.startswith("rank 2 has not joined the others for 30 s, before the first step")


def test_the_users_code_between_steps_has_time_until_others_have_waited_long() -> None:
    outside = RankState(rank=0, operation=7, step=2, idle_s=100.0, silent_s=50.0)
    assert judged(outside, RankState(rank=1, operation=7, step=2, idle_s=100.0)) is None  # Nobody waits.
    assert judged(RankState(rank=0, operation=7, step=2, idle_s=50.0, silent_s=50.0), waiting(1, idle_s=50.0)) is None
    verdict = judged(outside, waiting(1, idle_s=90.0))
    assert verdict is not None
    assert verdict.message.startswith(
        "rank 0 has made no progress for 100.0 s, at the code between two steps in step 2"
    )


def test_a_rank_that_alone_has_refused_an_operation_is_missed() -> None:
    state = RankState(rank=0, operation=8, refused=8, step=3)
    left = Sign(kind=SignKind.LEFT, state=state, message="no file", age_s=0.9)
    assert judged(waiting(1), signs=[left]) is None  # It may see the same error in a moment.
    left = replace(left, age_s=1.0)
    assert judged(RankState(rank=1, operation=8, refused=8), signs=[left]) is None  # As it has here.
    verdict = judged(waiting(1), signs=[left])
    assert verdict is not None
    assert verdict.message.startswith("rank 0 left the job while others go on, after step 3: no file")
    assert judged(replace(state, idle_s=59.0), waiting(1)) is None  # Nor may it stay away for ever.
    assert judged(replace(state, idle_s=60.0), waiting(1)) is not None
    assert judged(replace(state, idle_s=60.0, operation=9), waiting(1)) is None


def test_a_rank_may_leave_when_nobody_waits_for_it() -> None:
    left = Sign(kind=SignKind.LEFT, state=RankState(rank=0, operation=8, step=3))
    assert judged(waiting(1), signs=[left]) is None  # It still takes what rank 0 has sent.
    verdict = judged(waiting(1, operation=9), signs=[left])
    assert verdict is not None
    assert verdict.message.startswith("rank 0 left the job after step 3 while others go on")


def test_what_the_launcher_has_ended_is_no_cause() -> None:
    signs = [Sign(kind=SignKind.ENDED, state=working(r)) for r in (0, 1)]
    assert judged(signs=signs) is None


def test_ranks_that_all_wait_are_told_after_the_limit() -> None:
    assert judged(waiting(0, idle_s=61.0), waiting(1, idle_s=59.0)) is None
    verdict = judged(waiting(0, idle_s=61.0), waiting(1, idle_s=60.0))
    assert verdict is not None
    assert verdict.message.startswith("all ranks have waited for each other for 60 s and more: rank 0 at the receive")


def test_many_consequences_are_counted() -> None:
    verdict = judged(*map(waiting, range(1, 9)), signs=[Sign(kind=SignKind.DIED, state=working(0))])
    assert verdict is not None
    assert verdict.message.endswith("rank 4 waits at the receive of h from task 1F2 in step 3; 4 more ranks likewise")
