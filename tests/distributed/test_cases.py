"""Losses, gradients and trained parameters equal one process's, on real processes, over gloo and by NCCL's rules."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.harness import BOTH, run_case

pytestmark = pytest.mark.distributed
RELATIVE = 1e-9


def check(results: list[dict[str, Any]]) -> None:
    """Check parity, that all ranks heard the same losses, and that copies of a parameter are the same bits."""
    for result in results:
        assert max(result["loss"], result["gradient"], result["parameter"]) < RELATIVE
        assert result["losses"] == results[0]["losses"]
        assert not result["unexpected_gradients"]
        assert result["copies_equal"]


def check_order(result: dict[str, Any]) -> None:
    """Check that every device ran its tasks in the order of the schedule that the simulator runs."""
    lines = result["order"].splitlines()
    for device in sorted({span[0] for span in result["spans"]}):
        ran = [
            f"{stage}{kind[0].upper()}{m}"
            for d, kind, _, _, stage, m in result["spans"]
            if d == device and kind in ("forward", "backward")
        ]
        assert " ".join(ran) in lines


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    """Return what each of two ranks found in its cases, over both transports."""
    return run_case("on_two", 2, kinds=BOTH)


@pytest.fixture(scope="module")
def three() -> list[dict[str, Any]]:
    """Return what each of three ranks found in its cases, over both transports."""
    return run_case("on_three", 3, kinds=BOTH, limit_s=150)


def of(results: list[dict[str, Any]], case: str) -> list[dict[str, Any]]:
    """Return what the ranks found in one of their cases."""
    return [result[case] for result in results]


def test_unequal_micro_batches_weigh_their_samples(three: list[dict[str, Any]]) -> None:
    results = of(three, "unequal_micro_batches")
    check(results)
    assert results[0]["losses"][0] == pytest.approx(38.5, rel=RELATIVE)
    assert results[0]["gradients"].keys() == {"a.weight", "b.weight", "c.weight"}
    for gradient in results[0]["gradients"].values():
        assert gradient[0][0] == pytest.approx(77, rel=RELATIVE)


@pytest.fixture(scope="module")
def replicas() -> list[dict[str, Any]]:
    """Return what five ranks found in the case of replicas, over both transports."""
    return run_case("replicas", 5, kinds=BOTH)


def test_replicas_reduce_once_a_step_and_stay_equal(replicas: list[dict[str, Any]]) -> None:
    check(replicas)
    for result in replicas:
        assert result["reductions"] == [1, 1, 0, 0, 0]


def test_replicas_share_the_states_of_the_optimizer(tmp_path: Path) -> None:
    results = run_case("shared_optimizer_states", 4, str(tmp_path), kinds=BOTH)
    check(results)
    assert all(result["resumed"] == [True, True] for result in results)
    for kind in range(2):
        updated = [result["updated"] for result in results[4 * kind : 4 * kind + 4]]
        assert all(updated)
        # Every parameter has one state, and every replica about a third of the bytes of its stage.
        assert sorted(name for own in updated for name in own) == sorted(
            f"{layer}.{kind}" for layer in "abcd" for kind in ("bias", "weight")
        )
        assert updated[3] == ["c.bias", "c.weight", "d.bias", "d.weight"]


def test_a_contrastive_loss_is_that_of_the_whole_batch(two: list[dict[str, Any]]) -> None:
    results = of(two, "contrastive_loss_of_one_hot")
    check(results)
    # Over micro-batches of two it would be 0.31326.
    assert results[0]["losses"][0] == pytest.approx(math.log(math.e + 7) - 1, rel=RELATIVE)
    assert results[0]["losses"][0] == pytest.approx(1.27401, abs=1e-5)


def test_a_contrastive_loss_trains_towers_with_replicas(three: list[dict[str, Any]]) -> None:
    check(of(three, "contrastive_loss_trained"))


def test_values_without_gradient_cross_stages(three: list[dict[str, Any]]) -> None:
    check(of(three, "values_without_gradient"))


def test_a_value_whose_gradient_nobody_returns(three: list[dict[str, Any]]) -> None:
    # C10: what is only read detached, and what is not read, trains nothing.
    check(of(three, "edges_without_gradient"))


def test_batch_statistics_are_those_of_the_mini_batch_under_every_plan(three: list[dict[str, Any]]) -> None:
    # C27: the mean of 1 to 8 is 4.5, and a tenth of it goes into the running mean, once.
    results = of(three, "batch_statistics")
    for name, rank_of_norm in (("three", 1), ("replicas", 2), ("recomputed", 1)):
        check([result[name] for result in results])
        for owner in (results[rank_of_norm], results[3 + rank_of_norm]):
            assert owner[name]["mean"] == pytest.approx(0.45, rel=RELATIVE)
            assert owner[name]["batches"] == 1


def test_a_value_reaches_several_later_stages() -> None:
    results = run_case("skips", 4, kinds=BOTH)
    for case in results[0]:
        check([result[case] for result in results])
        check_order(results[0][case])


def test_inputs_used_late_or_never(three: list[dict[str, Any]]) -> None:
    check(of(three, "late_inputs"))


def test_fewer_micro_batches_than_stages() -> None:
    results = run_case("few_micro_batches", 4, kinds=BOTH)
    for case in results[0]:
        check([result[case] for result in results])
        check_order(results[0][case])


def test_batches_of_another_size(two: list[dict[str, Any]]) -> None:
    check(of(two, "other_batch_sizes"))


def test_an_idle_device_hears_the_loss(three: list[dict[str, Any]]) -> None:
    check(of(three, "idle_device"))


def test_spans_of_a_rank_do_not_overlap_and_follow_what_they_need(replicas: list[dict[str, Any]]) -> None:
    result = replicas[0]
    for device in range(5):
        mine = [span for span in result["spans"] if span[0] == device]
        assert mine
        assert all(a[3] <= b[2] for a, b in pairwise(mine))
    # All micro-batches of this chain have the same samples, so a forward pass follows those of the stage before it.
    forwards = {(span[4], span[5], span[0]): span for span in result["spans"] if span[1] == "forward"}
    assert len(forwards) == (2 + 1 + 1 + 1) * 8
    for (stage, m, _), span in forwards.items():
        before = [other for (s, n, _), other in forwards.items() if (s, n) == (stage - 1, m)]
        assert all(other[3] <= span[2] for other in before)
