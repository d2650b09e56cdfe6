"""Sums over all runs of a line of items: what a stage made of consecutive items holds, receives and sends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphpipe.graph import Value
from graphpipe.planner.costs import Setting, StageTables, Sums, stage_tables
from graphpipe.planner.operators import Floats, OperatorTable


class Line:
    """Sets of operators in line, such that every run of them may be a stage.

    Args:
        table: The operators.
        units: ``[n]`` the operators of each item.

    All arrays are ``[n + 1, n + 1]``: entry ``[i, j]`` is about the items ``i <= x < j``.
    """

    def __init__(self, table: OperatorTable, units: Sequence[Sequence[int]]) -> None:
        self.table = table
        self.units = units
        self.place = {operator: at for at, unit in enumerate(units) for operator in unit}

    def tables(self, setting: Setting) -> StageTables:
        """Return what every run takes as a stage. Empty runs are not possible."""
        sizes = sorted({setting.local_size(choice.num_replicas) for choice in setting.choices})
        found = stage_tables(setting, self.sums(setting, sizes), sizes)
        n = len(self.units)
        empty = np.arange(n + 1)[:, None] >= np.arange(n + 1)[None, :]
        return StageTables(np.where(empty, np.inf, found.seconds), np.where(empty, 0, found.levels), found.only_last)

    def sums(self, setting: Setting, sizes: Sequence[int]) -> Sums:
        """Return the sums over every run, for local sizes `sizes`."""
        batch = self.table.problem.mini_batch_size
        share = 1.0 / setting.num_micro_batches
        alone = self.table.is_batch_wise
        profile = self.table.problem.profile
        whole = profile.at(batch)
        by_size = [profile.at(size) for size in sizes]
        size = setting.micro_batch_size
        return Sums(
            state_bytes=self._runs(self.table.state_bytes),
            trainable_bytes=self._runs(self.table.trainable_bytes),
            has_backward=self._runs(self.table.has_backward.astype(np.float64)) > 0,
            is_batch_wise=self._runs(alone.astype(np.float64)) > 0,
            received_bytes=self._received[0].num_bytes(size),
            returned_bytes=self._received[1].num_bytes(size),
            sent_bytes=self._sent[0].num_bytes(size),
            awaited_bytes=self._sent[1].num_bytes(size),
            forward_s=np.stack([self._runs(np.where(alone, whole.forward_s * share, c.forward_s)) for c in by_size]),
            backward_s=np.stack([self._runs(np.where(alone, whole.backward_s * share, c.backward_s)) for c in by_size]),
            saved_bytes=np.stack(
                [self._runs(np.where(alone, whole.saved_bytes * share, c.saved_bytes)) for c in by_size]
            ),
            batch_wise_forward_s=self._runs(np.where(alone, whole.forward_s * share, 0.0)),
            batch_wise_saved_bytes=self._runs(np.where(alone, whole.saved_bytes * share, 0.0)),
        )

    def _runs(self, of_operator: Floats) -> Floats:
        by_item = np.array([of_operator[list(unit)].sum() for unit in self.units])
        before = np.concatenate([[0.0], np.cumsum(by_item)])
        return np.asarray(np.maximum(before[None, :] - before[:, None], 0.0), dtype=np.float64)

    @cached_property
    def _received(self) -> tuple[_Bytes, _Bytes]:
        """What every run reads that is made elsewhere, and the part of it that carries a gradient."""
        n = len(self.units)
        found = (_Bytes(n), _Bytes(n))
        for value, made, read in self._values():
            start = made + 1
            for at in read:
                # Runs that start after the producer, or after the reader before this one, and include this reader.
                for each in found[: 1 + value.carries_gradient]:
                    each.add(value, slice(start, at + 1), at + 1)
                start = at + 1
        return found

    @cached_property
    def _sent(self) -> tuple[_Bytes, _Bytes]:
        """What every run makes that is read elsewhere, and the part of it that carries a gradient."""
        n = len(self.units)
        found = (_Bytes(n), _Bytes(n))
        for value, made, read in self._values(with_readers_outside=True):
            if made < 0 or not read:
                continue
            # Runs that include the producer and stop before the last reader.
            for each in found[: 1 + value.carries_gradient]:
                each.add(value, slice(0, made + 1), made + 1)
                each.remove(value, slice(0, made + 1), read[-1] + 1)
        return found

    def _values(self, *, with_readers_outside: bool = False) -> list[tuple[Value, int, list[int]]]:
        """Return the values that touch the line, the item that makes each (-1: outside) and the items that read it."""
        n = len(self.units)
        found = []
        for value, made, read in self.table.values_of(self.place):
            at = self.place.get(made, -1)
            inside = sorted({self.place[c] for c in read if c in self.place} - {at})
            if with_readers_outside and any(c not in self.place for c in read):
                inside.append(n)
            found.append((value, at, inside))
        return found


class _Bytes:
    """Bytes over all runs, for one sample and for the part that does not depend on the batch.

    Entries are collected as differences along the second axis.
    """

    def __init__(self, num_items: int) -> None:
        shape = (num_items + 1, num_items + 2)
        self.per_sample = np.zeros(shape)
        self.fixed = np.zeros(shape)

    def add(self, value: Value, starts: slice, first_stop: int) -> None:
        """Count a value for all runs from `starts` that stop at `first_stop` or later."""
        self.per_sample[starts, first_stop] += value.bytes_per_sample
        self.fixed[starts, first_stop] += value.fixed_bytes

    def remove(self, value: Value, starts: slice, first_stop: int) -> None:
        """Count a value no longer for all runs from `starts` that stop at `first_stop` or later."""
        self.per_sample[starts, first_stop] -= value.bytes_per_sample
        self.fixed[starts, first_stop] -= value.fixed_bytes

    def num_bytes(self, num_samples: int) -> Floats:
        """Return ``[n + 1, n + 1]`` the bytes for a number of samples."""
        found = np.cumsum(self.per_sample * num_samples + self.fixed, axis=1)[:, :-1]
        return np.asarray(found, dtype=np.float64)


def combine(each: Sequence[Sums], counts: NDArray[np.int64], shared: Sequence[SharedInput]) -> Sums:
    """Return the sums of groups of sets that do not exchange anything.

    Args:
        each: The sets, all of shape ``[]``.
        counts: ``[groups, sets]`` how often a group holds each set.
        shared: What more than one set of a group reads, and receives once.
    """

    def add(name: str) -> Floats:
        stacked = np.stack([getattr(sums, name) for sums in each], axis=-1)
        return np.asarray(stacked @ counts.T, dtype=np.float64)

    found: dict[str, NDArray[Any]] = {f.name: add(f.name) for f in fields(Sums)}
    found["has_backward"] = found["has_backward"] > 0
    found["is_batch_wise"] = found["is_batch_wise"] > 0
    for value in shared:
        readers = counts @ np.array(value.is_read, dtype=np.int64)
        repeated = value.num_bytes * np.maximum(readers - 1, 0)
        found["received_bytes"] -= repeated
        if value.carries_gradient:
            found["returned_bytes"] -= repeated
    return Sums(**found)


@dataclass(frozen=True, slots=True)
class SharedInput:
    """A value from outside that several sets read.

    Attributes:
        num_bytes: Its size for a micro-batch.
        carries_gradient: Whether a gradient goes back.
        is_read: ``[sets]`` whether the set reads it.
    """

    num_bytes: int
    carries_gradient: bool
    is_read: tuple[bool, ...]
