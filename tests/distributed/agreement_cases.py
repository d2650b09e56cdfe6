"""Ranks that were given different things: a strategy, or a later batch."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from graphpipe.capture import capture
from graphpipe.errors import GraphPipeError
from graphpipe.runtime.meeting import Meeting, Meetings
from graphpipe.runtime.pipeline import Pipeline
from graphpipe.runtime.process_group import connect, rank
from graphpipe.runtime.rows import Rows
from tests.distributed.cases import batch_of, mean_square
from tests.distributed.parity import hand_made, sgd


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x))) * self.factor


class Told(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def rows() -> dict[str, Any]:
    """Rounds that overlap, one of them of rows that are shorter than the width, and a sum whose order matters."""
    connect()
    shown = Rows(3, datetime.timedelta(seconds=30))
    first, second = shown.begin(), shown.begin()
    meetings, numbers = Meetings(1, datetime.timedelta(seconds=30)), [1e16, 1.0, -1e16]
    return {
        "second": second.finish([rank() + 1, -(1 << 60)]).tolist(),
        "first": first.finish([10 * rank(), 7, 8]).tolist(),
        "sum": meetings.total(meetings.begin(), Meeting.LOSS, numbers[rank()]),
    }


def differ() -> dict[str, Any]:
    told = Told()
    logging.getLogger("graphpipe.runtime.pipeline").addHandler(told)
    model = Net()
    captured = capture(model, batch_of(8), loss_fn=mean_square)
    strategy = hand_made(captured, [("a", 2 if rank() else 4, (0,)), ("", 2, (1,))], 8)
    pipeline = Pipeline(captured, strategy, optimizer=sgd)
    sizes = [stage.micro_batch_size for stage in pipeline.strategy.stages.stages]
    nothing_new = refusal(pipeline.update)
    alone = Net()
    mean_square(alone(batch_of(8)["x"]), batch_of(8)).backward()
    result = pipeline.forward_backward(batch_of(8))
    gradients = pipeline.gather_gradients()
    right = all(
        torch.allclose(gradients[n], p.grad, rtol=1e-9) for n, p in alone.named_parameters() if p.grad is not None
    )
    model.factor = 2.0
    losses = [result.loss, pipeline.forward_backward(batch_of(8)).loss]
    said = [nothing_new, refusal(lambda: pipeline.step(batch_of(8, seed=rank())))]
    said.append(refusal(lambda: (pipeline.step if rank() else pipeline.accumulate)(batch_of(8))))
    said.append(refusal(pipeline.update if rank() else lambda: pipeline.evaluate(batch_of(8))))
    said.append(refusal(pipeline.gather_gradients if rank() else pipeline.gather_parameters))
    return {"sizes": sizes, "right": right, "losses": losses, "said": said, "told": told.messages}


def refusal(run: Callable[[], object]) -> str:
    """Return how something is refused; empty if it is not."""
    try:
        run()
    except GraphPipeError as error:
        return str(error)
    return ""
