"""What several commands print or write."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from graphpipe.errors import GraphPipeError
from graphpipe.estimate import Estimate, estimate
from graphpipe.report import plan_text, stage_graph_text
from graphpipe.strategy import Strategy


def print_strategy(strategy: Strategy, found: Estimate | None = None) -> None:
    """Print the table of a strategy and a picture of its stage graph."""
    width = max(80, min(shutil.get_terminal_size((110, 24)).columns, 140))
    print(plan_text(strategy, found or estimate(strategy), width=width))
    print(stage_graph_text(strategy))


def write_text(path: Path, text: str) -> None:
    """Write a file, whole or not at all.

    Raises:
        GraphPipeError: It cannot be written.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        draft.write_text(text)
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise GraphPipeError(f"{str(path)!r} cannot be written: {error.strerror}") from error


def write_json(path: Path, data: Any) -> None:
    """Write plain data as JSON, whole or not at all."""
    write_text(path, json.dumps(data))
