"""Pictures of benchmarks, drawn from their JSON files alone."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Plot:
    """Which figures of a benchmark make its picture.

    Attributes:
        pattern: A regular expression that a figure's whole name matches, with groups ``x`` and ``series``.
        x_label: What ``x`` is; a numeric one makes lines, any other one bars.
        y_label: What the values are.
        is_logarithmic: Whether the values span orders of magnitude.
    """

    pattern: str
    x_label: str
    y_label: str
    is_logarithmic: bool = False


_GAIN = "samples a second over the baseline's"
PLOTS = {
    "throughput": Plot(
        pattern=r"(?P<series>[^/]+)/(?P<x>\d+)/graphpipe_(?P<more>over_\w+)", x_label="devices", y_label=_GAIN
    ),
    "sequential": Plot(
        pattern=r"(?P<series>[^/]+)/(?P<x>\d+)/graphpipe_(?P<more>over_\w+)", x_label="devices", y_label=_GAIN
    ),
    "branches": Plot(
        pattern=r"candle_uno/(?P<series>\d+)/(?P<x>\d+)-branches/graphpipe_(?P<more>over_\w+)",
        x_label="branches",
        y_label=_GAIN,
    ),
    "micro-batches": Plot(
        pattern=r"mmt/8/micro-batches-of-(?P<x>\d+)/(?P<series>\w+)_samples_per_s",
        x_label="samples in a micro-batch",
        y_label="samples a second",
    ),
    "scale": Plot(
        pattern=r"scale/(?P<series>\d+)/(?P<x>\d+)/search_s",
        x_label="units (a line for each number of devices)",
        y_label="CPU seconds",
        is_logarithmic=True,
    ),
    "search": Plot(
        pattern=r"(?P<x>[^/]+)/\d+/(?P<series>\w*(search|sweep)_s)",
        x_label="",
        y_label="CPU seconds",
        is_logarithmic=True,
    ),
    "ablation": Plot(pattern=r"ablation/(?P<x>[^/]+)/(?P<series>\w+)", x_label="", y_label=_GAIN),
    "case-study": Plot(
        pattern=r"case-study/(?P<x>graph_over_\w+)(?P<series>)", x_label="", y_label="samples a second over the chain's"
    ),
    "towers": Plot(pattern=r"towers/(?P<x>[^/]+)/(?P<series>\w+_over_\w+)", x_label="", y_label="seconds over seconds"),
    "runtime": Plot(
        pattern=r"runtime/emulated/(?P<x>\d+-processes/\d+)-micro-batches/(?P<series>\w+)_over_simulated",
        x_label="processes and micro-batches",
        y_label="seconds over the simulated seconds",
    ),
    "capture": Plot(pattern=r"(?P<x>\S+) (?P<series>captured.*), CPU", x_label="", y_label="CPU seconds"),
}
"""The pictures by benchmark."""


def draw_all(folder: Path) -> list[Path]:
    """Draw every benchmark whose JSON file is in a folder, beside that file, and return the pictures.

    Raises:
        ModuleNotFoundError: matplotlib is not installed; it comes with the extra ``plot``.
    """
    found = []
    for name, plot in PLOTS.items():
        path = folder / f"{name}.json"
        if path.exists():
            found.append(path.with_suffix(".svg"))
            draw(name, plot, json.loads(path.read_text())["figures"], found[-1])
    return found


def points(plot: Plot, figures: Sequence[dict[str, Any]]) -> dict[str, list[tuple[str, dict[str, Any]]]]:
    """Return ``{series: [(x, figure)]}`` of the figures that a plot shows, in their order."""
    found: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for figure in figures:
        match = re.fullmatch(plot.pattern, figure["name"])
        if match:
            groups = match.groupdict()
            series = " ".join(filter(None, (groups["series"], groups.get("more"))))
            found.setdefault(series, []).append((groups["x"], figure))
    return found


def draw(name: str, plot: Plot, figures: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw one benchmark's figures as SVG: values, goals as dashes, what the paper or theory says as crosses."""
    import matplotlib as mpl  # Only pictures need it.

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = name  # The same figures make the same file.
    from matplotlib import pyplot

    series = points(plot, figures)
    names = list(dict.fromkeys(x for line in series.values() for x, _ in line))
    is_line = all(x.isdigit() for x in names)
    canvas, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for at, (label, line) in enumerate(series.items()):
        width = 0.8 / len(series)
        xs = [float(x) if is_line else names.index(x) + (at + 0.5) * width - 0.4 for x, _ in line]
        values = [figure["value"] for _, figure in line]
        if is_line:
            axes.plot(xs, values, marker="o", label=label)
        else:
            axes.bar(xs, values, width, label=label)
        for key, marker in (("goal", "_"), ("paper", "x")):
            marks = [(x, figure[key]) for x, (_, figure) in zip(xs, line, strict=True) if figure[key] is not None]
            axes.plot([x for x, _ in marks], [y for _, y in marks], marker, color="black", markersize=8)
    if is_line:
        axes.set_xscale("log", base=2)
        ticks = sorted(map(int, names))
        axes.set_xticks(ticks, labels=list(map(str, ticks)))
    else:
        axes.set_xticks(range(len(names)), labels=names, rotation=20)
    if plot.is_logarithmic:
        axes.set_yscale("log")
    axes.set(title=name, xlabel=plot.x_label, ylabel=plot.y_label)
    if any(series):
        canvas.legend(loc="outside lower center", ncols=2, fontsize="small")
    canvas.savefig(path, format="svg", metadata={"Date": None})
    pyplot.close(canvas)
