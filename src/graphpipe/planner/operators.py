"""The operators of a problem as arrays, as the search sums them up."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphpipe.estimate import WORKSPACE_MARGIN
from graphpipe.graph import Value
from graphpipe.planner.base import PlanningProblem

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class OperatorTable:
    """The operators of a problem as arrays, in the graph's order."""

    problem: PlanningProblem

    @property
    def num_devices(self) -> int:
        """The devices of the cluster."""
        return len(self.problem.cluster)

    @cached_property
    def lines(self) -> dict[tuple[tuple[int, ...], ...], Any]:
        """What `graphpipe.planner.spans.Line.of` has made of these operators, by the items of the line."""
        return {}

    @cached_property
    def memory_bytes(self) -> float:
        """What the smallest device has for stages, without the workspace margin."""
        return min(device.memory_bytes for device in self.problem.cluster.devices) / (1 + WORKSPACE_MARGIN)

    @cached_property
    def trainable_bytes(self) -> Floats:
        """``[operators]`` bytes of parameters with a gradient."""
        return np.array([o.trainable_bytes for o in self.problem.graph.operators], dtype=np.float64)

    @cached_property
    def state_bytes(self) -> Floats:
        """``[operators]`` bytes of parameters, gradients and optimizer state.

        A parameter that two operators read counts for both, also where one stage holds both.
        """
        all_bytes = np.array([o.parameter_bytes for o in self.problem.graph.operators], dtype=np.float64)
        each = 1 + self.problem.optimizer.state_bytes_per_parameter_byte
        return all_bytes + self.trainable_bytes * each

    @cached_property
    def is_batch_wise(self) -> NDArray[np.bool_]:
        """``[operators]`` whether the operator mixes samples."""
        return np.array([o.is_batch_wise for o in self.problem.graph.operators], dtype=np.bool_)

    @cached_property
    def has_backward(self) -> NDArray[np.bool_]:
        """``[operators]`` whether a gradient flows through it."""
        return np.array([o.has_backward for o in self.problem.graph.operators], dtype=np.bool_)

    @cached_property
    def work(self) -> Floats:
        """``[operators]`` the least seconds a sample of both passes, over all sizes that a replica may take.

        Costs are linear between the sizes of the profile, so the least share is at one of them, or at an end.
        """
        found = [seconds / size for size, seconds in self._pass_s.items()]
        whole = self.seconds(self.problem.mini_batch_size).sum(axis=0) / self.problem.mini_batch_size
        return np.asarray(np.where(self.is_batch_wise, whole, np.min(found, axis=0)), dtype=np.float64)

    @cached_property
    def least_pass_s(self) -> Floats:
        """``[operators]`` the least seconds of one forward and backward pass, whatever the size."""
        found = list(self._pass_s.values())
        whole = self.seconds(self.problem.mini_batch_size).sum(axis=0)
        return np.asarray(np.where(self.is_batch_wise, whole, np.min(found, axis=0)), dtype=np.float64)

    @cached_property
    def _pass_s(self) -> dict[int, Floats]:
        """By size ``[operators]`` the seconds of both passes, for all sizes between which costs are linear."""
        batch = self.problem.mini_batch_size
        sizes = sorted({size for size in self.problem.profile.sizes if size < batch} | {1, batch})
        return {size: self.seconds(size).sum(axis=0) for size in sizes}

    def seconds(self, size: int) -> Floats:
        """Return ``[2, operators]`` the seconds of the forward and the backward pass over `size` samples."""
        costs = self.problem.profile.at(size)
        return np.stack([costs.forward_s, costs.backward_s])

    @cached_property
    def _values(self) -> tuple[tuple[Value, int, tuple[int, ...]], ...]:
        index = self.problem.graph.index
        return tuple((v, index[v.producer], tuple(index[c] for c in v.consumers)) for v in self.problem.graph.values)

    @cached_property
    def _values_by_operator(self) -> tuple[tuple[int, ...], ...]:
        found: list[list[int]] = [[] for _ in self.problem.graph.operators]
        for at, (_, made, read) in enumerate(self._values):
            for operator in {made, *read}:
                found[operator].append(at)
        return tuple(map(tuple, found))

    def values_of(self, operators: Iterable[int]) -> list[tuple[Value, int, tuple[int, ...]]]:
        """Return the values that some operators make or read, with the positions of producer and consumers."""
        found = {at for operator in operators for at in self._values_by_operator[operator]}
        return [self._values[at] for at in sorted(found)]

    @cached_property
    def _traffic(self) -> tuple[list[int], list[int]]:
        index = self.problem.graph.index
        read = [0] * len(index)
        made = [0] * len(index)
        for value in self.problem.graph.values:
            made[index[value.producer]] += value.num_bytes(1)
            for consumer in value.consumers:
                read[index[consumer]] += value.num_bytes(1)
        return read, made

    def kinds(self, tolerance: float | None) -> list[int]:
        """Return ``[operators]`` a number that equal operators share: those with equal costs, traffic and parameters.

        Args:
            tolerance: Costs that differ by less are usually equal; by default almost exactly.
        """
        profile = self.problem.profile
        tables = np.concatenate([profile.forward_s, profile.backward_s, profile.saved_bytes])
        step = np.log1p(tolerance or 1e-6)
        with np.errstate(divide="ignore"):
            rounded = np.where(tables > 0, np.round(np.log(np.maximum(tables, 1e-300)) / step), -1e9)
        read, made = self._traffic
        keys = [
            (costs.tobytes(), o.parameter_bytes, o.trainable_bytes, o.is_batch_wise, o.has_backward, *traffic)
            for o, costs, *traffic in zip(self.problem.graph.operators, rounded.T, read, made, strict=True)
        ]
        numbers: dict[tuple[object, ...], int] = {}
        return [numbers.setdefault(key, len(numbers)) for key in keys]
