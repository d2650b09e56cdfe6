"""Optimizers, precision and data on real processes, beside one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.harness import BOTH, run_case

pytestmark = pytest.mark.distributed
RELATIVE = 1e-9


@pytest.fixture(scope="module")
def updates(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return what each of three ranks found in the cases about updates, run in one job."""
    return run_case("training_cases.updates", 3, str(tmp_path_factory.mktemp("updates")), kinds=BOTH)


@pytest.mark.parametrize(
    "case",
    [
        "three and four",
        "replicas",
        "tied",
        "tied on one rank",
        "tied with replicas",
        "groups",
        "groups shared",
        "cyclic",
        "plateau",
        "plateau with copies",
        "accumulation",
        "constants",
        "views",
        "measured",
    ],
)
def test_an_update_is_that_of_one_process(updates: list[dict[str, Any]], case: str) -> None:
    # C05: clipping. C16: an embedding tied to the head, five steps. C18: tables and constants. C20: samples in views.
    for result in (r[case] for r in updates):
        assert result["error"] < RELATIVE
        assert result["copies_equal"]
        assert result["norms"] == updates[0][case]["norms"]
        if result["expected_norms"]:
            assert result["norms"] == pytest.approx(result["expected_norms"], rel=RELATIVE)
        for rates, expected in zip(result["rates"], result["expected_rates"], strict=True):
            assert rates == pytest.approx(expected, rel=RELATIVE)


@pytest.mark.parametrize("case", ["three and four", "replicas"])
def test_clipping_sees_the_gradients_of_all_ranks_once(updates: list[dict[str, Any]], case: str) -> None:
    # C05: gradients of 3 and 4 have norm 5, and both are divided by 5.
    for result in (r[case] for r in updates):
        assert result["norms"] == pytest.approx([5.0], rel=RELATIVE)
        assert result["small_gradients"] == pytest.approx({"a.weight": 0.6, "b.weight": 0.8}, rel=1e-6)


def test_a_rank_may_have_none_of_a_group(updates: list[dict[str, Any]]) -> None:
    assert [r["groups"]["group_sizes"] for r in updates[:3]] == [[2, 2, 0], [1, 0, 1], [1, 1, 0]]
    # Replicas that share the states have a part of each group.
    sizes = [r["cyclic"]["group_sizes"] for r in updates[:3]]
    assert [sum(column) for column in zip(*sizes, strict=True)] == [4, 3, 1]
    assert sizes[2] == [2, 1, 1]


@pytest.mark.parametrize("case", ["groups", "groups shared", "cyclic", "plateau", "plateau with copies"])
def test_learning_rates_change_with_every_step(updates: list[dict[str, Any]], case: str) -> None:
    for result in (r[case] for r in updates):
        assert len(result["rates"]) == 6
        assert len({tuple(rates) for rates in result["rates"]}) > 2


@pytest.mark.parametrize(("case", "copies"), [("two ranks", [1, 1, 1]), ("one rank", [1, 1, 0])])
def test_tied_weights_stay_one_parameter(updates: list[dict[str, Any]], case: str, copies: list[int]) -> None:
    for result in (r["tied and saved"][case] for r in updates):
        assert result["resumed"]
        assert result["copies_equal"]
        assert result["is_tied"]
        assert result["count"] == result["expected_count"]
    # Both uses on one rank are of one tensor.
    assert [r["tied and saved"][case]["copies_here"] for r in updates] == copies * 2


@pytest.fixture(scope="module")
def precision(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return what each of three ranks found in the cases about precision, run in one job."""
    return run_case("training_cases.precision", 3, str(tmp_path_factory.mktemp("precision")), kinds=BOTH)


def test_bfloat16_is_that_of_one_process(precision: list[dict[str, Any]]) -> None:
    for result in (r["bfloat16"] for r in precision):
        assert result["losses"] == precision[0]["bfloat16"]["losses"]
        assert result["losses"] == pytest.approx(result["expected"], rel=1e-2)
        assert result["losses"] != pytest.approx(result["expected"], rel=1e-9)  # micro-batches round elsewhere
        assert result["parameter"] < 1e-2
        assert result["edges"] == ["torch.bfloat16"]


def test_stages_keep_the_autocast_of_the_capture(precision: list[dict[str, Any]]) -> None:
    for result in (r["bfloat16"] for r in precision):
        assert result["same_outside"]
        assert (
            "captured under autocast to bfloat16 on cpu and this step is under autocast to float16" in result["message"]
        )


def test_an_overflow_on_one_rank_skips_the_update_on_all(precision: list[dict[str, Any]]) -> None:
    assert [r["float16"]["finite_here"] for r in precision] == [False, True, True] * 2
    for result in (r["float16"] for r in precision):
        assert result["rows"] == result["expected"]
        assert [skipped for _, skipped in result["rows"]] == [True, True, False, False]
        assert result["unchanged"] == [True, True, False, False]
        assert result["parameter"] < 1e-2
        assert result["resumed"]
        assert result["accumulated"] < 2e-2


def test_evaluation_and_prediction_are_those_of_the_model_in_eval_mode() -> None:
    # C13 and C19: structure, kinds of tensors, modes and gradients, before and between steps.
    results = run_case("training_cases.evaluation", 3, kinds=BOTH)
    for result in results:
        assert max(result["loss"]) < RELATIVE
        assert max(result["output"]) < 1e-6  # complex64 is among the outputs
        assert all(result["structure"] + result["modes"] + result["gradients"])


@pytest.fixture(scope="module")
def data() -> list[dict[str, Any]]:
    """Return what each of three ranks found in the cases about batches and frozen parts, run in one job."""
    return run_case("training_cases.data_and_frozen", 3, kinds=BOTH)


def test_lengths_change_from_step_to_step(data: list[dict[str, Any]]) -> None:
    # C25: the sequence lengths are 5, 9, 3 and 9.
    for result in data:
        assert result["lengths"]["error"] < RELATIVE


def test_a_rank_may_load_only_what_its_stages_read(data: list[dict[str, Any]]) -> None:
    assert [r["partial"]["required"] for r in data] == [["x"], ["keep"], ["weight", "labels"]] * 2
    for result in (r["partial"] for r in data):
        assert max(result["loss"], result["gradient"]) < RELATIVE
        assert result["num_samples"] == 6


def test_a_wrong_batch_ends_in_an_error_on_every_rank(data: list[dict[str, Any]]) -> None:
    for result in (r["mistakes"] for r in data):
        assert "no input `labls`; did you mean `labels`?" in result["misspelt"]
        assert "rank 0 was given a batch of 6 samples and rank 2 one of 5" in result["other count"]
        assert "rank 0 was given a batch of another shape of 'x' than rank 2" in result["other length"]
    assert [r["mistakes"]["missing"] for r in data] == [
        "the batch has no input `x`; it has weight",
        "the batch has no input `keep`; it has weight",
        "the batch has no input `labels`; it has weight",
    ] * 2


def test_a_frozen_stage_sends_nothing_back_and_does_nothing_in_backward(data: list[dict[str, Any]]) -> None:
    for rank, result in enumerate(r["frozen"] for r in data):
        assert result["error"] < RELATIVE
        assert result["unchanged"]
        assert result["backward"] == [1, 2]
        assert result["messages"] == [["BACKWARD", 2, 1], ["FORWARD", 0, 2], ["FORWARD", 1, 2]]
        assert result["has_optimizer"] == (rank % 3 != 0)
        # Nor does it keep anything for one, and the simulator has it the same.
        assert (result["saved_bytes"] == 0) == (rank % 3 == 0)
        assert result["simulated_backward"] == [1, 2]
        assert result["below"]["error"] < RELATIVE
