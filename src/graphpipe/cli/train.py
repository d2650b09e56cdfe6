"""``graphpipe train``."""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from graphpipe.cli.launch import is_worker, launch, launch_again
from graphpipe.cli.model_options import ModelOptions, model_options
from graphpipe.cli.output import write_json
from graphpipe.errors import GraphPipeError
from graphpipe.files import write_text
from graphpipe.strategy import Strategy

if TYPE_CHECKING:
    from graphpipe.cli.jobs import Batches
    from graphpipe.runtime.pipeline import Pipeline


@click.command("train", short_help="train a model by a strategy")
@click.argument("strategy_file", metavar="STRATEGY", type=click.Path(path_type=Path))
@model_options("Returns the job planned for.")
@click.option("--steps", type=click.IntRange(min=1), default=100, show_default=True)
@click.option("--log-every", type=click.IntRange(min=1), default=10, show_default=True, help="Steps between lines.")
@click.option("--trace", type=click.Path(path_type=Path), help="Write a Chrome trace of the last step.")
@click.option("--report", type=click.Path(path_type=Path), help="Write a report as one HTML page.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=1),
    default=300.0,
    show_default=True,
    help="Seconds that one task, or a rank between two steps, may take while others wait.",
)
@click.option(
    "--stall-timeout",
    "stall_timeout_s",
    type=click.FloatRange(min=1),
    default=7.0,
    show_default=True,
    help="Seconds that one task may take if it never took a fifth of that before, or a rank let no other thread run.",
)
@click.option(
    "--verify",
    type=click.Choice(["auto", "never", "first-step"]),
    default="auto",
    show_default=True,
    help="When to compare with one process: the first step of small models, of none, or of any.",
)
@click.option("--save", type=click.Path(path_type=Path), help="Write the trained model as safetensors.")
@click.option("--init", type=click.Path(path_type=Path), help="Begin with the model of a safetensors file.")
@click.option(
    "--checkpoint-dir",
    "folder",
    type=click.Path(path_type=Path),
    help="Save checkpoints here, and go on from the newest one that is here already.",
)
@click.option(
    "--save-every", type=click.IntRange(min=1), default=100, show_default=True, help="Steps between checkpoints."
)
@click.option("--keep", type=click.IntRange(min=1), default=3, show_default=True, help="Checkpoints that stay.")
@click.option(
    "--saving",
    type=click.Choice(["synchronous", "asynchronous"]),
    default="synchronous",
    show_default=True,
    help="Whether steps go on while a checkpoint is written.",
)
@click.option("--resume-from", type=click.IntRange(min=0), help="Go back to the checkpoint of this step.")
@click.option(
    "--elastic", is_flag=True, help="After a failure go on from the last checkpoint, also with fewer processes."
)
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    default=3,
    show_default=True,
    help="With --elastic; torchrun has an option of its own.",
)
def command(
    strategy_file: Path,
    model: ModelOptions,
    steps: int,
    log_every: int,
    trace: Path | None,
    report: Path | None,
    timeout_s: float,
    stall_timeout_s: float,
    verify: str,
    save: Path | None,
    init: Path | None,
    folder: Path | None,
    save_every: int,
    keep: int,
    saving: str,
    resume_from: int | None,
    elastic: bool,
    max_restarts: int,
) -> None:
    """Train a model by a strategy.

    Starts a process for each device of the strategy, or joins those that torchrun has started. The job's optimizer and
    batches are used; without them AdamW and the example batch, repeated.

    With --checkpoint-dir a job that was interrupted goes on where it was when it is started again, also under another
    strategy. --steps counts the steps before as well.
    """
    if folder is None:
        given = click.get_current_context().get_parameter_source
        for name in ("resume_from", "elastic", "save_every", "keep", "saving"):
            if given(name) is not ParameterSource.DEFAULT:
                option = "--" + name.replace("_", "-")
                raise GraphPipeError(f"{option} needs --checkpoint-dir, the folder of the checkpoints")
    if click.get_current_context().get_parameter_source("max_restarts") is not ParameterSource.DEFAULT and not elastic:
        raise GraphPipeError("--max-restarts needs --elastic; torchrun has an option of its own")
    strategy = Strategy.load(strategy_file)
    for path in (trace, report, save):
        if path is not None and not path.parent.is_dir():
            raise GraphPipeError(f"there is no folder {str(path.parent)!r} to write {path.name!r} to")
        if path is not None and path.is_dir():
            raise GraphPipeError(f"{str(path)!r} is a folder; name a file in it")
    if not is_worker():
        options: dict[str, Path | int | str | None] = {
            "--trace": trace,
            "--report": report,
            "--save": save,
            "--init": init,
        }
        if folder is not None:
            options |= {
                "--checkpoint-dir": folder,
                "--save-every": save_every,
                "--keep": keep,
                "--saving": saving,
                "--resume-from": None if elastic else resume_from,
            }
        with_values = [text for name, value in options.items() if value is not None for text in (name, str(value))]
        arguments = [
            *("train", str(strategy_file), *model.arguments()),
            *("--steps", str(steps), "--log-every", str(log_every)),
            *("--timeout", str(timeout_s), "--stall-timeout", str(stall_timeout_s)),
            *("--verify", verify),
            *with_values,
        ]
        if elastic:
            again = [*arguments, "--elastic"]
            first = again if resume_from is None else [*again, "--resume-from", str(resume_from)]
            launch_again(len(strategy.cluster), first, again, max_restarts=max_restarts)
        else:
            launch(len(strategy.cluster), arguments)
        return
    from graphpipe.cli.checkpoints import TrainingCheckpoints
    from graphpipe.cli.jobs import Batches, default_optimizer
    from graphpipe.runtime.checkpoint import Saving
    from graphpipe.runtime.elastic import strategy_for_this_job
    from graphpipe.runtime.model_file import load_model
    from graphpipe.runtime.pipeline import Pipeline
    from graphpipe.runtime.process_group import world_size

    if elastic:
        strategy = strategy_for_this_job(
            strategy, lambda count: _planned_again(strategy, count), datetime.timedelta(seconds=timeout_s)
        )
    strategy.check_world_size(world_size())
    job = model.job()
    if init is not None:
        load_model(job.model, init)
    with job.autocasting():
        pipeline = Pipeline(
            job.model,
            strategy,
            loss_fn=job.loss_fn,
            optimizer=job.optimizer or default_optimizer,
            lr_scheduler=job.lr_scheduler,
            max_gradient_norm=job.max_gradient_norm,
            loss_scaling=job.loss_scaling,
            compilation=job.compilation,
            example_batch=job.example_batch,
            timeout=datetime.timedelta(seconds=timeout_s),
            stall_timeout=datetime.timedelta(seconds=stall_timeout_s),
            init=job.init,
            free_sizes=job.free_sizes,
            sample_axes=job.sample_axes,
            split_points=job.split_points,
            keep_whole=job.keep_whole,
            verify=verify,
            cache=model.cache,
        )
    batches = Batches(job, strategy.mini_batch_size)
    if folder is None:
        _train(pipeline, batches, iter(batches), steps, log_every, lambda: None)
    else:
        checkpoints = TrainingCheckpoints(
            pipeline, batches, folder, save_every=save_every, keep=keep, saving=Saving(saving)
        )
        _train(pipeline, batches, checkpoints.resume(resume_from), steps, log_every, checkpoints.step_done)
        checkpoints.close()
    _write(pipeline, trace, report, save)


def _planned_again(strategy: Strategy, num_devices: int) -> Strategy:
    """Return a strategy for fewer devices by the planner of the one for all of them, and say so."""
    from graphpipe.cli.planners import PLANNERS, make_planner
    from graphpipe.planner.again import plan_again

    name = strategy.planner if strategy.planner in PLANNERS else "graphpipe"
    found = plan_again(strategy, num_devices, make_planner(name))
    print(f"{num_devices} of {len(strategy.cluster)} processes are left; planned again:\n{found}", flush=True)
    return found


def _train(
    pipeline: Pipeline,
    batches: Batches,
    stream: Iterator[Any],
    steps: int,
    log_every: int,
    step_done: Callable[[], None],
) -> None:
    from graphpipe.runtime.process_group import rank

    since, samples, before = time.perf_counter(), 0, pipeline.num_steps
    for batch in islice(stream, max(0, steps - before)):
        result = pipeline.step(batch, position=batches.position)
        samples += result.num_samples
        if not (math.isfinite(result.loss) or result.is_skipped):
            raise GraphPipeError(
                f"the loss of step {pipeline.num_steps} is {result.loss}, so the parameters are spoilt; the step is "
                "not saved. Go on from a checkpoint before it, with a smaller learning rate or clipping, or look at "
                "its batch"
            )
        done = pipeline.num_steps
        if rank() == 0 and (done % log_every == 0 or done == steps):
            seconds = time.perf_counter() - since
            print(f"step {done}/{steps}  loss {result.loss:.4f}  {samples / seconds:.0f} samples/s", flush=True)
            since, samples = time.perf_counter(), 0
        step_done()
    if pipeline.num_steps == before < steps:
        raise GraphPipeError("the job's batches are empty; `batches` must yield at least one batch")
    if before >= steps and rank() == 0:
        print(f"{before} of {steps} steps were done before; nothing is left to train")


def _write(pipeline: Pipeline, trace: Path | None, report: Path | None, save: Path | None) -> None:
    """Write what was asked for, on rank 0."""
    from graphpipe.estimate import estimate
    from graphpipe.report.chrome_trace import chrome_trace
    from graphpipe.report.html import html_report
    from graphpipe.runtime.process_group import rank

    measured = pipeline.trace() if trace is not None or report is not None else None
    if save is not None:
        pipeline.save_model(save)
    if rank() != 0:
        return
    if trace is not None and measured is not None:
        write_json(trace, chrome_trace(measured, pipeline.strategy))
        print(f"trace of the last step written to {trace}")
    if report is not None:
        write_text(report, html_report(pipeline.strategy, estimate(pipeline.strategy), measured))
        print(f"report written to {report}")
    if save is not None:
        print(f"model written to {save}")
