"""Ends a job whose ranks would otherwise wait for ever, and says why: the rank's side.

Each rank starts a small process, `graphpipe.runtime.watch`, and writes where it is into memory that both share: one
integer an instruction. The watchdogs talk to each other over a channel of their own.
"""

from __future__ import annotations

import atexit
import datetime
import json
import mmap
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from typing import Any

from graphpipe.errors import GraphPipeError
from graphpipe.program import (
    AwaitReceive,
    AwaitReduction,
    AwaitSend,
    Compute,
    Instruction,
    Message,
    OptimizerStep,
    PostReceive,
    Program,
    Send,
    StartReduction,
)
from graphpipe.runtime.origin import raised_at
from graphpipe.runtime.verdict import FILES_S, OUTSIDE, Limits, Place, PlaceKind, SignKind
from graphpipe.runtime.watch import TICK_S, Cell, Cells
from graphpipe.schedule import Phase, Task

Broadcast = Callable[[str, int], str]
"""Returns the text of the rank with this number, on every rank."""

FILES_TIMEOUT = datetime.timedelta(seconds=FILES_S)
DEFAULT_STALL_TIMEOUT = datetime.timedelta(seconds=7)
# What torch raises where another rank does not answer, and little else.
_BROKEN_CONNECTION = (RuntimeError, OSError)
# A rank whose message failed waits this long for its watchdog to end it: another rank is to be named, not this one.
_ECHO_PATIENCE_S = 15.0


class Watchdog:
    """The connection of a rank to its watchdog process, or to none in a job of one process.

    Args:
        timeout: How long one task, or the user's code between two steps, may take while other ranks wait.
        stall_timeout: How long, in a step, the interpreter may run no other thread, or a task may take that was never
            nearly as long before.
    """

    def __init__(self, timeout: datetime.timedelta, stall_timeout: datetime.timedelta = DEFAULT_STALL_TIMEOUT) -> None:
        self.cells: Cells = [0] * len(Cell)
        self._limits = _limits(timeout, stall_timeout)
        self._places: list[Place] = [OUTSIDE]
        self._bases: dict[tuple[Program, int], int] = {}
        self._runs: Counter[Hashable] = Counter()
        self._running: Hashable = None
        self._operations: dict[tuple[str, float | None], int] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._owner = os.getpid()

    def limit(self, timeout: datetime.timedelta, stall_timeout: datetime.timedelta) -> None:
        """Let other limits hold from now on. All ranks must call this, with the same ones."""
        limits = _limits(timeout, stall_timeout)
        if limits != self._limits:
            self._limits = limits
            self._tell(limits=asdict(limits))

    def start(self, rank: int, world_size: int, broadcast: Broadcast) -> None:
        """Start the watchdog process and connect it with those of the other ranks. All ranks must call this.

        Raises:
            GraphPipeError: It cannot connect.
        """
        if world_size == 1 or self._process is not None:
            return
        shared = _shared_memory()
        memory = memoryview(mmap.mmap(shared, mmap.PAGESIZE)).cast("q")
        for cell in Cell:
            memory[cell] = self.cells[cell]
        mine, theirs = socket.socketpair()
        arguments = (rank, world_size, json.dumps(asdict(self._limits)), os.getpid(), shared, theirs.fileno())
        # The interpreter's own search path, whatever folder the job runs in.
        program = f"import sys; sys.path[:] = {sys.path!r}; from graphpipe.runtime.watch import main; main()"
        self._process = subprocess.Popen(
            [sys.executable, "-c", program, *map(str, arguments)],
            pass_fds=(shared, theirs.fileno()),
            stdin=subprocess.DEVNULL,
        )
        os.close(shared)
        theirs.close()
        self.cells, self._control = memory, mine
        self._tell_places(self._places[1:])
        self._connect(rank, broadcast)
        threading.Thread(target=self._beat, name="graphpipe-heartbeat", daemon=True).start()
        atexit.register(self.leave)

    def _connect(self, rank: int, broadcast: Broadcast) -> None:
        address = {}
        if rank == 0:
            token = secrets.token_hex(16)
            hosts = _own_addresses()
            self._tell(serve="127.0.0.1" if hosts == ["127.0.0.1"] else "", token=token)
            address = {"hosts": hosts, "port": self._ask()["port"], "token": token}
        address = json.loads(broadcast(json.dumps(address), 0))
        if rank == 0:
            return
        for host in address["hosts"]:
            self._tell(connect=[host, address["port"]], token=address["token"])
            answer = self._ask()
            if "connected" in answer:
                return
        raise GraphPipeError(
            f"the watchdog of rank {rank} cannot connect to that of rank 0 at {address['hosts']}, port "
            f"{address['port']}: {answer['error']}; let the machines of the job reach each other"
        )

    def _beat(self) -> None:
        assert self._process is not None
        while True:
            self.cells[Cell.BEAT] += 1
            time.sleep(TICK_S)
            if self._control is None:
                return
            if self._process.poll() is not None:
                # Without a watchdog the rank could be left over when the job has ended.
                sys.stderr.write("error: the watchdog of this rank is gone, so it ends\n")
                sys.stderr.flush()
                os._exit(70)

    def place(self, program: Program, device: int, shapes: Hashable = None, purpose: str = "") -> int:
        """Return the place of a device's first instruction; the others follow in sequence. Call `has_run` afterwards.

        Args:
            program: What the device runs next.
            device: Whose instructions.
            shapes: Of the inputs: with others, tasks may take longer than they ever did.
            purpose: Of the program, as a noun; empty for training.
        """
        key = (program, device)
        if key not in self._bases:
            self._bases[key] = len(self._places)
            found = [_place_of(instruction, program) for instruction in program.instructions[device]]
            if purpose:
                found = [replace(place, text=f"{place.text} of {purpose}") for place in found]
            self._places += found
            self._tell_places(found)
        self._running = (*key, shapes)
        self.cells[Cell.RUNS] = self._runs[self._running]
        return self._bases[key]

    def has_run(self) -> None:
        """Take note that the program of `place` has come to its end: what its tasks took is what they usually take."""
        self._runs[self._running] += 1

    @contextmanager
    def operation(self, text: str, limit: datetime.timedelta | None = None) -> Iterator[None]:
        """Watch a block that all ranks run together and in which each waits for the others.

        Args:
            text: What it is, as a noun.
            limit: How long it may take; by default as long as a task.
        """
        key = (text, None if limit is None else limit.total_seconds())
        if key not in self._operations:
            self._operations[key] = len(self._places)
            self._places.append(Place(PlaceKind.WAIT, *key))
            self._tell_places(self._places[-1:])
        cells = self.cells
        before = cells[Cell.PLACE]
        number = cells[Cell.OPERATION] = cells[Cell.OPERATION] + 1
        cells[Cell.PLACE] = self._operations[key]
        try:
            yield
        except GraphPipeError:
            # Mostly every rank sees what is wrong. Where one alone does, the others wait for it in this operation.
            cells[Cell.PLACE], cells[Cell.REFUSED] = before, number
            raise
        except _BROKEN_CONNECTION as error:
            self._echo(error)
            raise
        except Exception as error:
            self._tell(failed=_one_line(error), kind=SignKind.FAILED)
            raise
        cells[Cell.PLACE] = before

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Watch a block in which the executor runs the program of `place`, for the step with this number."""
        cells = self.cells
        cells[Cell.OPERATION] += 1
        cells[Cell.STEP] = number
        try:
            yield
        except Exception as error:
            waits = self._places[cells[Cell.PLACE]].kind is PlaceKind.WAIT
            if isinstance(error, GraphPipeError) or not waits or not isinstance(error, _BROKEN_CONNECTION):
                cause = error.__cause__ or error
                self._tell(failed=_one_line(cause) + raised_at(cause), kind=SignKind.FAILED)
            else:
                self._echo(error)
            raise  # The place stays: the watchdog may look at it later.
        cells[Cell.PLACE] = 0
        self.has_run()

    def _echo(self, error: Exception) -> None:
        """Say that a message failed, and wait to be ended: whoever failed first is to be named first."""
        self._tell(failed=_one_line(error), kind=SignKind.ECHO)
        if self._control is not None:
            time.sleep(_ECHO_PATIENCE_S)

    def leave(self, error: BaseException | str | None = None) -> None:
        """Tell the others that this process ends. Done by itself when the interpreter exits.

        Args:
            error: Why, where something went wrong; by default the exception that ends the interpreter.
        """
        if self._control is None or os.getpid() != self._owner:
            return
        found = error or getattr(sys, "last_value", None)
        self._tell(leave="" if found is None else found if isinstance(found, str) else _one_line(found))
        self._control.close()
        self._control = None

    def _tell_places(self, places: Sequence[Place]) -> None:
        if places:
            self._tell(places=[[place.kind, place.text, place.limit_s] for place in places])

    def _tell(self, **message: Any) -> None:
        if self._control is not None:
            try:
                self._control.sendall(json.dumps(message).encode() + b"\n")
            except OSError:
                return  # The heartbeat's thread finds that the watchdog is gone.

    def _ask(self) -> dict[str, Any]:
        """Return the watchdog's answer."""
        assert self._control is not None
        self._control.settimeout(30.0)
        try:
            data = b""
            while not data.endswith(b"\n"):
                part = self._control.recv(4096)
                if not part:
                    raise GraphPipeError("the watchdog process ended as soon as it was started")
                data += part
        except TimeoutError:
            raise GraphPipeError("the watchdog process has not answered for 30 s") from None
        finally:
            self._control.settimeout(None)
        answer: dict[str, Any] = json.loads(data)
        return answer


_watchdog: Watchdog | None = None


def job_watchdog(timeout: datetime.timedelta, stall_timeout: datetime.timedelta = DEFAULT_STALL_TIMEOUT) -> Watchdog:
    """Return the watchdog of this process, with these limits. A process belongs to one job and has one watchdog."""
    global _watchdog  # noqa: PLW0603
    if _watchdog is None:
        _watchdog = Watchdog(timeout, stall_timeout)
    _watchdog.limit(timeout, stall_timeout)
    return _watchdog


@contextmanager
def writing_files() -> Iterator[None]:
    """Let a thread write files in a block, for which it may let no other thread of the process run."""
    if _watchdog is None:
        yield
        return
    _watchdog.cells[Cell.WRITES] += 1
    try:
        yield
    finally:
        _watchdog.cells[Cell.WRITES] -= 1


@contextmanager
def joint_operation(text: str, limit: datetime.timedelta | None = None) -> Iterator[None]:
    """Watch a block as `Watchdog.operation` does, where this process has joined a job."""
    with _watchdog.operation(text, limit) if _watchdog is not None else nullcontext():
        yield


def leave_job(error: str | None = None) -> None:
    """Take this process's leave, where it has joined a job: before an exit that runs no handlers."""
    if _watchdog is not None:
        _watchdog.leave(error)


def _limits(timeout: datetime.timedelta, stall_timeout: datetime.timedelta) -> Limits:
    return Limits(progress_s=timeout.total_seconds(), stall_s=stall_timeout.total_seconds())


def _shared_memory() -> int:
    """Return the descriptor of a page of memory that a child process can share."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("graphpipe-watchdog", 0)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, mmap.PAGESIZE)
    return descriptor


def _own_addresses() -> list[str]:
    """Return under which names other ranks may reach this machine, the likeliest first."""
    size, local_size = os.environ.get("WORLD_SIZE", "1"), os.environ.get("LOCAL_WORLD_SIZE", "")
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    if local_size == size or master in ("localhost", "127.0.0.1", "::1"):
        return ["127.0.0.1"]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((master, 9))  # Sends nothing, and chooses the interface that leads to the others.
            found = [probe.getsockname()[0]]
        except OSError:
            found = []
    return [*(a for a in found if not a.startswith("127.")), socket.getfqdn(), master]


def _one_line(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}" if not isinstance(error, GraphPipeError) else str(error)
    return " ".join(text.split())


def _place_of(instruction: Instruction, program: Program) -> Place:
    match instruction:
        case Compute(task, _, samples):
            operators = program.stages.stages[task.stage].operators
            what = "forward" if task.phase is Phase.FORWARD else "backward"
            return Place(
                PlaceKind.WORK,
                f"task {task} (stage {task.stage}, micro-batch {task.micro_batch}, {what} pass of samples "
                f"{samples.start} to {samples.stop - 1}, operators {operators[0]!r} to {operators[-1]!r}, "
                f"{_edges_of(task, program)})",
            )
        case PostReceive(message) | AwaitReceive(message):
            return Place(PlaceKind.WAIT, f"the receive of {_edge_of(message)}")
        case Send(message) | AwaitSend(message):
            return Place(PlaceKind.WAIT, f"the send of {_edge_of(message)}")
        case StartReduction(reduction) | AwaitReduction(reduction):
            return Place(PlaceKind.WAIT, f"the {reduction}")
        case OptimizerStep():
            return Place(PlaceKind.WORK, "the optimizer's step")


def _edge_of(message: Message) -> str:
    return f"{message}, edge {message.source.stage}→{message.target.stage}"


def _edges_of(task: Task, program: Program) -> str:
    edges = [f"{e.source}→{e.target}" for e in program.stages.edges if task.stage in (e.source, e.target)]
    return f"edges {', '.join(edges)}" if edges else "no edges"
