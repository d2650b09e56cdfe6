"""``graphpipe simulate``."""

from __future__ import annotations

from pathlib import Path

import click

from graphpipe.cli.output import print_strategy, write_json
from graphpipe.estimate import estimate
from graphpipe.files import write_text
from graphpipe.report.chrome_trace import chrome_trace
from graphpipe.report.html import html_report
from graphpipe.strategy import Strategy


@click.command("simulate", short_help="predict the timeline of a strategy")
@click.argument("strategy_file", metavar="STRATEGY", type=click.Path(path_type=Path))
@click.option("--trace", type=click.Path(path_type=Path), help="Write a Chrome trace (chrome://tracing, Perfetto).")
@click.option("--report", type=click.Path(path_type=Path), help="Write a report as one HTML page.")
def command(strategy_file: Path, trace: Path | None, report: Path | None) -> None:
    """Predict what happens when on every device during one mini-batch, and how much memory it takes."""
    strategy = Strategy.load(strategy_file)
    found = estimate(strategy)
    print_strategy(strategy, found)
    if trace is not None:
        write_json(trace, chrome_trace(found.trace, strategy))
        print(f"trace written to {trace}")
    if report is not None:
        write_text(report, html_report(strategy, found))
        print(f"report written to {report}")
