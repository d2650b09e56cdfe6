"""What every benchmark returns, prints and writes."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One number beside what was hoped for.

    Attributes:
        name: Unique over all benchmarks.
        value: What came out.
        unit: Of the value; ``ratio`` for a quotient of two measurements in one run.
        goal: What we want it to reach, if anything.
        paper: What the GraphPipe paper or theory says, if anything.
        holds: Whether the goal is reached; True where there is none.
    """

    name: str
    value: float
    unit: str
    goal: float | None = None
    paper: float | None = None
    holds: bool = True


def print_figures(figures: Sequence[Figure]) -> None:
    """Print a line a figure."""
    for figure in figures:
        goal = "" if figure.goal is None else f"  goal {figure.goal:g}: {'reached' if figure.holds else 'missed'}"
        paper = "" if figure.paper is None else f"  theory {figure.paper:g}"
        print(f"{figure.name:44s} {figure.value:8.3f} {figure.unit}{goal}{paper}")


def write_figures(figures: Sequence[Figure], path: Path) -> None:
    """Write the figures and the machine that they were measured on as JSON."""
    environment = {"python": platform.python_version(), "machine": platform.machine(), "cores": os.cpu_count()}
    path.write_text(json.dumps({"figures": [asdict(f) for f in figures], "environment": environment}, indent=1))
