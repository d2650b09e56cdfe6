"""``graphpipe train`` with checkpoints, on real processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from graphpipe.capture import capture
from tests.distributed.cases import batch_of, mean_square
from tests.distributed.checkpoints import PLANS, Net
from tests.distributed.harness import run
from tests.distributed.parity import hand_made

pytestmark = pytest.mark.distributed
JOB = """
import torch
import graphpipe as gp
from tests.distributed.cases import batch_of, mean_square
from tests.distributed.checkpoints import Net, adamw, schedule

def job():
    return gp.Job(
        model=Net(0.0).float(),
        example_batch=batch_of(8),
        loss_fn=mean_square,
        optimizer=adamw,
        lr_scheduler=schedule,
        batches=lambda: [batch_of(8, seed=s) for s in range(3)],
    )
"""


def train(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "graphpipe", "train", str(folder / "strategy.json"), "--log-every", "1"]
    return run([*command, "--model", f"{folder / 'job.py'}:job", "--checkpoint-dir", str(folder / "saved"), *options])


def test_a_job_that_is_started_again_goes_on(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    captured = capture(Net(0.0).float(), batch_of(8), loss_fn=mean_square)
    hand_made(captured, PLANS["two"], 8).save(tmp_path / "strategy.json")

    whole = train(tmp_path, "--steps", "5", "--save-every", "2", "--keep", "9", "--save", str(tmp_path / "whole"))
    assert whole.returncode == 0, whole.stderr
    names = sorted(path.name for path in (tmp_path / "saved").iterdir())
    assert names == ["latest", "lock", "step-00000002", "step-00000004", "step-00000005"]

    again = train(
        tmp_path, "--steps", "5", "--resume-from", "2", "--saving", "asynchronous", "--save", str(tmp_path / "again")
    )
    assert again.returncode == 0, again.stderr
    assert f"going on after step 2, from the checkpoint in {tmp_path / 'saved'}" in again.stdout
    assert losses(again) == losses(whole)[2:]
    assert (tmp_path / "again").read_bytes() == (tmp_path / "whole").read_bytes()
    Net(0.0).float().load_state_dict(load_file(tmp_path / "again"), strict=True)


def test_a_loss_that_is_not_a_number_ends_the_job_and_is_not_saved(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(
        JOB.replace("for s in range(3)]", "for s in range(3)] + [{**batch_of(8), 'x': batch_of(8)['x'] * nan}]")
    )
    (tmp_path / "job.py").write_text(
        (tmp_path / "job.py").read_text().replace("import torch\n", "from math import nan\n", 1)
    )
    captured = capture(Net(0.0).float(), batch_of(8), loss_fn=mean_square)
    hand_made(captured, PLANS["two"], 8).save(tmp_path / "strategy.json")
    done = train(tmp_path, "--steps", "9", "--save-every", "2", "--keep", "1")
    assert done.returncode == 1
    assert "error: the loss of step 4 is nan, so the parameters are spoilt; the step is not saved." in done.stderr
    assert (tmp_path / "saved" / "latest").read_text() == "step-00000002\n"


def losses(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Return the part of each line of progress that does not depend on the machine."""
    return [line.rsplit("  ", 1)[0] for line in done.stdout.splitlines() if line.startswith("step")]
