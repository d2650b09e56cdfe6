"""Finds the training job that ``package.module:function`` names."""

from __future__ import annotations

import importlib
import inspect
import sys
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from torch import nn

from graphpipe.api import Job
from graphpipe.errors import GraphPipeError


def load_job(reference: str) -> Job:
    """Return what the function of a reference returns.

    The folder that the command runs in is searched first, as `python -m` does.

    Args:
        reference: ``package.module:function``, or ``path/to/file.py:function``. The function takes no arguments and
            returns a `graphpipe.Job`, or a tuple of model and example batch, with a loss function if there is one.

    Raises:
        GraphPipeError: There is no such module or function, or it returns something else.
    """
    module_name, separator, function_name = reference.rpartition(":")
    if not separator or not module_name or not function_name:
        raise GraphPipeError(f"{reference!r} does not name a model; write package.module:function")
    module = _import(module_name)
    function = getattr(module, function_name, None)
    if not callable(function):
        others = [n for n, f in vars(module).items() if inspect.isfunction(f) and f.__module__ == module.__name__]
        near = get_close_matches(function_name, others, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; it has {', '.join(sorted(others)) or 'no functions'}"
        raise GraphPipeError(f"module {module_name!r} has no function {function_name!r}{hint}")
    return _as_job(function(), reference)


def _import(name: str) -> Any:
    if name.endswith(".py"):
        path = Path(name)
        if not path.is_file():
            raise GraphPipeError(f"there is no file {name!r}")
        sys.path.insert(0, str(path.resolve().parent))
        name = path.stem
    elif "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise GraphPipeError(
                f"there is no module {name!r} here; run the command in the folder that holds it"
            ) from error
        raise GraphPipeError(f"module {name!r} needs {error.name!r}, which is not installed") from error


def _as_job(found: object, reference: str) -> Job:
    if isinstance(found, Job):
        return found
    if isinstance(found, tuple) and len(found) in (2, 3) and isinstance(found[0], nn.Module):
        loss_fn = found[2] if len(found) == 3 else None
        return Job(model=found[0], example_batch=found[1], loss_fn=loss_fn)
    raise GraphPipeError(
        f"{reference} returned {type(found).__name__}; return a graphpipe.Job, or (model, example_batch, loss_fn)"
    )
