"""From a PyTorch model to a graph of operators."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from graphpipe.capture.accounting import account
from graphpipe.capture.autocast import Autocast
from graphpipe.capture.batch import BatchLayout, means_any, resize, tensor_names
from graphpipe.capture.captured import CapturedModel
from graphpipe.capture.classes import Kind
from graphpipe.capture.describe import describe
from graphpipe.capture.division import Division
from graphpipe.capture.export import (
    Mode,
    ModelWithLoss,
    export_graph,
    positional_names,
    shapes_for_meta,
    without_gradients,
)
from graphpipe.capture.keeping import next_kept
from graphpipe.capture.kept import KeptCapture, Question
from graphpipe.capture.leaves import UntraceableModuleError
from graphpipe.capture.outputs import ModelOutputs, OutputShape
from graphpipe.capture.probe import classify
from graphpipe.capture.specs import LossReduction
from graphpipe.capture.training_graph import TrainingGraph, clean
from graphpipe.capture.trial import NUM_SAMPLES
from graphpipe.capture.units import Granularity, form_units
from graphpipe.capture.wishes import Wishes
from graphpipe.disk_cache import DiskCache
from graphpipe.errors import CaptureError


def capture(
    model: nn.Module,
    example_batch: Any,
    *,
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    name: str | None = None,
    granularity: Granularity = Granularity.OPERATOR,
    split_points: Sequence[str] = (),
    keep_whole: Sequence[str] = (),
    mode: Mode = Mode.TRAIN,
    free_sizes: Mapping[str, Mapping[int, str]] = MappingProxyType({}),
    sample_axes: Mapping[str, int | None] = MappingProxyType({}),
    cache: DiskCache | None = None,
) -> CapturedModel:
    """Return a model and its loss as a graph of operators.

    The model is not changed. It may be on the meta device; the example batch may not. Freeze parameters before the
    capture, and capture again after freezing others. For training, a model in train mode keeps the mode of each of its
    modules; one in eval mode is captured in train mode. What is captured under autocast runs under the same one.

    Custom autograd functions keep their backward. A submodule that cannot be followed inside, because it branches on
    the values of tensors or has hooks on gradients, is kept whole: it becomes one operator, which runs its own code on
    the whole mini-batch at once. A warning says so, and why.

    Args:
        model: The model.
        example_batch: A batch of at least 2 samples. A mapping from names to tensors, plain values, or nested lists,
            tuples and dicts of these; or a tuple, list or single tensor of positional arguments. Samples are along axis
            0, unless `sample_axes` says otherwise. Tensors whose axis 0 has another size than most are taken not to
            depend on the batch. Other sizes, and plain values, are the same in every batch.
        loss_fn: Called with the model's output and the whole batch, returns the scalar loss. Then the model gets only
            the entries of the batch that its forward accepts. Without it, the model gets the whole batch and returns
            its loss: alone, as ``.loss``, under ``"loss"`` or first in a tuple.
        name: What the model is called in tables and pictures; by default its class.
        granularity: How finely the model is divided.
        split_points: Paths of modules to divide at: no operator has parts inside and outside of one of them.
        keep_whole: Paths of modules that become one operator each, with whatever lies between their own parts.
        free_sizes: Axes, besides the samples', whose size may differ from batch to batch, with a name for each size:
            ``{"input_ids": {1: "length"}, "labels": {1: "length"}}``. Inputs are meant by their name or by that of the
            batch's entry that they are part of. Sizes of one name are always equal.
        sample_axes: Where the samples of inputs are: ``{"tokens": 1, "positions": None}`` for a tensor that has them
            along axis 1 and one that has none, even though its axis 0 may have their number. Inputs are meant as in
            `free_sizes`.
        mode: What the model is captured for: an exported graph has one mode, so evaluation needs a capture of its own.
        cache: Where captures are kept, to be found again by a model that does the same; by default the user's own.

    Raises:
        CaptureError: The batch does not fit the model's inputs, or the model cannot be captured: its batch size is
            fixed, it branches on the values of a tensor, or it modifies an input. The message names the line.
    """
    wishes = Wishes.of(model, split_points, keep_whole)
    layout, tensors = flat_batch(model, example_batch, free_sizes, sample_axes)
    wrapper = ModelWithLoss(model, layout, loss_fn)
    name = name or type(model).__name__
    options = (name, granularity.value, *(f"split {p}" for p in split_points), *(f"whole {p}" for p in keep_whole))
    question = Question(model, wrapper, layout, tensors, loss_fn, mode, options)
    kept = KeptCapture(cache or DiskCache.default(), question)
    division, reasons = kept.read(), dict[str, str]()
    if division is None:
        division, reasons = _divide(model, wrapper, layout, tensors, name, granularity, wishes, mode)
        kept.write(division)
    return _captured(division, model, layout, reasons, loss_fn, mode)


def capture_evaluation(
    model: nn.Module,
    example_batch: Any,
    *,
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    free_sizes: Mapping[str, Mapping[int, str]] = MappingProxyType({}),
    sample_axes: Mapping[str, int | None] = MappingProxyType({}),
) -> CapturedModel:
    """Return a model in eval mode and its loss as a graph of operators, none of which has a backward pass.

    The arguments and errors are those of `capture`.
    """
    with without_gradients(model):
        return capture(
            model, example_batch, loss_fn=loss_fn, mode=Mode.EVAL, free_sizes=free_sizes, sample_axes=sample_axes
        )


def capture_prediction(
    model: nn.Module,
    example_batch: Any,
    *,
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    free_sizes: Mapping[str, Mapping[int, str]] = MappingProxyType({}),
    sample_axes: Mapping[str, int | None] = MappingProxyType({}),
) -> tuple[CapturedModel, Callable[[Sequence[Tensor], Mapping[str, Tensor]], Any]]:
    """Return a model in eval mode with what it returns, and what puts the tensors of `outputs` into that structure.

    It is called with these tensors and the flat batch: numbers in the output may follow from its sizes.

    The arguments and errors are those of `capture`; the batch may lack what only `loss_fn` reads, of which
    `free_sizes` and `sample_axes` may tell all the same.
    """
    inputs = tensor_names(example_batch, _positional_names(model, example_batch))
    own_sizes = {name: axes for name, axes in free_sizes.items() if means_any(name, inputs)}
    own_axes = {name: axis for name, axis in sample_axes.items() if means_any(name, inputs)}
    layout, tensors = flat_batch(model, example_batch, own_sizes, own_axes)
    wishes = Wishes.of(model, (), ())
    shape = OutputShape()
    wrapper = ModelOutputs(model, layout, loss_fn or _unused_loss, shape)
    with without_gradients(model):
        name, mode = type(model).__name__, Mode.EVAL
        division, reasons = _divide(model, wrapper, layout, tensors, name, Granularity.OPERATOR, wishes, mode)
    captured = _captured(division, model, layout, reasons, loss_fn, mode)
    return captured, shape.filled


def _unused_loss(_: Any, __: Any) -> Tensor:
    raise AssertionError("a prediction computes no loss")


def _divide(
    model: nn.Module,
    wrapper: ModelWithLoss,
    layout: BatchLayout,
    tensors: dict[str, Tensor],
    name: str,
    granularity: Granularity,
    wishes: Wishes,
    mode: Mode,
) -> tuple[Division, dict[str, str]]:
    """Return the division of a model, and why some of its modules are kept whole."""
    graph, reasons = _training_graph(wrapper, model, layout, tensors, mode)
    for path, reason in reasons.items():
        warnings.warn(f"`{path}` is kept whole and takes the whole mini-batch at once: {reason}", stacklevel=3)
    accounting = account(graph, NUM_SAMPLES)
    classification = classify(graph, resize(layout, tensors, NUM_SAMPLES))
    units = form_units(graph, classification, accounting, granularity, wishes)
    description = describe(name, graph, classification, accounting, units)
    return Division(graph, classification, units, description), reasons


def _captured(
    division: Division,
    model: nn.Module,
    layout: BatchLayout,
    reasons: Mapping[str, str],
    loss_fn: Callable[[Any, Any], Tensor] | None,
    mode: Mode,
) -> CapturedModel:
    graph, classification = division.graph, division.classification
    loss_unit = next(nodes for nodes in division.units.members if graph.loss in nodes)
    is_batch_wise = any(node in classification.batch_wise for node in loss_unit)
    return CapturedModel(
        model,
        division.description,
        layout,
        _loss_reduction(classification.classes[graph.loss].kind, is_batch_wise),
        _parameter_names(model),
        graph,
        classification,
        division.units,
        Autocast.ambient(),
        reasons,
        loss_fn,
        mode,
    )


def _training_graph(
    wrapper: ModelWithLoss, model: nn.Module, layout: BatchLayout, tensors: Mapping[str, Tensor], mode: Mode
) -> tuple[TrainingGraph, dict[str, str]]:
    """Return the graph of a model, and why some of its modules are kept whole."""
    kept_whole: dict[str, bool] = {}
    reasons: dict[str, str] = {}
    while True:
        try:
            with shapes_for_meta(model) as original:
                module, leaves = export_graph(wrapper, list(tensors.values()), layout, kept_whole, mode)
            graph = clean(module, model, layout, original, leaves)
        except UntraceableModuleError as needed:
            before = kept_whole
            try:
                kept_whole = next_kept(model, kept_whole, needed)
            except UntraceableModuleError:
                if not reasons:
                    raise
                first = next(iter(reasons.values()))
                raise CaptureError(f"{first}. Keeping a module whole does not help: {needed}") from needed
            reasons |= {path: str(needed) for path in kept_whole if path not in before}
        else:
            return graph, {path: reasons[path] for path in kept_whole}


def eager_loss(model: nn.Module, batch: Any, loss_fn: Callable[[Any, Any], Tensor] | None = None) -> Tensor:
    """Return the loss of a batch as one process computes it, in the way in which `capture` reads model and batch.

    A model in eval mode is put into train mode, as `capture` does.
    """
    layout, tensors = flat_batch(model, batch)
    if not model.training:
        model.train()
    loss: Tensor = ModelWithLoss(model, layout, loss_fn)(*tensors.values())
    return loss


def flat_batch(
    model: nn.Module,
    example_batch: Any,
    free_sizes: Mapping[str, Mapping[int, str]] = MappingProxyType({}),
    sample_axes: Mapping[str, int | None] = MappingProxyType({}),
) -> tuple[BatchLayout, dict[str, Tensor]]:
    """Return the layout of an example batch, and its tensors by name."""
    layout = BatchLayout.of(example_batch, _positional_names(model, example_batch), free_sizes, sample_axes)
    return layout, layout.flatten(example_batch)


def _positional_names(model: nn.Module, batch: Any) -> list[str]:
    if isinstance(batch, Mapping):
        return []
    return positional_names(model, 1 if isinstance(batch, Tensor) else len(batch))


def _loss_reduction(kind: Kind, is_batch_wise: bool) -> LossReduction:
    if is_batch_wise or kind not in (Kind.MEAN, Kind.SUM, Kind.INDEPENDENT):
        return LossReduction.WHOLE
    return LossReduction.SUM if kind is Kind.SUM else LossReduction.MEAN


def _parameter_names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, tuple[str, ...]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found[first[id(parameter)]] = (*found.get(first[id(parameter)], ()), name)
    return found
