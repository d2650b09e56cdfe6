"""The models of the paper's evaluation at full size, as computation graphs.

They are captured on the meta device: nothing is allocated, and operators and costs are those that training would see.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from graphpipe.capture import Granularity, capture
from graphpipe.graph import ComputationGraph
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

# Capture needs a batch of at least two samples, and its costs are per sample.
NUM_SAMPLES = 2


@cache
def mmt(
    num_branches: int = 4, granularity: Granularity = Granularity.OPERATOR, *, num_layers: int = 8
) -> ComputationGraph:
    """Return the multi-modal Transformer."""
    config = replace(MMTConfig.paper(), num_branches=num_branches, num_layers=num_layers)
    return _captured(MMT, config, granularity)


@cache
def dlrm(num_branches: int = 7) -> ComputationGraph:
    """Return the recommendation model: as many dense branches as sparse ones."""
    return _captured(DLRM, replace(DLRMConfig.paper(), num_dense=num_branches, num_sparse=num_branches))


@cache
def candle_uno(num_branches: int = 7) -> ComputationGraph:
    """Return CANDLE-Uno: 4 feed-forward layers a branch."""
    return _captured(CandleUno, CandleUnoConfig.paper(num_branches))


@cache
def sequential_transformer() -> ComputationGraph:
    """Return the Transformer without branches: 32 layers."""
    return _captured(SequentialTransformer, SequentialTransformerConfig.paper())


def _captured(
    model: Callable[[Any], torch.nn.Module], config: Any, granularity: Granularity = Granularity.OPERATOR
) -> ComputationGraph:
    with torch.device("meta"):
        built = model(config)
    return capture(built, config.example_batch(NUM_SAMPLES), granularity=granularity).graph
