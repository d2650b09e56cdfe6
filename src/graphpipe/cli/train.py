"""``graphpipe train``."""

from __future__ import annotations

import datetime
import time
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from graphpipe.cli.launch import is_worker, launch
from graphpipe.cli.output import write_json
from graphpipe.errors import GraphPipeError
from graphpipe.files import write_text
from graphpipe.strategy import Strategy

if TYPE_CHECKING:
    from graphpipe.runtime.pipeline import Pipeline


@click.command("train", short_help="train a model by a strategy")
@click.argument("strategy_file", metavar="STRATEGY", type=click.Path(path_type=Path))
@click.option("--model", "reference", required=True, metavar="MODULE:FUNCTION", help="Returns the job planned for.")
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
@click.option("--save", type=click.Path(path_type=Path), help="Write the trained parameters as safetensors.")
def command(
    strategy_file: Path,
    reference: str,
    steps: int,
    log_every: int,
    trace: Path | None,
    report: Path | None,
    timeout_s: float,
    save: Path | None,
) -> None:
    """Train a model by a strategy.

    Starts a process for each device of the strategy, or joins those that torchrun has started. The job's optimizer and
    batches are used; without them AdamW and the example batch, repeated.
    """
    strategy = Strategy.load(strategy_file)
    for path in (trace, report, save):
        if path is not None and not path.parent.is_dir():
            raise GraphPipeError(f"there is no folder {str(path.parent)!r} to write {path.name!r} to")
        if path is not None and path.is_dir():
            raise GraphPipeError(f"{str(path)!r} is a folder; name a file in it")
    if not is_worker():
        options = {"--trace": trace, "--report": report, "--save": save}
        given = [text for name, path in options.items() if path is not None for text in (name, str(path))]
        launch(
            len(strategy.cluster),
            [
                *("train", str(strategy_file), "--model", reference),
                *("--steps", str(steps), "--log-every", str(log_every), "--timeout", str(timeout_s)),
                *given,
            ],
        )
        return
    from graphpipe.cli.jobs import batches, default_optimizer
    from graphpipe.cli.model_reference import load_job
    from graphpipe.runtime.pipeline import Pipeline
    from graphpipe.runtime.process_group import world_size

    strategy.check_world_size(world_size())
    job = load_job(reference)
    with job.autocasting():
        pipeline = Pipeline(
            job.model,
            strategy,
            loss_fn=job.loss_fn,
            optimizer=job.optimizer or default_optimizer,
            lr_scheduler=job.lr_scheduler,
            max_gradient_norm=job.max_gradient_norm,
            loss_scaling=job.loss_scaling,
            example_batch=job.example_batch,
            timeout=datetime.timedelta(seconds=timeout_s),
        )
    _train(pipeline, islice(batches(job, strategy.mini_batch_size), steps), steps, log_every)
    _write(pipeline, trace, report, save)


def _train(pipeline: Pipeline, stream: Any, steps: int, log_every: int) -> None:
    from graphpipe.runtime.process_group import rank

    since, samples, done = time.perf_counter(), 0, 0
    for done, batch in enumerate(stream, start=1):
        result = pipeline.step(batch)
        samples += result.num_samples
        if rank() == 0 and (done % log_every == 0 or done == steps):
            seconds = time.perf_counter() - since
            print(f"step {done}/{steps}  loss {result.loss:.4f}  {samples / seconds:.0f} samples/s", flush=True)
            since, samples = time.perf_counter(), 0
    if not done:
        raise GraphPipeError("the job's batches are empty; `batches` must yield at least one batch")


def _write(pipeline: Pipeline, trace: Path | None, report: Path | None, save: Path | None) -> None:
    """Write what was asked for, on rank 0."""
    from graphpipe.estimate import estimate
    from graphpipe.report.chrome_trace import chrome_trace
    from graphpipe.report.html import html_report
    from graphpipe.runtime.process_group import rank

    measured = pipeline.trace() if trace is not None or report is not None else None
    parameters = pipeline.gather_parameters() if save is not None else None
    if rank() != 0:
        return
    if trace is not None and measured is not None:
        write_json(trace, chrome_trace(measured, pipeline.strategy))
        print(f"trace of the last step written to {trace}")
    if report is not None:
        write_text(report, html_report(pipeline.strategy, estimate(pipeline.strategy), measured))
        print(f"report written to {report}")
    if save is not None and parameters is not None:
        from safetensors.torch import save_file

        draft = save.with_name(f".{save.name}.tmp")
        save_file(parameters, draft)
        draft.replace(save)
        print(f"{len(parameters)} parameters written to {save}")
