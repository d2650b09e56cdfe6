"""The scale of the loss follows torch's GradScaler."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from graphpipe.errors import GraphPipeError
from graphpipe.runtime.loss_scale import LossScaler, LossScaling, check_scalable
from graphpipe.runtime.update import Update

OPTIONS = LossScaling(initial_scale=8.0, growth_interval=2)


def test_the_scale_grows_and_falls_as_in_torch() -> None:
    mine = LossScaler(OPTIONS)
    theirs = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scales = []
    for overflowed in (False, False, True, False, True, False, False, False, False):
        theirs.scale(torch.zeros(1))
        parameter.grad = torch.tensor([math.inf if overflowed else 1.0])
        theirs.step(optimizer)
        theirs.update()
        mine.updated(overflowed=overflowed)
        scales.append(mine.scale)
        assert mine.scale == theirs.get_scale()
    assert scales == [8, 16, 8, 8, 4, 4, 8, 8, 16]


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_an_update_with_an_overflow_is_skipped(bad: float) -> None:
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scaler = LossScaler(OPTIONS)
    update = Update(
        {"p": parameter}, {"p"}, lambda number: number, optimizer=optimizer, lr_scheduler=schedule, loss_scaler=scaler
    )
    parameter.grad = torch.tensor([bad])
    assert update.apply().is_skipped
    assert (parameter.item(), schedule.last_epoch, scaler.scale) == (1.0, 0, 4.0)
    parameter.grad = torch.tensor([0.5])
    assert not update.apply().is_skipped
    assert (parameter.item(), schedule.last_epoch, scaler.scale) == (0.5, 1, 4.0)


def test_a_scaler_goes_on_from_its_state() -> None:
    first, second = LossScaler(OPTIONS), LossScaler(OPTIONS)
    first.updated(overflowed=True)
    first.updated(overflowed=False)
    second.load_state_dict(first.state_dict())
    for scaler in (first, second):
        scaler.updated(overflowed=False)
    assert first.scale == second.scale == 8.0


def test_numbers_out_of_range_and_float16_parameters_are_refused() -> None:
    for name, value in (("initial_scale", 0), ("growth_factor", 0.5), ("backoff_factor", 1.0), ("growth_interval", 0)):
        with pytest.raises(ValueError, match=f"{name} must be .*, got {value}"):
            LossScaling(**{name: value})
    with pytest.raises(GraphPipeError, match="parameter 'w' is float16"):
        check_scalable({"w": nn.Parameter(torch.zeros(1, dtype=torch.float16))})
