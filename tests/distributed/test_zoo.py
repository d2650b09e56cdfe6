"""Models that people have, by the planner's own strategies on real processes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.capture.zoo import ZOO
from tests.distributed.harness import run_case

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(
    "names",
    [("DLRM", "Two-tower retrieval", "U-Net"), ("CLIP", "T5"), ("LLaVA", "Mixtral")],
    ids=", ".join,
)
def test_planned_models_train_as_one_process(names: tuple[str, ...]) -> None:
    results: list[dict[str, Any]] = run_case("zoo_cases.planned", 3, *names)
    for name in names:
        for result in (r[name] for r in results):
            assert result["num_stages"] > 1
            assert result["devices"] == [0, 1, 2]
            assert not result["missing"]
            assert result["loss"] < ZOO[name].tolerance
            assert result["gradient"] < ZOO[name].tolerance, result["worst"]
