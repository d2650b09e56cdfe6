"""A job that loses a process goes on by itself from its last checkpoint, with all processes or with those left."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from graphpipe.api import plan
from graphpipe.cli.model_reference import load_job
from graphpipe.cluster import Cluster
from tests.distributed.harness import run, torchrun

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

def job(fail):
    def batches():
        for seed in range(100):
            # Ranks draw batches in step; what happens here happens between two steps.
            if seed in fail and os.environ["RANK"] == "1" and not Path(f"failed-{seed}").exists():
                Path(f"failed-{seed}").touch()
                fail[seed]()
            yield batch(seed)
    return gp.Job(model=Towers(), example_batch=batch(0), batches=batches)

def raise_it():
    raise OSError("the disk of rank 1 is gone")

def steady():
    return job({})

def unlucky():
    return job({5: lambda: os.kill(os.getpid(), signal.SIGKILL)})

def unlucky_later():
    return job({9: raise_it})
"""
# Jobs that are started again take twice as long.
LIMIT_S = 120
EVERY = "--log-every 1 --checkpoint-dir checkpoints --save-every 4"


def graphpipe(folder: Path, arguments: str) -> subprocess.CompletedProcess[str]:
    return run([sys.executable, "-m", "graphpipe", *arguments.split()], cwd=folder, limit_s=LIMIT_S)


@pytest.mark.timeout(400)
def test_a_job_goes_on_by_itself_and_with_fewer_processes(tmp_path: Path) -> None:
    (tmp_path / "jobs.py").write_text(JOBS)
    job = load_job(f"{tmp_path}/jobs.py:steady")
    cluster = Cluster.uniform(3, memory_bytes=10**9)
    plan(job.model, job.example_batch, mini_batch_size=8, cluster=cluster).save(tmp_path / "strategy.json")

    # A process is killed before step 6; the last checkpoint is of step 4.
    command = f"train strategy.json --model jobs:unlucky --steps 8 --elastic {EVERY} --save a.safetensors"
    done = graphpipe(tmp_path, command)
    assert done.returncode == 0, done.stdout + done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert errors[0].startswith("error: rank 1 died at the code between two steps in step 5")
    assert "restart 1 of 3 with 3 processes, from the newest checkpoint" in done.stderr
    assert "going on after step 4, from the checkpoint in checkpoints" in done.stdout
    steady = graphpipe(tmp_path, "train strategy.json --model jobs:steady --steps 8 --save b.safetensors")
    assert steady.returncode == 0, steady.stderr
    found, expected = load_file(tmp_path / "a.safetensors"), load_file(tmp_path / "b.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)

    # The same job on two processes, which torchrun starts again after one has raised before step 10.
    command = f"-m graphpipe train strategy.json --model jobs:unlucky_later --steps 12 --elastic {EVERY}"
    fewer = torchrun(2, ["--max-restarts", "1", *command.split()], cwd=tmp_path, limit_s=LIMIT_S)
    assert fewer.returncode == 0, fewer.stdout + fewer.stderr
    assert fewer.stdout.count("2 of 3 processes are left; planned again:") == 2
    assert fewer.stdout.count("going on after step 8, from the checkpoint in checkpoints") == 2
    assert "step 12/12" in fewer.stdout
    assert "OSError: the disk of rank 1 is gone" in fewer.stderr


def test_elastic_needs_checkpoints(tmp_path: Path) -> None:
    done = graphpipe(tmp_path, "train strategy.json --model jobs:steady --elastic")
    assert done.returncode == 1
    assert "--elastic needs --checkpoint-dir" in done.stderr
