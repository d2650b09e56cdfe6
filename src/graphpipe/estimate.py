"""The one yardstick: seconds an iteration and peak memory of a strategy, whoever planned it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from graphpipe.cost import CostModel, MemoryParts
from graphpipe.errors import PlanningError
from graphpipe.program import AwaitSend, Compute, Message, PostReceive, Program, Send, lower
from graphpipe.schedule import Phase, Task
from graphpipe.simulator import simulate
from graphpipe.stage import Recompute
from graphpipe.strategy import Strategy
from graphpipe.trace import Trace

# What an allocator and the libraries of a device add to what we count: kernels' workspaces and fragmentation.
WORKSPACE_MARGIN = 0.03


@dataclass(frozen=True)
class Estimate:
    """What a strategy costs, by simulation of its program.

    Attributes:
        trace: What happens when.
        memory: ``[devices]`` the peak memory of each device by what it holds.
        mini_batch_size: Samples an iteration.
    """

    trace: Trace
    memory: tuple[MemoryParts, ...]
    mini_batch_size: int

    @property
    def iteration_s(self) -> float:
        """Seconds a mini-batch."""
        return self.trace.makespan_s

    @property
    def samples_per_s(self) -> float:
        """The throughput."""
        return self.mini_batch_size / self.iteration_s if self.iteration_s else float("inf")

    @property
    def peak_bytes(self) -> tuple[float, ...]:
        """``[devices]`` the peak memory, with the workspace margin."""
        return tuple(parts.total * (1 + WORKSPACE_MARGIN) for parts in self.memory)

    def idle_share(self, device: int) -> float:
        """Return the share of an iteration that a device spends outside forward and backward passes."""
        return 1 - self.trace.busy_s(device) / self.iteration_s if self.iteration_s else 0.0


def estimate(strategy: Strategy) -> Estimate:
    """Return the time and memory of a strategy by simulating its program."""
    program = lower(strategy.stages, strategy.schedule, num_devices=len(strategy.cluster))
    trace = simulate(program, strategy.costs)
    return Estimate(trace, peak_memory(program, strategy.cost_model), strategy.mini_batch_size)


def peak_memory(program: Program, model: CostModel) -> tuple[MemoryParts, ...]:
    """Return the peak memory of every device by walking its instructions.

    Counted are parameters, gradients and optimizer state of every parameter that a device holds, each once; from a
    task's forward pass to its backward pass what its operators save (under recomputation only while the backward pass
    runs) and what it received; gradients, and values of stages without a backward pass, that are on their way. What
    other stages send forward is part of what they save.
    The batch itself is not counted.

    Returns:
        ``[devices]`` bytes, without the workspace margin.
    """
    stages = program.stages
    found = []
    for device, instructions in enumerate(program.instructions):
        held = sorted(
            {i for x, s in enumerate(stages.stages) if device in s.devices for i in stages.operator_positions[x]}
        )
        state = model.state_memory(held)
        walk = _ActivationWalk(program, model)
        peak = walk.peak(instructions)
        found.append(MemoryParts(state.parameters, state.gradients, state.optimizer, peak))
    return tuple(found)


class _ActivationWalk:
    """Adds up and releases the activations of one device along its instructions."""

    def __init__(self, program: Program, model: CostModel) -> None:
        self.stages = program.stages
        self.model = model
        self.now = 0.0
        self.highest = 0.0
        self.received: dict[Task, float] = {}

    def peak(self, instructions: Iterable[object]) -> float:
        for instruction in instructions:
            match instruction:
                case PostReceive(message):
                    self._receive(message)
                case Compute(task, _, samples):
                    self._compute(task, len(samples))
                case Send(message):
                    if self._is_held(message) and not message.is_local:
                        self._add(message.num_bytes)
                case AwaitSend(message):
                    if self._is_held(message):
                        self._add(-message.num_bytes)
                case _:
                    pass
        return self.highest

    def _is_held(self, message: Message) -> bool:
        """Whether only the message holds what it brings; a stage with a backward pass saves what it sends forward."""
        return message.phase is Phase.BACKWARD or not self.stages.has_backward[message.source.stage]

    def _receive(self, message: Message) -> None:
        self.received[message.target] = self.received.get(message.target, 0.0) + message.num_bytes
        self._add(message.num_bytes)

    def _compute(self, task: Task, num_samples: int) -> None:
        x = task.stage
        saved = self.model.saved_bytes(self.stages.operator_positions[x], num_samples)
        keeps = self.stages.has_backward[x] and self.stages.stages[x].recompute is Recompute.NONE
        if task.phase is Phase.FORWARD:
            self._add(saved)
            if not keeps:
                self._add(-saved)
            if not self.stages.has_backward[x]:
                self._add(-self.received.pop(task, 0.0))
            return
        if not keeps:
            self._add(saved)
        forward = Task(x, Phase.FORWARD, task.micro_batch)
        self._add(-saved - self.received.pop(forward, 0.0) - self.received.pop(task, 0.0))

    def _add(self, num_bytes: float) -> None:
        self.now += num_bytes
        self.highest = max(self.highest, self.now)


def check_memory(strategy: Strategy, found: Estimate) -> None:
    """Check that every device has the memory that its stages need.

    Raises:
        PlanningError: One has not; the message gives its stages, the bytes needed and available, and their parts.
    """
    for device, parts in enumerate(found.memory):
        available = strategy.cluster.devices[device].memory_bytes
        needed = found.peak_bytes[device]
        if needed > available:
            held = [x for x, stage in enumerate(strategy.stages.stages) if device in stage.devices]
            raise PlanningError(
                f"device {strategy.cluster.devices[device].name} with stages {held} needs {format_bytes(needed)} of "
                f"{format_bytes(available)}: {describe_memory(parts)}; lower the micro-batch size, recompute, or add "
                "devices"
            )


def describe_memory(parts: MemoryParts) -> str:
    """Return the parts of a memory peak in words."""
    return (
        f"parameters {format_bytes(parts.parameters)}, gradients {format_bytes(parts.gradients)}, "
        f"optimizer {format_bytes(parts.optimizer)}, activations {format_bytes(parts.activations)}"
    )


def format_bytes(num_bytes: float) -> str:
    """Return bytes as people read them: 18.2 GB, 512 kB."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}" if num_bytes < 1000 * size else f"{num_bytes / size:.0f} {unit}"
    return f"{num_bytes:.0f} B"
