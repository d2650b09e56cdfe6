"""Kinds of models and batches on real processes beside one process, over gloo and by NCCL's rules."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.harness import BOTH, run_case
from tests.distributed.test_cases import check

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def features() -> list[dict[str, Any]]:
    """Return what each of three ranks found in every case, run in one job over each transport."""
    return run_case("feature_cases.features", 3, kinds=BOTH)


def test_stages_are_compiled_one_by_one(features: list[dict[str, Any]]) -> None:
    check([result["compiled"] for result in features if "compiled" in result])
