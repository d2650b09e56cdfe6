"""A model on the meta device is planned for, and what needs its values says so."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import graphpipe as gp
from graphpipe.models import MMT, MMTConfig


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return MMT(MMTConfig.small())


def test_costs_are_computed_where_there_is_nothing_to_measure() -> None:
    cluster = gp.Cluster.uniform(2, memory_bytes=10**9, kind="A100-80GB")
    model = on_meta()
    said: list[str] = []
    strategy = gp.plan(
        model, MMTConfig.small().example_batch(2), mini_batch_size=4, cluster=cluster, progress=said.append
    )
    assert any("the model is on the meta device" in line for line in said)
    assert len(strategy.stages.stages) > 1
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_device_without_known_rates_asks_for_a_profile() -> None:
    cluster = gp.Cluster.uniform(2, memory_bytes=10**9, kind="TPU")
    with pytest.raises(gp.GraphPipeError, match=r"the peak rates of 'TPU' are not known .* give plan\(\) a profile"):
        gp.plan(on_meta(), MMTConfig.small().example_batch(2), mini_batch_size=4, cluster=cluster)


def test_verify_needs_values() -> None:
    batch = MMTConfig.small().example_batch(2)
    strategy = gp.plan(on_meta(), batch, mini_batch_size=2, cluster=gp.Cluster.uniform(1, memory_bytes=10**9))
    with pytest.raises(gp.GraphPipeError, match="MMT is on the meta device"):
        gp.verify(on_meta(), strategy, batch)
