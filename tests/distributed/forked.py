"""Jobs whose ranks are forked from one process that has imported torch, with no launcher to clean up after them.

``python -m tests.distributed.forked`` reads one request a line: a folder, a number of ranks, and what each runs. The
ranks of a job are a session of their own, so that whoever is left over can be found. `JobServer` is the tests' side.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Ended:
    """How a job ended: exit codes by rank (negative for a signal), when (monotonic), what it wrote, what is left."""

    codes: list[int]
    times_s: list[float]
    output: str
    left_over: list[str]


class JobServer:
    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
        command = [sys.executable, "-m", "tests.distributed.forked"]
        self._process = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, text=True)

    def start(self, folder: Path, num_ranks: int, function: str, /, **arguments: Any) -> Path:
        """Start a job; ``module:function`` is called on every rank with these arguments."""
        folder.mkdir(parents=True, exist_ok=True)
        assert self._process.stdin is not None
        request = {"folder": str(folder), "ranks": num_ranks, "function": function, "arguments": arguments}
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return folder

    def wait(self, folder: Path, limit_s: float = 60.0) -> Ended:
        """Return how the job ended; past the limit it is killed and the test fails."""
        until_s = time.monotonic() + limit_s
        while not (folder / "ended.json").exists():
            if time.monotonic() > until_s:
                _kill_session(int((folder / "session").read_text()))
                raise AssertionError(f"the job ran for {limit_s} s\n{_output(folder)}")
            time.sleep(0.02)
        ended = json.loads((folder / "ended.json").read_text())
        # Watchdogs may take a moment more than their ranks.
        while left := session_members(ended["session"]):
            if time.monotonic() > ended["times_s"][-1] + 10.0:
                _kill_session(ended["session"])
                break
            time.sleep(0.02)
        return Ended(ended["codes"], ended["times_s"], _output(folder), left)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def _output(folder: Path) -> str:
    return "".join(path.read_text() for path in sorted(folder.glob("output*")))


def session_members(session: int) -> list[str]:
    """Return the command lines of a session's living processes."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            fields = (path / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(f"{path.name} {(path / 'cmdline').read_text()[-200:]}")
        except OSError:
            continue
    return found


def _kill_session(session: int) -> None:
    for line in session_members(session):
        os.kill(int(line.split()[0]), signal.SIGKILL)


# ---- the process that forks


def main() -> None:
    from tests.distributed import failures, soak

    failures.captured()
    soak.captured()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _run_job(json.loads(line))
            os._exit(0)


def _run_job(request: dict[str, Any]) -> None:
    os.setsid()
    folder = Path(request["folder"])
    (folder / "session").write_text(str(os.getpid()))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    pids = [_fork_rank(request, rank, port) for rank in range(request["ranks"])]
    (folder / "pids").write_text(json.dumps(pids))
    codes, times_s = [0] * len(pids), []
    for _ in pids:
        pid, status = os.wait()
        times_s.append(time.monotonic())
        codes[pids.index(pid)] = os.waitstatus_to_exitcode(status)
    draft = folder / "ended.tmp"
    draft.write_text(json.dumps({"codes": codes, "times_s": times_s, "session": os.getpid()}))
    draft.rename(folder / "ended.json")


def _fork_rank(request: dict[str, Any], rank: int, port: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    output = os.open(Path(request["folder"]) / f"output-{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(request["ranks"]),
        "LOCAL_WORLD_SIZE": str(request["ranks"]),
    }
    module, _, function = request["function"].partition(":")
    code = 0
    try:
        getattr(importlib.import_module(module), function)(**request["arguments"])
    except BaseException as error:
        traceback.print_exc()
        sys.last_value = error  # As the interpreter does before it exits.
        code = 1
    from graphpipe.runtime.watchdog import leave_job

    leave_job(repr(sys.last_value) if code else None)
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
