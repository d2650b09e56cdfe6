"""What a task, a message and a reduction take, as the scheduler and the simulator ask for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from graphpipe.cluster import Link
from graphpipe.cost import CostModel
from graphpipe.cost.collectives import ring_all_reduce_s
from graphpipe.schedule.task import Phase
from graphpipe.stage import Recompute, StageGraph


class TaskCosts(Protocol):
    """Seconds of everything that a program does."""

    def compute_s(self, stage: int, phase: Phase, num_samples: int) -> float:
        """Return the seconds of one pass of one replica of a stage over `num_samples` samples."""
        ...

    def link(self, source: int, target: int) -> Link | None:
        """Return the link between two devices, or None where messages are free."""
        ...

    def all_reduce_s(self, num_bytes: float, devices: Sequence[int]) -> float:
        """Return the seconds to sum `num_bytes` of gradients over `devices`."""
        ...


@dataclass(frozen=True)
class ModelCosts:
    """The costs of a stage graph under a cost model."""

    model: CostModel
    stages: StageGraph
    _known: dict[tuple[int, Phase, int], float] = field(default_factory=dict, repr=False, compare=False)

    def compute_s(self, stage: int, phase: Phase, num_samples: int) -> float:
        """Return the seconds of one pass; a backward pass of a recomputing stage includes a forward pass."""
        key = (stage, phase, num_samples)
        if key not in self._known:
            operators = self.stages.operator_positions[stage]
            seconds = 0.0
            recomputes = self.stages.stages[stage].recompute is Recompute.ALL
            if phase is Phase.FORWARD or recomputes:
                seconds += self.model.forward_s(operators, num_samples)
            if phase is Phase.BACKWARD:
                seconds += self.model.backward_s(operators, num_samples)
            self._known[key] = seconds
        return self._known[key]

    def link(self, source: int, target: int) -> Link | None:
        """Return the cluster's link."""
        return self.model.cluster.link(source, target)

    def all_reduce_s(self, num_bytes: float, devices: Sequence[int]) -> float:
        """Return the seconds of a ring over the slowest link among the devices."""
        return ring_all_reduce_s(num_bytes, len(devices), self.model.cluster.slowest_link(devices))


@dataclass(frozen=True, slots=True)
class UniformCosts:
    """Every task takes the same time a pass, or a time a sample; messages and reductions are free. For tests and talks.

    Attributes:
        forward_s: Seconds of a forward pass.
        backward_s: Seconds of a backward pass.
        forward_s_per_sample: Seconds added for each sample.
        backward_s_per_sample: Seconds added for each sample.
    """

    forward_s: float = 1.0
    backward_s: float = 1.0
    forward_s_per_sample: float = 0.0
    backward_s_per_sample: float = 0.0

    def compute_s(self, stage: int, phase: Phase, num_samples: int) -> float:
        """Return the seconds of the pass, whatever the stage."""
        if phase is Phase.FORWARD:
            return self.forward_s + self.forward_s_per_sample * num_samples
        return self.backward_s + self.backward_s_per_sample * num_samples

    def link(self, source: int, target: int) -> Link | None:
        """Return None: messages are free."""
        return None

    def all_reduce_s(self, num_bytes: float, devices: Sequence[int]) -> float:
        """Return 0."""
        return 0.0
