"""A pipeline that compares itself with one process before it trains."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

from graphpipe.capture import capture
from graphpipe.errors import GraphPipeError
from graphpipe.runtime.loss_scale import LossScaling
from graphpipe.runtime.pipeline import Pipeline
from tests.distributed.cases import batch_of
from tests.distributed.parity import hand_made, sgd


class Normalised(nn.Module):
    """Has statistics, drops entries, and may add noise."""

    def __init__(self, dropout: float = 0.0, noise: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.norm, self.b = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.drop = nn.Dropout(dropout)
        self.noise = noise

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.drop(torch.tanh(self.norm(self.a(x))))
        if self.noise:
            x = x + self.noise * torch.randn_like(x)
        return (self.b(x) - y).square().mean()


def pipeline_of(model: nn.Module, **options: Any) -> Pipeline:
    captured = capture(model, batch_of(8))
    strategy = hand_made(captured, [("a norm", 8, (0,)), ("", 4, (1,))], 8)
    return Pipeline(captured, strategy, optimizer=sgd, **options)


def trained(**options: Any) -> tuple[list[float], dict[str, Tensor], Tensor]:
    pipeline = pipeline_of(Normalised(dropout=0.5), **options)
    torch.manual_seed(7)
    losses = [pipeline.step(batch_of(8, seed=seed)).loss for seed in range(2)]
    return losses, pipeline.gather_state_dict(), torch.get_rng_state()


class Compared(logging.Handler):
    """Counts the comparisons of a block by their absence: what is not compared is told."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def leaves_no_trace() -> dict[str, Any]:
    losses, state, random_state = trained(verify="auto")
    expected_losses, expected, expected_random_state = trained(verify=None)
    return {
        "losses": losses == expected_losses,
        "state": all(torch.equal(state[name], expected[name]) for name in expected),
        "statistics_moved": bool(expected["norm.running_mean"].any()),
        "random_state": torch.equal(random_state, expected_random_state),
    }


def message_of(pipeline: Pipeline, batch: Any) -> str:
    """Return what the first step says against it."""
    try:
        pipeline.step(batch)
    except GraphPipeError as error:
        return str(error)
    return ""


def finds_errors() -> dict[str, Any]:
    scaled = pipeline_of(Normalised(), verify="auto")
    assert scaled._executor is not None
    if torch.distributed.get_rank() == 1:
        scaled._executor.loss_scale = 1.5
    strictly = pipeline_of(Normalised(), verify="first-step")
    assert strictly._executor is not None
    if torch.distributed.get_rank() == 1:
        strictly._executor.loss_scale = 1.0 + 1e-7
    # As a split would that gave the second stage another weight, with what it drops as it should be.
    split = pipeline_of(Normalised(dropout=0.5), verify="auto")
    assert split._executor is not None
    if torch.distributed.get_rank() == 1:
        (module,) = split._executor.modules.values()
        split._executor.modules[next(iter(split._executor.modules))] = _Halved(module)
    watching = Compared()
    logger = logging.getLogger("graphpipe.runtime.pipeline")
    logger.addHandler(watching)
    logger.setLevel(logging.INFO)
    batch = batch_of(8)
    return {
        "scaled": message_of(scaled, batch),
        "strictly": message_of(strictly, batch),
        "split": message_of(split, batch),
        "noisy, asked": message_of(pipeline_of(Normalised(noise=0.1), verify="first-step"), batch),
        "noisy, unasked": message_of(pipeline_of(Normalised(noise=0.1), verify="auto"), batch),
        "told": watching.messages,
    }


class _Halved:
    """A stage that gives its second parameter half of its gradient."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def __call__(self, *args: Any) -> dict[str, Tensor]:
        results: dict[str, Tensor] = self._module(*args)
        weight = dict(self._module.named_parameters())["b.weight"]
        return {name: t - 0.5 * (weight.sum() - weight.sum().detach()) for name, t in results.items()}


def undoes_the_scale() -> dict[str, Any]:
    """Train under autocast to float16 with a scale, which the gradients of the check must not have."""
    model = Normalised().float()
    batch = {name: tensor.float() for name, tensor in batch_of(8).items()}
    with torch.autocast("cpu", torch.float16):
        captured = capture(model, batch)
        strategy = hand_made(captured, [("a norm", 8, (0,)), ("", 4, (1,))], 8)
        scaling = LossScaling(initial_scale=1024.0)
        options: dict[str, Any] = {"optimizer": sgd, "loss_scaling": scaling, "verify": "first-step"}
        right = Pipeline(captured, strategy, **options)
        wrong = Pipeline(captured, strategy, **options)
        vars(wrong)["_complete_gradients"] = lambda _: None
        return {"right": message_of(right, batch), "wrong": message_of(wrong, batch)}
