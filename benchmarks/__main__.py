"""``python -m benchmarks NAME --json FILE``, or ``all --out DIR`` for all of them, or ``plot --out DIR``.

`plot` draws the JSON files that are in the folder, and needs the extra ``plot``.
"""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

from benchmarks import plots
from benchmarks.common import print_report, write_report

NAMES = (
    "throughput",
    "search",
    "branches",
    "micro-batches",
    "ablation",
    "case-study",
    "sequential",
    "scale",
    "towers",
    "runtime",
    "capture",
)


def main() -> None:
    """Run one benchmark or all of them, or draw what came out."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", choices=(*NAMES, "all", "plot"))
    parser.add_argument("--json", type=Path, help="write the figures of one benchmark here")
    parser.add_argument("--out", type=Path, help="the folder for the figures of all benchmarks")
    given = parser.parse_args()
    is_one = given.name in NAMES
    if (given.json and not is_one) or (given.out and is_one):
        parser.error("--json is for one benchmark, --out for all of them")
    if given.name == "plot":
        if not given.out or not given.out.is_dir():
            parser.error("plot needs --out, the folder with the JSON files")
        for path in plots.draw_all(given.out):
            print(path)
        return
    for name in NAMES if given.name == "all" else (given.name,):
        report = importlib.import_module(f"benchmarks.{name.replace('-', '_')}").run()
        print_report(name, report)
        path = given.json or (given.out and given.out / f"{name}.json")
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_report(report, path)


if __name__ == "__main__":
    main()
