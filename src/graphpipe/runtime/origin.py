"""Where in the user's own code an error comes from."""

from __future__ import annotations

import traceback
from pathlib import Path

import torch


def raised_at(error: BaseException) -> str:
    """Return the file and line of the user's code that an error comes from, in brackets; empty where there is none."""
    found = ""
    libraries = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
    for frame, line in traceback.walk_tb(error.__traceback__):
        name = frame.f_code.co_filename
        if not name.startswith((*libraries, "<")):
            found = f" ({name}:{line})"
    return found
