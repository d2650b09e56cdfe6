"""The numbers that tables and pictures show, each computed once."""

from __future__ import annotations

from dataclasses import dataclass

from graphpipe.cost import MemoryParts
from graphpipe.estimate import Estimate, format_bytes
from graphpipe.report.labels import device_name, devices_label, stage_label
from graphpipe.report.units import format_number, format_seconds, format_share
from graphpipe.schedule import Phase
from graphpipe.stage import Recompute, StageEdge
from graphpipe.strategy import Strategy
from graphpipe.trace import SpanKind, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFacts:
    """What there is to say about one stage.

    Attributes:
        stage: Its number.
        label: What it holds.
        num_operators: How many operators it holds.
        devices: The names of its devices.
        num_replicas: Its data-parallel copies.
        micro_batch_size: Samples a micro-batch, over all replicas.
        num_micro_batches: Micro-batches a mini-batch.
        parameter_bytes: The parameters of one replica.
        num_in_flight: The most samples, over all replicas, between their forward and backward passes.
        forward_s: Seconds of the forward pass of one replica over its part of a micro-batch.
        backward_s: Seconds of the backward pass, recomputation included.
        recompute: What it keeps until the backward pass.
    """

    stage: int
    label: str
    num_operators: int
    devices: str
    num_replicas: int
    micro_batch_size: int
    num_micro_batches: int
    parameter_bytes: int
    num_in_flight: int
    forward_s: float
    backward_s: float
    recompute: Recompute


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """What there is to say about one device.

    Attributes:
        device: Its number.
        name: What the cluster calls it.
        stages: The stages that it holds.
        busy_share: The share of the iteration in forward and backward passes.
        memory: The predicted peak by what it holds, without the workspace margin.
        peak_bytes: The predicted peak with the workspace margin.
        available_bytes: What a process may use.
    """

    device: int
    name: str
    stages: tuple[int, ...]
    busy_share: float
    memory: MemoryParts
    peak_bytes: float
    available_bytes: int

    @property
    def idle_share(self) -> float:
        """The share of the iteration outside forward and backward passes."""
        return 1 - self.busy_share


def stage_facts(strategy: Strategy) -> tuple[StageFacts, ...]:
    """Return the facts of every stage."""
    stages, model = strategy.stages, strategy.cost_model
    in_flight = most_in_flight(strategy)
    return tuple(
        StageFacts(
            stage=x,
            label=stage_label(stages, x),
            num_operators=len(stage.operators),
            devices=devices_label(strategy.cluster, stage.devices),
            num_replicas=stage.num_replicas,
            micro_batch_size=stage.micro_batch_size,
            num_micro_batches=stages.num_micro_batches(x),
            parameter_bytes=model.parameter_bytes(stages.operator_positions[x])[0],
            num_in_flight=in_flight[x],
            forward_s=strategy.costs.compute_s(x, Phase.FORWARD, stages.local_size(x)),
            backward_s=strategy.costs.compute_s(x, Phase.BACKWARD, stages.local_size(x))
            if stages.has_backward[x]
            else 0.0,
            recompute=stage.recompute,
        )
        for x, stage in enumerate(stages.stages)
    )


def most_in_flight(strategy: Strategy) -> tuple[int, ...]:
    """Return, for each stage, the most samples that its schedule has between forward and backward passes.

    A stage without a backward pass lets go of its samples at once, so for it this is one micro-batch.
    """
    stages = strategy.stages
    now = [0] * len(stages.stages)
    most = [0] * len(stages.stages)
    for order in strategy.schedule.orders:
        for task in order.tasks:
            x = task.stage
            samples = len(stages.micro_batch(x, task.micro_batch))
            if task.phase is Phase.BACKWARD:
                now[x] -= samples
                continue
            now[x] += samples
            most[x] = max(most[x], now[x])
            if not stages.has_backward[x]:
                now[x] -= samples
    return tuple(most)


def stages_on(strategy: Strategy, device: int) -> tuple[int, ...]:
    """Return the stages that a device holds."""
    return tuple(x for x, stage in enumerate(strategy.stages.stages) if device in stage.devices)


def device_facts(strategy: Strategy, estimate: Estimate) -> tuple[DeviceFacts, ...]:
    """Return the facts of every device of the cluster."""
    return tuple(
        DeviceFacts(
            device=d,
            name=device_name(strategy.cluster, d),
            stages=stages_on(strategy, d),
            busy_share=1 - estimate.idle_share(d),
            memory=estimate.memory[d],
            peak_bytes=estimate.peak_bytes[d],
            available_bytes=device.memory_bytes,
        )
        for d, device in enumerate(strategy.cluster.devices)
    )


def measured_pass_s(trace: Trace, x: int, kind: SpanKind) -> float | None:
    """Return the mean seconds of a stage's passes of one kind, or None where the trace has none."""
    found = [span.duration_s for span in trace.spans if span.stage == x and span.kind is kind]
    return sum(found) / len(found) if found else None


def edge_bytes(strategy: Strategy, edge: StageEdge) -> int:
    """Return the bytes that pass along an edge for one micro-batch of the producing stage."""
    samples = strategy.stages.stages[edge.source].micro_batch_size
    return sum(value.num_bytes(samples) for value in edge.values)


def edge_is_local(strategy: Strategy, edge: StageEdge) -> bool:
    """Return whether both stages of an edge are on the same devices, so that values are handed over in place."""
    stages = strategy.stages.stages
    return stages[edge.source].devices == stages[edge.target].devices


def summary(strategy: Strategy, estimate: Estimate, measured: Trace | None = None) -> tuple[tuple[str, str], ...]:
    """Return the headline figures as pairs of name and text."""
    stages = strategy.stages
    used = stages.devices
    idle = sum(estimate.idle_share(d) for d in used) / len(used)
    found = [
        ("predicted iteration", format_seconds(estimate.iteration_s)),
        ("predicted throughput", f"{format_number(estimate.samples_per_s)} samples/s"),
    ]
    if measured is not None and measured.makespan_s:
        found.append(("measured iteration", format_seconds(measured.makespan_s)))
        if estimate.iteration_s:
            found.append(("measured / predicted", f"{measured.makespan_s / estimate.iteration_s:.2f} ×"))
    fullest = max(device_facts(strategy, estimate), key=lambda facts: facts.peak_bytes / facts.available_bytes)
    found += [
        ("mini-batch", f"{strategy.mini_batch_size} samples"),
        ("stages", _stages_in_words(len(stages.stages), stages.depth)),
        ("devices", f"{len(used)} of {len(strategy.cluster)}"),
        ("mean idle time", format_share(idle)),
        ("fullest device", f"{format_bytes(fullest.peak_bytes)} of {format_bytes(fullest.available_bytes)}"),
        ("planner", strategy.planner),
        ("optimizer", strategy.optimizer.name),
    ]
    return tuple(found)


def _stages_in_words(count: int, depth: int) -> str:
    if count == 1:
        return "1"
    return f"{count} in sequence" if depth == count else f"{count}, at most {depth} in sequence"
