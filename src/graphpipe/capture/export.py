"""A model and its loss as one exported graph over the flat tensors of a batch."""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import re
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from graphpipe.capture.assignments import assignments_recorded
from graphpipe.capture.batch import BatchLayout, closest
from graphpipe.capture.detectors import losses_noticed
from graphpipe.capture.keeping import innermost_module, leaves_made
from graphpipe.capture.leaves import Leaf, UntraceableModuleError
from graphpipe.capture.symbolic_builtins import symbolic_builtins
from graphpipe.errors import CaptureError

LossFunction = Callable[[Any, Any], Tensor]

# The module under which the user's model is exported; taken off again from every name.
MODEL = "model"


class ModelWithLoss(nn.Module):
    """A model and its loss as a function from the flat tensors of a batch to a scalar.

    Args:
        model: The user's model.
        layout: The structure of its batches.
        loss_fn: Takes the model's output and the batch; None if the model returns its loss.

    Raises:
        CaptureError: The names of the batch don't fit the arguments of the model's forward.
    """

    def __init__(self, model: nn.Module, layout: BatchLayout, loss_fn: LossFunction | None) -> None:
        super().__init__()
        self.add_module(MODEL, model)
        self._layout = layout
        self._loss_fn = loss_fn
        self._accepted = _accepted_arguments(model, layout, loss_fn)

    def forward(self, *tensors: Tensor) -> Tensor:
        """Return the loss of a batch."""
        output, given = self._call(tensors)
        return _scalar(output) if self._loss_fn is None else _scalar(self._loss_fn(output, given), "loss_fn")

    def _call(self, tensors: tuple[Tensor, ...]) -> tuple[Any, Any]:
        """Return the model's output for a batch, and the batch."""
        batch = self._layout.unflatten(tensors)
        model = getattr(self, MODEL)
        if self._layout.is_positional:
            output = model(*batch[: len(self._accepted)])
            given = batch if len(batch) > 1 else batch[0]
        else:
            output = model(**{name: batch[name] for name in self._accepted})
            given = batch
        return output, given


def positional_names(model: nn.Module, count: int) -> list[str]:
    """Return names for `count` positional inputs: forward's own, then ``batch_1`` and so on."""
    names = []
    for parameter in inspect.signature(model.forward).parameters.values():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
    return [names[i] if i < len(names) else f"batch_{i}" for i in range(count)]


def _accepted_arguments(model: nn.Module, layout: BatchLayout, loss_fn: LossFunction | None) -> list[str]:
    """The batch's entries that go to the model."""
    signature = inspect.signature(model.forward).parameters.values()
    entries = list(layout.entries)
    if layout.is_positional:
        takes_all = any(p.kind is p.VAR_POSITIONAL for p in signature)
        named = [p for p in signature if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        accepted = entries if takes_all else entries[: len(named)]
        if loss_fn is None and len(accepted) < len(entries):
            raise CaptureError(
                f"forward of {type(model).__name__} takes {len(named)} positional inputs and the example batch has "
                f"{len(entries)}; pass a loss_fn that takes the rest"
            )
        return accepted
    takes_all = any(p.kind is p.VAR_KEYWORD for p in signature)
    named = [p for p in signature if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    names = [p.name for p in named]
    accepted = [entry for entry in entries if takes_all or entry in names]
    left = [entry for entry in entries if entry not in accepted]
    for parameter in named:
        if parameter.default is parameter.empty and parameter.name not in entries:
            near = closest(parameter.name, left)
            raise CaptureError(
                f"the example batch has no `{parameter.name}`, which forward of {type(model).__name__} needs"
                + (f"; it has `{near}`, did you mean `{parameter.name}`?" if near else "")
            )
    if loss_fn is None and left:
        near = closest(left[0], [name for name in names if name not in entries])
        raise CaptureError(
            f"{type(model).__name__} has no input `{left[0]}`; "
            + (
                f"did you mean `{near}`?"
                if near
                else f"its inputs are {', '.join(names)}; or pass a loss_fn that reads it"
            )
        )
    return accepted


def _scalar(output: Any, source: str = "the model") -> Tensor:
    loss = output
    if isinstance(output, Mapping):
        loss = output.get("loss")
    elif isinstance(output, tuple | list) and not hasattr(output, "loss"):
        loss = output[0] if output else None
    elif not isinstance(output, Tensor):
        loss = getattr(output, "loss", None)
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        got = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(output).__name__}"
        raise CaptureError(
            f"{source} must return a scalar loss (alone, as `.loss`, under 'loss' or first in a tuple), got {got}; "
            + ("pass a loss_fn" if source == "the model" else "reduce it with .mean() or .sum()")
        )
    return loss


class Mode(StrEnum):
    """What a model is captured for."""

    TRAIN = "train"
    """Training. A module that is in eval mode while the model is not, such as a frozen normalisation, stays so."""
    EVAL = "eval"
    """Evaluation: nothing is dropped, and running statistics are used and left alone."""


@contextlib.contextmanager
def put_into(mode: Mode, model: nn.Module) -> Iterator[None]:
    """Put a model into a mode for the block, and every module back to its own mode after it."""
    modes = [(module, module.training) for module in model.modules()]
    if mode is Mode.EVAL:
        model.eval()
    elif not model.training:
        model.train()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextlib.contextmanager
def shapes_for_meta(model: nn.Module) -> Iterator[dict[int, Tensor]]:
    """Put tensors without memory, on the CPU, in the place of a model's meta tensors for the block.

    Export mixes them with the real inputs, which it refuses for the meta device itself. Buffers become zeros.

    Yields:
        The model's own tensor for the identity of each one put in its place.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    original: dict[int, Tensor] = {}
    stand_ins: dict[int, Tensor] = {}  # tied tensors stay tied
    replaced: list[tuple[dict[str, Any], str, Tensor]] = []
    tensors: dict[str, Any]
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor.is_meta:
                    replaced.append((tensors, name, tensor))
    for tensors, name, tensor in replaced:
        if id(tensor) not in stand_ins:
            if isinstance(tensor, nn.Parameter):
                with mode:
                    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                    stand_in: Tensor = nn.Parameter(empty, requires_grad=tensor.requires_grad)
            else:
                stand_in = torch.zeros(tensor.shape, dtype=tensor.dtype)
            stand_ins[id(tensor)] = stand_in
            original[id(stand_in)] = tensor
        tensors[name] = stand_ins[id(tensor)]
    try:
        yield original
    finally:
        for tensors, name, tensor in replaced:
            tensors[name] = tensor


@dataclass
class _GuardLog:
    """The conditions on sizes that tracing relied on, each with the user's line that asked for it."""

    entries: list[tuple[sympy.Basic, str]] = field(default_factory=list)

    def about_one_size(self) -> tuple[sympy.Basic, str] | None:
        """The first condition that bounds a size; that two inputs have the same size is none. Equations go first."""
        found = [(g, place) for g, place in self.entries if len(g.free_symbols) == 1]
        return next(iter(sorted(found, key=lambda entry: not isinstance(entry[0], sympy.Eq | sympy.Ne))), None)


@contextlib.contextmanager
def _guard_log() -> Iterator[_GuardLog]:
    # Export's own message about a fixed batch size has no location. The shape environment calls this method from
    # inside the user's forward at the moment it gives up generality.
    log = _GuardLog()
    original = ShapeEnv._log_guard

    def record(self: ShapeEnv, prefix: str, g: Any, forcing_spec: bool) -> None:
        place = _user_line(traceback.extract_stack())
        if place is not None:
            log.entries.append((g, place))
        original(self, prefix, g, forcing_spec)

    ShapeEnv._log_guard = record  # type: ignore[method-assign]
    try:
        yield log
    finally:
        ShapeEnv._log_guard = original  # type: ignore[method-assign]


def _user_line(frames: traceback.StackSummary) -> str | None:
    """The innermost frame that is neither torch's nor ours, as ``file:line `code```."""
    for frame in reversed(frames):
        path = frame.filename.replace("\\", "/")
        if "/torch/" in path or "/graphpipe/capture/" in path or path.startswith("<") or "contextlib" in path:
            continue
        return f"{frame.filename}:{frame.lineno}" + (f" `{frame.line}`" if frame.line else "")
    return None


@contextlib.contextmanager
def without_gradients(model: nn.Module) -> Iterator[None]:
    """Freeze the parameters of a model for the block."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trainable:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)


def export_graph(
    wrapper: ModelWithLoss, tensors: list[Tensor], layout: BatchLayout, kept_whole: Mapping[str, bool], mode: Mode
) -> tuple[fx.GraphModule, list[Leaf]]:
    """Return the graph of a model and its loss, undecomposed, with the batch size as its only free size.

    Args:
        wrapper: The model and its loss, or its outputs.
        tensors: A flat batch.
        layout: Of the batch.
        kept_whole: The paths of the modules to keep as one operation; for each, whether it can run on tensors
            without values.
        mode: What the model is captured for.

    Returns:
        The graph, and the Python code in it, which lives as long as these objects.

    Raises:
        UntraceableModuleError: A module cannot be followed inside, but perhaps kept whole.
        CaptureError: The model cannot be exported so. The message has the user's file and line where known.
    """
    model = getattr(wrapper, MODEL)
    flat = dict(zip(layout.inputs, tensors, strict=True))
    free_examples = frozenset(flat[name].shape[axis] for name, axes in layout.free_axes.items() for axis in axes)
    with (
        put_into(mode, model),
        leaves_made(model, kept_whole, free_examples) as leaves,
        losses_noticed(model, kept_whole),
        assignments_recorded(model),
        symbolic_builtins(model, wrapper._loss_fn),
        _guard_log() as log,
        quiet(),
    ):
        try:
            try:
                program = _export(wrapper, tensors, layout, {})
            except torch._dynamo.exc.UserError as error:
                bounds = _bounds(str(error))
                if not bounds:
                    raise
                leaves.clear()
                program = _export(wrapper, tensors, layout, bounds)
            return program.module(check_guards=False), leaves
        except CaptureError:
            raise
        except Exception as error:  # torch raises whatever the user's code or its own tracer met
            raise _explained(error, model, layout.num_samples, log) from error


def _export(
    wrapper: ModelWithLoss, tensors: list[Tensor], layout: BatchLayout, bounds: Mapping[str, Mapping[str, int]]
) -> torch.export.ExportedProgram:
    batch = Dim("batch")
    named = {n: Dim(n, **bounds.get(n, {})) for axes in layout.free_axes.values() for n in axes.values()}
    shapes: list[dict[int, Any] | None] = []
    for name, spec in layout.inputs.items():
        axes: dict[int, Any] = {} if spec.layout is None else {spec.layout.axis: batch}
        axes |= {axis: named[size] for axis, size in layout.free_axes.get(name, {}).items()}
        shapes.append(axes or None)
    return torch.export.export(wrapper, tuple(tensors), dynamic_shapes={"tensors": tuple(shapes)}, strict=False)


def _bounds(message: str) -> dict[str, dict[str, int]]:
    """The bounds that export asks for, of a length up to the rows of a table of positions; none if a size is fixed."""
    _, _, fixes = message.partition("Suggested fixes:")
    found: dict[str, dict[str, int]] = {}
    for line in filter(None, map(str.strip, fixes.splitlines())):
        fix = re.match(r"(\w+) = Dim\('\w+', (.*)\)$", line)
        if fix is None:
            break
        found[fix[1]] = {bound: int(size) for bound, size in re.findall(r"(min|max)=(\d+)", fix[2])}
    is_fixed = "specialized" in message or "batch" in found
    return {} if is_fixed else found


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep torch from printing warnings and whole graphs: what went wrong is said in one sentence afterwards."""
    logger = logging.getLogger("torch")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _explained(error: Exception, root: nn.Module, num_samples: int, log: _GuardLog) -> CaptureError:
    kind, model = type(error).__name__, type(root).__name__
    path = innermost_module(root, [frame for frame, _ in traceback.walk_tb(error.__traceback__)])
    place = _user_line(traceback.extract_tb(error.__traceback__))
    first_line = next((line for line in str(error).splitlines() if line.strip()), kind)
    if "data-dependent" in str(error) or kind.startswith(
        ("GuardOnDataDependent", "DataDependent", "UnsupportedOperator")
    ):
        return UntraceableModuleError(
            f"{model} branches or takes a size from the values of a tensor at {place or 'an unknown line'}, so its "
            "graph is not the same for every batch; use torch.where, or compute the condition outside of the model",
            path,
        )
    if "specialized" in str(error) or "Constraints violated" in str(error) or kind == "ConstraintViolationError":
        condition, line = log.about_one_size() or (None, "an unknown line")
        fixed = re.search(
            r"marked (\w+) as dynamic but your code specialized it to be a constant \((\d+)\)", str(error)
        )
        if fixed is not None and fixed[1] != "batch":
            return CaptureError(
                f"the size {fixed[1]!r} of {model} was fixed to {fixed[2]} at {line}; take it from `.shape` of an "
                "input, or leave it out of the free sizes"
            )
        if condition is None or isinstance(condition, sympy.Eq):
            return CaptureError(
                f"the batch size of {model} was fixed to {num_samples} at {line}; take it from `.shape[0]` of an input "
                "and write no number for it"
            )
        return CaptureError(
            f"{model} does something else for other batch sizes than {num_samples} at {line}; micro-batches of any "
            "size must take the same path"
        )
    message = f"{model} cannot be exported: {kind}: {first_line}" + (f" (at {place})" if place else "")
    return UntraceableModuleError(message, path)
