"""Starts a command on every device of a strategy, and says what went wrong once, not once a process.

`graphpipe train` and `graphpipe verify` work under torchrun; without it they start the processes themselves, with the
same machinery. A worker then leaves its error in a folder, and the launcher shows the first one.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import click

from graphpipe.errors import GraphPipeError, RankFailure
from graphpipe.runtime.failure_report import ERROR_FOLDER, first_error, has_verdict


def is_worker() -> bool:
    """Return whether this process was started by torchrun, or by `launch`."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launch(num_processes: int, arguments: Sequence[str]) -> None:
    """Run ``graphpipe`` with these arguments in several processes of this machine and wait for them.

    Each process has one thread for its operators: several processes with several threads each would get in each
    other's way.

    Raises:
        GraphPipeError: A process failed. The message is that of the first one that did.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    logging.getLogger("torch.distributed.launcher").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="graphpipe-") as folder:
        os.environ[ERROR_FOLDER] = folder
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_processes,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            run_id=f"graphpipe-{os.getpid()}",
            max_restarts=0,
            monitor_interval=0.1,
        )
        try:
            elastic_launch(config, sys.executable)("-m", "graphpipe", *arguments)
        except SignalException as stopped:
            if stopped.sigval is signal.SIGINT:
                raise KeyboardInterrupt from None
            print("stopped", file=sys.stderr)
            raise click.exceptions.Exit(128 + stopped.sigval) from None
        except ChildFailedError as failure:
            rank, first = failure.get_first_failure()
            message = first_error(Path(folder))
            if message is None:
                raise RankFailure(f"rank {rank} ended with exit code {first.exitcode} and said nothing") from None
            raise (RankFailure if has_verdict(Path(folder)) else GraphPipeError)(message) from None
        finally:
            del os.environ[ERROR_FOLDER]


def launch_again(num_processes: int, arguments: Sequence[str], again: Sequence[str], *, max_restarts: int) -> None:
    """Run ``graphpipe`` as `launch` does, and again after a process has failed, with the GPUs that are left then.

    An error that comes a second time is a mistake rather than an accident, and is not tried again.

    Args:
        num_processes: How many to start.
        arguments: Of the first run.
        again: Of those after it.
        max_restarts: How many those may be.

    Raises:
        GraphPipeError: A process has raised the same error twice or failed once more than there are restarts, or no GPU
            is left.
    """
    before = ""
    for restart in range(1, max_restarts + 2):
        try:
            launch(num_processes, arguments)
        except GraphPipeError as failure:
            if not isinstance(failure, RankFailure) and str(failure) == before:
                raise
            before = str(failure)
            if restart > max_restarts:
                raise GraphPipeError(f"{failure}; that was after {max_restarts} restarts, the most allowed") from None
            print(f"error: {failure}", file=sys.stderr, flush=True)
        else:
            return
        arguments = again
        num_processes = _processes_left(num_processes)
        if not num_processes:
            raise GraphPipeError("no GPU is left to go on with")
        what = f"restart {restart} of {max_restarts} with {num_processes} processes"
        print(f"{what}, from the newest checkpoint", file=sys.stderr, flush=True)


def _processes_left(num_processes: int) -> int:
    """Return for how many processes there are GPUs; on a machine without any, processes need none."""
    import torch

    return min(num_processes, torch.cuda.device_count()) if torch.cuda.is_available() else num_processes
