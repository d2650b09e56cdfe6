from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

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

MODELS = [
    (MMT, MMTConfig, "labels"),
    (DLRM, DLRMConfig, "clicks"),
    (CandleUno, CandleUnoConfig, "growth"),
    (SequentialTransformer, SequentialTransformerConfig, "labels"),
]


@pytest.mark.parametrize(("model_type", "config_type", "target"), MODELS)
def test_loss_inside_or_outside(model_type: type[nn.Module], config_type: Any, target: str) -> None:
    torch.manual_seed(0)
    config = config_type.small()
    model = model_type(config)
    batch = config.example_batch(5)
    loss = model(**batch)
    loss.backward()
    assert loss.dim() == 0
    assert all(parameter.grad is not None for parameter in model.parameters())
    del batch[target]
    assert model(**batch).shape[0] == 5


@pytest.mark.parametrize(
    ("model_type", "config_type", "millions"),
    [
        # 4 branches of 8 layers: 12 hidden^2 each, and biases and norms
        (MMT, MMTConfig, 4 * 8 * 12 * 1024**2 / 1e6),
        # 7 branches of 4 layers, 4 after the concatenation, and 7 tables of 1e6 x 64
        (DLRM, DLRMConfig, (7 * 4 * 4096**2 + (7 * 4096 + 7 * 64) * 4096 + 3 * 4096**2) / 1e6 + 448),
        (CandleUno, CandleUnoConfig, (7 * 4 * 4096**2 + 7 * 4096**2 + 3 * 4096**2) / 1e6),
        (SequentialTransformer, SequentialTransformerConfig, 32 * 12 * 1024**2 / 1e6),
    ],
)
def test_paper_sizes(model_type: type[nn.Module], config_type: Any, millions: float) -> None:
    with torch.device("meta"):
        model = model_type(config_type.paper())
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.02)


@pytest.mark.parametrize("num_branches", [2, 16])
def test_candle_uno_with_any_number_of_branches(num_branches: int) -> None:
    config = CandleUnoConfig.paper(num_branches)
    assert config.num_branches == num_branches
    with torch.device("meta"):
        model = CandleUno(config)
    assert len(model.branches) == num_branches
    assert len(CandleUnoConfig(num_branches=num_branches).example_batch(2)["features"]) == num_branches
