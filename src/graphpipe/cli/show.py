"""``graphpipe show``."""

from __future__ import annotations

from pathlib import Path

import click

from graphpipe.cli.output import print_strategy, write_text
from graphpipe.estimate import estimate
from graphpipe.report.stage_graph import stage_graph_svg
from graphpipe.strategy import Strategy


@click.command("show", short_help="print a strategy")
@click.argument("strategy_file", metavar="STRATEGY", type=click.Path(path_type=Path))
@click.option("--svg", type=click.Path(path_type=Path), help="Draw the stage graph into this file.")
@click.option("--schedule", is_flag=True, help="Print the order of tasks on every device too.")
def command(strategy_file: Path, svg: Path | None, schedule: bool) -> None:
    """Print a strategy: its stages, devices, predicted time and memory, and a picture of its stage graph."""
    strategy = Strategy.load(strategy_file)
    found = estimate(strategy)
    print_strategy(strategy, found)
    if schedule:
        print(strategy.schedule)
    if svg is not None:
        write_text(svg, stage_graph_svg(strategy, found))
        print(f"stage graph drawn in {svg}")
