"""Kinds of models and batches on real processes beside one process, over gloo and by NCCL's rules."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.harness import BOTH, run_case
from tests.distributed.test_cases import RELATIVE, check

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def features() -> list[dict[str, Any]]:
    """Return what each of three ranks found in every case, run in one job over each transport."""
    return run_case("feature_cases.features", 3, kinds=BOTH, limit_s=150)


def test_stages_are_compiled_one_by_one(features: list[dict[str, Any]]) -> None:
    check([result["compiled"] for result in features if "compiled" in result])


@pytest.mark.parametrize("case", ["alone", "replicas", "tied"])
def test_sparse_gradients_are_those_of_a_dense_table(features: list[dict[str, Any]], case: str) -> None:
    for result in (r["sparse"][case] for r in features):
        assert result["error"] < RELATIVE
        assert result["copies_equal"]
        assert result["norms"] == pytest.approx(result["expected_norms"], rel=RELATIVE)


def test_gradients_of_tables_stay_sparse_unless_a_dense_one_is_added(features: list[dict[str, Any]]) -> None:
    by_case = {case: [r["sparse"][case]["sparse"] for r in features[:3]] for case in ("alone", "replicas", "tied")}
    assert by_case == {
        "alone": [["table.weight"], ["bag.weight"], []],
        "replicas": [["bag.weight", "table.weight"], ["bag.weight", "table.weight"], []],
        "tied": [["bag.weight"], ["bag.weight"], []],
    }


def test_samples_may_be_along_any_axis_or_none_and_lengths_may_differ(
    features: list[dict[str, Any]],
) -> None:
    for result in (r["other axes"] for r in features):
        assert max(result["errors"].values()) < RELATIVE, result
        # One for sequences of any length, and one for those of length 1.
        assert result["captures"] == [2, 2]


@pytest.mark.parametrize("loss", ["mean", "mean of samples", "ignored", "sum", "auxiliary"])
def test_losses_over_valid_tokens_and_of_several_parts(features: list[dict[str, Any]], loss: str) -> None:
    results = [result["masks"][loss] for result in features]
    check(results)
    # What divides by the tokens of the whole mini-batch takes all of it; what does not takes micro-batches.
    assert all(result["whole"] == (loss in ("mean", "ignored", "auxiliary")) for result in results)
