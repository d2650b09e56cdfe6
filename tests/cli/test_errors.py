"""A wrong input gives one clear error, exit code 1 and no half-written file, on every rank and within seconds."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.distributed.harness import run, torchrun

pytestmark = pytest.mark.distributed

JOBS = """
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

class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, a):
        return self.linear(a).mean() if a.sum() > 0 else a.mean()

def batch(**names):
    torch.manual_seed(1)
    return {name: torch.randn(8, 8) for name in names or ("a", "b")}

def good():
    return gp.Job(model=Towers(), example_batch=batch())

def misspelt():
    return Towers(), {"a": torch.randn(8, 8), "bb": torch.randn(8, 8)}

def misspelt_later():
    wrong = {"a": torch.ones(8, 8), "bb": torch.ones(8, 8)}
    return gp.Job(model=Towers(), example_batch=batch(), batches=lambda: [wrong])

def shuffled():
    import os
    torch.manual_seed(int(os.environ["RANK"]))
    different = {"a": torch.randn(8, 8), "b": torch.randn(8, 8)}
    return gp.Job(model=Towers(), example_batch=batch(), batches=lambda: [different])

def failing():
    import os
    class Broken(Exception):
        pass
    def batches():
        yield batch()
        if os.environ["RANK"] == "1":
            raise gp.GraphPipeError("the loader of rank 1 broke")
        yield batch()
    return gp.Job(model=Towers(), example_batch=batch(), batches=batches)

def differently_built():
    import os
    job = good()
    with torch.no_grad():
        job.model.head.bias.fill_(float(os.environ["RANK"]))
    return job

def of_another_size():
    import os
    rows = 4 if os.environ["RANK"] == "1" else 8
    def batches():
        yield batch()
        yield {name: tensor[:rows] for name, tensor in batch().items()}
    return gp.Job(model=Towers(), example_batch=batch(), batches=batches)

def branching():
    return Branching(), {"a": torch.randn(8, 8)}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with jobs and a strategy for two devices."""
    path = tmp_path_factory.mktemp("jobs")
    (path / "jobs.py").write_text(JOBS)
    done = graphpipe(path, "plan --model jobs:good --mini-batch-size 8 --micro-batch-size 4 --devices 2")
    assert done.returncode == 0, done.stderr
    (path / "damaged.json").write_text((path / "strategy.json").read_text()[:-100])
    return path


def graphpipe(folder: Path, arguments: str) -> subprocess.CompletedProcess[str]:
    return run([sys.executable, "-m", "graphpipe", *arguments.split()], cwd=folder)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("plan --model jobs:misspelt --mini-batch-size 8 --out new.json", "did you mean `b`?"),
        ("plan --model jobs:branching --mini-batch-size 8 --out new.json", "if a.sum() > 0 else a.mean()`"),
        ("plan --model jobs:godo --mini-batch-size 8 --out new.json", "did you mean 'good'?"),
        ("plan --model jobs:good --mini-batch-size 8 --devices 2 --memory-gb 1e-6 --out new.json", "What would fit"),
        ("plan --model jobs:good --mini-batch-size 8 --micro-batch-size 3 --out new.json", "sizes that do: 1, 2, 4, 8"),
        ("plan --model jobs:good --mini-batch-size 8 --out nowhere/new.json", "no folder 'nowhere'"),
        ("train good.json --model jobs:good --keep 3", "--keep needs --checkpoint-dir"),
        ("train good.json --model jobs:good --save-every 100", "--save-every needs --checkpoint-dir"),
        ("show missing.json", "no strategy file 'missing.json'"),
        ("show damaged.json", "damaged.json' cannot be read"),
        ("train damaged.json --model jobs:good", "plan again"),
        ("train strategy.json --model jobs:branching", "if a.sum() > 0 else a.mean()`"),
        ("train strategy.json --model jobs:misspelt_later", "has no input `b"),
        ("train strategy.json --model jobs:shuffled", "ranks 0 and 1 were given different tensors for input"),
        ("train strategy.json --model jobs:differently_built", "ranks 0 and 1 have different parameters"),
        ("train strategy.json --model jobs:of_another_size", "a batch of 8 samples and rank 1 one of 4"),
        ("train strategy.json --model jobs:failing --save new.json", "the loader of rank 1 broke"),
    ],
)
def test_one_clear_error(folder: Path, arguments: str, message: str) -> None:
    before = sorted(p.name for p in folder.iterdir() if p.name != "__pycache__")
    start = time.monotonic()
    done = graphpipe(folder, arguments)
    assert done.returncode == 1, done.stdout + done.stderr
    assert message in done.stderr
    assert done.stderr.count("error:") == 1
    assert "Traceback" not in done.stderr
    assert sorted(p.name for p in folder.iterdir() if p.name != "__pycache__") == before
    assert time.monotonic() - start < 30  # The harness's limit is longer; most of this is importing torch.


def test_another_number_of_processes_ends_every_rank(folder: Path) -> None:
    done = torchrun(3, ["-m", "graphpipe", "train", "strategy.json", "--model", "jobs:good"], cwd=folder)
    assert done.returncode != 0
    assert "the strategy is for 2 devices, the job has 3 processes; start 2" in done.stderr


def test_a_job_is_planned_verified_trained_and_saved(folder: Path) -> None:
    verified = graphpipe(folder, "verify strategy.json --model jobs:good")
    assert verified.returncode == 0, verified.stderr
    assert "verified: loss" in verified.stdout
    outputs = "--trace t.json --report r.html --save p.safetensors"
    trained = graphpipe(folder, f"train strategy.json --model jobs:good --steps 3 --log-every 1 {outputs}")
    assert trained.returncode == 0, trained.stderr
    assert trained.stdout.count("loss") == 3
    for name in ("t.json", "r.html", "p.safetensors"):
        assert (folder / name).stat().st_size > 0
        (folder / name).unlink()
    shown = graphpipe(folder, "show strategy.json --svg s.svg --schedule")
    assert shown.returncode == 0, shown.stderr
    assert "0F0" in shown.stdout
    (folder / "s.svg").unlink()
    simulated = graphpipe(folder, "simulate strategy.json --trace t.json --report r.html")
    assert simulated.returncode == 0, simulated.stderr
    (folder / "t.json").unlink()
    (folder / "r.html").unlink()
