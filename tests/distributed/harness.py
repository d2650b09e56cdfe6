"""Runs a case on real processes: torchrun, gloo, a time limit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from graphpipe.runtime.process_transports import TransportKind

BOTH = (TransportKind.GLOO, TransportKind.ORDERED)
ROOT = Path(__file__).resolve().parents[2]
TIME_LIMIT_S = 60


def run_case(
    name: str,
    num_processes: int,
    *arguments: str,
    kinds: Sequence[TransportKind] = (TransportKind.GLOO,),
    limit_s: float = TIME_LIMIT_S,
) -> list[dict[str, Any]]:
    """Run a case as `tests.distributed.worker` names it on every rank, over each transport; `limit_s` for all of it.

    Returns:
        ``[transports * ranks]`` what each rank returned, by transport, then by rank.
    """
    with tempfile.TemporaryDirectory() as folder:
        worker = ["-m", "tests.distributed.worker", name, folder, ",".join(kinds), *arguments]
        done = torchrun(num_processes, worker, limit_s=limit_s)
        assert done.returncode == 0, done.stdout + done.stderr
        found = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(num_processes)]
        return [results[i] for i in range(len(kinds)) for results in found]


def torchrun(
    num_processes: int, arguments: list[str], cwd: Path = ROOT, *, limit_s: float = TIME_LIMIT_S
) -> subprocess.CompletedProcess[str]:
    """Run torchrun and return its exit code and output; past the time limit the whole process group is killed."""
    launcher = ["torch.distributed.run", "--nproc-per-node", str(num_processes), "--rdzv-backend", "c10d"]
    return run([sys.executable, "-m", *launcher, "--rdzv-endpoint", "localhost:0", *arguments], cwd, limit_s=limit_s)


def run(command: list[str], cwd: Path = ROOT, *, limit_s: float = TIME_LIMIT_S) -> subprocess.CompletedProcess[str]:
    """Run a command with one thread a process and the time limit."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, errors = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, errors = process.communicate()
        raise AssertionError(f"{' '.join(command)} ran for {limit_s} s\n{out}\n{errors}") from None
    return subprocess.CompletedProcess(command, process.returncode, out, errors)
