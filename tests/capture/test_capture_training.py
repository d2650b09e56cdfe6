"""Random partitions of a captured model, run stage by stage over micro-batches, train like the model itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from graphpipe.capture import Granularity, LossReduction, capture
from graphpipe.models import (
    DLRM,
    MMT,
    CandleUno,
    CandleUnoConfig,
    DLRMConfig,
    MMTConfig,
    SequentialTransformer,
    SequentialTransformerConfig,
)

Check = Callable[..., None]


@pytest.fixture(autouse=True)
def _double() -> object:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("granularity", list(Granularity))
@pytest.mark.parametrize(
    ("model_type", "config"),
    [
        (MMT, MMTConfig(num_branches=2, num_layers=2)),
        (DLRM, DLRMConfig.small()),
        (CandleUno, CandleUnoConfig.small()),
        (SequentialTransformer, SequentialTransformerConfig(num_layers=2)),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_paper_models(
    assert_equal_training: Check, model_type: type[nn.Module], config: MMTConfig, granularity: Granularity
) -> None:
    model = model_type(config)
    captured = capture(model, config.example_batch(4), granularity=granularity)
    batch = config.example_batch(9)

    assert captured.loss_reduction is LossReduction.MEAN
    assert not any(operator.is_batch_wise for operator in captured.graph.operators)
    assert_equal_training(captured, model, batch, lambda m: m(**batch))


def test_loss_outside_of_the_model(assert_equal_training: Check) -> None:
    config = CandleUnoConfig.small()
    model = CandleUno(config)

    def loss_fn(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return functional.l1_loss(output, batch["target"], reduction="sum")

    def batch_of(num_samples: int) -> dict[str, object]:
        batch = config.example_batch(num_samples)
        return {"features": batch["features"], "target": batch["growth"]}

    captured = capture(model, batch_of(4), loss_fn=loss_fn)
    batch = batch_of(7)

    assert captured.loss_reduction is LossReduction.SUM
    assert_equal_training(captured, model, batch, lambda m: loss_fn(m(batch["features"]), batch))
