"""Models that people have, by the planner's own strategies on real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.capture.zoo import ZOO
from tests.distributed.harness import run_case
from tests.distributed.zoo_cases import strategy_of

pytestmark = pytest.mark.distributed


@pytest.mark.timeout(240)  # transformers alone takes seconds to import in each of the processes
@pytest.mark.parametrize(
    "names",
    [("DLRM", "Two-tower retrieval", "U-Net", "LSTM tagger"), ("CLIP", "GPT-2"), ("T5",), ("LLaVA",), ("Mixtral",)],
    ids=", ".join,
)
def test_planned_models_train_as_one_process(names: tuple[str, ...], tmp_path: Path) -> None:
    for name in names:
        strategy = strategy_of(name)
        assert len(strategy.stages.stages) > 1
        assert {d for stage in strategy.stages.stages for d in stage.devices} == {0, 1, 2}
        strategy.save(tmp_path / f"{name}.json")
    results: list[dict[str, Any]] = run_case("zoo_cases.train_by", 3, str(tmp_path))
    for name in names:
        for result in (r[name] for r in results):
            assert not result["missing"]
            assert result["loss"] < ZOO[name].tolerance
            assert result["gradient"] < ZOO[name].tolerance, result["worst"]
            assert bool(result["statistics"]) == (name == "U-Net")
            assert result["statistic"] < ZOO[name].tolerance
