"""Checkpoints on real processes: written by some, taken up by others."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graphpipe.runtime.process_transports import TransportKind
from tests.distributed.harness import run_case, torchrun

pytestmark = pytest.mark.distributed
RELATIVE = 1e-9


@dataclass
class Saved:
    """Checkpoints of step 3, and what six steps without a break gave on each rank."""

    folder: str
    whole: list[dict[str, Any]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = str(tmp_path_factory.mktemp("checkpoints"))
    return Saved(folder, run_case("checkpoints.train_and_save", 3, folder))


def test_training_goes_on_in_new_processes_to_the_last_bit(saved: Saved) -> None:
    for rank, result in enumerate(run_case("checkpoints.resume", 3, saved.folder, "three", "dropout")):
        expected = saved.whole[rank]["dropout"]
        assert result["step"] == 3
        assert result["losses"] == expected["losses"][3:]
        assert result["state"] == expected["state"]
        assert set(result["adam_steps"]) == {6}
        assert result["rates"] == expected["rates"]


@pytest.mark.parametrize(("plan", "num_processes"), [("replicas", 4), ("one", 1)])
def test_training_goes_on_under_another_plan(saved: Saved, plan: str, num_processes: int) -> None:
    # C33: other cuts, micro-batch sizes and replicas, with learning rates by name that most ranks have no part of.
    for result in run_case("checkpoints.resume", num_processes, saved.folder, plan, "plain"):
        check_close(result, saved.whole[0]["alone"])


def test_what_replicas_share_is_taken_up_by_one_and_the_other_way_round(saved: Saved) -> None:
    for result in run_case("checkpoints.resume", 4, saved.folder, "sharded", "plain", "shared"):
        check_close(result, saved.whole[0]["alone"])
    for result in run_case("checkpoints.resume", 1, saved.folder, "one", "shared"):
        check_close(result, saved.whole[0]["alone"], step=4)


def check_close(found: dict[str, Any], expected: dict[str, Any], step: int = 3) -> None:
    assert found["step"] == step
    assert set(found["adam_steps"]) == {6}
    assert set(found["rates"]) <= {0.0025, 0.005}
    np.testing.assert_allclose(found["losses"], expected["losses"][step:], rtol=RELATIVE)
    assert found["state"].keys() == expected["state"].keys()
    for name, tensor in found["state"].items():
        np.testing.assert_allclose(tensor, expected["state"][name], rtol=RELATIVE, atol=1e-15)


def test_after_a_rank_died_while_saving_the_older_checkpoint_is_used(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    worker = [
        "-m",
        "tests.distributed.worker",
        "checkpoints.die_while_saving",
        str(tmp_path),
        TransportKind.GLOO,
        str(folder),
    ]
    assert torchrun(2, worker).returncode != 0
    assert (folder / "latest").read_text() == "step-00000001\n"
    written = {path.name.partition("-model")[0] for path in (folder / "step-00000002.draft").glob("*.safetensors")}
    assert written == {"shard-00001", "shard-00002"}

    results = run_case("checkpoints.resume_after_death", 2, str(folder))
    assert [result["step"] for result in results] == [1, 1]
    assert results[0]["files"] == ["latest", "lock", "step-00000001"]
    assert "saved a checkpoint of step 2, which is removed; the newest whole one is of step 1" in results[0]["said"][0]


def test_a_full_disk_on_one_rank_is_told_on_all_and_training_goes_on(tmp_path: Path) -> None:
    for result in run_case("checkpoints.fill_the_disk", 2, str(tmp_path / "checkpoints")):
        assert "the checkpoint of step 2 could not be saved: rank 1: OSError" in result["said"]
        assert "that of step 1 is still there" in result["said"]
        assert result["files"] == ["latest", "lock", "step-00000001", "step-00000003"]
