"""``python -m benchmarks NAME --json FILE``, or ``python -m benchmarks all --out DIR``."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

from benchmarks.common import print_figures, write_figures

NAMES = ("towers",)


def main() -> None:
    """Run one benchmark or all of them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", choices=(*NAMES, "all"))
    parser.add_argument("--json", type=Path, help="write the figures of one benchmark here")
    parser.add_argument("--out", type=Path, help="write the figures of all benchmarks into this folder")
    given = parser.parse_args()
    for name in NAMES if given.name == "all" else (given.name,):
        figures = importlib.import_module(f"benchmarks.{name}").run()
        print_figures(figures)
        path = given.json if given.name != "all" else given.out and given.out / f"{name}.json"
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_figures(figures, path)


if __name__ == "__main__":
    main()
