"""Notice what an exported graph would lose without a word: code that runs in backward, and Python's own state.

Export records tensor operations of the forward pass. A hook on a gradient, a Python counter or a number from Python's
random generator leave no trace in it, and training would silently do something else.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from graphpipe.capture.keeping import innermost_module, is_inside_leaf
from graphpipe.capture.leaves import UntraceableModuleError
from graphpipe.errors import CaptureError


@dataclass
class _Findings:
    functions: list[tuple[str, str]] = field(default_factory=list)
    hooks: list[tuple[str, str]] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)


@contextlib.contextmanager
def losses_noticed(model: nn.Module, kept_whole: Collection[str]) -> Iterator[None]:
    """Watch a model's forward pass in the block.

    Args:
        model: The model.
        kept_whole: The paths of the modules whose code is kept as it is.

    Raises:
        UntraceableModuleError: A module has what a graph would lose; kept whole it would not.
        CaptureError: After the block: the model has what a graph would lose.
    """
    name = type(model).__name__
    for path, module in model.named_modules():
        if any(path == kept or path.startswith(kept + ".") for kept in kept_whole):
            continue
        if module._backward_hooks or module._backward_pre_hooks:
            raise UntraceableModuleError(
                f"the backward hook on {path or name!r} would be lost in the captured graph; remove it, or put what it "
                "does into the forward pass or the optimizer",
                path,
                is_traceable=True,
            )
    randomness = random.getstate()
    numpy_randomness = np.random.get_state()[1].tobytes()  # type: ignore[index] # noqa: NPY002
    findings = _Findings()
    with _watched(model, findings):
        yield
    for function, path in findings.functions:
        raise UntraceableModuleError(
            f"{name} uses the torch.autograd.Function {function!r}, whose backward would give way to that of its "
            "forward's operations; checkpoint with use_reentrant=False",
            path,
            is_traceable=True,
        )
    for hook, path in findings.hooks:
        raise UntraceableModuleError(
            f"{name} registers the gradient hook {hook!r} in forward, which would be lost in the "
            "captured graph; put what it does into the forward pass",
            path,
            is_traceable=True,
        )
    if random.getstate() != randomness or np.random.get_state()[1].tobytes() != numpy_randomness:  # type: ignore[index] # noqa: NPY002
        raise CaptureError(
            f"{name} draws from Python's or numpy's random generator in forward, and the captured graph would hold "
            "one draw for ever; draw with torch"
        )
    if findings.changes:
        raise CaptureError(
            f"forward of {name} changes its attribute {findings.changes[0]}, and the captured graph would not; keep "
            "it in a buffer"
        )


@contextlib.contextmanager
def _watched(model: nn.Module, findings: _Findings) -> Iterator[None]:
    function_apply = torch.autograd.Function.__dict__["apply"]
    register_hook = Tensor.register_hook
    set_attribute = nn.Module.__setattr__
    paths = {id(module): path for path, module in model.named_modules()}

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        # Other custom functions are kept as they are; this one runs a part of the model in its backward.
        if cls.__name__ == "CheckpointFunction" and not is_inside_leaf():
            findings.functions.append((cls.__qualname__, _calling_module(model)))
        return function_apply.__func__(cls, *args, **kwargs)

    def register(self: Tensor, hook: Any) -> Any:
        if not is_inside_leaf():
            findings.hooks.append((getattr(hook, "__qualname__", repr(hook)), _calling_module(model)))
        return register_hook(self, hook)  # type: ignore[no-untyped-call]

    def assign(self: nn.Module, name: str, value: Any) -> None:
        before = vars(self).get(name)
        is_plain = isinstance(value, int | float | str | bool) and not name.startswith("_") and name != "training"
        is_of_model = id(self) in paths or is_inside_leaf()
        if is_plain and is_of_model and name in vars(self) and before != value:
            path = f"{paths.get(id(self), type(self).__name__)}.{name}".lstrip(".")
            findings.changes.append(f"{path!r} from {before!r} to {value!r}")
        set_attribute(self, name, value)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment,method-assign]
    Tensor.register_hook = register  # type: ignore[method-assign]
    nn.Module.__setattr__ = assign  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autograd.Function.apply = function_apply  # type: ignore[method-assign]
        Tensor.register_hook = register_hook  # type: ignore[method-assign]
        nn.Module.__setattr__ = set_attribute  # type: ignore[method-assign]


def _calling_module(model: nn.Module) -> str:
    """The path of the innermost module of a model whose code runs at the moment."""
    frames = []
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        frames.append(frame)
    return innermost_module(model, frames[::-1])
