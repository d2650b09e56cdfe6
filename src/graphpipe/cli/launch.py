"""Starts a command on every device of a strategy, and says what went wrong once, not once a process.

`graphpipe train` and `graphpipe verify` work under torchrun; without it they start the processes themselves, with the
same machinery. A worker then leaves its error in a folder, and the launcher shows the first one.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from graphpipe.errors import GraphPipeError
from graphpipe.runtime.failure_report import ERROR_FOLDER, first_error


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
        except ChildFailedError as failure:
            rank, first = failure.get_first_failure()
            raise GraphPipeError(
                first_error(Path(folder)) or f"rank {rank} ended with exit code {first.exitcode} and said nothing"
            ) from None
        finally:
            del os.environ[ERROR_FOLDER]
