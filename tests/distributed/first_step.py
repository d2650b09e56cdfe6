"""A pipeline that compares itself with one process before it trains."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from graphpipe.capture import capture
from graphpipe.errors import GraphPipeError
from graphpipe.runtime.pipeline import Pipeline
from tests.distributed.cases import batch_of
from tests.distributed.parity import hand_made, sgd


class Normalised(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.norm, self.b = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.b(self.drop(torch.tanh(self.norm(self.a(x))))) - y).square().mean()


def pipeline_of(model: nn.Module, verify: str) -> Pipeline:
    captured = capture(model, batch_of(8))
    strategy = hand_made(captured, [("a norm", 8, (0,)), ("", 4, (1,))], 8)
    return Pipeline(captured, strategy, optimizer=sgd, verify=verify)


def trained(verify: str) -> tuple[list[float], dict[str, Tensor], Tensor]:
    pipeline = pipeline_of(Normalised(), verify)
    torch.manual_seed(7)
    losses = [pipeline.step(batch_of(8, seed=seed)).loss for seed in range(2)]
    return losses, pipeline.gather_state_dict(), torch.get_rng_state()


def leaves_no_trace() -> dict[str, Any]:
    losses, state, random_state = trained("first-step")
    expected_losses, expected, expected_random_state = trained("never")
    return {
        "losses": losses == expected_losses,
        "state": all(torch.equal(state[name], expected[name]) for name in expected),
        "statistics_moved": bool(expected["norm.running_mean"].any()),
        "random_state": torch.equal(random_state, expected_random_state),
    }


def finds_errors() -> dict[str, Any]:
    wrong = pipeline_of(Normalised(), "first-step")
    assert wrong._executor is not None
    if 1 in wrong.strategy.stages.stages[1].devices and torch.distributed.get_rank() == 1:
        wrong._executor.loss_scale = 1.5
    messages = []
    for pipeline in (wrong, pipeline_of(Normalised(dropout=0.5), "first-step")):
        try:
            pipeline.step(batch_of(8))
        except GraphPipeError as error:
            messages.append(str(error))
    return {"messages": messages}
