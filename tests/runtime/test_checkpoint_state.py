"""A learning-rate schedule goes on where other ranks, with other parameter groups, have left it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from graphpipe.runtime.checkpoint_state import fit_schedule, parameters_by_group, prepare_optimizer, save_optimizer
from graphpipe.runtime.plain_data import decode, encode

Schedule = Any
NAMES = "abcd"
RATES = {"a": 0.1, "b": 0.2, "c": 0.2, "d": 0.4}


class Decay:
    """A callable object, whose state a schedule saves."""

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.calls = 0

    def __call__(self, epoch: int) -> float:
        self.calls += 1
        return self.factor**epoch


def by_rate(optimizer: torch.optim.Optimizer, scale: float) -> list[float]:
    return [scale * group["initial_rate"] for group in optimizer.param_groups]


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Schedule]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4], 0.5),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 9),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, by_rate(o, 3.0), total_steps=9),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, by_rate(o, 0.5), by_rate(o, 2.0), step_size_up=2),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, [Decay(1 - g["initial_rate"]) for g in o.param_groups]),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, [lambda _: 0.9] * len(o.param_groups)),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, min_lr=by_rate(o, 0.3)),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 4), lr_scheduler.CyclicLR(o, by_rate(o, 0.5), by_rate(o, 2.0), 2)]
    ),
}
# Groups by the parameters that a rank holds: a user's factory makes a group of each rate.
PLANS = {"parts": ("ab", "cd"), "whole": ("abcd",), "crossed": ("da", "bc", "cb")}
# A rank may have none of the parameters of a group that its user makes all the same.
KEEPS_EMPTY = (False, True)


class Rank:
    """One rank's optimizer and schedule."""

    def __init__(
        self, names: str, make: Callable[[torch.optim.Optimizer], Schedule], *, keeps_empty: bool = False
    ) -> None:
        self.parameters = {name: nn.Parameter(torch.ones(2)) for name in names}
        self.names = {id(parameter): name for name, parameter in self.parameters.items()}
        rates = list(dict.fromkeys(RATES[name] for name in (NAMES if keeps_empty else names)))
        groups = [
            {"params": [self.parameters[n] for n in names if RATES[n] == rate], "lr": rate, "initial_rate": rate}
            for rate in rates
        ]
        self.optimizer = torch.optim.SGD(groups, lr=1.0, momentum=0.9)
        self.schedule = make(self.optimizer)

    def step(self, count: int) -> None:
        for _ in range(count):
            for parameter in self.parameters.values():
                parameter.grad = torch.ones(2)
            self.optimizer.step()
            metric = (1.0,) if isinstance(self.schedule, lr_scheduler.ReduceLROnPlateau) else ()
            self.schedule.step(*metric)

    def options(self) -> Mapping[str, Any]:
        """Return the learning rate and the momentum of each parameter."""
        groups = parameters_by_group(self.optimizer, self.names)
        return {
            name: (group["lr"], group["momentum"])
            for group, names in zip(self.optimizer.param_groups, groups, strict=True)
            for name in names
        }


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("saved_under", PLANS)
@pytest.mark.parametrize("keeps_empty", KEEPS_EMPTY)
def test_a_schedule_goes_on_with_other_parameter_groups(
    schedule: str, saved_under: str, plan: str, keeps_empty: bool
) -> None:
    make = SCHEDULES[schedule]
    alone = Rank(NAMES, make)
    before = [Rank(names, make, keeps_empty=keeps_empty) for names in PLANS[saved_under]]
    for rank in (alone, *before):
        rank.step(3)
    tensors: dict[str, Tensor] = {}
    records = [
        json.loads(
            json.dumps(
                {
                    "optimizer": save_optimizer(rank.optimizer, rank.names, tensors),
                    "schedule": encode(rank.schedule.state_dict(), tensors, "schedule"),
                }
            )
        )
        for rank in before
    ]
    after = [Rank(names, make, keeps_empty=keeps_empty) for names in PLANS[plan]]
    for number, rank in enumerate(after):
        ordered = [records[number % len(records)], *records]
        layout = {name: ["float32", *tensor.shape] for name, tensor in tensors.items()}
        prepare_optimizer(rank.optimizer, rank.names, [record["optimizer"] for record in records], layout)
        rank.schedule.load_state_dict(
            fit_schedule(
                rank.schedule.state_dict(),
                parameters_by_group(rank.optimizer, rank.names),
                [decode(record["schedule"], tensors) for record in ordered],
                [[group["parameters"] for group in record["optimizer"]["groups"]] for record in ordered],
            )
        )
    for _ in range(5):
        assert {name: o for rank in after for name, o in rank.options().items()} == alone.options()
        for rank in (alone, *after):
            rank.step(1)
    if schedule == "LambdaLR":
        counts = {function.calls for rank in (alone, *after) for function in rank.schedule.lr_lambdas}
        assert counts == {9}  # Objects go on with their own state.
