"""What a stage costs to the search: seconds a micro-batch and the most samples in flight, for many stages at once.

The search asks about all runs of a line of items at once, so everything here is an array over them. What it assumes is
a little more than what `graphpipe.estimate` finds by playing the program through: the transfer buffers of a stage are
counted at their most, and messages take the link between nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphpipe.cost.collectives import ring_all_reduce_s
from graphpipe.planner.operators import Floats, OperatorTable
from graphpipe.stage import Recompute

Ints = NDArray[np.int64]
# As small as they can be: searches go over millions of them.
Levels = NDArray[np.signedinteger[Any]]

# Buffers of a stage, in micro-batches: receives are posted two passes ahead, and gradients on their way out are awaited
# four passes later (the windows of `graphpipe.program.lower`, and the pass that runs).
RECEIVE_BUFFERS = 2
SEND_BUFFERS = 5


class RecomputePolicy(StrEnum):
    """Where a planner may drop a stage's activations and compute them again."""

    NEVER = "never"
    """Nowhere."""
    IF_NEEDED = "if-needed"
    """Nowhere, unless nothing fits otherwise; then wherever it pays."""
    AUTO = "auto"
    """On any stage, wherever it pays."""


@dataclass(frozen=True, slots=True)
class Choice:
    """How a stage runs.

    Attributes:
        num_replicas: Its devices.
        recompute: What it keeps until the backward pass.
    """

    num_replicas: int
    recompute: Recompute


@dataclass
class Tally:
    """How much a search has done.

    Attributes:
        transitions: Ways to go on that were weighed: a stage, or a way through a block, at one level.
    """

    transitions: int = 0


@dataclass(frozen=True)
class Setting:
    """What one search holds fixed.

    Attributes:
        table: The operators.
        micro_batch_size: Samples a micro-batch.
        num_levels: The levels of in-flight samples that are told apart. A stage at level ``l`` holds ``l`` rounds of
            micro-batches, at the last level the whole mini-batch.
        choices: How a stage may run, by replicas.
        k: Passes in a round.
        tally: What the search has done.
    """

    table: OperatorTable
    micro_batch_size: int
    num_levels: int
    choices: tuple[Choice, ...]
    k: int = 1
    tally: Tally = field(default_factory=Tally, compare=False)

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches in a mini-batch, the smaller last one included."""
        return -(-self.table.problem.mini_batch_size // self.micro_batch_size)

    def above(self, level: int) -> int:
        """Return the level of a stage when the stage after it has `level`."""
        return min(level + 1, self.num_levels)

    def local_size(self, num_replicas: int) -> int:
        """Return the most samples that one replica takes at a time."""
        return -(-self.micro_batch_size // num_replicas)

    @property
    def local_sizes(self) -> list[int]:
        """The most samples that a replica takes at a time, over all choices, ascending."""
        return sorted({self.local_size(choice.num_replicas) for choice in self.choices})


@dataclass(frozen=True)
class Sums:
    """What adds up over the operators of a set, for any number of sets (``[...]``).

    Attributes:
        state_bytes: Parameters, gradients, optimizer state.
        trainable_bytes: Parameters with a gradient.
        has_backward: Whether a gradient flows through any.
        is_batch_wise: Whether any mixes samples.
        received_bytes: What a micro-batch receives from other stages.
        returned_bytes: The part of it whose gradient goes back.
        sent_bytes: What a micro-batch sends to other stages.
        awaited_bytes: The part of it whose gradient comes back.
        forward_s: ``[sizes, ...]`` seconds by local size, a batch-wise operator's share of its one pass included.
        backward_s: ``[sizes, ...]`` likewise.
        saved_bytes: ``[sizes, ...]`` bytes that a micro-batch keeps, likewise.
        batch_wise_forward_s: The share of batch-wise operators in ``forward_s``. They are not recomputed.
        batch_wise_saved_bytes: Their share in ``saved_bytes``.
    """

    state_bytes: Floats
    trainable_bytes: Floats
    has_backward: NDArray[np.bool_]
    is_batch_wise: NDArray[np.bool_]
    received_bytes: Floats
    returned_bytes: Floats
    sent_bytes: Floats
    awaited_bytes: Floats
    forward_s: Floats
    backward_s: Floats
    saved_bytes: Floats
    batch_wise_forward_s: Floats
    batch_wise_saved_bytes: Floats

    def at(self, *where: int) -> Sums:
        """Return the sums of one set."""
        return Sums(**{f.name: getattr(self, f.name)[(..., *where)] for f in fields(self)})


@dataclass(frozen=True)
class StageTables:
    """What stages take, for each choice and any number of stages.

    Attributes:
        seconds: ``[choices, ...]`` seconds a micro-batch of the busiest of a replica's processor and its outgoing link,
            the reduction of gradients spread over the micro-batches. Infinite where a choice is not possible.
        levels: ``[choices, ...]`` the highest level at which the stage fits into memory; 0 where it never does.
        only_last: ``[...]`` whether the stage only runs at the last level: it mixes samples, so it takes the whole
            mini-batch, and everything before it holds that.
    """

    seconds: Floats
    levels: Levels
    only_last: NDArray[np.bool_]

    @cached_property
    def steps(self) -> list[int]:
        """The levels, ascending, at which some stage stops to fit."""
        steps: list[int] = np.flatnonzero(np.bincount(self.levels.ravel())).tolist()
        return steps

    @cached_property
    def mixes(self) -> bool:
        """Whether some stage only runs at the last level."""
        return bool(self.only_last.any())

    def sliced(self, *where: slice) -> StageTables:
        """Return a part of the stages."""
        index: Any = (..., *where)
        return StageTables(self.seconds[index], self.levels[index], self.only_last[index])


def stage_tables(setting: Setting, sums: Sums, sizes: Sequence[int]) -> StageTables:
    """Return seconds and levels of stages from their sums.

    Args:
        setting: The search.
        sums: The stages.
        sizes: What the first axis of the sums by size stands for.
    """
    shape = (len(setting.choices), *sums.is_batch_wise.shape)
    seconds, levels = np.empty(shape), np.empty(shape, dtype=np.min_scalar_type(-setting.num_levels - 1))
    mixes = bool(sums.is_batch_wise.any())
    scratch = [np.empty(shape[1:]) for _ in range(4)]
    for c, choice in enumerate(setting.choices):
        at = sizes.index(setting.local_size(choice.num_replicas))
        _fill_seconds(setting, sums, choice, at, seconds[c], scratch)
        _fill_levels(setting, sums, choice, at, levels[c], scratch)
        if choice.num_replicas > 1 and mixes:
            seconds[c][sums.is_batch_wise] = np.inf
            levels[c][sums.is_batch_wise] = 0
    splits = setting.micro_batch_size < setting.table.problem.mini_batch_size
    return StageTables(seconds, levels, sums.is_batch_wise & splits)


# The tables of a long line are larger than what an allocator keeps, so that every new array would cost more than its
# numbers. The two functions below make do with four of them.


def _fill_seconds(
    setting: Setting, sums: Sums, choice: Choice, at: int, found: Floats, scratch: Sequence[Floats]
) -> None:
    cluster = setting.table.problem.cluster
    replicas = choice.num_replicas
    compute_s, other, *_ = scratch
    np.add(sums.forward_s[at], sums.backward_s[at], out=compute_s)
    if choice.recompute is Recompute.ALL:
        compute_s += np.subtract(sums.forward_s[at], sums.batch_wise_forward_s, out=other)
    slowest = cluster.slowest_link(range(len(cluster)))
    # Transfers overlap with computing, so the busier of processor and link counts.
    np.add(sums.sent_bytes, sums.returned_bytes, out=found)
    found *= 1 / (replicas * slowest.bandwidth_bytes_per_s)
    np.maximum(compute_s, found, out=found)
    if replicas > 1:
        ring = cluster.inside_node if replicas <= cluster.devices_per_node else slowest
        # The time is linear in the bytes, but for nothing it is nothing.
        slope = ring_all_reduce_s(2.0, replicas, ring) - ring_all_reduce_s(1.0, replicas, ring)
        first = ring_all_reduce_s(1.0, replicas, ring) - slope
        count = setting.num_micro_batches
        np.multiply(sums.trainable_bytes, slope / count, out=other)
        other += first / count
        found += np.multiply(other, sums.trainable_bytes > 0, out=other)


def _fill_levels(
    setting: Setting, sums: Sums, choice: Choice, at: int, levels: Levels, scratch: Sequence[Floats]
) -> None:
    replicas, count, last, k = choice.num_replicas, setting.num_micro_batches, setting.num_levels, setting.k
    saved = sums.saved_bytes[at]
    received, free, each, other = scratch
    np.divide(sums.received_bytes, replicas, out=received)
    np.subtract(setting.table.memory_bytes, sums.state_bytes, out=free)
    free -= np.multiply(sums.returned_bytes, min(count, SEND_BUFFERS) / replicas, out=other)
    free -= np.multiply(sums.awaited_bytes, min(count, RECEIVE_BUFFERS) / replicas, out=other)
    if choice.recompute is Recompute.ALL:
        free -= np.subtract(saved, sums.batch_wise_saved_bytes, out=other)
        saved = sums.batch_wise_saved_bytes
    ahead = np.multiply(received, RECEIVE_BUFFERS, out=other)
    is_ahead = free >= ahead
    np.subtract(free, ahead, out=other)
    np.add(saved, received, out=each)
    fits_whole = free >= count * each
    each *= k
    other /= np.maximum(each, 1e-9, out=each)
    levels[...] = np.clip(other, 0, last - 1, out=other)
    if (last - 1) * k + RECEIVE_BUFFERS > count:
        # There are no more receives than micro-batches, which the line above doesn't know.
        np.multiply(saved, (last - 1) * k, out=each)
        each += np.multiply(received, count, out=other)
        levels[(free >= each) & is_ahead] = last - 1
    levels[fits_whole] = last
    if not sums.has_backward.all():
        # Nothing waits for a backward pass that never comes.
        passes_on = free - saved >= min(count, RECEIVE_BUFFERS + 1) * received
        levels[...] = np.where(sums.has_backward, levels, np.where(passes_on, last, 0))
