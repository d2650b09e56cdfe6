"""The check on the first mini-batch finds wrong gradients, and changes nothing where they are right."""

from __future__ import annotations

import pytest

from tests.distributed.harness import run_case

pytestmark = pytest.mark.distributed


def test_training_goes_on_as_without_the_check() -> None:
    for result in run_case("first_step.leaves_no_trace", 2):
        assert result == {"losses": True, "state": True, "statistics_moved": True, "random_state": True}


def test_the_worst_gradient_is_named_on_every_rank() -> None:
    for result in run_case("first_step.finds_errors", 2):
        for name in ("scaled", "split"):
            assert "does not give what one process gives on the first batch: the gradient of '" in result[name]
        assert "differs by 5.0e-01 of its size, allowed 1e-03: " in result["scaled"]
        assert "differs by 1.0e-07 of its size, allowed 1e-09: " in result["strictly"]
        assert "the gradient of 'b.weight' differs" in result["split"]
        assert ", one process " in result["split"]
        assert "'Normalised' draws random numbers that depend on the micro-batches" in result["noisy, asked"]
        assert result["noisy, unasked"] == ""
        (told,) = result["told"]
        assert told.startswith("the first step is not compared with one process: 'Normalised' draws")


def test_a_scaled_loss_is_compared_as_if_it_were_not() -> None:
    for result in run_case("first_step.undoes_the_scale", 2):
        assert result["right"] == ""
        assert "differs by 1.0e+03 of its size, allowed 5e-02" in result["wrong"]
