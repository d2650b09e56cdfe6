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
        wrong, random = result["messages"]
        assert "does not give what one process gives on the first batch: the gradient of '" in wrong
        assert "differs by 5.0e-01 of its size, allowed 1e-09" in wrong
        assert "'Normalised' draws random numbers, as dropout does" in random
