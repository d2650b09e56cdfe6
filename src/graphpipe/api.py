"""The functions of the package: from a model to a strategy, and from a strategy to the proof that it is right."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from graphpipe.capture import CapturedModel, capture, eager_loss
from graphpipe.cluster import Cluster
from graphpipe.cost import ADAM, DEVICE_KINDS, OptimizerCost, Profile, roofline_profile
from graphpipe.disk_cache import DiskCache
from graphpipe.errors import GraphPipeError
from graphpipe.graph import ComputationGraph
from graphpipe.planner.base import Planner, PlanningProblem, check_sizes
from graphpipe.planner.graphpipe import GraphPipePlanner
from graphpipe.profiler import measure_profile
from graphpipe.runtime.comparison import default_tolerance, gradient_error, loss_error, smallest_scale
from graphpipe.runtime.compilation import Compilation
from graphpipe.runtime.first_step import Verify
from graphpipe.runtime.initialise import Init
from graphpipe.runtime.loss_scale import LossScaling
from graphpipe.runtime.pipeline import LossFunction, Pipeline
from graphpipe.runtime.update import LRSchedulerFactory, OptimizerFactory
from graphpipe.strategy import Strategy

__all__ = ["Job", "Verification", "plan", "verify"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything about a training job that the command line needs; a function in your code returns it.

    Attributes:
        model: Any module.
        example_batch: A batch of at least two samples, to capture the model with.
        loss_fn: ``loss_fn(output, batch)``; None for a model that returns its loss.
        optimizer: Makes the optimizer from (name, parameter) pairs; by default AdamW with a learning rate of 1e-3.
        lr_scheduler: Makes the learning-rate schedule from the optimizer; stepped after every step.
        max_gradient_norm: The largest norm of all gradients together; None to clip nothing.
        autocast: The lower type that the model runs in under autocast; None for its own types.
        loss_scaling: How the loss is scaled, for training under autocast to float16.
        compilation: How `torch.compile` compiles each stage; None to run stages as they are.
        batches: Makes the batches to train with; every rank gets the same ones.
        init: For a model on the meta device: where its parameters get their values.
        free_sizes: The sizes that may differ from batch to batch, as `graphpipe.capture.capture` takes them.
        sample_axes: Where the samples of inputs are, if not along axis 0, as `graphpipe.capture.capture` takes it.
        split_points: Paths of modules to divide the model at.
        keep_whole: Paths of modules that are one operator each.
    """

    model: nn.Module
    example_batch: Any
    loss_fn: LossFunction | None = None
    optimizer: OptimizerFactory | None = None
    lr_scheduler: LRSchedulerFactory | None = None
    max_gradient_norm: float | None = None
    autocast: torch.dtype | None = None
    loss_scaling: LossScaling | None = None
    compilation: Compilation | None = None
    batches: Callable[[], Iterable[Any]] | None = None
    init: Init | None = None
    free_sizes: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    sample_axes: Mapping[str, int | None] = field(default_factory=dict)
    split_points: Sequence[str] = ()
    keep_whole: Sequence[str] = ()

    def autocasting(self) -> contextlib.AbstractContextManager[Any]:
        """Return the autocast to plan, verify and train under, on the type of device that holds the parameters."""
        if self.autocast is None:
            return contextlib.nullcontext()
        device = next((p.device.type for p in self.model.parameters() if not p.is_meta), "cpu")
        return torch.autocast(device, self.autocast)


def plan(
    model: nn.Module | CapturedModel,
    example_batch: Any,
    *,
    mini_batch_size: int,
    loss_fn: LossFunction | None = None,
    cluster: Cluster | None = None,
    micro_batch_sizes: Sequence[int] = (),
    optimizer: OptimizerCost = ADAM,
    planner: Planner | None = None,
    profile: Profile | None = None,
    free_sizes: Mapping[str, Mapping[int, str]] = MappingProxyType({}),
    sample_axes: Mapping[str, int | None] = MappingProxyType({}),
    split_points: Sequence[str] = (),
    keep_whole: Sequence[str] = (),
    cache: DiskCache | None = None,
    progress: Callable[[str], None] | None = None,
) -> Strategy:
    """Return the best strategy that the planner finds for a model on a cluster.

    Args:
        model: Any module, or one that has been captured.
        example_batch: A batch of at least two samples: a mapping of the model's inputs by name, or a tuple of them.
        mini_batch_size: Samples a step.
        loss_fn: ``loss_fn(output, batch)`` returns the scalar loss; None for a model that returns its loss.
        cluster: By default this machine.
        micro_batch_sizes: Sizes to try; by default the powers of two that divide the mini-batch, and the mini-batch.
        optimizer: What the optimizer keeps.
        planner: By default `GraphPipePlanner`.
        profile: What the operators cost; by default they are measured here, or taken from the cache on disk. Those of
            a model on the meta device, which has nothing to measure with, are computed from the peak rates of the
            cluster's first device.
        free_sizes: The sizes that may differ from batch to batch, as `graphpipe.capture.capture` takes them. A plan is
            made for those of the example batch; for a model that has been captured, say so there.
        sample_axes: Where the samples of inputs are, if not along axis 0, as `graphpipe.capture.capture` takes it; for
            a model that has been captured, say so there.
        split_points: Paths of modules to divide the model at; for a model that has been captured, say so there.
        keep_whole: Paths of modules that are one operator each; for a model that has been captured, say so there.
        cache: Where captures and profiles are kept from one run to the next; by default the user's own.
        progress: Called now and then with a line for people.

    Raises:
        CaptureError: The model cannot be captured.
        PlanningError: No strategy fits the cluster.
    """
    check_sizes(mini_batch_size, micro_batch_sizes)
    say = progress or (lambda line: None)
    cluster = cluster or Cluster.detect()
    if isinstance(model, CapturedModel):
        captured = model
    else:
        say("capturing the model")
        captured = capture(
            model,
            example_batch,
            loss_fn=loss_fn,
            free_sizes=free_sizes,
            sample_axes=sample_axes,
            split_points=split_points,
            keep_whole=keep_whole,
            cache=cache,
        )
    if profile is None:
        sizes = profile_sizes(mini_batch_size, micro_batch_sizes)
        count = len(captured.graph.operators)
        if any(parameter.is_meta for parameter in captured.model.parameters()):
            say(f"computing the costs of {count} operators, since the model is on the meta device")
            profile = _computed_profile(captured.graph, cluster, sizes)
        else:
            say(f"measuring {count} operators at {', '.join(map(str, sizes))} samples")
            profile = measure_profile(captured, sizes, example_batch, cache=cache)
    problem = PlanningProblem(
        graph=captured.graph,
        profile=profile,
        cluster=cluster,
        mini_batch_size=mini_batch_size,
        optimizer=optimizer,
        micro_batch_sizes=tuple(micro_batch_sizes),
    )
    chosen = planner or GraphPipePlanner()
    say(f"planning for {len(cluster)} devices with {chosen.name}")
    return chosen.plan(problem, progress=progress)


def _computed_profile(graph: ComputationGraph, cluster: Cluster, sizes: Sequence[int]) -> Profile:
    kind = cluster.devices[0].kind
    if kind not in DEVICE_KINDS:
        raise GraphPipeError(
            f"{graph.name!r} is on the meta device, so its operators cannot be measured, and the peak rates of "
            f"{kind!r} are not known ({', '.join(DEVICE_KINDS)} are); give plan() a profile"
        )
    return roofline_profile(graph, kind, sizes)


def profile_sizes(mini_batch_size: int, micro_batch_sizes: Sequence[int] = ()) -> tuple[int, ...]:
    """Return the local micro-batch sizes to measure: powers of two, the wanted sizes, and the mini-batch.

    Other sizes, such as a micro-batch split over three replicas, are interpolated: costs are close to linear between.
    """
    sizes = {mini_batch_size}
    size = 1
    while size < mini_batch_size:
        sizes.add(size)
        size *= 2
    for wanted in micro_batch_sizes:
        sizes.add(wanted)
    return tuple(sorted(sizes))


@dataclass(frozen=True)
class Verification:
    """One step of a strategy beside the same step in a single process.

    Attributes:
        loss: Of the strategy.
        reference_loss: Of the single process.
        errors: By parameter, the largest difference of a gradient over the largest entry of the single process's, or
            over a thousandth of the largest entry of all gradients where that is more: some gradients are zero but
            for rounding, such as that of a key projection's bias.
        tolerance: What is allowed.
    """

    loss: float
    reference_loss: float
    errors: Mapping[str, float]
    tolerance: float

    @property
    def loss_error(self) -> float:
        """The difference of the losses, relative to the single process's where that is above 1."""
        return loss_error(self.loss, self.reference_loss)

    @property
    def worst(self) -> tuple[str, float]:
        """The parameter with the largest error."""
        return max(self.errors.items(), key=lambda item: item[1], default=("", 0.0))

    @property
    def holds(self) -> bool:
        """Whether the loss and every gradient are within the tolerance."""
        return self.loss_error <= self.tolerance and self.worst[1] <= self.tolerance


def verify(
    model: nn.Module,
    strategy: Strategy,
    batch: Any,
    *,
    loss_fn: LossFunction | None = None,
    tolerance: float | None = None,
    free_sizes: Mapping[str, Mapping[int, str]] = MappingProxyType({}),
    sample_axes: Mapping[str, int | None] = MappingProxyType({}),
    split_points: Sequence[str] = (),
    keep_whole: Sequence[str] = (),
    cache: DiskCache | None = None,
) -> Verification:
    """Compare the loss and every gradient of one step with a single process. All ranks call this.

    The model's parameters and gradients are left as they were. A model that draws random numbers, as dropout does, is
    compared with its captured graph run as a whole, which draws the same ones.

    Args:
        model: The same on every rank.
        strategy: For this model and number of processes.
        batch: One mini-batch.
        loss_fn: As it was given to `plan`.
        tolerance: Relative; by default 1e-9 for a model in float64, 1e-4 in float32 and 5e-2 under autocast, where
            micro-batches round elsewhere.
        free_sizes: As they were given to `plan`.
        sample_axes: As they were given to `plan`.
        split_points: As they were given to `plan`.
        keep_whole: As it was given to `plan`.
        cache: As it was given to `plan`.

    Raises:
        GraphPipeError: The strategy is for another model or number of processes, a task failed, or the model is on the
            meta device.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        raise GraphPipeError(
            f"{type(model).__name__} is on the meta device, and one process with all of it is what verify compares "
            "with; build a smaller one with values"
        )
    dtypes = {p.dtype for p in model.parameters()}
    if tolerance is None:
        tolerance = default_tolerance(dtypes)
    own = copy.deepcopy(model)
    own.zero_grad(set_to_none=True)
    captured = capture(
        own,
        batch,
        loss_fn=loss_fn,
        free_sizes=free_sizes,
        sample_axes=sample_axes,
        split_points=split_points,
        keep_whole=keep_whole,
        cache=cache,
    )
    whole = copy.deepcopy(captured.stage_module([o.name for o in captured.graph.operators]))
    pipeline = Pipeline(captured, strategy, verify=Verify.NEVER)
    found = pipeline.forward_backward(batch)
    gradients = pipeline.gather_gradients()
    if captured.is_random:
        tensors = captured.flatten_batch(batch)
        loss = whole(tensors, captured.num_samples(tensors))[captured.loss]
        reference_loss, reference = _backward(loss, whole)
    else:
        shadow = copy.deepcopy(model)
        shadow.zero_grad(set_to_none=True)
        reference_loss, reference = _backward(eager_loss(shadow, batch, loss_fn), shadow)
    scale = smallest_scale(reference)
    errors = {name: gradient_error(gradients.get(name), expected, scale) for name, expected in reference.items()}
    unexpected = set(gradients) - set(reference)
    if unexpected:
        raise GraphPipeError(f"the strategy trains parameters that the model lacks: {sorted(unexpected)[:3]}")
    dist.barrier()
    return Verification(found.loss, reference_loss, errors, tolerance)


def _backward(loss: Tensor, module: nn.Module) -> tuple[float, dict[str, Tensor | None]]:
    """Return a loss and the gradients of a module without any before."""
    torch.autograd.backward(loss)
    return float(loss.detach()), {n: p.grad for n, p in module.named_parameters() if p.requires_grad}
