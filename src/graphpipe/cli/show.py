"""``graphpipe show``."""

from __future__ import annotations

from pathlib import Path

import click

from graphpipe.cli.model_options import ModelOptions, model_options
from graphpipe.cli.output import print_strategy
from graphpipe.estimate import estimate
from graphpipe.files import write_text
from graphpipe.report.outline_svg import outline_svg
from graphpipe.report.outline_text import outline_text
from graphpipe.report.stage_graph import stage_graph_svg
from graphpipe.strategy import Strategy


@click.command("show", short_help="print a strategy, or the shape of a model")
@click.argument("strategy_file", metavar="[STRATEGY]", required=False, type=click.Path(path_type=Path))
@model_options("Show the model of this job instead.", required=False)
@click.option("--svg", type=click.Path(path_type=Path), help="Draw the stage graph, or the model, into this file.")
@click.option("--schedule", is_flag=True, help="Print the order of tasks on every device too.")
@click.option("--operators", is_flag=True, help="With --model: show every operator by itself.")
def command(
    strategy_file: Path | None, model: ModelOptions | None, svg: Path | None, schedule: bool, operators: bool
) -> None:
    """Print a strategy: its stages, devices, predicted time and memory, and a picture of its stage graph.

    With --model, print the branches of a model instead, with their share of the work, and why a part is a knot.
    """
    if (strategy_file is None) == (model is None):
        raise click.UsageError("give either a STRATEGY or --model")
    if model is not None:
        if schedule:
            raise click.UsageError("--schedule belongs to a STRATEGY; a model has none")
        _show_model(model, svg, every_operator=operators)
        return
    if operators:
        raise click.UsageError("--operators belongs to --model")
    assert strategy_file is not None
    strategy = Strategy.load(strategy_file)
    found = estimate(strategy)
    print_strategy(strategy, found)
    if schedule:
        print(strategy.schedule)
    if svg is not None:
        write_text(svg, stage_graph_svg(strategy, found))
        print(f"stage graph drawn in {svg}")


def _show_model(model: ModelOptions, svg: Path | None, *, every_operator: bool) -> None:
    from graphpipe.capture import capture

    job = model.job()
    captured = capture(
        job.model,
        job.example_batch,
        loss_fn=job.loss_fn,
        free_sizes=job.free_sizes,
        sample_axes=job.sample_axes,
        split_points=job.split_points,
        keep_whole=job.keep_whole,
        cache=model.cache,
    )
    graph = captured.graph
    print(outline_text(graph, every_operator=every_operator))
    if svg is not None:
        write_text(svg, outline_svg(graph, every_operator=every_operator))
        print(f"\nmodel drawn in {svg}")
