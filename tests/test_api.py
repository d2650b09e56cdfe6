from __future__ import annotations

import math

import pytest
import torch

import graphpipe as gp
from graphpipe.api import Verification, profile_sizes
from graphpipe.runtime.comparison import gradient_error


def test_a_verification_holds_only_within_its_tolerance() -> None:
    good = Verification(1.0, 1.0 + 1e-12, {"a": 1e-12, "b": 3e-12}, 1e-9)
    assert good.holds
    assert good.worst == ("b", 3e-12)
    assert not Verification(1.0, 1.001, {"a": 0.0}, 1e-9).holds
    assert not Verification(1.0, 1.0, {"a": 1e-8}, 1e-9).holds
    assert not Verification(1.0, 1.0, {"a": math.inf}, 1e-9).holds
    assert Verification(math.nan, 1.0, {}, 1e-9).loss_error == math.inf


def test_a_gradient_is_compared_on_its_own_scale_or_on_the_floor() -> None:
    expected = torch.tensor([2.0, -4.0])
    assert gradient_error(expected + torch.tensor([0.0, 0.4]), expected, 0.0) == pytest.approx(0.1, rel=1e-6)
    # Zero but for rounding: on the scale of the other gradients.
    assert gradient_error(torch.tensor([2e-9]), torch.tensor([1e-9]), 1.0) < 1e-8
    assert gradient_error(None, expected, 0.0) == math.inf
    assert gradient_error(torch.tensor([math.nan, -4.0]), expected, 0.0) == math.inf
    assert gradient_error(None, torch.zeros(2), 0.0) == 0.0
    assert gradient_error(torch.zeros(2), None, 0.0) == 0.0


def test_every_public_name_is_there() -> None:
    for name in gp.__all__:
        assert callable(getattr(gp, name)), name


def test_the_package_of_captures_is_their_function_too() -> None:
    captured = gp.capture(torch.nn.Sequential(torch.nn.Linear(2, 1)), torch.rand(2, 2), loss_fn=lambda y, _: y.mean())
    assert isinstance(captured, gp.CapturedModel)


def test_a_plan_is_made_with_the_sizes_that_are_free() -> None:
    with pytest.raises(gp.CaptureError, match="there is no input `y`, whose size is to be free"):
        gp.plan(torch.nn.Linear(2, 1), (torch.zeros(4, 2),), mini_batch_size=4, free_sizes={"y": {1: "length"}})


def test_a_profile_has_powers_of_two_and_what_was_asked_for() -> None:
    assert profile_sizes(96, (24, 48)) == (1, 2, 4, 8, 16, 24, 32, 48, 64, 96)
    assert profile_sizes(1) == (1,)
