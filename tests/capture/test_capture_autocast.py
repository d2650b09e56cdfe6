"""Stages run under the autocast of the capture, and give what the model gives under it."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from graphpipe.capture import Autocast, capture, eager_loss
from graphpipe.program import lower
from graphpipe.runtime.in_process import run_in_process
from graphpipe.schedule import kfkb
from graphpipe.stage import Recompute, Stage, StageGraph
from tests.capture.conftest import random_partition, train_eagerly


class Mixed(nn.Module):
    """Products that autocast lowers, a norm and a loss that it does not, and a region with autocast switched off."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.norm, self.b, self.c = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.norm(torch.tanh(self.a(x)))
        with torch.autocast("cpu", enabled=False):
            hidden = self.b(hidden.float())
        return functional.cross_entropy(self.c(torch.relu(hidden)), y)


def batch_of(num_samples: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 4, (num_samples,), generator=generator)
    return {"x": torch.randn(num_samples, 8, generator=generator), "y": labels}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("recompute", list(Recompute))
def test_stages_give_what_eager_gives_under_the_same_autocast(
    dtype: torch.dtype, seed: int, recompute: Recompute
) -> None:
    model, batch = Mixed(), batch_of(6)
    with torch.autocast("cpu", dtype):
        captured = capture(model, batch)

    def loss_of(copied: nn.Module) -> Tensor:
        with torch.autocast("cpu", dtype):
            return eager_loss(copied, batch)

    expected = train_eagerly(model, loss_of)  # backward runs outside of autocast, as torch recommends
    assert captured.autocast == Autocast((("cpu", dtype),))
    parts = random_partition(captured, 3, random.Random(seed))
    stages = tuple(
        Stage(operators=tuple(part), micro_batch_size=6, devices=(i,), recompute=recompute)
        for i, part in enumerate(parts)
    )
    graph = StageGraph(captured.graph, stages, 6)
    # Outside of autocast: the stages bring it along. With one micro-batch nothing is rounded in another order.
    result = run_in_process(captured, lower(graph, kfkb(graph)), batch)
    found = {n: g for own in result.gradients for n, g in own.items() if g is not None}
    assert result.loss == float(expected.loss)
    assert found.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        assert torch.equal(found[name], gradient), name


def test_stages_without_autocast_stay_without_it() -> None:
    model, batch = Mixed(), batch_of(6)
    captured = capture(model, batch)
    module = captured.stage_module([o.name for o in captured.graph.operators])
    with torch.autocast("cpu", torch.bfloat16):
        loss = module(captured.flatten_batch(batch), 6)["loss"]
    assert float(loss.detach()) == float(eager_loss(model, batch).detach())
    assert str(captured.autocast) == "no autocast"


def test_casts_are_not_kept_from_before_an_update() -> None:
    model, batch = Mixed(), batch_of(6)
    with torch.autocast("cpu", torch.bfloat16):
        captured = capture(model, batch)
        module = captured.stage_module([o.name for o in captured.graph.operators])
        before = float(module(captured.flatten_batch(batch), 6)["loss"].detach())
        with torch.no_grad():
            model.a.weight.add_(0.5)
        after = float(module(captured.flatten_batch(batch), 6)["loss"].detach())
        torch.clear_autocast_cache()
        expected = float(eager_loss(model, batch).detach())
    assert before != after == expected
