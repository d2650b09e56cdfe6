"""The processes of a job: how they find each other, and agree before the first step."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import secrets
import time

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from graphpipe.errors import GraphPipeError, StrategyError
from graphpipe.strategy import Strategy

DEFAULT_TIMEOUT = datetime.timedelta(minutes=5)
# What outlives the processes where torchrun starts them again; none without torchrun.
_launchers_store: Store | None = None


def world_size() -> int:
    """Return the number of processes of the job: what torchrun says, or 1."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """Return this process's rank: what torchrun says, or 0."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", "0"))


def join(strategy: Strategy, timeout: datetime.timedelta = DEFAULT_TIMEOUT) -> None:
    """Join the job's processes, unless that has been done.

    Raises:
        StrategyError: The strategy is for another number of processes. Every process sees this before it connects.
        GraphPipeError: The process was not started by torchrun.
    """
    strategy.check_world_size(world_size())
    connect(timeout)


def connect(timeout: datetime.timedelta = DEFAULT_TIMEOUT) -> None:
    """Connect the job's processes, unless that has been done.

    Raises:
        GraphPipeError: The process was not started by torchrun.
    """
    if dist.is_initialized():
        return
    if "MASTER_ADDR" not in os.environ or "RANK" not in os.environ:
        if world_size() > 1:
            raise GraphPipeError("start the processes with torchrun, which tells them how to find each other")
        alone = torch._C._distributed_c10d.HashStore()
        dist.init_process_group("gloo", store=alone, rank=0, world_size=1, timeout=timeout)
        return
    store, mine, size = next(rendezvous("env://", timeout=timeout))
    global _launchers_store  # noqa: PLW0603
    _launchers_store = store
    while isinstance(_launchers_store, PrefixStore):  # torch gives every start a part of its own.
        _launchers_store = _launchers_store.underlying_store
    store = _unused_part(store, mine, size, timeout) if size > 1 else store
    dist.init_process_group("gloo", store=store, rank=mine, world_size=size, timeout=timeout)


def _unused_part(store: Store, mine: int, size: int, timeout: datetime.timedelta) -> Store:
    """Return a part of the store that no processes before these have used.

    When torchrun starts the processes of a job again, they find in the store what those before have left, such as the
    addresses of listeners that are gone. So the ranks agree on a name of their own first. Every one leaves a word that
    it has just made up; rank 0 makes a name of all words, and again until every rank has found its own word in it.

    Raises:
        GraphPipeError: The others have not come in time.
    """
    store = PrefixStore("graphpipe", store)
    word = secrets.token_hex(8)
    store.set(f"word/{mine}", word)
    until_s = time.monotonic() + timeout.total_seconds()
    missing: list[int] = []
    while time.monotonic() < until_s:
        missing = [other for other in range(size) if not store.check([f"word/{other}"])]
        if missing or (mine and not store.check(["words"])):
            pass
        elif mine == 0:
            words = [store.get(f"word/{other}").decode() for other in range(size)]
            name = hashlib.sha256(" ".join(words).encode()).hexdigest()
            store.set("words", json.dumps(words))
            missing = [other for other in range(1, size) if not store.check([f"{name}/found/{other}"])]
            if not missing:
                store.set(f"{name}/go", "")
                return PrefixStore(name, store)
        else:
            words = json.loads(store.get("words"))
            name = hashlib.sha256(" ".join(words).encode()).hexdigest()
            if len(words) == size and words[mine] == word:
                store.set(f"{name}/found/{mine}", "")
                if store.check([f"{name}/go"]):
                    return PrefixStore(name, store)
        time.sleep(0.02)
    whom = f"ranks {', '.join(map(str, missing[:8]))}" if missing else "the others"
    raise GraphPipeError(
        f"rank {mine} has waited {timeout.total_seconds():g} s for {whom} to come; see what holds them, or raise the "
        "timeout if they need longer to build and capture the model"
    )


def is_done(what: str) -> bool:
    """Return whether `note_done` was called for this, by these processes or by those that torchrun started before them.

    All ranks must call this.
    """
    answer = [_launchers_store is not None and rank() == 0 and _launchers_store.check([f"graphpipe/done/{what}"])]
    dist.broadcast_object_list(answer, src=0)
    return bool(answer[0])


def note_done(what: str) -> None:
    """Take note of something for this job and its restarts."""
    if _launchers_store is not None and rank() == 0:
        _launchers_store.set(f"graphpipe/done/{what}", "1")


def check_agreement(what: str, digest: str, way_out: str) -> None:
    """Check that every process has the same of something, by its digest of hexadecimal digits.

    Raises:
        StrategyError: One has not.
    """
    mine = torch.tensor(list(bytes.fromhex(digest)), dtype=torch.int64)
    theirs = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(theirs, mine)
    for other, found in enumerate(theirs):
        if not torch.equal(found, theirs[0]):
            raise StrategyError(f"ranks 0 and {other} have different {what}; {way_out} on every rank")
