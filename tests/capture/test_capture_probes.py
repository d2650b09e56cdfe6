"""What export may lose in silence: right losses, gradients and buffers, or a clear refusal."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import Tensor, nn

from graphpipe.capture import CapturedModel, capture
from graphpipe.errors import CaptureError
from tests.capture.conftest import Training, random_partition, train_in_stages
from tests.capture.probes import PROBES, Probe

pytestmark = pytest.mark.usefixtures("double")


def compare(found: Training, expected: Training, tolerance: float) -> None:
    torch.testing.assert_close(found.loss, expected.loss, rtol=tolerance, atol=tolerance * 1e-3)
    assert found.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        same = found.gradients[name].to_dense()
        torch.testing.assert_close(
            same, gradient.to_dense(), rtol=tolerance, atol=tolerance * 1e-3, msg=lambda m, n=name: f"{n}: {m}"
        )
    for name, buffer in found.buffers.items():
        torch.testing.assert_close(buffer, expected.buffers[name], rtol=tolerance, atol=tolerance * 1e-3, msg=name)


def train_once(model: nn.Module, batch: Tensor) -> Training:
    """One step of a model, not of a copy: hooks may refer to the model."""
    loss = model(batch)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Training(loss.detach(), gradients, dict(model.named_buffers()))


def check(probe: Probe, captured: CapturedModel, num_samples: int) -> None:
    """Compare with eager, cut at random; what draws random numbers, with itself."""
    if probe.draws:
        check_draws(probe, captured, num_samples)
        return
    model = probe.build()
    model.load_state_dict(captured.stage_module([o.name for o in captured.graph.operators]).state_dict(), strict=False)
    batch = probe.batch(num_samples)
    torch.manual_seed(1)
    expected = train_once(model, batch.clone())
    for seed in range(3):
        rng = random.Random(seed)
        partition = random_partition(captured, rng.randint(1, 3), rng)
        compare(train_in_stages(captured, partition, batch, rng), expected, probe.tolerance)


def check_draws(probe: Probe, captured: CapturedModel, num_samples: int) -> None:
    """Draw the same numbers again, and compare the gradients with how the loss moves along them."""
    whole = copy.deepcopy(captured.stage_module([o.name for o in captured.graph.operators]))
    inputs = captured.flatten_batch(probe.batch(num_samples))

    def loss() -> Tensor:
        return whole(inputs, num_samples)[captured.loss]

    first = loss()
    assert torch.equal(first, loss())
    first.backward()
    trained = [p for p in whole.parameters() if p.grad is not None]
    assert trained
    step = 1e-4
    with torch.no_grad():
        for p in trained:
            p.add_(p.grad, alpha=step)
        above = loss()
        for p in trained:
            p.sub_(p.grad, alpha=2 * step)
        below = loss()
    slope = sum(float((p.grad**2).sum()) for p in trained if p.grad is not None)
    assert float(above - below) / (2 * step) == pytest.approx(slope, rel=1e-6)


@pytest.mark.parametrize("name", PROBES)
def test_right_or_refused(name: str) -> None:
    probe = PROBES[name]
    model = probe.build()
    before = copy.deepcopy(model.state_dict())
    if probe.refusal:
        with pytest.raises(CaptureError, match=probe.refusal):
            capture(model, probe.batch(4))
    else:
        captured = capture(model, probe.batch(4))
        for num_samples in (4, 3):
            check(probe, captured, num_samples)
    for key, value in before.items():
        assert torch.equal(model.state_dict()[key], value), key


def test_every_trap_is_here() -> None:
    assert len(PROBES) == 49
