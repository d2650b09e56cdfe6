"""Writes the table of models in docs/capture.md: how the capture divides each model that the tests train.

Run ``python -m docs.make_tables`` after a change of the capture. A test compares rows with new captures, all but the
seconds, which are those of the machine that wrote the table.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

from graphpipe.capture import capture
from graphpipe.report.outline import knots, longest_path_share, num_branches, outline
from graphpipe.report.units import format_share
from tests.capture.zoo import ZOO

PAGE = Path(__file__).parent / "capture.md"
START, END = "<!-- table of models: start -->\n", "<!-- table of models: end -->\n"
HEADER = ("model", "operators", "branches", "knots", "longest path", "kept whole", "mixes samples", "capture, CPU")
NUM_SAMPLES = 4


def row(name: str) -> tuple[str, ...]:
    """Return the cells of a model; the last one is the CPU time."""
    model = ZOO[name]
    with model.in_its_dtype(), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        built, batch = model.build(), model.batch(NUM_SAMPLES)
        start_s = time.process_time()
        captured = capture(built, batch, free_sizes=model.free_sizes)
        seconds = time.process_time() - start_s
    graph = captured.graph
    root = outline(graph)
    mixing = sum(o.is_batch_wise for o in graph.operators)
    return (
        name,
        str(len(graph.operators)),
        str(num_branches(root)),
        ", ".join(f"of {len(knot.operators)}" for knot in knots(root)) or "none",
        format_share(longest_path_share(graph)),
        ", ".join(f"`{path}`" for path in sorted(captured.kept_whole)) or "none",
        f"{mixing} operator{'s' if mixing != 1 else ''}" if mixing else "none",
        f"{seconds:.1f} s",
    )


def table(rows: Sequence[tuple[str, ...]]) -> str:
    """Return a table in Markdown."""
    lines = [HEADER, tuple("---" for _ in HEADER), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def rows_of_the_page() -> list[tuple[str, ...]]:
    """Return the rows as they are in the page."""
    lines = PAGE.read_text().split(START)[1].split(END)[0].splitlines()
    return [tuple(cell.strip() for cell in line.strip("| ").split("|")) for line in lines[2:]]


def main() -> None:
    """Capture every model and write the table."""
    page = PAGE.read_text()
    before, rest = page.split(START)
    after = rest.split(END)[1]
    PAGE.write_text(f"{before}{START}{table([row(name) for name in ZOO])}{END}{after}")


if __name__ == "__main__":
    main()
