"""The processes of a job: how they find each other, and agree before the first step."""

from __future__ import annotations

import datetime
import os

import torch
import torch.distributed as dist

from graphpipe.errors import GraphPipeError, StrategyError
from graphpipe.strategy import Strategy

DEFAULT_TIMEOUT = datetime.timedelta(minutes=5)


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
    if dist.is_initialized():
        return
    if "MASTER_ADDR" not in os.environ or "RANK" not in os.environ:
        if world_size() > 1:
            raise GraphPipeError("start the processes with torchrun, which tells them how to find each other")
        store = torch._C._distributed_c10d.HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timeout)
        return
    dist.init_process_group("gloo", timeout=timeout)


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
