"""Finds Python numbers that have changed since a model was captured, which the captured model does not follow.

A model's code has run once, in the capture: the numbers, flags and texts that it has read then are part of the graph. A
weight of the loss that the training loop changes, as in annealing, would be without effect.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import FunctionType
from typing import Any

from torch import nn

_Watched = tuple[str, Callable[[], Any]]


class FrozenNumbers:
    """The plain values of a model and its loss function at the time of the capture.

    Watched are attributes of modules, their mode, which parameters need gradients, the entries of dictionaries and the
    variables that the loss function has from around it.

    Args:
        model: The model.
        loss_fn: Its loss, if it is a function of its own.
    """

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any] | None) -> None:
        self._watched = [*_entries(model, loss_fn), *_cells(loss_fn)]
        self._values = [read() for _, read in self._watched]
        self._flags = [
            _Flags("training", "modules", dict(model.named_modules())),
            _Flags("requires_grad", "parameters", dict(model.named_parameters())),
        ]

    def changed(self) -> list[tuple[str, Any, Any]]:
        """Return what has changed and was not returned before: what it is, its value then and now."""
        found = []
        for i, ((what, read), before) in enumerate(zip(self._watched, self._values, strict=True)):
            now = read()
            if now is not before and not (_is_plain(now) and now == before):
                found.append((i, what, before, now))
        for i, *_ in reversed(found):
            del self._watched[i], self._values[i]
        flags = [told for flags in self._flags if (told := flags.changed()) is not None]
        return [(what, before, now) for _, what, before, now in found] + flags


class _Flags:
    """One flag of many objects, of which all changes are told at once: a whole model may change its mode.

    Args:
        flag: The attribute.
        kind: What the objects are, as a plural.
        objects: By name.
    """

    def __init__(self, flag: str, kind: str, objects: Mapping[str, Any]) -> None:
        self._flag = flag
        self._kind = kind
        self._objects = objects
        self._values = [getattr(each, flag) for each in objects.values()]
        self._told: set[str] = set()

    def changed(self) -> tuple[str, Any, Any] | None:
        """Return what has changed and was not returned before."""
        now = [getattr(each, self._flag) for each in self._objects.values()]
        if now == self._values:
            return None
        differing = [(n, a, b) for n, a, b in zip(self._objects, self._values, now, strict=True) if a != b]
        found = [each for each in differing if each[0] not in self._told]
        if not found:
            return None
        self._told.update(name for name, _, _ in found)
        name, before, after = found[0]
        more = f" and {len(found) - 1} more {self._kind}" if found[1:] else ""
        return f"{self._flag} of {name or 'the model'}{more}", before, after


def _is_plain(value: Any) -> bool:
    return isinstance(value, int | float | str) and not isinstance(value, type)


def _entries(model: nn.Module, loss_fn: Callable[..., Any] | None) -> Iterator[_Watched]:
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for key, value in vars(module).items():
            # What torch keeps of its own, and the mode, are not what training changes.
            if _is_plain(value) and key != "training" and not key.startswith("_"):
                yield f"{prefix}{key} of the model", partial(vars(module).get, key)
    for name, value in _variables(loss_fn):
        if isinstance(value, dict):
            for key, entry in value.items():
                if _is_plain(entry):
                    yield f"{name}[{key!r}] of the loss", partial(value.get, key)
        elif _is_plain(value) and isinstance(loss_fn, FunctionType) and name in loss_fn.__globals__:
            yield f"{name} of the loss", partial(loss_fn.__globals__.get, name)


def _cells(loss_fn: Callable[..., Any] | None) -> Iterator[_Watched]:
    if isinstance(loss_fn, FunctionType):
        for name, cell in zip(loss_fn.__code__.co_freevars, loss_fn.__closure__ or (), strict=True):
            if _is_plain(_content(cell)):
                yield f"{name} of the loss", partial(_content, cell)


def _variables(loss_fn: Callable[..., Any] | None) -> Iterator[tuple[str, Any]]:
    """Yield the global and enclosing variables that a function reads."""
    if isinstance(loss_fn, FunctionType):
        for name, cell in zip(loss_fn.__code__.co_freevars, loss_fn.__closure__ or (), strict=True):
            yield name, _content(cell)
        # The code's own list of names has those of attributes and methods as well.
        for name in {i.argval for i in dis.get_instructions(loss_fn) if i.opname == "LOAD_GLOBAL"}:
            yield name, loss_fn.__globals__.get(name)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # It is not set yet.
        return None
