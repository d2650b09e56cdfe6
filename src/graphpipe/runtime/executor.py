"""Interprets a device's program with tensors. Its counterpart with costs is `graphpipe.simulator`.

A task's inputs are detached from what produced them, so that each backward pass is a step of its own: the gradients of
a task's outputs arrive as messages, those of its inputs leave as messages. A gradient that nobody returns is zero, and
the gradients of several consumers are summed in the order of their stages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from graphpipe.capture.draws import Draws
from graphpipe.capture.specs import LossReduction, SampleLayout, ValueSpec
from graphpipe.errors import GraphPipeError
from graphpipe.program import (
    AwaitReceive,
    AwaitReduction,
    AwaitSend,
    Compute,
    Instruction,
    Message,
    OptimizerStep,
    PostReceive,
    Program,
    Reduction,
    Send,
    StartReduction,
)
from graphpipe.runtime.buckets import Bucket, start_buckets
from graphpipe.runtime.clock import Clock, Mark
from graphpipe.runtime.compilation import Compilation
from graphpipe.runtime.origin import raised_at
from graphpipe.runtime.sparse_sums import SparseSum
from graphpipe.runtime.stages import StageModule, StageSource, named_parameters, take_samples
from graphpipe.runtime.transport import Transport
from graphpipe.runtime.watch import Cells
from graphpipe.schedule import Phase, Task
from graphpipe.stage import TURN, Recompute, SampleRange, StageGraph
from graphpipe.trace import Span, SpanKind

TURN_SPEC = ValueSpec(TURN, torch.uint8, (1,), SampleLayout(0, 1), carries_gradient=True)


@dataclass
class _Held:
    """What a task keeps from its forward pass until its backward pass."""

    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    saved_buffers: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _DeviceProgram:
    """What one device needs to know of a program, found once.

    Attributes:
        stages: The stage graph.
        instructions: The device's own list.
        ranges: The samples of each of its tasks.
        incoming: The messages that bring a task the parts of a value, or of an output's gradient, in the order in which
            gradients are summed: by stage, samples and device.
    """

    stages: StageGraph
    instructions: tuple[Instruction, ...]
    ranges: Mapping[Task, SampleRange]
    incoming: Mapping[tuple[Task, str], Sequence[Message]]

    @classmethod
    def of(cls, program: Program, device: int) -> _DeviceProgram:
        instructions = program.instructions[device]
        ranges = {i.task: i.samples for i in instructions if isinstance(i, Compute)}
        incoming: dict[tuple[Task, str], list[Message]] = {}
        for message in (i.message for i in instructions if isinstance(i, AwaitReceive)):
            incoming.setdefault((message.target, message.value), []).append(message)
        for messages in incoming.values():
            messages.sort(key=lambda m: (m.source.stage, m.samples.start, m.source_device))
        return cls(program.stages, instructions, ranges, incoming)


@dataclass
class _MiniBatch:
    """Everything that belongs to the mini-batch in progress."""

    program: _DeviceProgram
    inputs: Mapping[str, Tensor]
    losses: list[Tensor] = field(default_factory=list)
    loss_weights: list[float] = field(default_factory=list)
    loss_gradients: dict[float, Tensor] = field(default_factory=dict)
    arrived: dict[int, Tensor] = field(default_factory=dict)
    buffers: dict[tuple[Task, str], Tensor] = field(default_factory=dict)
    held: dict[tuple[int, int], _Held] = field(default_factory=dict)
    gradients: dict[Task, dict[str, Tensor]] = field(default_factory=dict)
    reductions: dict[Reduction, list[Bucket | SparseSum]] = field(default_factory=dict)


class Executor:
    """Runs the instructions of one device.

    Args:
        device: Which device of the program this is.
        source: The captured model.
        modules: The modules of the stages that this device holds, by stage. Stages that share a parameter must share
            the object.
        transport: Moves messages.
        clock: Tells the time of the trace.
        torch_device: Where buffers are made.

    Attributes:
        loss_scale: What the gradient of the loss is multiplied by, and with it every gradient that `run` leaves.
        draws: What the random numbers of the mini-batch follow from.
        compilation: How the modules were compiled, to tell what failed.
        kept_names: The outputs of stages to keep in `kept`, with their samples, until somebody clears it.
    """

    def __init__(
        self,
        device: int,
        source: StageSource,
        modules: Mapping[int, StageModule],
        transport: Transport,
        clock: Clock,
        torch_device: torch.device | None = None,
    ) -> None:
        self.device = device
        self.source = source
        self.modules = modules
        self.parameters = named_parameters(modules)
        self.transport = transport
        self.clock = clock
        self.torch_device = torch_device or torch.device("cpu")
        self._programs: dict[Program, _DeviceProgram] = {}
        self._record: list[tuple[SpanKind, Mark, Mark, int, int]] = []
        self.loss_scale = 1.0
        # Where the device is: `run` writes the number of each instruction, from `first_place` on, into the first entry.
        self.position: Cells = [0]
        self.first_place = 0
        self.draws = Draws()
        self.compilation: Compilation | None = None
        self.kept_names: frozenset[str] = frozenset()
        self.kept: list[tuple[str, SampleRange, Tensor]] = []

    def run(
        self, program: Program, inputs: Mapping[str, Tensor], optimizer_step: Callable[[], None] | None = None
    ) -> Tensor:
        """Run one mini-batch; gradients are added to the parameters.

        Args:
            program: What to do.
            inputs: The whole mini-batch by input name.
            optimizer_step: Called where the program says so; None to leave the parameters as they are.

        Returns:
            This device's part of the loss, float64; the loss is the sum over all devices.

        Raises:
            GraphPipeError: A task failed; the message names device, stage, task and samples.
        """
        own = self._programs.get(program)
        if own is None:
            own = self._programs[program] = _DeviceProgram.of(program, self.device)
        batch = _MiniBatch(own, inputs)
        self._record = []
        self.clock.start()
        position = self.position
        for place, instruction in enumerate(own.instructions, start=self.first_place):
            position[0] = place
            self._interpret(batch, instruction, optimizer_step)
        return self._sum_losses(batch)

    def _sum_losses(self, batch: _MiniBatch) -> Tensor:
        """Return this device's part of the loss, with one operation for all micro-batches."""
        if not batch.losses:
            return torch.zeros((), dtype=torch.float64, device=self.torch_device)
        weights = torch.tensor(batch.loss_weights, dtype=torch.float64, device=self.torch_device)
        return (torch.stack(batch.losses).to(torch.float64) * weights).sum()

    @property
    def spans(self) -> tuple[Span, ...]:
        """What this device did in the last mini-batch."""
        when = self.clock.seconds_at
        return tuple(Span(self.device, kind, when(a), when(b), x, m) for kind, a, b, x, m in self._record)

    def _interpret(
        self, batch: _MiniBatch, instruction: Instruction, optimizer_step: Callable[[], None] | None
    ) -> None:
        match instruction:
            case PostReceive(message):
                self._post(batch, message)
            case AwaitReceive(message):
                if not message.is_local:
                    self.transport.await_receive(message)
                self.clock.received(message)
            case Compute(task, _, samples):
                start = self.clock.mark()
                self._compute(batch, task, samples)
                self.clock.computed(task, len(samples))
                kind = SpanKind.FORWARD if task.phase is Phase.FORWARD else SpanKind.BACKWARD
                self._record.append((kind, start, self.clock.mark(), task.stage, task.micro_batch))
            case Send(message):
                self._send(batch, message)
            case AwaitSend(message):
                self.transport.await_send(message)
                self.clock.send_awaited(message)
            case StartReduction(reduction):
                batch.reductions[reduction] = self._start_sums(reduction)
                self.clock.reduction_started(reduction)
            case AwaitReduction(reduction):
                start = self.clock.mark()
                for started in batch.reductions.pop(reduction):
                    started.finish()
                self.clock.reduced(reduction)
                self._record.append((SpanKind.REDUCE, start, self.clock.mark(), -1, -1))
            case OptimizerStep():
                if optimizer_step is not None:
                    start = self.clock.mark()
                    optimizer_step()
                    self._record.append((SpanKind.OPTIMIZER, start, self.clock.mark(), -1, -1))

    def _start_sums(self, reduction: Reduction) -> list[Bucket | SparseSum]:
        sparse = self.source.sparse_parameters.intersection(reduction.parameters)
        dense = [self.parameters[name] for name in reduction.parameters if name not in sparse]
        return [
            *start_buckets(self.transport, reduction.devices, dense),
            *(
                SparseSum.start(self.transport, reduction.devices, self.device, self.parameters[name])
                for name in sorted(sparse)
            ),
        ]

    # ---- messages

    def _post(self, batch: _MiniBatch, message: Message) -> None:
        spec = self._spec(message)
        batch.arrived[message.tag] = self._receive_buffer(batch, message, spec)
        self.transport.post_receive(message, batch.arrived[message.tag])
        self.clock.posted(message)

    def _receive_buffer(self, batch: _MiniBatch, message: Message, spec: ValueSpec) -> Tensor:
        """Return a slice of the task's own buffer where samples lie one after another in memory, else a buffer."""
        layout = spec.layout
        if message.phase is Phase.FORWARD and layout is not None and layout.axis == 0:
            samples = batch.program.ranges[message.target]
            whole = batch.buffers.get((message.target, message.value))
            if whole is None:
                whole = torch.empty(spec.shape_for(len(samples)), dtype=spec.dtype, device=self.torch_device)
                batch.buffers[message.target, message.value] = whole
            return take_samples(whole, layout, message.samples, samples.start)
        return torch.empty(spec.shape_for(len(message.samples)), dtype=spec.dtype, device=self.torch_device)

    def _spec(self, message: Message) -> ValueSpec:
        return TURN_SPEC if message.value.startswith(TURN) else self.source.values[message.value]

    def _send(self, batch: _MiniBatch, message: Message) -> None:
        samples = batch.program.ranges[message.source]
        spec = self._spec(message)
        if spec is TURN_SPEC:
            tensor = torch.zeros(len(samples), dtype=spec.dtype, device=self.torch_device)
        elif message.phase is Phase.FORWARD:
            tensor = batch.held[message.source.stage, message.source.micro_batch].outputs[message.value]
        else:
            tensor = batch.gradients[message.source][message.value]
        piece = take_samples(tensor.detach(), spec.layout, message.samples, samples.start)
        if message.is_local:
            batch.arrived[message.tag] = piece
        else:
            if piece.dtype != spec.dtype or piece.shape != spec.shape_for(len(message.samples)):
                raise GraphPipeError(
                    f"{message} has shape {tuple(piece.shape)} and {piece.dtype}; it was captured with "
                    f"{spec.shape_for(len(message.samples))} and {spec.dtype}. Capture the model with a batch of the "
                    "same shapes and the same autocast as it is trained with"
                )
            self.transport.send(message, piece.contiguous())
        self.clock.sent(message)

    # ---- tasks

    def _compute(self, batch: _MiniBatch, task: Task, samples: SampleRange) -> None:
        try:
            if task.phase is Phase.FORWARD:
                self._forward(batch, task, samples)
            else:
                self._backward(batch, task, samples)
        except Exception as error:
            stage = batch.program.stages.stages[task.stage]
            if self.compilation is not None and (told := self.compilation.failure(task.stage, stage, error)):
                raise told from error
            raise GraphPipeError(
                f"task {task} (stage {task.stage}, micro-batch {task.micro_batch}, samples {samples.start} to "
                f"{samples.stop - 1}, operators {stage.operators[0]!r} to {stage.operators[-1]!r}) failed on device "
                f"{self.device}: {type(error).__name__}: {error}{raised_at(error)}"
            ) from error

    def _forward(self, batch: _MiniBatch, task: Task, samples: SampleRange) -> None:
        stages = batch.program.stages
        module = self.modules[task.stage]
        has_backward = stages.has_backward[task.stage]
        recomputes = stages.stages[task.stage].recompute is Recompute.ALL
        self._drop_sent_outputs(batch, task, has_backward=has_backward, recomputes=recomputes)
        inputs: dict[str, Tensor] = {}
        for name in module.input_names:
            if name in self.source.inputs:
                taken = take_samples(batch.inputs[name], self.source.inputs[name].layout, samples)
                inputs[name] = taken.to(self.torch_device, non_blocking=True)
            else:
                spec = self.source.values[name]
                value = self._assemble(batch, task, name, spec, samples).detach()
                inputs[name] = value.requires_grad_(spec.carries_gradient and has_backward)
        held = _Held(inputs, {})
        if recomputes:
            held.saved_buffers = {n: b.clone() for n, b in module.written_buffers().items()}
        with torch.set_grad_enabled(has_backward and not recomputes):
            outputs = module(inputs, len(samples), self._draws(samples))
        if self.source.loss in outputs:
            batch.losses.append(outputs[self.source.loss].detach())
            batch.loss_weights.append(self._loss_weight(batch, samples))
        self.kept += [(n, samples, t.detach()) for n, t in outputs.items() if n in self.kept_names]
        held.outputs = outputs
        batch.held[task.stage, task.micro_batch] = held

    def _drop_sent_outputs(self, batch: _MiniBatch, task: Task, *, has_backward: bool, recomputes: bool) -> None:
        """Let go of the last micro-batch's outputs where no backward pass needs them: their messages hold them now."""
        before = (task.stage, task.micro_batch - 1)
        if not has_backward:
            batch.held.pop(before, None)
        elif recomputes and before in batch.held:
            batch.held[before].outputs = {}

    def _assemble(self, batch: _MiniBatch, task: Task, name: str, spec: ValueSpec, samples: SampleRange) -> Tensor:
        """Return a value over all samples of a task from the messages that brought it."""
        messages = batch.program.incoming[task, name]
        buffer = batch.buffers.pop((task, name), None)
        found = [batch.arrived.pop(message.tag) for message in messages]
        if len(messages) == 1 and buffer is None:
            return found[0]
        if buffer is None:
            buffer = torch.empty(spec.shape_for(len(samples)), dtype=spec.dtype, device=self.torch_device)
        for message, piece in zip(messages, found, strict=True):
            place = take_samples(buffer, spec.layout, message.samples, samples.start)
            if place.data_ptr() != piece.data_ptr():
                place.copy_(piece)
        return buffer

    def _loss_weight(self, batch: _MiniBatch, samples: SampleRange) -> float:
        if self.source.loss_reduction is LossReduction.MEAN:
            return len(samples) / batch.program.stages.mini_batch_size
        return 1.0

    def _backward(self, batch: _MiniBatch, task: Task, samples: SampleRange) -> None:
        held = batch.held.pop((task.stage, task.micro_batch))
        stage = batch.program.stages.stages[task.stage]
        if stage.recompute is Recompute.ALL:
            held.outputs = self._recompute(task, held, samples)
        outputs: list[Tensor] = []
        gradients: list[Tensor] = []
        for name, output in held.outputs.items():
            if not output.requires_grad:
                continue
            if name == self.source.loss:
                outputs.append(output)
                gradients.append(self._loss_gradient(batch, output, samples))
            elif (task, name) in batch.program.incoming:
                outputs.append(output)
                gradients.append(self._gather_gradient(batch, task, name, output, samples))
        if outputs:
            torch.autograd.backward(outputs, gradients)
        batch.gradients[task] = {
            name: value.grad if value.grad is not None else torch.zeros_like(value)
            for name, value in held.inputs.items()
            if value.requires_grad
        }
        # The gradients of the task before are with their messages by now.
        batch.gradients.pop(Task(task.stage, Phase.BACKWARD, task.micro_batch - 1), None)

    def _loss_gradient(self, batch: _MiniBatch, loss: Tensor, samples: SampleRange) -> Tensor:
        """Return what the backward pass of a micro-batch starts with; micro-batches of one size share it."""
        weight = self.loss_scale * self._loss_weight(batch, samples)
        if weight not in batch.loss_gradients:
            batch.loss_gradients[weight] = torch.full_like(loss, weight)
        return batch.loss_gradients[weight]

    def _draws(self, samples: SampleRange) -> Draws:
        return replace(self.draws, first_sample=samples.start)

    def _recompute(self, task: Task, held: _Held, samples: SampleRange) -> dict[str, Tensor]:
        """Run a forward pass again as it was the first time, and leave no mark on running statistics."""
        with torch.enable_grad():
            return self.modules[task.stage].forward_again(
                held.inputs, len(samples), self._draws(samples), held.saved_buffers
            )

    def _gather_gradient(
        self, batch: _MiniBatch, task: Task, name: str, output: Tensor, samples: SampleRange
    ) -> Tensor:
        """Return the gradient of an output: the sum of what its consumers returned, by stage and samples."""
        layout = self.source.values[name].layout
        messages = batch.program.incoming[task, name]
        found = [batch.arrived.pop(message.tag) for message in messages]
        if len(messages) == 1 and found[0].shape == output.shape:
            return found[0]
        total = torch.zeros_like(output, memory_format=torch.contiguous_format)
        for message, piece in zip(messages, found, strict=True):
            take_samples(total, layout, message.samples, samples.start).add_(piece)
        return total
