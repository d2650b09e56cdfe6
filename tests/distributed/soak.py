"""Training with checkpoints that is interrupted again and again: what each rank does, and the incidents."""

from __future__ import annotations

import functools
import json
import os
import random
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from graphpipe.capture import CapturedModel, capture
from graphpipe.program import Instruction
from graphpipe.runtime.checkpoint import Checkpointer
from graphpipe.runtime.executor import Executor
from graphpipe.runtime.meeting import tensor_digest
from graphpipe.runtime.pipeline import Pipeline
from tests.distributed.cases import batch_of, mean_square
from tests.distributed.failures import fail, is_at
from tests.distributed.forked import JobServer
from tests.distributed.parity import hand_made

NUM_RANKS = 3
SAVE_EVERY = 2
PARTS = [("a", 4, (0, 1)), ("b", 2, (2,)), ("", 2, (2,))]
PLACES = [
    ["0F0", "0F1", "0B0", "0B1", "wait 0B0", "sum", "optimizer"],
    ["0F0", "0F1", "0B0", "0B1", "wait 0B1", "sum", "optimizer"],
    ["1F0", "1F2", "1B0", "1B3", "2F3", "2B1", "wait 1F1", "wait 2F2", "optimizer"],
]
# A job that is struck from outside takes its time, so that it is still there.
PAUSE_S = 0.03


class Net(nn.Module):
    """Three layers with dropout, so that the state of the random generators counts as well."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.dropout(torch.tanh(self.b(self.dropout(torch.tanh(self.a(x)))))))


@functools.cache
def captured() -> CapturedModel:
    return capture(Net(), batch_of(8), loss_fn=mean_square)


@dataclass(frozen=True)
class Incident:
    """What happens to a rank: inside, at a place of the n-th step after the start; outside, some seconds after it."""

    how: str
    rank: int
    step: int = 0
    place: str = ""
    delay_s: float = 0.0


def draw(generator: random.Random) -> Incident:
    rank, how = generator.randrange(NUM_RANKS), generator.choice(["exception", "exception", "kill", "kill", "stop"])
    if how != "exception" and generator.random() < 0.5:
        return Incident(how, rank, delay_s=generator.uniform(0.0, 6 * PAUSE_S))
    return Incident(how, rank, step=generator.randint(1, 6), place=generator.choice(PLACES[rank]))


def train(folder: str, checkpoints: str, steps: int, incident: dict[str, Any] | None) -> None:
    """Train on, from the last checkpoint, until the incident or to the end; leave digests of everything there."""
    rank = int(os.environ["RANK"])
    plan = Incident(**incident) if incident is not None else Incident("none", -1)
    pipeline = Pipeline(
        captured(),
        hand_made(captured(), PARTS, 8),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.9),
    )
    torch.manual_seed(rank)
    (Path(folder) / f"ready-{rank}").touch()
    began = 0
    interpret = Executor._interpret

    def failing(self: Executor, batch: Any, instruction: Instruction, optimizer_step: Any) -> None:
        if rank == plan.rank and pipeline.num_steps - began + 1 == plan.step and is_at(instruction, plan.place):
            fail(plan.how, Path(folder))
        interpret(self, batch, instruction, optimizer_step)

    Executor._interpret = failing  # type: ignore[method-assign]
    with Checkpointer(pipeline, checkpoints, save_every=SAVE_EVERY, keep=2) as saving:
        began = saving.restore()
        for batch in saving.remaining(batch_of(8, seed=s) for s in range(steps)):
            pipeline.step(batch)
            saving.save_if_due()
            if plan.rank >= 0 and not plan.place:
                time.sleep(PAUSE_S)
                # However late the strike comes, the job does not get far before it.
                while pipeline.num_steps - began >= 6 and not (Path(folder) / "failed_at").exists():
                    time.sleep(0.01)
    assert pipeline.optimizer is not None
    state = {name: tensor_digest(p) for name, p in pipeline.parameters.items()}
    for i, entry in enumerate(pipeline.optimizer.state.values()):
        state |= {f"{i}.{name}": tensor_digest(value) for name, value in entry.items()}
    (Path(folder) / f"final-{rank}.json").write_text(json.dumps({"steps": pipeline.num_steps, **state}))


@dataclass
class Outcome:
    """What a job that was interrupted came to."""

    finals: list[dict[str, Any]]
    num_incidents: int
    messages: list[str]
    slowest_end_s: float


def run(server: JobServer, folder: Path, steps: int, incidents: list[Incident], limit_s: float = 90.0) -> Outcome:
    """Train to the end, started again after each incident. Every job must end by itself and leave no process."""
    happened, messages, slowest_s = 0, [], 0.0
    for attempt, incident in enumerate([*incidents, None]):
        here = folder / f"attempt-{attempt}"
        arguments = {"checkpoints": str(folder / "checkpoints"), "steps": steps}
        told = None if incident is None else asdict(incident)
        server.start(here, NUM_RANKS, "tests.distributed.soak:train", folder=str(here), incident=told, **arguments)
        if incident is not None and not incident.place:
            _strike(here, incident, limit_s)
        end = server.wait(here, limit_s)
        assert not end.left_over, (incident, end.left_over)
        assert any(end.codes) == (incident is not None), (incident, end.output)
        if incident is not None:
            assert all(end.codes), (incident, end)
            happened += 1
            messages += [line for line in end.output.splitlines() if line.startswith("error:")][:1]
            slowest_s = max(slowest_s, end.times_s[-1] - float((here / "failed_at").read_text()))
        if (here / "final-0.json").exists():
            finals = [json.loads((here / f"final-{rank}.json").read_text()) for rank in range(NUM_RANKS)]
            return Outcome(finals, happened, messages, slowest_s)
    raise AssertionError("the job has not come to its end")


def _strike(folder: Path, incident: Incident, limit_s: float) -> None:
    """Kill or stop a rank from outside, once all ranks have joined."""
    until_s = time.monotonic() + limit_s
    while not all((folder / f"ready-{rank}").exists() for rank in range(NUM_RANKS)) and time.monotonic() < until_s:
        time.sleep(0.01)
    time.sleep(incident.delay_s)
    (folder / "failed_at").write_text(str(time.monotonic()))
    try:
        os.kill(
            json.loads((folder / "pids").read_text())[incident.rank],
            signal.SIGKILL if incident.how == "kill" else signal.SIGSTOP,
        )
    except ProcessLookupError:
        return
