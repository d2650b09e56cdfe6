"""Ranks that fail where a test wants it: in a task, while they wait, in a reduction, or between two steps."""

from __future__ import annotations

import collections
import datetime
import functools
import itertools
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch

from graphpipe.capture import CapturedModel, capture
from graphpipe.errors import GraphPipeError
from graphpipe.program import AwaitReceive, AwaitReduction, Compute, Instruction, OptimizerStep
from graphpipe.runtime import watchdog
from graphpipe.runtime.checkpoint import Checkpointer
from graphpipe.runtime.executor import Executor
from graphpipe.runtime.pipeline import Pipeline
from graphpipe.runtime.process_transports import TransportKind
from tests.distributed.cases import Fork, batch_of, mean_square
from tests.distributed.parity import hand_made, sgd

# Branches b and c between a, which has two replicas, and d.
PARTS = [("a", 4, (0, 1)), ("b", 2, (2,)), ("c", 2, (3,)), ("", 2, (2,))]
NUM_RANKS = 4
# By then it is known how long a task takes.
FAILS_AT = 5


@functools.cache
def captured() -> CapturedModel:
    """Return the model. The process that forks the ranks captures it once for all."""
    torch.set_num_threads(1)
    return capture(Fork(), batch_of(8), loss_fn=mean_square)


def fail(how: str, folder: Path) -> None:
    """Fail, after leaving a note of when."""
    (folder / "failed_at").write_text(str(time.monotonic()))
    match how:
        case "exception":
            raise ZeroDivisionError("planted")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "kill-both" | "stop-both":
            assert watchdog._watchdog is not None
            assert watchdog._watchdog._process is not None
            number = signal.SIGKILL if how == "kill-both" else signal.SIGSTOP
            for pid in (watchdog._watchdog._process.pid, os.getpid()):
                os.kill(pid, number)
        case "refuse":
            raise GraphPipeError("planted")
        case "loop":
            while True:
                pass
        case "c-loop":
            collections.deque(itertools.repeat(0), maxlen=0)
        case _:
            raise AssertionError(how)


def is_at(instruction: Instruction, place: str) -> bool:
    """Return whether a place as tests write it is this instruction: a task (1B0), ``wait 1B0``, sum, optimizer."""
    match instruction:
        case Compute(task, _, _):
            return str(task) == place
        case AwaitReceive(message):
            return f"wait {message.target}" == place
        case AwaitReduction():
            return place == "sum"
        case OptimizerStep():
            return place == "optimizer"
        case _:
            return False


def train(folder: str, how: str, rank: int, place: str, timeout_s: float = 60.0, transport: str = "gloo") -> None:
    """Train, and fail on a rank at a place of step `FAILS_AT`."""
    pipeline = Pipeline(
        captured(),
        hand_made(captured(), PARTS, 8),
        optimizer=sgd,
        timeout=datetime.timedelta(seconds=timeout_s),
        transport=TransportKind(transport),
    )
    checkpoints = Checkpointer(pipeline, Path(folder) / "checkpoints") if place == "saving" else None
    step = 0
    interpret = Executor._interpret

    def failing(self: Executor, batch: Any, instruction: Instruction, optimizer_step: Any) -> None:
        if step == FAILS_AT and int(os.environ["RANK"]) == rank and is_at(instruction, place):
            fail(how, Path(folder))
        interpret(self, batch, instruction, optimizer_step)

    Executor._interpret = failing  # type: ignore[method-assign]
    for step in range(1, FAILS_AT + 3):
        if step == FAILS_AT and int(os.environ["RANK"]) == rank and place == "outside":
            fail(how, Path(folder))
        print(f"step {step} loss {pipeline.step(batch_of(8, seed=step)).loss}", flush=True)
        if checkpoints is not None:
            if step == FAILS_AT and int(os.environ["RANK"]) == rank:
                checkpoints._write = lambda *_: fail(how, Path(folder))  # type: ignore[method-assign]
            checkpoints.save()


def evaluate(folder: str, how: str, rank: int) -> None:
    """Evaluate again and again, and fail on a rank in the fifth evaluation."""
    pipeline = Pipeline(captured(), hand_made(captured(), PARTS, 8), optimizer=sgd)
    interpret = Executor._interpret
    number = 0

    def failing(self: Executor, batch: Any, instruction: Instruction, optimizer_step: Any) -> None:
        if number == FAILS_AT and int(os.environ["RANK"]) == rank and isinstance(instruction, Compute):
            fail(how, Path(folder))
        interpret(self, batch, instruction, optimizer_step)

    Executor._interpret = failing  # type: ignore[method-assign]
    pipeline.step(batch_of(8))
    for number in range(1, FAILS_AT + 1):
        print(pipeline.evaluate(batch_of(8, seed=number)).loss, flush=True)


def hold(folder: str, checkpoints: str) -> None:
    """Train with checkpoints until there is a file ``go``, or for a minute."""
    until_s = time.monotonic() + 60.0
    pipeline = Pipeline(captured(), hand_made(captured(), PARTS, 8), optimizer=sgd)
    with Checkpointer(pipeline, checkpoints) as saving:
        saving.restore()
        (Path(folder) / f"ready-{os.environ['RANK']}").touch()
        while not (Path(folder) / "go").exists() and time.monotonic() < until_s:
            time.sleep(0.05)
        pipeline.step(batch_of(8))
        saving.save()


def slow(seconds: float) -> None:
    """Train with one task that takes longer than any limit but that of progress."""
    pipeline = Pipeline(captured(), hand_made(captured(), PARTS, 8), optimizer=sgd)
    interpret = Executor._interpret

    def slowly(self: Executor, batch: Any, instruction: Instruction, optimizer_step: Any) -> None:
        if os.environ["RANK"] == "3" and is_at(instruction, "2F1"):
            time.sleep(seconds)
        interpret(self, batch, instruction, optimizer_step)

    Executor._interpret = slowly  # type: ignore[method-assign]
    print(f"loss {pipeline.step(batch_of(8)).loss}", flush=True)
