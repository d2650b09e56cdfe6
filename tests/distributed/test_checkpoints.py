"""Checkpoints on real processes: written by some, taken up by others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distributed.harness import run_case, torchrun

pytestmark = pytest.mark.distributed
RELATIVE = 1e-9


def test_training_goes_on_in_new_processes_under_the_same_and_another_plan(tmp_path: Path) -> None:
    whole = run_case("checkpoints.train_and_save", 3, str(tmp_path))

    same = run_case("checkpoints.resume", 3, str(tmp_path), "three", "dropout")
    for rank, result in enumerate(same):
        assert result["step"] == 3
        assert result["losses"] == whole[rank]["dropout"]["losses"][3:]
        assert result["state"] == whole[rank]["dropout"]["state"]
        assert set(result["adam_steps"]) == {6}
        assert result["rates"] == whole[rank]["dropout"]["rates"]

    for plan, num_processes in (("replicas", 4), ("one", 1)):
        for result in run_case("checkpoints.resume", num_processes, str(tmp_path), plan, "plain"):
            check_close(result, whole[0]["alone"])


def check_close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["step"] == 3
    assert set(found["adam_steps"]) == {6}
    assert set(found["rates"]) <= {0.0025, 0.005}
    np.testing.assert_allclose(found["losses"], expected["losses"][3:], rtol=RELATIVE)
    assert found["state"].keys() == expected["state"].keys()
    for name, tensor in found["state"].items():
        np.testing.assert_allclose(tensor, expected["state"][name], rtol=RELATIVE, atol=1e-15)


def test_after_a_rank_died_while_saving_the_older_checkpoint_is_used(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    worker = ["-m", "tests.distributed.worker", "checkpoints.die_while_saving", str(tmp_path), str(folder)]
    assert torchrun(2, worker).returncode != 0
    assert (folder / "latest").read_text() == "step-00000001\n"
    assert len(list((folder / "step-00000002.draft").glob("*.safetensors"))) == 2

    results = run_case("checkpoints.resume_after_death", 2, str(folder))
    assert [result["step"] for result in results] == [1, 1]
    assert results[0]["files"] == ["latest", "lock", "step-00000001"]
    assert "saved a checkpoint of step 2, which is removed; the newest whole one is of step 1" in results[0]["said"][0]
