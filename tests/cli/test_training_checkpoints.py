from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import graphpipe as gp
from graphpipe.capture import capture
from graphpipe.cli.checkpoints import TrainingCheckpoints
from graphpipe.cli.jobs import Batches
from graphpipe.runtime.checkpoint_folder import CheckpointFolder
from tests.distributed.parity import hand_made, sgd


@pytest.fixture
def job() -> Iterator[gp.Job]:
    batch = {"input": torch.ones(2, 3)}
    yield gp.Job(model=nn.Linear(3, 1), example_batch=batch, loss_fn=lambda output, _: output.mean(), optimizer=sgd)
    dist.destroy_process_group()


def start(job: gp.Job, folder: Path) -> tuple[gp.Pipeline, TrainingCheckpoints]:
    captured = capture(job.model, job.example_batch, loss_fn=job.loss_fn)
    pipeline = gp.Pipeline(captured, hand_made(captured, [("", 2, (0,))], 2), optimizer=sgd)
    saving = gp.Saving.SYNCHRONOUS
    return pipeline, TrainingCheckpoints(pipeline, Batches(job, 2), folder, save_every=2, keep=3, saving=saving)


def no_space(*arguments: Any, **options: Any) -> None:
    raise OSError(28, "No space left on device")


def test_a_full_disk_is_told_and_does_not_end_the_training(
    job: gp.Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pipeline, checkpoints = start(job, tmp_path)
    stream = checkpoints.resume(None)
    for step in range(1, 6):
        with monkeypatch.context() as patched:
            if step == 4:
                patched.setattr(CheckpointFolder, "finish", no_space)
            pipeline.step(next(stream))
            checkpoints.step_done()
    assert CheckpointFolder(tmp_path).steps() == [2]
    said = capsys.readouterr()
    assert "warning: the checkpoint of step 4 could not be saved: rank 0: OSError: [Errno 28] No space" in said.err
    assert "that of step 2 is still there; training goes on" in said.err
    assert not said.out
    checkpoints.close()
    assert CheckpointFolder(tmp_path).steps() == [2, 5]

    again, checkpoints = start(job, tmp_path)
    checkpoints.resume(None)
    assert again.num_steps == 5
    assert capsys.readouterr().out == f"going on after step 5, from the checkpoint in {tmp_path}\n"
    again.step(job.example_batch)
    monkeypatch.setattr(CheckpointFolder, "finish", no_space)
    with pytest.raises(gp.CheckpointError, match="step 6 could not be saved"):
        checkpoints.close()
