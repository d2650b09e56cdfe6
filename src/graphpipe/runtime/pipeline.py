"""Trains a model by a strategy: the object that every rank of a job holds."""

from __future__ import annotations

import datetime
import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from graphpipe.capture import (
    Autocast,
    CapturedModel,
    Draws,
    capture,
)
from graphpipe.disk_cache import DiskCache
from graphpipe.errors import GraphPipeError
from graphpipe.program import Program, lower
from graphpipe.runtime.clock import clock_for
from graphpipe.runtime.comparison import Reference
from graphpipe.runtime.compilation import Compilation
from graphpipe.runtime.evaluations import Evaluations
from graphpipe.runtime.executor import Executor
from graphpipe.runtime.first_step import (
    Verify,
    check,
    comparable_unasked,
    is_small,
    largest_difference,
    reference_step,
    tolerance_of,
)
from graphpipe.runtime.frozen_numbers import FrozenNumbers
from graphpipe.runtime.gathering import gather_tensors, gather_trace
from graphpipe.runtime.initialise import Init
from graphpipe.runtime.loss_scale import LossScaler, LossScaling, check_scalable
from graphpipe.runtime.meeting import (
    Meeting,
    Meetings,
    Position,
    Progress,
    broadcast_text,
    check_batches,
)
from graphpipe.runtime.model_file import save_model
from graphpipe.runtime.own_stages import all_parameters, prepared_stages, specs_digest
from graphpipe.runtime.peak_memory import peak_memory_bytes
from graphpipe.runtime.process_group import DEFAULT_TIMEOUT, check_agreement, join, rank, world_size
from graphpipe.runtime.process_transports import TransportKind, make_transport
from graphpipe.runtime.resize import resized
from graphpipe.runtime.rows import Round
from graphpipe.runtime.sharding import OptimizerStates, ParameterSharing, parameter_owners
from graphpipe.runtime.stages import StageSource, shapes_of
from graphpipe.runtime.update import (
    LRSchedulerFactory,
    OptimizerFactory,
    Update,
    UpdateResult,
    checked_norm,
    counted_parameters,
    make_optimizer,
)
from graphpipe.runtime.watchdog import DEFAULT_STALL_TIMEOUT, FILES_TIMEOUT, job_watchdog
from graphpipe.schedule import ModelCosts, kfkb
from graphpipe.stage import StageGraph
from graphpipe.strategy import Strategy
from graphpipe.trace import Trace

_log = logging.getLogger(__name__)

LossFunction = Callable[[Any, Any], Tensor]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step tells every rank.

    Attributes:
        loss: The loss of the whole mini-batch, the same number on every rank.
        num_samples: The samples of the mini-batch.
        gradient_norm: The 2-norm of all gradients of the model before clipping; None without clipping and loss scaling,
            or if the mini-batch did not update the parameters.
        is_skipped: Whether the update was left out because a scaled gradient was infinite or undefined.
    """

    loss: float
    num_samples: int
    gradient_norm: float | None = None
    is_skipped: bool = False


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """What an evaluation tells every rank.

    Attributes:
        loss: Of the batch, in eval mode.
        num_samples: The samples of the batch.
    """

    loss: float
    num_samples: int


class Pipeline:
    """A model that is trained by a strategy. Every rank makes one, with the same model and strategy.

    The model's own parameters are trained in place: those of a rank's stages on that rank. `gather_state_dict` brings
    them together.

    Args:
        model: Any module. It is captured when the first batch is seen, or right away with `example_batch`. A model
            that has been captured already is taken as it is.
        strategy: From `graphpipe.plan` for this model.
        loss_fn: As it was given to `graphpipe.plan`.
        optimizer: Makes the optimizer of this rank from its (name, parameter) pairs, under their original names. Every
            optimizer of torch takes such pairs. In parameter groups put the parameters alone: a rank may have none of
            a group, and torch takes no empty group among those with names. Without an optimizer, `step` leaves the
            parameters as they are.
        lr_scheduler: Makes the learning-rate schedule of this rank's optimizer. It is stepped after every step of the
            optimizer; `ReduceLROnPlateau` needs a metric, so you step it where it is not None, which it is on
            a rank without an optimizer: ``pipeline.lr_scheduler.step(metric)``.
        max_gradient_norm: Scales all gradients of the model down together where their norm over all ranks is larger,
            each parameter counted once; ``math.inf`` only measures it.
        loss_scaling: For training under autocast to float16: every rank scales the loss alike, and skips the same
            updates.
        seed: What the entries that dropout drops follow from, with the step and the sample. The same on every rank.
        example_batch: A batch to capture the model with, under the autocast that is in force.
        timeout: How long one task, or what runs between two steps, may take while other ranks wait for it; past that
            the job ends and says where. Processes that are gone or stopped are noticed within seconds.
        stall_timeout: How long, in a step, a rank may run no other thread, or a task may take that has been run before
            and never took a fifth of it. Past that the job ends. Where stages are compiled, which they may be again,
            `timeout` holds if it is longer.
        transport: How messages travel; by default NCCL where the model's parameters are on a GPU, else gloo.
        optimizer_states: Whether every replica keeps the optimizer's state of its parameters, or they share it. If they
            share it, each one's optimizer gets a part of the parameters.
        init: For a model on the meta device: where its parameters get their values. A rank makes those of its own
            stages only, on the CPU; the others stay without memory.
        free_sizes: As they were given to `graphpipe.plan`.
        sample_axes: As they were given to `graphpipe.plan`.
        split_points: As they were given to `graphpipe.plan`.
        keep_whole: As it was given to `graphpipe.plan`.
        verify: When to compare loss and gradients with one process; each rank then runs the whole model once.
            ``"auto"`` for the first mini-batch of models so small that it does not matter; None or ``"never"`` not at
            all.
        compilation: How `torch.compile` compiles each stage; by default stages run as they are, as they do in
            evaluation. The first micro-batches then take the time of the compiler, which `timeout` must allow for.
        cache: Where captures are kept from one run to the next; by default the user's own.

    Attributes:
        num_steps: The updates of the parameters so far, also those before a checkpoint that was taken up.
        has_whole_model: Whether what this rank holds of other ranks' stages is what they hold, as it is before the
            first update or a checkpoint.

    Raises:
        StrategyError: The strategy is for another model or number of processes.
        CaptureError: The model cannot be captured.
        ValueError: `max_gradient_norm` is not above zero, or there is a schedule without an optimizer.
    """

    def __init__(
        self,
        model: nn.Module | StageSource,
        strategy: Strategy,
        *,
        loss_fn: LossFunction | None = None,
        optimizer: OptimizerFactory | None = None,
        lr_scheduler: LRSchedulerFactory | None = None,
        max_gradient_norm: float | None = None,
        loss_scaling: LossScaling | None = None,
        seed: int = 0,
        example_batch: Any = None,
        timeout: datetime.timedelta = DEFAULT_TIMEOUT,
        stall_timeout: datetime.timedelta = DEFAULT_STALL_TIMEOUT,
        transport: TransportKind | None = None,
        optimizer_states: OptimizerStates = OptimizerStates.COPIED,
        init: Init | None = None,
        free_sizes: Mapping[str, Mapping[int, str]] = MappingProxyType({}),
        sample_axes: Mapping[str, int | None] = MappingProxyType({}),
        split_points: Sequence[str] = (),
        keep_whole: Sequence[str] = (),
        verify: Verify | str | None = Verify.AUTO,
        compilation: Compilation | None = None,
        cache: DiskCache | None = None,
    ) -> None:
        self.strategy = strategy
        if lr_scheduler is not None and optimizer is None:
            raise ValueError("a learning-rate schedule needs an optimizer; give optimizer= as well")
        self.optimizer: torch.optim.Optimizer | None = None
        self.lr_scheduler: LRScheduler | None = None
        self._loss_fn = loss_fn
        self._make_optimizer = optimizer
        self._make_lr_scheduler = lr_scheduler
        self._max_gradient_norm = checked_norm(max_gradient_norm)
        self._loss_scaler = None if loss_scaling is None else LossScaler(loss_scaling)
        self._update: Update | None = None
        self._has_accumulated = False
        self._transport_kind = transport
        self._optimizer_states = optimizer_states
        self._sharing: ParameterSharing | None = None
        # Past this torch itself gives up, without knowing the cause; the watchdog is to be first.
        self._transport_timeout = timeout + datetime.timedelta(seconds=30)
        # A stage may be compiled again at any time.
        self._watchdog = job_watchdog(timeout, stall_timeout if compilation is None else max(timeout, stall_timeout))
        self._init = init
        self._free_sizes = dict(free_sizes)
        self._sample_axes = dict(sample_axes)
        self._split_points = tuple(split_points)
        self._keep_whole = tuple(keep_whole)
        self._verify = Verify.NEVER if verify is None else Verify(verify)
        self._compilation = compilation
        if compilation is not None:
            compilation.check(len(strategy.stages.stages))
        self._cache = cache
        self._programs: dict[int, Program] = {}
        self._source: StageSource | None = None
        self._model = model
        self._executor: Executor | None = None
        self._prepared_evaluations: Evaluations | None = None
        self._frozen_numbers: FrozenNumbers | None = None
        self._batches_agree = False
        self.num_steps = 0
        self.has_whole_model = True
        self._seed = seed
        self._turn = 0
        strategy.check_world_size(world_size())
        if not isinstance(model, nn.Module):
            self._build(model)
        elif example_batch is not None:
            self._build(self._capture(model, example_batch))

    def _capture(self, model: nn.Module, batch: Any) -> CapturedModel:
        return capture(
            model,
            batch,
            loss_fn=self._loss_fn,
            free_sizes=self._free_sizes,
            sample_axes=self._sample_axes,
            split_points=self._split_points,
            keep_whole=self._keep_whole,
            cache=self._cache,
        )

    def _build(self, source: StageSource) -> None:
        self.strategy.check_model(source.graph)
        join(self.strategy, self._transport_timeout)
        self._watchdog.start(rank(), world_size(), broadcast_text)
        limit = None if self._init is None else FILES_TIMEOUT
        with self._watchdog.operation("the comparison of the strategies and parameters", limit):
            self._take_first_strategy()
            self.strategy.check_model(source.graph)
            check_agreement("shapes or types between stages", specs_digest(source), "use the same versions and options")
            check_agreement("seeds", hashlib.sha256(str(self._seed).encode()).hexdigest(), "give the same seed")
            modules = prepared_stages(source, self.strategy.stages, self._init)
        parameters = all_parameters(source).values()
        device = next((p.device for p in parameters if not p.is_meta), torch.device("cpu"))
        self._transport_kind = self._transport_kind or TransportKind.for_device(device)
        reductions = self._program(self.strategy.mini_batch_size).reductions
        transport = make_transport(self._transport_kind, [r.devices for r in reductions], self._transport_timeout)
        self._source = source
        if isinstance(source, CapturedModel):
            self._frozen_numbers = FrozenNumbers(source.model, source.loss_fn)
        self._meetings = Meetings(len(source.inputs), self._transport_timeout)
        self._executor = Executor(rank(), source, modules, transport, clock_for(device), device)
        self._executor.position = self._watchdog.cells
        if self._compilation is not None:
            self._compilation.compile(modules)
            self._executor.compilation = self._compilation
        trainable = [(name, p) for name, p in self._executor.parameters.items() if p.requires_grad]
        if self._optimizer_states is OptimizerStates.SHARDED:
            owners = parameter_owners(self.strategy.graph, reductions)
            self._sharing = ParameterSharing(rank(), self._executor.parameters, reductions, owners, transport)
            trainable = [(name, p) for name, p in trainable if owners.get(name, rank()) == rank()]
        if self._make_optimizer is not None and trainable:
            self.optimizer = make_optimizer(self._make_optimizer, trainable)
            if self._make_lr_scheduler is not None:
                self.lr_scheduler = self._make_lr_scheduler(self.optimizer)
        if self._loss_scaler is not None:
            check_scalable(self._executor.parameters)
        self._update = Update(
            self._executor.parameters,
            counted_parameters(self.strategy.stages, rank()),
            self._sum_of_squares,
            optimizer=self.optimizer,
            lr_scheduler=self.lr_scheduler,
            max_gradient_norm=self._max_gradient_norm,
            loss_scaler=self._loss_scaler,
        )
        _warm_up_autograd()

    def _program(self, mini_batch_size: int) -> Program:
        if mini_batch_size not in self._programs:
            stages, schedule = resized(self.strategy, mini_batch_size)
            assert self._transport_kind is not None
            self._programs[mini_batch_size] = lower(
                stages,
                schedule,
                num_devices=len(self.strategy.cluster),
                matching=self._transport_kind.matching,
                costs=ModelCosts(self.strategy.cost_model, stages),
            )
        return self._programs[mini_batch_size]

    def _tell_frozen_numbers(self) -> None:
        for what, before, now in self._frozen_numbers.changed() if self._frozen_numbers is not None else ():
            if rank() == 0:
                _log.warning(
                    "%s was %r when the model was captured and is %r now; training goes on with %r. What changes in "
                    "training must be a buffer of the model or an entry of the batch, else make a new pipeline",
                    *(what, before, now, before),
                )

    def _take_first_strategy(self) -> None:
        """Take rank 0's strategy: ranks that each measure and plan for themselves find different ones."""
        own = self.strategy.to_json()
        first = json.loads(broadcast_text(json.dumps(own), 0))
        # The notes tell how long the search took, which no two ranks agree on.
        if {**first, "notes": {}} != json.loads(json.dumps({**own, "notes": {}})):
            _log.warning("rank %d was given another strategy than rank 0; all ranks train by that of rank 0", rank())
            self.strategy = Strategy.from_json(first)

    def step(self, batch: Any, *, position: Position | None = None) -> StepResult:
        """Train on one mini-batch: forward and backward passes, the sum over replicas, the optimizer.

        Gradients that `accumulate` has gathered since the last update are part of it.

        Args:
            batch: The mini-batch, the same on every rank: all of it, or at least the rank's `required_inputs`. It may
                have another number of samples than the strategy's mini-batch.
            position: The epoch and the number of the batch in it, to compare between ranks: loaders that start again
                at their end, and have different lengths, are an error then. A rank that has no more batches than
                others, and does something else, is one anyway.

        Raises:
            BatchError: The batch does not have the inputs that the model was captured with, or ranks have different
                ones.
            GraphPipeError: A task failed.
        """
        if self._make_optimizer is None and not self.num_steps and rank() == 0:
            _log.warning("there is no optimizer, so step changes no parameter; give optimizer= to the pipeline")
        return self._run(batch, keeps=self._has_accumulated, updates=True, position=position)

    def forward_backward(self, batch: Any) -> StepResult:
        """Compute the loss and the gradients of one mini-batch and leave the parameters as they are.

        Gradients that were there before are dropped, those of `accumulate` as well.
        """
        return self._run(batch, keeps=False, updates=False)

    def accumulate(self, batch: Any, *, position: Position | None = None) -> StepResult:
        """Add the gradients of one mini-batch to those since the last update, and leave the parameters as they are.

        As with ``backward`` in a loop, gradients are summed, not averaged: for the mean over `n` mini-batches, divide
        the loss by `n`.

        Args:
            batch: As for `step`.
            position: As for `step`.
        """
        result = self._run(batch, keeps=self._has_accumulated, updates=False, position=position)
        self._has_accumulated = True
        return result

    def update(self) -> UpdateResult:
        """Clip the gradients and step the optimizer and the schedule. All ranks must call this.

        The gradients stay until the next mini-batch, which starts afresh.

        Raises:
            GraphPipeError: There was no mini-batch since the last update, or a rank does something else.
        """
        self._built()
        if not self._turn:
            raise GraphPipeError(
                f"there was no mini-batch since update {self.num_steps}, so the same gradients would be applied again; "
                "call accumulate or forward_backward first. step makes its own update"
            )
        with self._watchdog.operation("the comparison of the updates"):
            self._meetings.meet(Meeting.UPDATE, self._progress(keeps=self._has_accumulated))
        return self._updated()

    def _updated(self) -> UpdateResult:
        assert self._update is not None
        result = self._update.apply()
        if self._sharing is not None:
            self._sharing.share()
        self._has_accumulated = False
        self.num_steps += 1
        self._turn = 0
        return result

    def evaluate(self, batch: Any) -> EvaluationResult:
        """Compute the loss of a batch in eval mode, without gradients. All ranks must call this.

        The model is captured in eval mode when a batch of its kind is first seen; other shapes are another kind, but
        for the number of samples and the sizes that are free. The modules of the model keep the mode that they are in.

        Args:
            batch: As for `step`.

        Raises:
            CaptureError: The model cannot be captured in eval mode.
            GraphPipeError: A task failed.
        """
        prepared = self._evaluations().prepare(Meeting.EVALUATION, batch, self._progress())
        losses = self._meetings.begin()
        with self._watchdog.operation("an evaluation"):
            loss, _ = self._evaluations().run(prepared, "an evaluation")
        return EvaluationResult(self._total_loss(losses, loss), prepared.num_samples)

    def predict(self, batch: Any) -> Any:
        """Return what the model returns for a batch in eval mode, on every rank. All ranks must call this.

        The structure is the model's own; tensors of micro-batches are put together in the order of the samples.

        Args:
            batch: As for `step`. What only the loss reads may be missing.

        Raises:
            CaptureError: The model cannot be captured in eval mode.
            GraphPipeError: A task failed.
        """
        prepared = self._evaluations().prepare(Meeting.PREDICTION, batch, self._progress())
        with self._watchdog.operation("a prediction"):
            _, pieces = self._evaluations().run(prepared, "a prediction")
            gathered = gather_tensors(pieces, keeps=True)
        return prepared.structured(gathered)

    def _evaluations(self) -> Evaluations:
        if self._prepared_evaluations is None:
            if not isinstance(self._source, CapturedModel):
                raise GraphPipeError("run a step first, or make the pipeline with example_batch, before an evaluation")
            self._prepared_evaluations = Evaluations(
                self._source, self.strategy.stages, self._built(), self._meetings, self._watchdog, self._lowered
            )
        return self._prepared_evaluations

    def _lowered(self, stages: StageGraph) -> Program:
        assert self._transport_kind is not None
        return lower(
            stages, kfkb(stages), num_devices=len(self.strategy.cluster), matching=self._transport_kind.matching
        )

    def _progress(self, *, updates: bool = False, keeps: bool = False) -> Progress:
        return Progress(self.num_steps, self._turn, updates, keeps)

    @property
    def has_accumulated(self) -> bool:
        """Whether there are gradients of `accumulate` that no update has used."""
        return self._has_accumulated

    def _run(self, batch: Any, *, keeps: bool, updates: bool, position: Position | None = None) -> StepResult:
        if self._executor is None or self._source is None:
            assert isinstance(self._model, nn.Module)
            self._build(self._capture(self._model, batch))
        assert self._executor is not None and self._source is not None
        inputs = self._source.flatten_batch(batch, self.required_inputs)
        self._executor.source = self._source.sized(inputs)
        with self._watchdog.operation("the comparison of the batches"):
            progress = self._progress(updates=updates, keeps=keeps)
            count = self._meetings.num_samples(Meeting.MINI_BATCH, self._source, inputs, progress, position)
            program = self._program(count)
            if not self._batches_agree:
                check_batches(inputs)
                self._batches_agree = True
        self._check_autocast(self._source)
        self._tell_frozen_numbers()
        if self._loss_scaler is not None:
            self._executor.loss_scale = self._loss_scaler.scale
        if self._verify is not Verify.NEVER:
            self._check_first_step(batch, count)
        self._executor.draws = Draws(self._seed, self.num_steps, self._turn)
        self._turn += 1
        before = {n: p.grad for n, p in self._executor.parameters.items() if keeps and p.grad is not None}
        for parameter in self._executor.parameters.values():
            parameter.grad = None
        finished: list[UpdateResult] = []

        def finish() -> None:
            self._complete_gradients(before)
            finished.append(self._updated() if updates else UpdateResult())

        self._executor.first_place = self._watchdog.place(program, rank(), shapes_of(inputs))
        losses = self._meetings.begin()
        with self._watchdog.step(self.num_steps + 1):
            loss = self._executor.run(program, inputs, finish if updates else None)
            if not finished:  # also on a rank without a stage, whose program is empty
                finish()
        total = self._total_loss(losses, loss)
        return StepResult(total, count, finished[0].gradient_norm, finished[0].is_skipped)

    def _total_loss(self, losses: Round, own: Tensor) -> float:
        with self._watchdog.operation("the sum of the loss"):
            return self._meetings.total(losses, Meeting.LOSS, float(own))

    def _sum_of_squares(self, own: float) -> float:
        with self._watchdog.operation("the norm of the gradients"):
            return self._meetings.total(self._meetings.begin(), Meeting.NORM, own)

    def _check_autocast(self, source: StageSource) -> None:
        ambient = Autocast.ambient()
        if ambient.dtypes and ambient != source.autocast:
            raise GraphPipeError(
                f"the model was captured under {source.autocast} and this step is under {ambient}; plan, and make the "
                "pipeline, under the autocast that it is trained with"
            )

    def _complete_gradients(self, before: Mapping[str, Tensor]) -> None:
        """Undo the scale, and add gradients of earlier mini-batches: the sums over replicas must not see them again."""
        scale = self._built().loss_scale
        if scale != 1.0:
            for parameter in self._built().parameters.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(1.0 / scale)
        for name, gradient in before.items():
            parameter = self._built().parameters[name]
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)

    def _check_first_step(self, batch: Any, num_samples: int) -> None:
        """Compare loss and gradients of a mini-batch with one process, and leave everything as it was.

        Raises:
            GraphPipeError: They differ by more than rounding can explain, or were to be compared and cannot be.
        """
        verify, self._verify = self._verify, Verify.NEVER
        executor, source = self._built(), self._source
        assert source is not None
        if verify is Verify.AUTO and not (
            isinstance(source, CapturedModel)
            and is_small(source.graph, num_samples)
            and comparable_unasked(source.model)
        ):
            return
        draws = Draws(self._seed, self.num_steps, self._turn)
        expected: Reference | str = "its parameters come from a checkpoint, of which each rank has read its own"
        if self.has_whole_model and not self.num_steps:
            with self._watchdog.operation("the comparison with one process"):
                loss_fn = source.loss_fn if isinstance(source, CapturedModel) else self._loss_fn
                expected = reference_step(source, batch, loss_fn, draws)
        if isinstance(expected, str):
            if verify is Verify.AUTO:
                _log.info("the first step is not compared with one process: %s", expected)
                return
            raise GraphPipeError(f"{expected}; leave verify='first-step' out")
        kept = {name: b.detach().clone() for m in executor.modules.values() for name, b in m.named_buffers()}
        with torch.random.fork_rng():
            found = self._run(batch, keeps=False, updates=False)
        self._turn -= 1  # The numbers that the first step draws are those without a check.
        for module in executor.modules.values():
            for name, buffer in module.named_buffers():
                buffer.copy_(kept[name])
        gradients = {n: None if p.grad is None else p.grad.to_dense() for n, p in executor.parameters.items()}
        for parameter in executor.parameters.values():
            parameter.grad = None
        with self._watchdog.operation("the comparison with one process"):
            largest = largest_difference(found.loss, gradients, expected)
        check(largest, found.loss, expected.loss, tolerance_of(verify, source.model))

    @property
    def loss_scaler(self) -> LossScaler | None:
        """The scale of the loss as it is now; None without loss scaling."""
        return self._loss_scaler

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The parameters of this rank's stages by their original names."""
        return self._built().parameters

    @property
    def model(self) -> nn.Module:
        """The whole model. This rank trains the part of it that its stages hold."""
        self._built()
        assert self._source is not None
        return self._source.model

    @property
    def model_fingerprint(self) -> str:
        """A hash of the model's operations and how they are connected, whatever the plan."""
        self._built()
        assert self._source is not None
        return self._source.fingerprint

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The parameters and buffers of this rank's stages by their original names."""
        executor = self._built()
        buffers = {n: b for x in sorted(executor.modules) for n, b in executor.modules[x].named_buffers()}
        return {**{name: p.detach() for name, p in executor.parameters.items()}, **buffers}

    @property
    def required_inputs(self) -> tuple[str, ...]:
        """The model's inputs that this rank's stages read."""
        executor = self._built()
        assert self._source is not None
        names = {n for module in executor.modules.values() for n in module.input_names}
        return tuple(name for name in self._source.inputs if name in names)

    def gather_parameters(self) -> dict[str, Tensor]:
        """Return every parameter of the model by its original name, on every rank. All ranks must call this.

        Those that the loss does not depend on are as they were. A tied one has one name here, and all of its names in
        what `gather_state_dict` returns, which a model can load.
        """
        found = self._gather({name: p.detach() for name, p in self._built().parameters.items()})
        return {name: found.get(name, p.detach().clone()) for name, p in self.model.named_parameters()}

    def gather_state_dict(self) -> dict[str, Any]:
        """Return the ``state_dict()`` of the trained model, on every rank. All ranks must call this.

        It has every parameter and every buffer that the model's own would have, so the unwrapped model loads it with
        ``strict=True``. Parameters and buffers that the loss does not depend on are as they were.
        """
        return self._whole_state(range(dist.get_world_size()))

    def _whole_state(self, ranks: Sequence[int], meeting: Meeting = Meeting.GATHERING) -> dict[str, Any]:
        """Return the model's state on some ranks. On the others it has only what they hold."""
        first = {id(t): n for n, t in (*self.model.named_parameters(), *self.model.named_buffers())}
        whole = self.model.state_dict(keep_vars=True)
        found = self._gather(self.tensors, ranks, meeting)
        return {n: found.get(first.get(id(t), n), t.detach() if isinstance(t, Tensor) else t) for n, t in whole.items()}

    def save_model(self, path: str | Path) -> None:
        """Write `gather_state_dict` to one safetensors file, on rank 0. All ranks must call this.

        ``model.load_state_dict(safetensors.torch.load_file(path))`` loads it, and so does `graphpipe.load_model`.

        Raises:
            GraphPipeError: The file cannot be written. Every rank hears of it.
        """
        state = self._whole_state([0], Meeting.WRITING)
        failure = ""
        with self._watchdog.operation("the writing of the model", FILES_TIMEOUT):
            if rank() == 0:
                try:
                    save_model(state, path)
                except GraphPipeError as error:
                    failure = str(error)
            failure = broadcast_text(failure, 0)
        if failure:
            raise GraphPipeError(failure)

    def gather_gradients(self) -> dict[str, Tensor]:
        """Return the gradient of every parameter that has one, dense, on every rank. All ranks must call this."""
        mine = {n: p.grad.to_dense() for n, p in self._built().parameters.items() if p.grad is not None}
        return self._gather(mine, meeting=Meeting.GRADIENTS)

    def _gather(
        self, mine: Mapping[str, Tensor], ranks: Sequence[int] | None = None, meeting: Meeting = Meeting.GATHERING
    ) -> dict[str, Tensor]:
        """Let each tensor's lowest rank broadcast it. Names, shapes and types travel as text.

        Args:
            mine: This rank's tensors.
            ranks: Those that keep what they get; by default all.
            meeting: What all ranks gather.
        """
        self._built()
        with self._watchdog.operation("the gathering of tensors", FILES_TIMEOUT):
            self._meetings.meet(meeting)
            return gather_tensors(mine, keeps=ranks is None or rank() in ranks)

    def trace(self) -> Trace:
        """Return what every rank did in the last step, and its memory peak so far. All ranks must call this.

        The processes of one machine share its clock; on several machines the clocks must agree (NTP).
        """
        executor = self._built()
        with self._watchdog.operation("the gathering of the trace"):
            self._meetings.meet(Meeting.TRACE)
            return gather_trace(executor.spans, peak_memory_bytes(executor.torch_device), executor.transport)

    def meet(self, meeting: Meeting) -> None:
        """Return once all ranks begin the same.

        Raises:
            GraphPipeError: One begins something else.
        """
        self._built()
        self._meetings.meet(meeting)

    def _built(self) -> Executor:
        if self._executor is None:
            raise GraphPipeError("the model is captured with the first batch; run a step first, or give example_batch")
        return self._executor


def _warm_up_autograd() -> None:
    """Run a backward pass once: the first one imports for over a second, which would spoil the first step's trace."""
    x = torch.ones(2, requires_grad=True)
    torch.autograd.backward([x * 2], [torch.ones(2)])
