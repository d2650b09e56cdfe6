"""Rows of numbers that every rank shows to all others, in as few hops as there can be."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

# More rounds than are ever under way at once. gloo keeps some memory for every tag that it has seen.
_NUM_TAGS = 16


class Rows:
    """Shows all ranks a row of each, by way of the first: two hops, however many ranks there are.

    gloo sums and gathers in a ring, and each hop of that has a thread to wake: on one machine with 16 processes a sum
    takes ten times as long.

    Args:
        width: The numbers of a row.
        timeout: After this long a wait raises.
    """

    def __init__(self, width: int, timeout: datetime.timedelta) -> None:
        self.width = width
        self._group = dist.new_group(list(range(dist.get_world_size())), timeout=timeout, backend="gloo")
        self._num_begun = 0

    def begin(self) -> Round:
        """Let the rows of the others come. All ranks must begin and finish the same rounds in the same order."""
        self._num_begun += 1
        return Round(self._group, self._num_begun % _NUM_TAGS, self.width)


class Round:
    """One exchange, whose receives are posted: what others send by now is here by the time it is asked for.

    Args:
        group: All ranks.
        tag: Of the messages, another one than in rounds that are not finished.
        width: The numbers of a row.
    """

    def __init__(self, group: dist.ProcessGroup, tag: int, width: int) -> None:
        self._group = group
        self._tag = tag
        self._rank, count = dist.get_rank(), dist.get_world_size()
        self._table = torch.zeros((count, width), dtype=torch.int64)
        sources = range(1, count) if self._rank == 0 else ()
        self._receiving = [group.recv([self._table[source]], source, tag) for source in sources]
        if self._rank:
            self._receiving = [group.recv([self._table], 0, tag)]

    def finish(self, row: Sequence[int]) -> Tensor:
        """Return int64 ``[ranks, width]`` the rows of all ranks.

        Args:
            row: This rank's; what is missing of the width is 0.
        """
        own = torch.zeros(self._table.shape[1], dtype=torch.int64)
        own[: len(row)] = torch.tensor(row, dtype=torch.int64)
        targets: Sequence[int] = (0,)
        if self._rank == 0:
            self._wait()
            self._table[0] = own
            own, targets = self._table, range(1, len(self._table))
        sending = [self._group.send([own], target, self._tag) for target in targets]
        if self._rank:
            self._wait()
        for work in sending:
            work.wait()
        return self._table

    def _wait(self) -> None:
        for work in self._receiving:
            work.wait()
