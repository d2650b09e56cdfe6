"""Python numbers that training changes behind the back of the captured model are found."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from graphpipe.runtime.frozen_numbers import FrozenNumbers

weight = 1.0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Dropout(0.1)
        self.beta = 1.0
        self.kind = "mean"
        self.layers = 2
        self.register_buffer("scale", torch.ones(()))


def test_each_change_is_told_once_by_its_name() -> None:
    config: dict[str, Any] = {"w": 1.0, "table": torch.ones(2)}
    gamma = 0.5

    def loss(output: Tensor, batch: Any) -> Tensor:
        return output.mean() * config["w"] * gamma * weight

    def set_gamma(value: float) -> None:
        nonlocal gamma
        gamma = value

    model = Net()
    numbers = FrozenNumbers(model, loss)
    assert numbers.changed() == []
    model.scale.fill_(2.0)
    config["new"] = 1
    assert numbers.changed() == []
    model.beta, model.inner.p = 50.0, 0.2
    config["w"] = 10.0
    set_gamma(0.1)
    globals()["weight"] = 3.0
    assert sorted(numbers.changed()) == [
        ("beta of the model", 1.0, 50.0),
        ("config['w'] of the loss", 1.0, 10.0),
        ("gamma of the loss", 0.5, 0.1),
        ("inner.p of the model", 0.1, 0.2),
        ("weight of the loss", 1.0, 3.0),
    ]
    assert numbers.changed() == []
    model.kind = "sum"
    assert numbers.changed() == [("kind of the model", "mean", "sum")]


def test_another_mode_and_parameters_that_are_frozen_later_are_told_at_once() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    numbers = FrozenNumbers(model, None)
    model[1].eval()
    model[0].bias.requires_grad_(False)
    assert numbers.changed() == [("training of 1", True, False), ("requires_grad of 0.bias", True, False)]
    model.train()
    assert numbers.changed() == []
    model.eval()
    assert numbers.changed() == [("training of the model and 1 more modules", True, False)]
    assert numbers.changed() == []


def test_a_model_with_its_own_loss_and_a_loss_that_is_no_function_are_watched_too() -> None:
    assert FrozenNumbers(Net(), None).changed() == []
    assert FrozenNumbers(Net(), nn.MSELoss()).changed() == []


mean = 0.0


def test_methods_are_not_taken_for_variables_and_numbers_may_become_tensors() -> None:
    factor: Any = 2.0

    def loss(output: Tensor, batch: Any) -> Tensor:
        return output.mean() * factor

    numbers = FrozenNumbers(Net(), loss)
    globals()["mean"] = 1.0
    factor = torch.ones(2)
    ((what, before, now),) = numbers.changed()
    assert (what, before) == ("factor of the loss", 2.0)
    assert now is factor
