"""What every benchmark returns, prints and writes."""

from __future__ import annotations

import json
import os
import platform
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One number beside what was hoped for.

    Attributes:
        name: Unique over all benchmarks.
        value: What came out.
        unit: Of the value; ``ratio`` for a quotient of two figures of one run.
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


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a benchmark found.

    Attributes:
        claim: What the paper or theory says, in a sentence or two.
        figures: What came out.
        remarks: Where that differs from the claim, and why; what was assumed.
    """

    claim: str
    figures: tuple[Figure, ...]
    remarks: tuple[str, ...] = ()


def at_least(name: str, value: float, unit: str, goal: float, paper: float | None = None) -> Figure:
    """Return a figure that should not be below its goal."""
    return Figure(name=name, value=value, unit=unit, goal=goal, paper=paper, holds=value >= goal)


def at_most(name: str, value: float, unit: str, goal: float, paper: float | None = None) -> Figure:
    """Return a figure that should not be above its goal."""
    return Figure(name=name, value=value, unit=unit, goal=goal, paper=paper, holds=value <= goal)


def progress(line: str) -> None:
    """Tell a person who waits what is done, apart from the results."""
    print(f"  {line}", file=sys.stderr, flush=True)


def print_report(name: str, report: Report) -> None:
    """Print the claim, a line a figure, and the remarks."""
    print(f"== {name}\nclaim: {report.claim}")
    for figure in report.figures:
        goal = "" if figure.goal is None else f"  goal {figure.goal:g}: {'reached' if figure.holds else 'missed'}"
        paper = "" if figure.paper is None else f"  paper or theory {figure.paper:g}"
        print(f"{figure.name:52s} {figure.value:10.4g} {figure.unit}{goal}{paper}")
    for remark in report.remarks:
        print(f"- {remark}")


def write_report(report: Report, path: Path) -> None:
    """Write a report and the machine that it was made on as JSON."""
    environment = {
        "python": platform.python_version(),
        "torch": version("torch"),
        "numpy": version("numpy"),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
    }
    data = {
        "claim": report.claim,
        "figures": [asdict(figure) for figure in report.figures],
        "remarks": report.remarks,
        "environment": environment,
    }
    path.write_text(json.dumps(data, indent=1))
