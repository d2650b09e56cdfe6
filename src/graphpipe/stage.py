"""Stages, and the stage graph: what is left of the computation graph when each stage is seen as one node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

from graphpipe.errors import StrategyError
from graphpipe.fields import Field
from graphpipe.graph import ComputationGraph, Value


class Recompute(StrEnum):
    """What a stage keeps of its forward pass until the backward pass."""

    NONE = "none"
    """All saved activations."""
    ALL = "all"
    """Only what it received; the forward pass runs again before the backward pass."""


class StageOrder(StrEnum):
    """What a stage waits for."""

    GRAPH = "graph"
    """Only the stages whose values it reads: branches run at the same time."""
    CHAIN = "chain"
    """The stage before it in the list as well, as in a sequential pipeline, whether or not it reads from it."""


# The value that a stage of a chain passes to the next one when nothing else passes: one byte a sample, of no content.
TURN = "turn:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A part of the model that runs as a whole.

    Attributes:
        operators: Names, in the graph's order.
        micro_batch_size: Samples a micro-batch. The last micro-batch may be smaller.
        devices: The devices that hold a replica each. A micro-batch is split over them.
        recompute: What it keeps until the backward pass.
    """

    operators: tuple[str, ...]
    micro_batch_size: int
    devices: tuple[int, ...]
    recompute: Recompute = Recompute.NONE

    @property
    def num_replicas(self) -> int:
        """The data-parallel copies of the stage."""
        return len(self.devices)


@dataclass(frozen=True, slots=True)
class SampleRange:
    """The samples ``start <= i < stop`` of a mini-batch."""

    start: int
    stop: int

    def __len__(self) -> int:
        return max(0, self.stop - self.start)

    def __and__(self, other: SampleRange) -> SampleRange:
        return SampleRange(max(self.start, other.start), min(self.stop, other.stop))


@dataclass(frozen=True, slots=True)
class StageEdge:
    """What passes from one stage to another.

    Attributes:
        source: The position of the producing stage.
        target: The position of the consuming stage.
        values: The tensors, in the graph's order.
        returned: Those of them whose gradient comes back: a value carries one, and both stages have a backward pass.
    """

    source: int
    target: int
    values: tuple[Value, ...]
    returned: tuple[Value, ...]


@dataclass(frozen=True, eq=False)
class StageGraph:
    """The stages of a model in a topological order, with the edges that follow from the computation graph.

    Conditions C1 to C3 of the GraphPipe paper are checked: the stages partition the operators (C1), the edges between
    stages are those of their operators and form no cycle (C2), and each stage has devices of its own, except that
    stages may share one whole set of devices (C3, where we leave the paper: a device may hold several stages).

    Attributes:
        graph: The computation graph.
        stages: In a topological order.
        mini_batch_size: Samples a step.
        order: What a stage waits for.

    Raises:
        StrategyError: A condition does not hold; the message says which, and for what.
    """

    graph: ComputationGraph
    stages: tuple[Stage, ...]
    mini_batch_size: int
    order: StageOrder = StageOrder.GRAPH

    def __post_init__(self) -> None:
        if self.mini_batch_size < 1:
            raise StrategyError(f"a mini-batch has at least one sample, got {self.mini_batch_size}")
        self._check_partition()
        for edge in self.edges:
            if edge.source > edge.target:
                raise StrategyError(
                    f"stage {edge.target} feeds stage {edge.source} and comes after it: the stages are not in a "
                    f"topological order, or stage {edge.target} is not convex "
                    f"(value {edge.values[0].name!r})"
                )
        for x, stage in enumerate(self.stages):
            self._check_stage(x, stage)
        self._check_devices()

    def _check_partition(self) -> None:
        owner: dict[str, int] = {}
        for x, stage in enumerate(self.stages):
            if not stage.operators:
                raise StrategyError(f"stage {x} has no operators")
            for name in stage.operators:
                if name not in self.graph.index:
                    raise StrategyError(f"stage {x} holds operator {name!r}, which {self.graph.name!r} lacks")
                if name in owner:
                    raise StrategyError(f"operator {name!r} is in stage {owner[name]} and in stage {x}")
                owner[name] = x
        for operator in self.graph.operators:
            if operator.name not in owner:
                raise StrategyError(f"operator {operator.name!r} is in no stage")

    def _check_stage(self, x: int, stage: Stage) -> None:
        if not 1 <= stage.micro_batch_size <= self.mini_batch_size:
            raise StrategyError(
                f"stage {x} takes {stage.micro_batch_size} samples at a time; the mini-batch has {self.mini_batch_size}"
            )
        if not stage.devices or len(set(stage.devices)) != len(stage.devices):
            raise StrategyError(f"stage {x} is on devices {list(stage.devices)}; it needs one or more different ones")
        if stage.num_replicas > stage.micro_batch_size:
            raise StrategyError(
                f"stage {x} splits {stage.micro_batch_size} samples over {stage.num_replicas} replicas; "
                "raise its micro-batch size or use fewer replicas"
            )
        coupled = [name for name in stage.operators if self.graph.operators[self.graph.index[name]].is_batch_wise]
        if coupled and (stage.micro_batch_size != self.mini_batch_size or stage.num_replicas != 1):
            raise StrategyError(
                f"stage {x} holds {coupled[0]!r}, which mixes the samples of a mini-batch, so it must take all "
                f"{self.mini_batch_size} samples at once on one device; it takes {stage.micro_batch_size} on "
                f"{stage.num_replicas}"
            )

    def _check_devices(self) -> None:
        holder: dict[int, tuple[int, ...]] = {}
        for x, stage in enumerate(self.stages):
            for device in stage.devices:
                if holder.setdefault(device, stage.devices) != stage.devices:
                    raise StrategyError(
                        f"stage {x} is on devices {list(stage.devices)}, and device {device} also holds a stage on "
                        f"devices {list(holder[device])}; stages share all of their devices or none"
                    )

    @cached_property
    def stage_of(self) -> Mapping[str, int]:
        """The position of the stage of each operator."""
        return {name: x for x, stage in enumerate(self.stages) for name in stage.operators}

    @cached_property
    def edges(self) -> tuple[StageEdge, ...]:
        """What passes between stages, sorted by (source, target)."""
        found: dict[tuple[int, int], list[Value]] = {}
        for value in self.graph.values:
            source = self.stage_of[value.producer]
            for target in sorted({self.stage_of[c] for c in value.consumers} - {source}):
                found.setdefault((source, target), []).append(value)
        if self.order is StageOrder.CHAIN:
            for x in range(len(self.stages) - 1):
                before, after = self.stages[x].operators[-1], self.stages[x + 1].operators[0]
                found.setdefault((x, x + 1), []).append(turn(x, before, after))
        edges = []
        for (u, v), values in sorted(found.items()):
            both = self.has_backward[u] and self.has_backward[v]
            returned = tuple(value for value in values if both and value.carries_gradient)
            edges.append(StageEdge(u, v, tuple(values), returned))
        return tuple(edges)

    @cached_property
    def incoming(self) -> tuple[tuple[StageEdge, ...], ...]:
        """For each stage, the edges into it by ascending source."""
        return tuple(tuple(e for e in self.edges if e.target == x) for x in range(len(self.stages)))

    @cached_property
    def outgoing(self) -> tuple[tuple[StageEdge, ...], ...]:
        """For each stage, the edges out of it by ascending target."""
        return tuple(tuple(e for e in self.edges if e.source == x) for x in range(len(self.stages)))

    @cached_property
    def has_backward(self) -> tuple[bool, ...]:
        """For each stage, whether a gradient flows through it."""
        return tuple(
            any(self.graph.operators[self.graph.index[name]].has_backward for name in stage.operators)
            for stage in self.stages
        )

    @cached_property
    def operator_positions(self) -> tuple[tuple[int, ...], ...]:
        """For each stage, the positions of its operators in the graph."""
        return tuple(tuple(self.graph.index[name] for name in stage.operators) for stage in self.stages)

    @cached_property
    def devices(self) -> tuple[int, ...]:
        """All devices that hold a stage, ascending."""
        return tuple(sorted({d for stage in self.stages for d in stage.devices}))

    @cached_property
    def depth(self) -> int:
        """The stages on the longest path."""
        longest = [1] * len(self.stages)
        for edge in sorted(self.edges, key=lambda e: e.target):
            longest[edge.target] = max(longest[edge.target], longest[edge.source] + 1)
        return max(longest)

    def num_micro_batches(self, x: int) -> int:
        """Return how many micro-batches stage `x` takes, the smaller last one included."""
        return -(-self.mini_batch_size // self.stages[x].micro_batch_size)

    def micro_batch(self, x: int, m: int) -> SampleRange:
        """Return the samples of micro-batch `m` of stage `x`, over all of its replicas."""
        size = self.stages[x].micro_batch_size
        return SampleRange(m * size, min((m + 1) * size, self.mini_batch_size))

    def replica_samples(self, x: int, m: int, replica: int) -> SampleRange:
        """Return the part of micro-batch `m` of stage `x` that one replica takes. It may be empty for the last one."""
        whole = self.micro_batch(x, m)
        count, replicas = len(whole), self.stages[x].num_replicas
        return SampleRange(whole.start + count * replica // replicas, whole.start + count * (replica + 1) // replicas)

    def replicas_holding(self, x: int, m: int, samples: SampleRange) -> range:
        """Return the replicas whose part of micro-batch `m` of stage `x` has some of `samples`.

        Args:
            x: The stage.
            m: The micro-batch; it holds some of the samples.
            samples: The samples.
        """
        whole, replicas = self.micro_batch(x, m), self.stages[x].num_replicas
        shared = whole & samples
        # Sample s of n is the last one that replica i can have when (s + 1) r <= n (i + 1).
        first, last = ((s + 1 - whole.start) * replicas - 1 for s in (shared.start, shared.stop - 1))
        return range(first // len(whole), last // len(whole) + 1)

    def local_size(self, x: int) -> int:
        """Return the most samples that one replica of stage `x` takes at a time."""
        stage = self.stages[x]
        return -(-min(stage.micro_batch_size, self.mini_batch_size) // stage.num_replicas)


def turn(x: int, producer: str, consumer: str) -> Value:
    """Return what tells stage ``x + 1`` of a chain that it is its turn, and stage ``x`` on the way back."""
    return Value(name=f"{TURN}{x}", producer=producer, consumers=(consumer,), bytes_per_sample=1)


def stages_to_json(stages: Sequence[Stage]) -> list[dict[str, Any]]:
    """Return stages as plain data."""
    return [
        {
            "operators": list(stage.operators),
            "micro_batch_size": stage.micro_batch_size,
            "devices": list(stage.devices),
            "recompute": stage.recompute.value,
        }
        for stage in stages
    ]


def stages_from_json(data: object) -> tuple[Stage, ...]:
    """Return the stages that `stages_to_json` wrote.

    Raises:
        FieldError: A field is missing or not valid.
    """
    return tuple(
        Stage(
            operators=field["operators"].texts(),
            micro_batch_size=field["micro_batch_size"].integer(1),
            devices=tuple(device.integer() for device in field["devices"].elements()),
            recompute=field["recompute"].choice(Recompute),
        )
        for field in Field(data, "<the stages>").elements()
    )
