"""Inputs whose samples are not along axis 0, or that have none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphpipe.capture import CapturedModel, SampleLayout, capture
from graphpipe.errors import BatchError, CaptureError
from tests.capture.conftest import batch_wise

Check = Callable[..., None]

pytestmark = pytest.mark.usefixtures("double")

LENGTH = 5
AXES = {"tokens": 1, "positions": None}


class Recurrent(nn.Module):
    """Reads sequences ``[length, samples, width]`` and positions ``[length, width]``; gives a number a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, tokens: Tensor, positions: Tensor, scale: Tensor, labels: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(tokens + positions.unsqueeze(1))) * scale
        return (self.second(hidden).mean((0, 2)) - labels).square().mean()


def batch_of(num_samples: int, length: int = LENGTH) -> dict[str, Tensor]:
    return {
        "tokens": torch.randn(length, num_samples, 4),
        "positions": torch.randn(length, 4),
        "scale": torch.tensor(0.7),
        "labels": torch.randn(num_samples),
    }


@pytest.fixture(scope="module")
def captured() -> CapturedModel:
    torch.set_default_dtype(torch.float64)
    # As many samples as positions, so that sizes alone do not tell them apart.
    return capture(Recurrent(), batch_of(LENGTH), sample_axes=AXES)


def test_samples_are_along_another_axis(captured: CapturedModel, assert_equal_training: Check) -> None:
    layouts = {name: spec.layout for name, spec in captured.inputs.items()}
    assert layouts == {"tokens": SampleLayout(1, 1), "positions": None, "scale": None, "labels": SampleLayout(0, 1)}
    assert batch_wise(captured) == []
    batch = batch_of(7)
    assert_equal_training(captured, captured.model, batch, lambda m: m(**batch))


def test_a_batch_is_made_longer_along_its_sample_axes(captured: CapturedModel) -> None:
    batch = batch_of(3)
    found = captured.resize_batch(captured.flatten_batch(batch), 4)
    assert torch.equal(found["tokens"], torch.cat([batch["tokens"], batch["tokens"][:, :1]], 1))
    assert torch.equal(found["positions"], batch["positions"])
    assert captured.num_samples(found) == 4


def test_a_single_sample_is_repeated_for_another_capture(captured: CapturedModel) -> None:
    batch = batch_of(1, length=1)
    found = captured.with_several_samples({**batch, "mask": torch.zeros(1, 3), "flag": True})
    sizes = {name: list(leaf.shape) for name, leaf in found.items() if isinstance(leaf, Tensor)}
    assert sizes == {"tokens": [1, 2, 4], "positions": [1, 4], "scale": [], "labels": [2], "mask": [2, 3]}
    assert torch.equal(found["tokens"][:, 1:], batch["tokens"])
    assert found["flag"] is True
    several = batch_of(2, length=1)
    assert captured.with_several_samples(several) is several


def test_the_number_of_samples_is_no_part_of_the_kind_of_a_batch(captured: CapturedModel) -> None:
    assert captured.kind_of(batch_of(3), {}) == captured.kind_of(batch_of(8), {})
    assert captured.kind_of(batch_of(3), {}) != captured.kind_of(batch_of(3, length=6), {})


def test_a_wrong_batch_is_told(captured: CapturedModel) -> None:
    with pytest.raises(BatchError, match=r"input 'tokens' has 4 samples and input 'labels' has 3"):
        captured.flatten_batch({**batch_of(4), "labels": torch.randn(3)})
    with pytest.raises(BatchError, match=r"captured with \[5, samples, 4\]"):
        captured.flatten_batch(batch_of(4, length=6))


@pytest.mark.parametrize(
    ("axes", "told"),
    [
        ({"tokes": 1}, "no input `tokes`, whose sample axis is given; did you mean `tokens`"),
        ({"tokens": 3}, "'tokens' has 3 axes, so its samples cannot be along axis 3"),
        ({"tokens": -1}, "'tokens' has 3 axes, so its samples cannot be along axis -1"),
        ({"tokens": 2, "labels": 0}, "'tokens' has 4 samples along axis 2 and input 'labels' has 5 along axis 0"),
        ({"tokens": None, "positions": None, "labels": None}, "no tensor with a sample axis"),
    ],
)
def test_axes_that_cannot_be_are_told(axes: dict[str, Any], told: str) -> None:
    with pytest.raises(CaptureError, match=told):
        capture(Recurrent(), batch_of(LENGTH), sample_axes=axes)


def test_an_axis_is_that_of_the_samples_or_free() -> None:
    with pytest.raises(CaptureError, match="axis 1 of input 'tokens' is said to hold the samples and to be 'length'"):
        capture(Recurrent(), batch_of(LENGTH), sample_axes=AXES, free_sizes={"tokens": {1: "length"}})
