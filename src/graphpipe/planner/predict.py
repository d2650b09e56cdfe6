"""A quick guess of a plan's iteration time, to tell which plans are worth a simulation.

A stage starts when the first samples have come down to it, works through the mini-batch, waits for its first backward
pass if its in-flight limit leaves it nothing to do meanwhile, waits again if the round trip of what is in flight takes
longer than the work, and is followed by the last backward passes of the stages before it. The guess is the longest such
time over all stages and over all groups of stages that share devices. For balanced chains under 1F1B it is exact:
``(M + d - 1)`` times a stage's share, with twice the transfers of ``d - 1`` hops in ``d`` micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graphpipe.cluster import Link
from graphpipe.cost import CostModel
from graphpipe.graph import Value
from graphpipe.schedule import ModelCosts, Phase, device_groups, in_flight_limits
from graphpipe.stage import StageEdge, StageGraph


@dataclass(frozen=True)
class Prediction:
    """What a plan is guessed to take.

    Attributes:
        iteration_s: Seconds a mini-batch.
        bottleneck_s: Seconds that the busiest device, or its outgoing link, works on a mini-batch, with its reduction
            of gradients.
    """

    iteration_s: float
    bottleneck_s: float


def predict(model: CostModel, stages: StageGraph, k: int = 1) -> Prediction:
    """Return a guess of the iteration time of stages under kFkB, and the load of the busiest device."""
    return _Guess(model, stages, k).prediction()


class _Guess:
    def __init__(self, model: CostModel, stages: StageGraph, k: int) -> None:
        costs = ModelCosts(model, stages)
        indices = range(len(stages.stages))
        self.stages = stages
        self.sizes = [stage.micro_batch_size for stage in stages.stages]
        self.counts = [stages.num_micro_batches(x) for x in indices]
        self.limits = in_flight_limits(stages, k)
        local = [stages.local_size(x) for x in indices]
        self.forward_s = [costs.compute_s(x, Phase.FORWARD, local[x]) for x in indices]
        self.backward_s = [
            costs.compute_s(x, Phase.BACKWARD, local[x]) if stages.has_backward[x] else 0.0 for x in indices
        ]
        self.reduce_s = [
            costs.all_reduce_s(model.parameter_bytes(stages.operator_positions[x])[1], stages.stages[x].devices)
            for x in indices
        ]
        self.delay_s: dict[tuple[int, int], float] = {}
        self.link_s = [0.0 for _ in indices]
        self.passes: dict[tuple[int, int], int] = {}
        for edge in stages.edges:
            a, b = stages.stages[edge.source].devices, stages.stages[edge.target].devices
            samples = min(local[edge.source], local[edge.target])
            num_bytes = sum(value.num_bytes(samples) for value in edge.values)
            link = model.cluster.slowest_link((*a, *b))
            self.passes[edge.source, edge.target] = self._passes(edge)
            self.delay_s[edge.source, edge.target] = 0.0 if a == b else link.transfer_s(num_bytes)
            if a != b:
                self._occupy(edge.source, edge.values, link)
                self._occupy(edge.target, edge.returned, link)

    def _occupy(self, x: int, values: Sequence[Value], link: Link) -> None:
        """Count the bytes that the replicas of a stage send in a mini-batch."""
        stage, count = self.stages.stages[x], self.counts[x]
        num_bytes = sum(value.num_bytes(stage.micro_batch_size) for value in values) / stage.num_replicas
        self.link_s[x] += count * num_bytes / link.bandwidth_bytes_per_s

    def prediction(self) -> Prediction:
        start, finish = self._starts(), self._tails()
        back = self._round_trips()
        longest = busiest = 0.0
        for _, held in device_groups(self.stages):
            load = reduce = link = 0.0
            for x in held:
                own = self.counts[x] * (self.forward_s[x] + self.backward_s[x])
                load += own
                reduce += self.reduce_s[x]
                link += self.link_s[x]
                rounds = min(self.limits[x] // self.sizes[x], self.counts[x])
                waits = max(0.0, back[x] - (rounds - 1) * self.forward_s[x])
                # No more than the limit come back from a round trip.
                trips = self.counts[x] / rounds * (self.forward_s[x] + back[x] + self.backward_s[x])
                longest = max(longest, start[x] + max(own + waits, trips) + max(finish[x], self.reduce_s[x]))
            first, last = min(start[x] for x in held), min(finish[x] for x in held)
            longest = max(longest, first + load + max(last, reduce))
            busiest = max(busiest, max(load, link) + reduce)
        return Prediction(longest, busiest)

    def _passes(self, edge: StageEdge) -> int:
        """Return how many passes of the stage before it a pass of the stage after it waits for."""
        if not any(value.bytes_per_sample for value in edge.values):
            # What does not depend on the batch comes with the first pass.
            return 1
        size = self.sizes[edge.target]
        return min(self.counts[edge.source], -(-size // self.sizes[edge.source]))

    def _starts(self) -> list[float]:
        """Return when each stage starts its first forward pass."""
        found = [0.0] * len(self.sizes)
        for edge in sorted(self.stages.edges, key=lambda e: e.source):
            x, y = edge.source, edge.target
            found[y] = max(found[y], found[x] + self.passes[x, y] * self.forward_s[x] + self.delay_s[x, y])
        return found

    def _tails(self) -> list[float]:
        """Return what is left to do in the stages before, once each stage has ended its last backward pass."""
        found = [0.0] * len(self.sizes)
        for edge in sorted(self.stages.edges, key=lambda e: e.source):
            x, y = edge.source, edge.target
            if edge.returned:
                ends = max(found[x], self.reduce_s[x])
                found[y] = max(found[y], ends + self.passes[x, y] * self.backward_s[x] + self.delay_s[x, y])
        return found

    def _round_trips(self) -> list[float]:
        """Return how long after its forward pass each stage may start the first backward pass."""
        found = [0.0] * len(self.sizes)
        for edge in sorted(self.stages.edges, key=lambda e: -e.target):
            x, y = edge.source, edge.target
            if edge.returned:
                through = self.forward_s[y] + found[y] + self.backward_s[y] + 2 * self.delay_s[x, y]
                found[x] = max(found[x], through + (self.passes[x, y] - 1) * self.forward_s[x])
        return found
