"""``python -m benchmarks NAME --json FILE``, or ``python -m benchmarks all --out DIR``."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

from benchmarks.common import print_report, write_report

NAMES = (
    "throughput",
    "search",
    "branches",
    "micro-batches",
    "ablation",
    "case-study",
    "sequential",
    "towers",
)


def main() -> None:
    """Run one benchmark or all of them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", choices=(*NAMES, "all"))
    parser.add_argument("--json", type=Path, help="write the figures of one benchmark here")
    parser.add_argument("--out", type=Path, help="write the figures of all benchmarks into this folder")
    given = parser.parse_args()
    if (given.name == "all" and given.json) or (given.name != "all" and given.out):
        parser.error("--json is for one benchmark, --out for all of them")
    for name in NAMES if given.name == "all" else (given.name,):
        report = importlib.import_module(f"benchmarks.{name.replace('-', '_')}").run()
        print_report(name, report)
        path = given.json or (given.out and given.out / f"{name}.json")
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_report(report, path)


if __name__ == "__main__":
    main()
