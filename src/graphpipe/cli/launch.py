"""Starts a command on every device of a strategy, and says what went wrong once, not once a process.

`graphpipe train` and `graphpipe verify` work under torchrun; without it they start the processes themselves, with the
same machinery. A worker then leaves its error in a folder, and the launcher shows the first one.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from graphpipe.errors import GraphPipeError

_ERRORS = "GRAPHPIPE_ERROR_DIR"


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
        os.environ[_ERRORS] = folder
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
                _first_error(Path(folder)) or f"rank {rank} ended with exit code {first.exitcode} and said nothing"
            ) from None
        finally:
            del os.environ[_ERRORS]


def report_failure(message: str) -> None:
    """Leave a worker's error where its launcher finds it; under plain torchrun, print it."""
    folder = os.environ.get(_ERRORS)
    rank = os.environ.get("RANK", "0")
    if folder is None or not Path(folder).is_dir():
        prefix = f"[rank {rank}] " if is_worker() else ""
        print(f"{prefix}error: {message}", file=sys.stderr, flush=True)
        return
    path = Path(folder) / f"rank-{rank}.json"
    path.write_text(json.dumps({"time": time.time(), "rank": int(rank), "message": message}))


def _first_error(folder: Path) -> str | None:
    found = [json.loads(path.read_text()) for path in folder.glob("rank-*.json")]
    if not found:
        return None
    first = min(found, key=lambda error: (error["time"], error["rank"]))
    same_everywhere = all(error["message"] == first["message"] for error in found) and len(found) > 1
    return str(first["message"]) if same_everywhere else f"rank {first['rank']}: {first['message']}"
