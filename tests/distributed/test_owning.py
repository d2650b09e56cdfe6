"""Ranks make the parameters of their own stages only, and train as one process with all of them."""

from __future__ import annotations

import pytest

from tests.distributed.harness import run_case

pytestmark = pytest.mark.distributed


def test_each_rank_holds_its_own_parameters_and_training_is_that_of_one_process() -> None:
    results = run_case("owning.train", 3)
    text, head = ["text.bias", "text.weight"], ["head.weight", "join.bias", "join.weight"]
    image = [f"image.{n}" for n in ("0.bias", "0.weight", "2.bias", "2.weight")]
    statistics = ["bias", "num_batches_tracked", "running_mean", "running_var", "weight"]
    for result in results[:2]:
        assert result["with_memory"] == ["head.weight", *text, "words.weight"]  # tied: two names of one tensor
    assert results[2]["with_memory"] == sorted([*head, *image, *(f"image.1.{n}" for n in statistics), "words.weight"])
    for result in results:
        assert "parameters of 'TiedTowers' are on the meta device" in result["refused"]
        assert "init=graphpipe.FromSeed(0)" in result["refused"]
        assert set(result["own"]) < set(result["all"])
        assert result["gathered"] == result["all"]
        assert result["loss"] < 1e-9
        assert result["parameter"] < 1e-9


def test_ranks_with_different_seeds_are_refused() -> None:
    for result in run_case("owning.train", 3, "disagreeing"):
        assert "ranks 0 and 1 were given different values for 'words.weight'" in result["error"]
