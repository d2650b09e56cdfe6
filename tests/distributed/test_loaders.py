"""Loaders of different lengths end in an error that says so, on real processes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.forked import JobServer

pytestmark = pytest.mark.distributed

ENDS = {
    "save": "rank 0 begins a mini-batch and rank 1 a checkpoint",
    "gather": "rank 0 begins a mini-batch and rank 1 a gathering",
    "evaluate": "rank 0 begins a mini-batch and rank 1 an evaluation",
    "leave": "rank 1 left the job after step 3 while others go on; every rank needs as many steps",
    "train": "rank 0 is at batch 4 of epoch 1 and rank 1 at batch 1 of epoch 2: their loaders have different numbers",
}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Run all jobs at once, and return what each of them writes."""
    server = JobServer()
    folders: dict[str, Path] = {}
    for then in (*ENDS, "refused"):
        folders[then] = folder = tmp_path_factory.mktemp(then)
        if then == "refused":
            server.start(folder, 2, "tests.distributed.loaders:refused")
        elif then == "train":
            server.start(folder, 2, "tests.distributed.loaders:train", folder=str(folder))
        else:
            kind = "gloo" if then == "save" else "ordered"
            saved = str(folder / "saved")
            server.start(folder, 2, "tests.distributed.loaders:loop", folder=saved, then=then, transport=kind)
    ended = {then: server.wait(folder, limit_s=40.0) for then, folder in folders.items()}
    assert all(any(end.codes) and not end.left_over for end in ended.values()), ended
    yield {then: end.output for then, end in ended.items()}
    server.close()


def test_a_mean_over_other_tokens_is_refused_with_the_ways_out(outputs: dict[str, str]) -> None:
    told = (
        r"rank 1 failed at task 1F0 .* \d of 12 targets of a micro-batch differ from ignore_index=-100, and 12 should"
    )
    assert re.search(told, outputs["refused"])
    assert "or use reduction='sum' and divide by a constant" in outputs["refused"]


@pytest.mark.parametrize("then", ENDS)
def test_a_shorter_loader_ends_in_an_error(outputs: dict[str, str], then: str) -> None:
    assert ENDS[then] in outputs[then], outputs[then]
