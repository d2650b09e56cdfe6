"""A job that loses a process goes on by itself from its last checkpoint, with all processes or with those left."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from graphpipe.api import plan
from graphpipe.cli.model_reference import load_job
from graphpipe.cluster import Cluster
from tests.distributed.harness import ROOT, run, torchrun

pytestmark = pytest.mark.distributed

JOBS = """
import os
import signal
from pathlib import Path
import torch
from torch import nn
import graphpipe as gp

class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(16, 1)

    def forward(self, a, b):
        return self.head(torch.cat([self.left(a), self.right(b)], 1)).squeeze(1).square().mean()

def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(8, 8, generator=generator) for name in ("a", "b")}

def job(fail, every_rank=False):
    def batches():
        for seed in range(100):
            # Ranks draw batches in step; what happens here happens between two steps.
            if seed in fail and (every_rank or os.environ["RANK"] == "1") and not Path(f"failed-{seed}").exists():
                Path(f"failed-{seed}").touch()
                fail[seed]()
            yield batch(seed)
    return gp.Job(model=Towers(), example_batch=batch(0), batches=batches)

def raise_it():
    raise OSError("the disk of rank 1 is gone")

def steady():
    return job({})

def slow():
    import time
    return job({seed: lambda: time.sleep(1.0) for seed in range(5, 10)}, every_rank=True)

def unlucky():
    if os.environ["RANK"] == "1" and not Path("failed-at-start").exists():
        Path("failed-at-start").touch()
        raise OSError("rank 1 cannot read its data")
    return job({5: lambda: os.kill(os.getpid(), signal.SIGKILL)})

def unlucky_later():
    return job({9: raise_it})
"""
# Jobs that are started again take twice as long.
LIMIT_S = 120
EVERY = "--log-every 1 --checkpoint-dir checkpoints --save-every 4"


class Launcher:
    """A launcher as on a machine of its own."""

    def __init__(self, command: str, folder: Path, output: Path) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
        with output.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, *command.split()],
                cwd=folder,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def processes(self) -> list[int]:
        """Return the launcher and all processes that it has started, and those that they have."""
        parents = {}
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
        found = [self.process.pid]
        for parent in found:
            found += [pid for pid, its_parent in parents.items() if its_parent == parent]
        return found

    def kill(self) -> None:
        """Kill all of them, as when a machine is gone."""
        for pid in reversed(self.processes()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(10)


def is_running(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.05)


def graphpipe(folder: Path, arguments: str) -> subprocess.CompletedProcess[str]:
    return run([sys.executable, "-m", "graphpipe", *arguments.split()], cwd=folder, limit_s=LIMIT_S)


@pytest.mark.timeout(400)
def test_a_job_goes_on_by_itself_and_with_fewer_processes(tmp_path: Path) -> None:
    (tmp_path / "jobs.py").write_text(JOBS)
    job = load_job(f"{tmp_path}/jobs.py:steady")
    cluster = Cluster.uniform(3, memory_bytes=10**9)
    plan(job.model, job.example_batch, mini_batch_size=8, cluster=cluster).save(tmp_path / "strategy.json")

    # A process fails before there is a watchdog, and is killed before step 6; the last checkpoint is of step 4.
    command = f"train strategy.json --model jobs:unlucky --steps 8 --elastic {EVERY} --save a.safetensors"
    done = graphpipe(tmp_path, command)
    assert done.returncode == 0, done.stdout + done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 2
    assert errors[0].startswith("error: rank 1: ")
    assert "OSError: rank 1 cannot read its data" in done.stderr
    assert errors[1].startswith("error: rank 1 died at the code between two steps in step 5")
    assert "restart 2 of 3 with 3 processes, from the newest checkpoint" in done.stderr
    assert "going on after step 4, from the checkpoint in checkpoints" in done.stdout
    steady = graphpipe(tmp_path, "train strategy.json --model jobs:steady --steps 8 --save b.safetensors")
    assert steady.returncode == 0, steady.stderr
    found, expected = load_file(tmp_path / "a.safetensors"), load_file(tmp_path / "b.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)

    # The same job on two processes, which goes back, and which torchrun starts again after one has raised before step
    # 10. That it is to go back counts once.
    command = (
        f"-m graphpipe train strategy.json --model jobs:unlucky_later --steps 12 --elastic --resume-from 4 {EVERY}"
    )
    fewer = torchrun(2, ["--max-restarts", "1", *command.split()], cwd=tmp_path, limit_s=LIMIT_S)
    assert fewer.returncode == 0, fewer.stdout + fewer.stderr
    assert fewer.stdout.count("2 of 3 processes are left; planned again:") == 2
    assert fewer.stdout.count("going on after step 4, from the checkpoint in checkpoints") == 1
    assert fewer.stdout.count("going on after step 8, from the checkpoint in checkpoints") == 1
    assert "step 12/12" in fewer.stdout
    assert "OSError: the disk of rank 1 is gone" in fewer.stderr


@pytest.mark.timeout(400)
def test_a_job_on_two_machines_goes_on_with_the_one_that_is_left(tmp_path: Path) -> None:
    """Two launchers of torchrun, as on two machines; one is killed with its process."""
    (tmp_path / "jobs.py").write_text(JOBS)
    job = load_job(f"{tmp_path}/jobs.py:steady")
    cluster = Cluster.uniform(2, memory_bytes=10**9)
    plan(job.model, job.example_batch, mini_batch_size=8, cluster=cluster).save(tmp_path / "strategy.json")
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    settings = "--nnodes 1:2 --nproc-per-node 1 --max-restarts 3 --rdzv-backend c10d --rdzv-id elastic"
    patience = "last_call_timeout=10,keep_alive_interval=1,keep_alive_max_attempt=4"
    command = (
        f"-m torch.distributed.run {settings} --rdzv-endpoint {endpoint} --rdzv-conf {patience},is_host=HOST "
        f"-m graphpipe train strategy.json --model jobs:slow --steps 10 --elastic {EVERY}"
    )
    # The machine that stays is the one where all meet.
    launchers = [
        Launcher(command.replace("HOST", is_host), tmp_path, tmp_path / f"output-{i}")
        for i, is_host in enumerate(["true", "false"])
    ]
    try:
        wait_for((tmp_path / "checkpoints" / "step-00000004").exists)
        launchers[1].kill()
        code = launchers[0].process.wait(LIMIT_S)
    finally:
        for launcher in launchers:
            launcher.kill()
    said = (tmp_path / "output-0").read_text()
    assert code == 0, said
    assert "1 of 2 processes are left; planned again:" in said
    assert re.search(r"error: rank \d (died|and its watchdog are gone)", said)
    assert re.search(r"going on after step [48], from the checkpoint in checkpoints", said)
    assert "step 10/10" in said


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_process_outlives_the_launcher(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "jobs.py").write_text(JOBS)
    job = load_job(f"{tmp_path}/jobs.py:steady")
    cluster = Cluster.uniform(2, memory_bytes=10**9)
    plan(job.model, job.example_batch, mini_batch_size=8, cluster=cluster).save(tmp_path / "strategy.json")
    command = "-m graphpipe train strategy.json --model jobs:slow --steps 10 --log-every 1"
    launcher = Launcher(command, tmp_path, tmp_path / "output")
    try:
        wait_for(lambda: "step 5/10" in (tmp_path / "output").read_text())
        processes = launcher.processes()
        assert len(processes) >= 5  # itself, two ranks, two watchdogs
        os.kill(launcher.process.pid, number)
        code = launcher.process.wait(30)
        killed_s = time.monotonic()
        wait_for(lambda: not any(is_running(pid) for pid in processes))
        assert time.monotonic() - killed_s < 10.0
    finally:
        launcher.kill()
    said = (tmp_path / "output").read_text()
    if number is signal.SIGKILL:
        assert "its launcher is gone" in said
    else:
        assert code == 128 + number
        assert said.endswith("stopped\n")
        assert "Traceback" not in said


def test_elastic_needs_checkpoints(tmp_path: Path) -> None:
    done = graphpipe(tmp_path, "train strategy.json --model jobs:steady --elastic")
    assert done.returncode == 1
    assert "--elastic needs --checkpoint-dir" in done.stderr
