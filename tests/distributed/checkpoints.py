"""What each rank does in the tests of checkpoints."""

from __future__ import annotations

import logging
import os
import resource
import signal
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import graphpipe as gp
from graphpipe.capture import capture
from graphpipe.runtime.process_group import rank
from tests.distributed.cases import batch_of, mean_square
from tests.distributed.parity import Part, hand_made

# Another number of devices, other cuts, micro-batch sizes and replicas.
PLANS: dict[str, list[Part]] = {
    "three": [("a", 2, (0,)), ("b c", 4, (1,)), ("", 2, (2,))],
    "replicas": [("a b", 4, (0, 1)), ("c", 1, (2,)), ("", 8, (3,))],
    "sharded": [("a b", 4, (0, 1)), ("c", 2, (2, 3)), ("", 8, (2, 3))],
    "two": [("a b", 4, (0,)), ("", 2, (1,))],
    "one": [("a b c", 2, (0,)), ("", 2, (0,))],
}
NUM_STEPS = 6


class Net(nn.Module):
    """Four layers, a tied weight, a buffer, and a layer that the loss does not need."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))
        self.d.weight = self.a.weight
        self.unused = nn.Linear(4, 2)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("scale", torch.full((4,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.b(self.dropout(torch.tanh(self.a(x)))))
        return self.d(torch.tanh(self.c(hidden * self.scale)))


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """Return AdamW with another learning rate for a layer that most ranks have no part of."""
    named = list(parameters)
    quick = [p for n, p in named if n.startswith("c.")]
    slow = [p for n, p in named if not n.startswith("c.")]
    groups = [{"params": g, "lr": lr} for g, lr in ((slow, 0.01), (quick, 0.02)) if g]
    return torch.optim.AdamW(groups, weight_decay=0.1)


def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Return a schedule that keeps a `Counter` and changes the rate before and after the interruption."""
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[2, 5], gamma=0.5)


def make(plan: str, dropout: float) -> gp.Pipeline:
    captured = capture(Net(dropout), batch_of(8), loss_fn=mean_square)
    sharing = gp.OptimizerStates.SHARDED if plan == "sharded" else gp.OptimizerStates.COPIED
    pipeline = gp.Pipeline(
        captured,
        hand_made(captured, PLANS[plan], 8),
        optimizer=adamw,
        lr_scheduler=schedule,
        optimizer_states=sharing,
    )
    torch.manual_seed(rank())
    return pipeline


def batches() -> list[dict[str, Tensor]]:
    return [batch_of(8, seed=s) for s in range(NUM_STEPS)]


def train(pipeline: gp.Pipeline, stream: Any) -> list[float]:
    return [pipeline.step(batch).loss for batch in stream]


def outcome(pipeline: gp.Pipeline, losses: list[float]) -> dict[str, Any]:
    state = pipeline.gather_state_dict()
    assert pipeline.optimizer is not None
    return {
        "losses": losses,
        "state": {name: tensor.tolist() for name, tensor in state.items()},
        "rates": sorted({group["lr"] for group in pipeline.optimizer.param_groups}),
        "adam_steps": [int(s["step"]) for s in pipeline.optimizer.state.values()],
    }


def train_alone() -> dict[str, Any]:
    """Train six steps in this process, without GraphPipe."""
    model = Net(0.0)
    optimizer = adamw(model.named_parameters())
    rates = schedule(optimizer)
    losses = []
    for batch in batches():
        optimizer.zero_grad()
        loss = mean_square(model(batch["x"]), batch)
        loss.backward()
        optimizer.step()
        rates.step()
        losses.append(float(loss))
    return {"losses": losses, "state": {name: tensor.tolist() for name, tensor in model.state_dict().items()}}


def train_and_save(folder: str) -> dict[str, Any]:
    """Six steps without a break, then three with a checkpoint, with dropout and without."""
    found = {"alone": train_alone()}
    for name, dropout in (("dropout", 0.5), ("plain", 0.0)):
        whole = make("three", dropout)
        found[name] = outcome(whole, train(whole, batches()))
        pipeline = make("three", dropout)
        with gp.Checkpointer(pipeline, Path(folder) / name) as checkpoints:
            assert checkpoints.restore() == 0
            train(pipeline, batches()[:3])
            checkpoints.save()
    return found


def resume(folder: str, plan: str, name: str, then: str = "") -> dict[str, Any]:
    """Take up a checkpoint in new processes and train to the end, with another checkpoint after the first step."""
    pipeline = make(plan, 0.5 if name == "dropout" else 0.0)
    with gp.Checkpointer(pipeline, Path(folder) / name) as checkpoints:
        step = checkpoints.restore()
        stream = checkpoints.remaining(batches())
        losses = train(pipeline, islice(stream, 1))
        if then:
            with gp.Checkpointer(pipeline, Path(folder) / then) as others:
                others.save()
        losses += train(pipeline, stream)
    return {"step": step, **outcome(pipeline, losses)}


def die_while_saving(folder: str) -> None:
    """Save step 1, and lose rank 1 while step 2 is written: its tensors are on disk then, the manifest is not."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    class Deadly(HuggingFaceStorageWriter):
        def write_data(self, *arguments: Any) -> Any:
            written = super().write_data(*arguments)
            written.wait()
            if rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return written

    pipeline = make("two", 0.5)
    with gp.Checkpointer(pipeline, folder) as checkpoints:
        train(pipeline, batches()[:1])
        checkpoints.save()
        train(pipeline, batches()[1:2])
        torch.distributed.checkpoint.hf_storage.HuggingFaceStorageWriter = Deadly  # type: ignore[misc]
        checkpoints.save()


def fill_the_disk(folder: str) -> dict[str, Any]:
    """Save steps 1, 2 and 3; there is no space on rank 1's disk for the second."""
    pipeline = make("two", 0.5)
    said = ""
    with gp.Checkpointer(pipeline, folder) as checkpoints:
        for step, batch in enumerate(batches()[:3], start=1):
            pipeline.step(batch)
            soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            if step == 2 and rank() == 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
            try:
                checkpoints.save()
            except gp.CheckpointError as error:
                said = str(error)
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return {"said": said, "files": sorted(p.name for p in Path(folder).iterdir())}


def resume_after_death(folder: str) -> dict[str, Any]:
    """Start again, and tell what was said."""
    said: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logging.getLogger("graphpipe.checkpoint").addHandler(Listener())
    pipeline = make("two", 0.5)
    with gp.Checkpointer(pipeline, folder) as checkpoints:
        return {"step": checkpoints.restore(), "said": said, "files": sorted(p.name for p in Path(folder).iterdir())}
