"""How the processes of a job find each other."""

from __future__ import annotations

import datetime
import threading

import pytest
import torch

from graphpipe.errors import GraphPipeError
from graphpipe.runtime.process_group import _unused_part

SHORT = datetime.timedelta(seconds=0.3)
LONG = datetime.timedelta(seconds=30)


def make_store() -> torch._C._distributed_c10d.Store:
    return torch._C._distributed_c10d.HashStore()


def test_ranks_that_do_not_come_are_named() -> None:
    store = make_store()
    with pytest.raises(GraphPipeError, match=r"rank 0 has waited 0\.3 s for ranks 1, 2 to come; .* raise the timeout"):
        _unused_part(store, 0, 3, SHORT)
    # What they have left before a restart does not stand for them.
    store.set("graphpipe/word/1", "old")
    store.set("graphpipe/word/2", "old")
    with pytest.raises(GraphPipeError, match="for ranks 1, 2 to come"):
        _unused_part(store, 0, 3, SHORT)
    with pytest.raises(GraphPipeError, match=r"rank 1 has waited .* for the others to come"):
        _unused_part(store, 1, 3, SHORT)


def test_all_ranks_find_the_same_part_of_the_store_also_after_others() -> None:
    store = make_store()

    def join(rank: int, found: dict[int, torch._C._distributed_c10d.Store]) -> None:
        found[rank] = _unused_part(store, rank, 3, LONG)
        found[rank].set(f"rank-{rank}", "here")

    for attempt in range(2):
        found: dict[int, torch._C._distributed_c10d.Store] = {}
        threads = [threading.Thread(target=join, args=(rank, found)) for rank in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(part.check([f"rank-{rank}" for rank in range(3)]) for part in found.values())
        assert not found[0].check([f"attempt-{attempt - 1}"])
        found[0].set(f"attempt-{attempt}", "")
