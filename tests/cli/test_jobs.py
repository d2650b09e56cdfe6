from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch import nn

from graphpipe.api import Job
from graphpipe.cli.jobs import Batches, tile


def test_samples_are_repeated_and_what_is_not_per_sample_is_kept() -> None:
    batch = {
        "x": torch.arange(4),
        "y": [torch.arange(8).reshape(4, 2)],
        "table": torch.zeros(3, 2),
        "flag": True,
        "late": torch.arange(8).reshape(2, 4),
        "indices": torch.arange(4),
    }
    free_sizes = {"indices": {0: "lookups"}}
    job = Job(model=nn.Linear(1, 1), example_batch=batch, free_sizes=free_sizes, sample_axes={"late": 1})
    found = tile(job, 6)
    assert found["x"].tolist() == [0, 1, 2, 3, 0, 1]
    assert found["y"][0].shape == (6, 2)
    assert found["table"].shape == (3, 2)
    assert found["flag"] is True
    assert found["indices"].tolist() == [0, 1, 2, 3]
    assert found["late"].tolist() == [[0, 1, 2, 3, 0, 1], [4, 5, 6, 7, 4, 5]]
    assert tile(job, 2)["x"].tolist() == [0, 1]


class Loader:
    """Three batches an epoch; its state is taken up by the next iteration."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Iterator[int]:
        while self.next < 3:
            self.next += 1
            yield self.next
        self.next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


@pytest.mark.parametrize("done", range(7))
def test_a_loader_with_a_state_goes_on_from_it(done: int) -> None:
    job = Job(model=nn.Linear(1, 1), example_batch=None, batches=Loader)
    first, second = Batches(job, 1), Batches(job, 1)
    stream = iter(first)
    whole = [next(stream) for _ in range(done)]
    assert first.is_stateful
    second.load_state_dict(first.state_dict())
    assert whole + list(islice(second, 7 - done)) == [1, 2, 3, 1, 2, 3, 1]


def test_batches_come_again_and_none_at_all_ends() -> None:
    def job(batches: Any) -> Job:
        return Job(model=nn.Linear(1, 1), example_batch=torch.ones(2), batches=batches)

    assert list(islice(Batches(job(lambda: iter([1, 2])), 1), 5)) == [1, 2, 1, 2, 1]
    assert list(Batches(job(list), 1)) == []
    assert next(iter(Batches(job(None), 3))).shape == (3,)
    assert not Batches(job(lambda: [1]), 1).is_stateful
