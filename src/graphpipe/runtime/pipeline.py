"""Trains a model by a strategy: the object that every rank of a job holds."""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from graphpipe.capture import capture
from graphpipe.errors import BatchError, GraphPipeError
from graphpipe.program import AllReduce, Program, lower
from graphpipe.runtime.clock import WallClock
from graphpipe.runtime.executor import Executor
from graphpipe.runtime.process_group import DEFAULT_TIMEOUT, check_agreement, join, rank, world_size
from graphpipe.runtime.resize import resized
from graphpipe.runtime.stages import StageSource
from graphpipe.runtime.transport import GlooTransport
from graphpipe.strategy import Strategy
from graphpipe.trace import Span, SpanKind, Trace, TraceSource

LossFunction = Callable[[Any, Any], Tensor]
OptimizerFactory = Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer]

_SPAN_KINDS = tuple(SpanKind)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step tells every rank.

    Attributes:
        loss: The loss of the whole mini-batch, the same number on every rank.
        num_samples: The samples of the mini-batch.
    """

    loss: float
    num_samples: int


class Pipeline:
    """A model that is trained by a strategy. Every rank makes one, with the same model and strategy.

    The model's own parameters are trained in place: those of a rank's stages on that rank. `gather_parameters` brings
    them together.

    Args:
        model: Any module. It is captured when the first batch is seen, or right away with `example_batch`. A model
            that has been captured already is taken as it is.
        strategy: From `graphpipe.plan` for this model.
        loss_fn: As it was given to `graphpipe.plan`.
        optimizer: Makes the optimizer of this rank from its (name, parameter) pairs, under their original names. Every
            optimizer of torch takes such pairs. Without one, `step` leaves the parameters as they are.
        example_batch: A batch to capture the model with.
        timeout: After this long without an answer from another process a rank gives up.

    Raises:
        StrategyError: The strategy is for another model or number of processes.
        CaptureError: The model cannot be captured.
    """

    def __init__(
        self,
        model: nn.Module | StageSource,
        strategy: Strategy,
        *,
        loss_fn: LossFunction | None = None,
        optimizer: OptimizerFactory | None = None,
        example_batch: Any = None,
        timeout: datetime.timedelta = DEFAULT_TIMEOUT,
    ) -> None:
        self.strategy = strategy
        self.optimizer: torch.optim.Optimizer | None = None
        self._loss_fn = loss_fn
        self._make_optimizer = optimizer
        self._timeout = timeout
        self._programs: dict[int, Program] = {}
        self._source: StageSource | None = None
        self._model = model
        self._executor: Executor | None = None
        self._batches_agree = False
        strategy.check_world_size(world_size())
        if not isinstance(model, nn.Module):
            self._build(model)
        elif example_batch is not None:
            self._build(capture(model, example_batch, loss_fn=loss_fn))

    def _build(self, source: StageSource) -> None:
        self.strategy.check_model(source.graph)
        join(self.strategy, self._timeout)
        check_agreement("strategies", _digest(self.strategy), "load the same strategy")
        check_agreement("parameters", _parameters_digest(source), "build the model with the same seed, or load it,")
        program = self._program(self.strategy.mini_batch_size)
        groups = [i.devices for instructions in program.instructions for i in instructions if isinstance(i, AllReduce)]
        transport = GlooTransport(groups, self._timeout)
        modules = {
            x: source.stage_module(stage.operators)
            for x, stage in enumerate(self.strategy.stages.stages)
            if rank() in stage.devices
        }
        self._source = source
        self._executor = Executor(rank(), source, modules, transport, WallClock())
        trainable = [(name, p) for name, p in self._executor.parameters.items() if p.requires_grad]
        if self._make_optimizer is not None and trainable:
            self.optimizer = self._make_optimizer(trainable)
        _warm_up_autograd()

    def _program(self, mini_batch_size: int) -> Program:
        if mini_batch_size not in self._programs:
            stages, schedule = resized(self.strategy, mini_batch_size)
            self._programs[mini_batch_size] = lower(stages, schedule, num_devices=len(self.strategy.cluster))
        return self._programs[mini_batch_size]

    def step(self, batch: Any) -> StepResult:
        """Train on one mini-batch: forward and backward passes, the sum over replicas, the optimizer.

        Args:
            batch: The whole mini-batch, the same on every rank. It may have another number of samples than the
                strategy's mini-batch.

        Raises:
            BatchError: The batch does not have the inputs that the model was captured with.
            GraphPipeError: A task failed.
        """
        return self._run(batch, self._optimizer_step)

    def forward_backward(self, batch: Any) -> StepResult:
        """Compute the loss and the gradients of one mini-batch and leave the parameters as they are."""
        return self._run(batch, None)

    def _run(self, batch: Any, optimizer_step: Callable[[], None] | None) -> StepResult:
        if self._executor is None or self._source is None:
            assert isinstance(self._model, nn.Module)
            self._build(capture(self._model, batch, loss_fn=self._loss_fn))
        assert self._executor is not None and self._source is not None
        inputs = self._source.flatten_batch(batch)
        count = self._source.num_samples(inputs)
        self._check_counts(count)
        program = self._program(count)
        if not self._batches_agree:
            self._check_batches(inputs)
        for parameter in self._executor.parameters.values():
            parameter.grad = None
        loss = self._executor.run(program, inputs, optimizer_step)
        self._executor.transport.all_reduce(range(dist.get_world_size()), loss)
        return StepResult(float(loss), count)

    def _check_counts(self, count: int) -> None:
        """Check that all ranks were given as many samples, before any message of another size is on its way."""
        counts = torch.zeros(dist.get_world_size(), dtype=torch.int64)
        counts[rank()] = count
        self._built().transport.all_reduce(range(len(counts)), counts)
        for other, found in enumerate(counts.tolist()):
            if found != counts[0]:
                raise BatchError(
                    f"rank 0 was given a batch of {int(counts[0])} samples and rank {other} one of {found}; every rank "
                    "needs the same batch"
                )

    def _check_batches(self, inputs: Mapping[str, Tensor]) -> None:
        """Check once that all ranks were given the same batch.

        A loader that every rank shuffles in its own way would train without an error, and wrongly.

        Raises:
            BatchError: Two ranks have different tensors for an input.
        """
        digests = {name: tensor_digest(inputs[name]) for name in inputs}
        seen: dict[str, tuple[int, str]] = {}
        for source in range(dist.get_world_size()):
            for name, digest in json.loads(_broadcast_text(json.dumps(digests), source)).items():
                other, expected = seen.setdefault(name, (source, digest))
                if digest != expected:
                    raise BatchError(
                        f"ranks {other} and {source} were given different tensors for input {name!r}; every rank needs "
                        "the same batch: make it with the same seed, and shuffle it in the same way, on all of them"
                    )
        self._batches_agree = True

    def _optimizer_step(self) -> None:
        if self.optimizer is not None:
            self.optimizer.step()

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The parameters of this rank's stages by their original names."""
        return self._built().parameters

    @property
    def required_inputs(self) -> tuple[str, ...]:
        """The model's inputs that this rank's stages read."""
        executor = self._built()
        assert self._source is not None
        names = {n for module in executor.modules.values() for n in module.input_names}
        return tuple(name for name in self._source.inputs if name in names)

    def gather_parameters(self) -> dict[str, Tensor]:
        """Return every parameter of the model by its original name, on every rank. All ranks must call this."""
        return self._gather({name: p.detach() for name, p in self._built().parameters.items()})

    def gather_gradients(self) -> dict[str, Tensor]:
        """Return the gradient of every parameter that has one, on every rank. All ranks must call this."""
        return self._gather({n: p.grad for n, p in self._built().parameters.items() if p.grad is not None})

    def _gather(self, mine: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Let each tensor's lowest rank broadcast it. Names, shapes and types travel as text."""
        header = json.dumps({n: [list(t.shape), str(t.dtype).removeprefix("torch.")] for n, t in mine.items()})
        found: dict[str, Tensor] = {}
        for source in range(dist.get_world_size()):
            layout = json.loads(_broadcast_text(header, source))
            for name, (shape, dtype) in layout.items():
                if name in found:
                    continue
                tensor = (
                    mine[name].contiguous() if source == rank() else torch.empty(shape, dtype=getattr(torch, dtype))
                )
                tensor = tensor.clone()
                dist.broadcast(tensor, src=source)
                found[name] = tensor
        return found

    def trace(self) -> Trace:
        """Return what every rank did in the last step. All ranks must call this.

        The processes of one machine share its clock; on several machines the clocks must agree (NTP).
        """
        spans = self._built().spans
        rows = torch.tensor(
            [[_SPAN_KINDS.index(s.kind), s.start_s, s.stop_s, s.stage, s.micro_batch] for s in spans],
            dtype=torch.float64,
        ).reshape(-1, 5)
        tables = []
        for source in range(dist.get_world_size()):
            size = torch.tensor([len(rows)])
            dist.broadcast(size, src=source)
            table = rows if source == rank() else torch.empty((int(size), 5), dtype=torch.float64)
            dist.broadcast(table, src=source)
            tables.append(table)
        start_s = min((float(table[:, 1].min()) for table in tables if len(table)), default=0.0)
        gathered = [
            Span(device, _SPAN_KINDS[int(kind)], start - start_s, stop - start_s, int(stage), int(m))
            for device, table in enumerate(tables)
            for kind, start, stop, stage, m in table.tolist()
        ]
        return Trace(TraceSource.MEASURED, len(tables), tuple(gathered))

    def _built(self) -> Executor:
        if self._executor is None:
            raise GraphPipeError("the model is captured with the first batch; run a step first, or give example_batch")
        return self._executor


def tensor_digest(tensor: Tensor) -> str:
    """Return a hash of a tensor's shape, type and bytes."""
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return hashlib.sha256(f"{tuple(tensor.shape)} {tensor.dtype} ".encode() + data).hexdigest()


def _digest(strategy: Strategy) -> str:
    text = json.dumps(strategy.to_json(), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _parameters_digest(source: StageSource) -> str:
    """Return a hash of all parameters: replicas and tied copies must start equal to stay so."""
    whole = source.stage_module([operator.name for operator in source.graph.operators])
    digests = sorted((name, tensor_digest(parameter)) for name, parameter in whole.named_parameters())
    return hashlib.sha256(json.dumps(digests).encode()).hexdigest()


def _broadcast_text(text: str, source: int) -> str:
    data = torch.tensor(list(text.encode()), dtype=torch.uint8)
    size = torch.tensor([len(data)])
    dist.broadcast(size, src=source)
    if source != rank():
        data = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(data, src=source)
    return bytes(data.tolist()).decode()


def _warm_up_autograd() -> None:
    """Run a backward pass once: the first one imports for over a second, which would spoil the first step's trace."""
    x = torch.ones(2, requires_grad=True)
    torch.autograd.backward([x * 2], [torch.ones(2)])
