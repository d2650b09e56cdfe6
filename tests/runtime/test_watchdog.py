"""The rank's side of the watchdog, without a watchdog process."""

from __future__ import annotations

import datetime
import socket

import pytest

import graphpipe.runtime.watchdog as watchdog_module
from graphpipe.errors import BatchError
from graphpipe.program import AwaitReceive, Compute, OptimizerStep, lower
from graphpipe.runtime.lines import Lines
from graphpipe.runtime.verdict import PlaceKind
from graphpipe.runtime.watch import Cell
from graphpipe.runtime.watchdog import Watchdog, job_watchdog
from graphpipe.schedule import kfkb
from tests.stage_graphs import DIAMOND, make_stages


@pytest.fixture
def watchdog() -> Watchdog:
    return Watchdog(datetime.timedelta(seconds=60))


def test_every_instruction_has_a_place_that_names_task_and_edges(watchdog: Watchdog) -> None:
    stages = make_stages(DIAMOND, mini_batch_size=4)
    program = lower(stages, kfkb(stages))
    firsts = [watchdog.place(program, device) for device in range(4)]
    assert firsts == [watchdog.place(program, device) for device in range(4)]  # Told once.
    for first, instructions in zip(firsts, program.instructions, strict=True):
        for place, instruction in zip(watchdog._places[first:], instructions, strict=False):
            match instruction:
                case Compute(task, _, _):
                    assert place.kind is PlaceKind.WORK
                    assert place.text.startswith(f"task {task} (stage {task.stage}, micro-batch {task.micro_batch}, ")
                    assert "edge" in place.text
                case AwaitReceive(message):
                    assert place.kind is PlaceKind.WAIT
                    assert place.text.endswith(f"edge {message.source.stage}→{message.target.stage}")
                case OptimizerStep():
                    assert place.kind is PlaceKind.WORK
                case _:
                    assert place.kind is PlaceKind.WAIT


def test_runs_are_counted_by_program_and_shapes(watchdog: Watchdog) -> None:
    stages = make_stages(DIAMOND, mini_batch_size=4)
    programs = [lower(stages, kfkb(stages)), lower(make_stages(DIAMOND, mini_batch_size=8), kfkb(stages))]
    seen = []
    for program, length in [(0, 5), (0, 5), (0, 9), (0, 5), (1, 5), (0, 9)]:
        watchdog.place(programs[program], 0, shapes=(("x", 4, length),))
        with watchdog.step(1):
            seen.append(watchdog.cells[Cell.RUNS])
    assert "of an evaluation" in watchdog._places[watchdog.place(programs[1], 1, purpose="an evaluation")].text
    assert seen == [0, 1, 0, 2, 0, 1]
    watchdog.place(programs[0], 0, shapes=(("x", 4, 5),))
    with pytest.raises(ZeroDivisionError), watchdog.step(1):
        raise ZeroDivisionError
    with watchdog.step(1):
        assert watchdog.cells[Cell.RUNS] == 3  # One that failed does not count.


def test_joint_operations_are_counted_and_nest(watchdog: Watchdog) -> None:
    cells = watchdog.cells
    with watchdog.step(7):
        assert (cells[Cell.STEP], cells[Cell.OPERATION]) == (7, 1)
        cells[Cell.PLACE] = 12
        with watchdog.operation("the norm of the gradients"):
            assert cells[Cell.OPERATION] == 2
            assert watchdog._places[cells[Cell.PLACE]].text == "the norm of the gradients"
        assert cells[Cell.PLACE] == 12
    assert cells[Cell.PLACE] == 0


def test_a_wrong_input_leaves_the_operation_and_training_may_go_on(watchdog: Watchdog) -> None:
    with pytest.raises(BatchError), watchdog.operation("the comparison of the batches"):
        raise BatchError("no input")
    assert watchdog.cells[Cell.PLACE] == 0
    assert watchdog.cells[Cell.REFUSED] == watchdog.cells[Cell.OPERATION] == 1


def test_a_failed_step_keeps_its_place_for_the_watchdog_to_see(watchdog: Watchdog) -> None:
    with pytest.raises(ZeroDivisionError), watchdog.step(1):  # noqa: PT012
        watchdog.cells[Cell.PLACE] = 0
        watchdog._places.append(watchdog._places[0])
        watchdog.cells[Cell.PLACE] = 1
        raise ZeroDivisionError
    assert watchdog.cells[Cell.PLACE] == 1


def test_a_job_of_one_process_has_no_watchdog(watchdog: Watchdog) -> None:
    watchdog.start(0, 1, lambda text, _: text)
    watchdog.leave()
    assert watchdog.cells == [0] * len(Cell)


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.0\r\n", b"[1, 2]\n", b"\xff\xfe\n", b"[" * 100_000 + b"\n"])
def test_a_stranger_that_speaks_something_else_is_left(sent: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        lines = Lines(ours)
        theirs.sendall(sent)
        assert list(lines.receive()) == []
        assert not lines.is_open


def test_the_limits_of_the_last_pipeline_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog_module, "_watchdog", None)
    first = job_watchdog(datetime.timedelta(seconds=60))
    ours, theirs = socket.socketpair()
    first._control = ours
    lines = Lines(theirs)
    # A second pipeline of the process asks for another timeout, and a third for the same.
    for _ in range(2):
        assert job_watchdog(datetime.timedelta(seconds=5)) is first
    told = list(lines.receive())
    assert [message["limits"]["progress_s"] for message in told] == [5.0]
    first._control = None
    ours.close()
    theirs.close()
