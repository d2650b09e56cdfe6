"""Built-in functions that keep the batch size symbolic in a model's code.

``len(tensor)`` must return a plain int, and ``list(tensor)`` a list with a plain number of rows. Either would fix the
batch size. So while a model is captured, the Python modules that define it see other ones, which do not.
"""

from __future__ import annotations

import builtins
import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn


@contextlib.contextmanager
def symbolic_builtins(model: nn.Module, loss_fn: Callable[..., Any] | None) -> Iterator[None]:
    """Let ``len(tensor)`` and ``list(tensor)`` keep the batch size symbolic for the block.

    Args:
        model: The Python modules of its classes are meant.
        loss_fn: So is this function's.
    """
    names = {cls.__module__ for module in model.modules() for cls in type(module).__mro__}
    if loss_fn is not None:
        names.add(getattr(loss_fn, "__module__", "builtins"))
    shimmed = []
    for name in sorted(names):
        space = vars(sys.modules[name]) if name in sys.modules else None
        if space is None or name.split(".")[0] in ("torch", "builtins", "graphpipe"):
            continue
        for builtin, shim in (("len", _symbolic_len), ("list", _SymbolicList)):
            if builtin not in space:
                space[builtin] = shim
                shimmed.append((space, builtin))
    try:
        yield
    finally:
        for space, builtin in shimmed:
            del space[builtin]


def _symbolic_len(x: Any) -> Any:
    if isinstance(x, _Rows):
        return x.source.shape[0]
    return x.shape[0] if isinstance(x, Tensor) and x.dim() else builtins.len(x)


class _Rows(list[Any]):
    """The rows of a tensor as a list of unknown length, for operators that put rows together again.

    Whatever else reads it reads the rows one by one, which fixes their number.
    """

    def __init__(self, source: Tensor) -> None:
        super().__init__([_AllRows(source)])  # operators read the entries of a list without asking the list
        self.source = source

    def __iter__(self) -> Iterator[Any]:
        return iter(self.source)

    def __len__(self) -> int:
        return builtins.len(self.source)

    def __getitem__(self, index: Any) -> Any:
        return builtins.list(self.source)[index] if isinstance(index, slice) else self.source[index]


class _AllRows:
    """Stands for all rows of a tensor, as an argument of an operator."""

    def __init__(self, source: Tensor) -> None:
        self.source = source

    @classmethod
    def __torch_function__(
        cls, function: Any, _: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        axis = kwargs.get("dim", kwargs.get("axis", args[1] if builtins.len(args) > 1 else 0))
        rows = args[0] if args else kwargs.get("tensors")
        if isinstance(rows, _Rows) and axis == 0:
            if function in (torch.cat, torch.concat, torch.concatenate):
                return rows.source.flatten(0, 1)
            if function is torch.stack:
                return rows.source
        args, kwargs = torch.utils._pytree.tree_map_only(
            _Rows, lambda r: builtins.list(r.source), (args, kwargs), is_leaf=lambda x: isinstance(x, _Rows)
        )
        return function(*args, **kwargs)


class _ListType(type):
    def __call__(cls, *args: Any) -> Any:
        if args and isinstance(args[0], Tensor) and args[0].dim():
            return _Rows(args[0])
        return builtins.list(*args)

    def __instancecheck__(cls, x: Any) -> bool:
        return isinstance(x, builtins.list)

    def __subclasscheck__(cls, other: type) -> bool:
        return issubclass(other, builtins.list)


class _SymbolicList(list[Any], metaclass=_ListType):
    """Takes the place of ``list``."""
