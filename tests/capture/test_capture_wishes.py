"""Units as the user wants them: boundaries and indivisible modules by path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphpipe.capture import CapturedModel, capture, eager_loss
from graphpipe.errors import CaptureError
from graphpipe.models import MMT, MMTConfig


class Network(nn.Module):
    """The activation after a layer is light, and would go to the layer before it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.activation, self.second = nn.Linear(4, 4), nn.Sequential(nn.Tanh(), nn.Dropout(0.0)), Norm()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.activation(self.first(x))).mean()


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.out = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(torch.relu(self.linear(x)))


def batch() -> dict[str, Tensor]:
    return {"x": torch.randn(6, 4, generator=torch.Generator().manual_seed(0))}


def names(captured: CapturedModel) -> list[str]:
    return [o.name for o in captured.graph.operators]


def test_light_operations_get_a_unit_of_their_own_where_a_split_is_wanted() -> None:
    assert names(capture(Network(), batch())) == ["first", "second.linear", "second.out"]
    found = names(capture(Network(), batch(), split_points=["activation"]))
    assert found == ["first", "activation.0", "second.linear", "second.out"]


def test_a_module_is_one_unit_where_it_is_to_stay_whole() -> None:
    assert names(capture(Network(), batch(), keep_whole=["second"])) == ["first", "second"]
    config = MMTConfig(num_branches=2, num_layers=2)
    found = names(capture(MMT(config), config.example_batch(4), keep_whole=["towers.0", "towers.1.layers.1"]))
    # The name is the path that all heavy operations share.
    assert [name for name in found if name.startswith("towers.0")] == ["towers.0.layers"]
    assert [name for name in found if name.startswith("towers.1.layers.1")] == ["towers.1.layers.1"]
    assert any(name.startswith("towers.1.layers.0.") for name in found)


@pytest.mark.parametrize(
    "wishes",
    [{"keep_whole": ["second"]}, {"split_points": ["activation", "second"]}, {"keep_whole": ["first", "second.out"]}],
)
def test_training_is_unchanged(wishes: dict[str, Any], assert_equal_training: Callable[..., None]) -> None:
    model = Network().double()
    data = {"x": batch()["x"].double()}
    captured = capture(model, data, **wishes)
    assert_equal_training(captured, model, data, lambda m: eager_loss(m, data))


def test_unknown_paths_are_answered_with_close_ones() -> None:
    with pytest.raises(CaptureError, match=r"keep_whole names 'secnd', which Network lacks; did you mean 'second'"):
        capture(Network(), batch(), keep_whole=["secnd"])
    with pytest.raises(CaptureError, match=r"split_points names 'nothing.like.it', which Network lacks"):
        capture(Network(), batch(), split_points=["nothing.like.it"])
    with pytest.raises(TypeError, match=r"write \['second'\]"):
        capture(Network(), batch(), keep_whole="second")
    model = Network()
    model.activation[1] = nn.Identity()
    with pytest.raises(CaptureError, match=r"'activation.1' does nothing"):
        capture(model, batch(), keep_whole=["activation.1"])


class InPlace(nn.Module):
    """The layer's result is written in place outside of the layer, so the two cannot be parted."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(x).relu_()).mean()


def test_a_split_through_memory_that_is_written_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"cannot be split at 'layer': 'linear' inside of it and 'relu_' outside"):
        capture(InPlace(), batch(), split_points=["layer"])
