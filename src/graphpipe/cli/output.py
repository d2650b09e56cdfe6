"""What several commands print or write."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from graphpipe.estimate import Estimate, estimate
from graphpipe.files import write_text
from graphpipe.report import plan_text, stage_graph_text
from graphpipe.strategy import Strategy


def print_strategy(strategy: Strategy, found: Estimate | None = None) -> None:
    """Print the table of a strategy and a picture of its stage graph."""
    width = max(80, min(shutil.get_terminal_size((110, 24)).columns, 140))
    print(plan_text(strategy, found or estimate(strategy), width=width))
    print(stage_graph_text(strategy))


def write_json(path: Path, data: Any) -> None:
    """Write plain data as JSON, whole or not at all."""
    write_text(path, json.dumps(data))
