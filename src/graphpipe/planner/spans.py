"""Sums over all runs of a line of items: what a stage made of consecutive items holds, receives and sends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple

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

    @staticmethod
    def of(table: OperatorTable, units: tuple[tuple[int, ...], ...]) -> Line:
        """Return the line of these items: searches of several micro-batch sizes share it."""
        if units not in table.lines:
            table.lines[units] = Line(table, units)
        found: Line = table.lines[units]
        return found

    def tables(self, setting: Setting, sums: Sums, sizes: Sequence[int]) -> StageTables:
        """Return what every run takes as a stage. Empty runs are not possible.

        Args:
            setting: The search.
            sums: The sums over every run.
            sizes: The local sizes that they are for.
        """
        found = stage_tables(setting, sums, sizes)
        n = len(self.units)
        empty = np.arange(n + 1)[:, None] >= np.arange(n + 1)[None, :]
        found.seconds[:, empty] = np.inf
        found.levels[:, empty] = 0
        return found

    def sums(self, setting: Setting, sizes: Sequence[int]) -> Sums:
        """Return the sums over every run, for local sizes `sizes`."""
        batch = self.table.problem.mini_batch_size
        share = 1.0 / setting.num_micro_batches
        alone = self.table.is_batch_wise
        profile = self.table.problem.profile
        whole, by_size = profile.at(batch), [profile.at(size) for size in sizes]
        mixes = bool(alone.any())

        def each_size(name: str) -> list[Floats]:
            if not mixes:
                return [getattr(costs, name) for costs in by_size]
            # What mixes samples runs once, and a micro-batch has its share of it.
            return [np.where(alone, getattr(whole, name) * share, getattr(costs, name)) for costs in by_size]

        count = len(sizes)
        of_operator = np.stack(
            [
                self.table.state_bytes,
                self.table.trainable_bytes,
                self.table.has_backward,
                alone,
                np.where(alone, whole.forward_s * share, 0.0),
                np.where(alone, whole.saved_bytes * share, 0.0),
                *each_size("forward_s"),
                *each_size("backward_s"),
                *each_size("saved_bytes"),
            ]
        )
        runs = self._runs(of_operator)
        state, trainable, has_backward, is_batch_wise, once_s, once_bytes = runs[: -3 * count]
        size = setting.micro_batch_size
        return Sums(
            state_bytes=state,
            trainable_bytes=trainable,
            has_backward=has_backward > 0,
            is_batch_wise=is_batch_wise > 0,
            received_bytes=self._received.num_bytes(size),
            returned_bytes=self._returned.num_bytes(size),
            sent_bytes=self._sent.num_bytes(size),
            awaited_bytes=self._awaited.num_bytes(size),
            forward_s=runs[-3 * count : -2 * count],
            backward_s=runs[-2 * count : -count],
            saved_bytes=runs[-count:],
            batch_wise_forward_s=once_s,
            batch_wise_saved_bytes=once_bytes,
        )

    def _runs(self, of_operator: Floats) -> Floats:
        """Return ``[..., n + 1, n + 1]`` the sums over all runs of what is known of operators."""
        order = [operator for unit in self.units for operator in unit]
        starts = np.cumsum([0, *(len(unit) for unit in self.units[:-1])])
        by_item = np.add.reduceat(of_operator[:, order], starts, axis=1)
        before = np.zeros((len(of_operator), len(self.units) + 1))
        np.cumsum(by_item, axis=1, out=before[:, 1:])
        found = before[:, None, :] - before[:, :, None]
        return np.maximum(found, 0.0, out=found)

    @cached_property
    def _received(self) -> _Bytes:
        """What every run reads that is made elsewhere."""
        return self._reads(self._values)

    @cached_property
    def _returned(self) -> _Bytes:
        """The part of it whose gradient goes back."""
        return self._reads(self._with_gradient)

    @cached_property
    def _sent(self) -> _Bytes:
        """What every run makes that is read elsewhere."""
        return self._makes(self._values)

    @cached_property
    def _awaited(self) -> _Bytes:
        """The part of it whose gradient comes back."""
        return self._makes(self._with_gradient)

    def _reads(self, values: Iterable[_Passed]) -> _Bytes:
        found = _Bytes(len(self.units))
        for value, made, read, _ in values:
            start = made + 1
            for at in read:
                # Runs that start after the producer, or after the reader before this one, and include this reader.
                found.add(value, 1, start, at + 1, at + 1)
                start = at + 1
        return found

    def _makes(self, values: Iterable[_Passed]) -> _Bytes:
        found = _Bytes(len(self.units))
        for value, made, _, last in values:
            if made >= 0 and last > made:
                # Runs that include the producer and stop before the last reader.
                found.add(value, 1, 0, made + 1, made + 1)
                found.add(value, -1, 0, made + 1, last + 1)
        return found

    @cached_property
    def _values(self) -> list[_Passed]:
        """The values that touch the line."""
        place, n = self.place, len(self.units)
        found = []
        for value, made, read in self.table.values_of(place):
            at = place.get(made, -1)
            readers = {place.get(c, n) for c in read}
            inside = sorted(readers - {at, n})
            found.append(_Passed(value, at, inside, max(readers, default=-1)))
        return found

    @cached_property
    def _with_gradient(self) -> list[_Passed]:
        return [each for each in self._values if each.value.carries_gradient]


class _Passed(NamedTuple):
    """A value that touches a line.

    Attributes:
        value: The value.
        made: The item that makes it; -1: outside.
        read: The other items that read it, ascending.
        last: The last item that reads it; one more than the last item of the line: outside.
    """

    value: Value
    made: int
    read: list[int]
    last: int


class _Bytes:
    """Bytes over all runs, for one sample and for the part that does not depend on the batch.

    They are collected as differences along both axes.
    """

    def __init__(self, num_items: int) -> None:
        self.shape = (num_items + 1, num_items + 2)
        self.where: list[int] = []
        self.per_sample: list[int] = []
        self.fixed: list[int] = []

    def add(self, value: Value, sign: int, start: int, end: int, first_stop: int) -> None:
        """Count a value for all runs that start at `start` or later, before `end`, and stop at `first_stop` or later.

        Args:
            value: The value.
            sign: -1 to count it no longer.
            start: The first start.
            end: After the last start.
            first_stop: The first stop.
        """
        width = self.shape[1]
        self.where += (start * width + first_stop, end * width + first_stop)
        self.per_sample += (sign * value.bytes_per_sample, -sign * value.bytes_per_sample)
        self.fixed += (sign * value.fixed_bytes, -sign * value.fixed_bytes)

    def num_bytes(self, num_samples: int) -> Floats:
        """Return ``[n + 1, n + 1]`` the bytes for a number of samples."""
        per_sample, fixed = self._runs
        found: Floats = per_sample * num_samples
        return found if fixed is None else np.add(found, fixed, out=found)

    @cached_property
    def _runs(self) -> tuple[Floats, Floats | None]:
        """``[n + 1, n + 1]`` the bytes for one sample, and the part that does not depend on the batch, if any."""
        where = np.array(self.where, dtype=np.int64)

        def runs(each: Sequence[int]) -> Floats:
            steps = np.bincount(where, np.array(each, dtype=np.float64), self.shape[0] * self.shape[1])
            found: Floats = steps.astype(np.float64).reshape(self.shape)[:, :-1].cumsum(axis=0).cumsum(axis=1)
            return np.maximum(found, 0.0, out=found)

        return runs(self.per_sample), runs(self.fixed) if any(self.fixed) else None


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
