"""``graphpipe plan``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click
from rich.console import Console

from graphpipe.cli.model_options import ModelOptions, model_options
from graphpipe.cli.output import print_strategy
from graphpipe.cluster import Cluster
from graphpipe.errors import GraphPipeError

_OPTIMIZERS = ("adam", "momentum", "sgd")


@click.command("plan", short_help="find a strategy for a model")
@model_options("Returns the job to plan for.")
@click.option("--mini-batch-size", required=True, type=click.IntRange(min=1), help="Samples a step.")
@click.option("--devices", type=click.IntRange(min=1), help="Devices of this machine; by default all of them.")
@click.option("--cluster", "cluster_file", type=click.Path(path_type=Path), help="A cluster in a JSON file.")
@click.option(
    "--micro-batch-size", "sizes", multiple=True, type=click.IntRange(min=1), help="Try this one; repeatable."
)
@click.option(
    "--planner", type=click.Choice(["graphpipe", "pipedream", "piper"]), default="graphpipe", show_default=True
)
@click.option("--optimizer", type=click.Choice(_OPTIMIZERS), default="adam", show_default=True, help="For its memory.")
@click.option(
    "--memory-gb", type=click.FloatRange(min=0, min_open=True), help="Memory of a device, instead of detected."
)
@click.option("--out", type=click.Path(path_type=Path), default=Path("strategy.json"), show_default=True)
def command(
    model: ModelOptions,
    mini_batch_size: int,
    devices: int | None,
    cluster_file: Path | None,
    sizes: tuple[int, ...],
    planner: str,
    optimizer: str,
    memory_gb: float | None,
    out: Path,
) -> None:
    """Find stages, devices, micro-batch size and schedule for a model, and write them to a file."""
    if cluster_file is not None and devices is not None:
        raise click.UsageError("--devices and --cluster contradict each other; give one of them")
    if not out.parent.is_dir():
        raise GraphPipeError(f"there is no folder {str(out.parent)!r} to write {out.name!r} to")
    cluster = Cluster.load(cluster_file) if cluster_file is not None else Cluster.detect(devices)
    if memory_gb is not None:
        cluster = cluster.with_memory(int(memory_gb * 1e9))
    import torch

    from graphpipe import api, cost
    from graphpipe.cli.planners import make_planner

    # As many as `train` gives a process, so that operators are measured as they will run.
    torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))
    job = model.job()
    messages = Console(stderr=True)
    with messages.status("planning") as status, job.autocasting():
        strategy = api.plan(
            job.model,
            job.example_batch,
            mini_batch_size=mini_batch_size,
            loss_fn=job.loss_fn,
            cluster=cluster,
            micro_batch_sizes=sizes,
            optimizer={"adam": cost.ADAM, "momentum": cost.MOMENTUM, "sgd": cost.SGD}[optimizer],
            planner=make_planner(planner),
            free_sizes=job.free_sizes,
            sample_axes=job.sample_axes,
            split_points=job.split_points,
            keep_whole=job.keep_whole,
            cache=model.cache,
            progress=status.update,
        )
    strategy.save(out)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if cluster_file is None and not torch.cuda.is_available() and len(cluster) > cores:
        text = f"note: this machine has {cores} cores; {len(cluster)} processes on it will take longer than predicted"
        print(text, file=sys.stderr)
    print_strategy(strategy)
    print(f"written to {out}")
