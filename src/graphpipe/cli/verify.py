"""``graphpipe verify``."""

from __future__ import annotations

from pathlib import Path

import click

from graphpipe.cli.launch import is_worker, launch
from graphpipe.cli.model_options import ModelOptions, model_options
from graphpipe.errors import GraphPipeError
from graphpipe.strategy import Strategy


@click.command("verify", short_help="compare one step with a single process")
@click.argument("strategy_file", metavar="STRATEGY", type=click.Path(path_type=Path))
@model_options("Returns the job planned for.")
def command(strategy_file: Path, model: ModelOptions) -> None:
    """Compare the loss and every gradient of one step with a single process.

    Starts a process for each device of the strategy, or joins those that torchrun has started.
    """
    strategy = Strategy.load(strategy_file)
    if not is_worker():
        launch(len(strategy.cluster), ["verify", str(strategy_file), *model.arguments()])
        return
    from graphpipe import api
    from graphpipe.cli.jobs import Batches
    from graphpipe.runtime.process_group import rank, world_size

    strategy.check_world_size(world_size())
    job = model.job()
    batch = next(iter(Batches(job, strategy.mini_batch_size)))
    with job.autocasting():
        found = api.verify(
            job.model,
            strategy,
            batch,
            loss_fn=job.loss_fn,
            free_sizes=job.free_sizes,
            sample_axes=job.sample_axes,
            split_points=job.split_points,
            keep_whole=job.keep_whole,
            cache=model.cache,
        )
    name, error = found.worst
    line = (
        f"loss {found.loss:.9g}, single process {found.reference_loss:.9g}; largest relative difference of "
        f"{len(found.errors)} gradients {error:.1e} ({name}); allowed {found.tolerance:.0e}"
    )
    if not found.holds:
        raise GraphPipeError(f"the strategy does not give the gradients of one process: {line}")
    if rank() == 0:
        print(f"verified: {line}", flush=True)
