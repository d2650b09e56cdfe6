"""Where a process leaves its error: in the folder that its launcher reads, or on the terminal."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

ERROR_FOLDER = "GRAPHPIPE_ERROR_DIR"
"""The environment variable that names the launcher's folder."""

_VERDICT = "verdict.json"
_WATCHED = "watched.json"


def report_failure(message: str, rank: int | None) -> None:
    """Leave an error where the launcher finds it; without one, print it.

    Args:
        message: What to say.
        rank: Of the process; None where it is the only one.
    """
    folder = _folder()
    if folder is None:
        prefix = f"[rank {rank}] " if rank is not None else ""
        _print(f"{prefix}error: {message}")
    else:
        _write(folder / f"rank-{rank or 0}.json", {"time": time.time(), "rank": rank or 0, "message": message})


def report_verdict(message: str, rank: int) -> None:
    """Leave why the whole job ended where the launcher finds it; without one, print it.

    Args:
        message: What to say.
        rank: The first that failed.
    """
    folder = _folder()
    if folder is None:
        _print(f"error: {message}")
    else:
        _write(folder / _VERDICT, {"rank": rank, "message": message})


def expect_verdict() -> None:
    """Tell the launcher that a watchdog runs which may have a verdict to write."""
    folder = _folder()
    if folder is not None:
        _write(folder / _WATCHED, {"pid": os.getpid()})


def expect_no_launcher() -> None:
    """Take note that nobody will look into the folder: what this process has to say is printed from now on."""
    os.environ.pop(ERROR_FOLDER, None)


def expect_no_verdict() -> None:
    """Tell the launcher that the watchdog has nothing more to say."""
    folder = _folder()
    if folder is not None:
        (folder / _WATCHED).unlink(missing_ok=True)


def has_verdict(folder: Path) -> bool:
    """Return whether a watchdog has ended the job: then not all processes had the same to complain about."""
    return (folder / _VERDICT).is_file()


def first_error(folder: Path, patience_s: float = 3.0) -> str | None:
    """Return the first cause that the processes of a job have left in a folder, or None.

    To a watchdog's verdict belongs the traceback of the rank that failed first, where it has left one.

    Args:
        folder: That of the launcher.
        patience_s: How long to wait for a watchdog that still runs.
    """
    _await_verdict(folder, patience_s)
    found = [json.loads(path.read_text()) for path in folder.glob("rank-*.json")]
    if (folder / _VERDICT).is_file():
        verdict = json.loads((folder / _VERDICT).read_text())
        traces = [e["message"] for e in found if e["rank"] == verdict["rank"] and "Traceback" in e["message"]]
        return "\n".join([verdict["message"], *traces])
    if not found:
        return None
    first = min(found, key=lambda error: (error["time"], error["rank"]))
    same_everywhere = all(error["message"] == first["message"] for error in found) and len(found) > 1
    return str(first["message"]) if same_everywhere else f"rank {first['rank']}: {first['message']}"


def _await_verdict(folder: Path, patience_s: float) -> None:
    until_s = time.monotonic() + patience_s
    while time.monotonic() < until_s and (folder / _WATCHED).is_file() and not (folder / _VERDICT).is_file():
        time.sleep(0.02)


def _folder() -> Path | None:
    name = os.environ.get(ERROR_FOLDER)
    return Path(name) if name is not None and Path(name).is_dir() else None


def _write(path: Path, content: object) -> None:
    """Write a file that appears whole."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(content))
    draft.replace(path)


def _print(text: str) -> None:
    # Straight to the terminal, from whatever process and thread: the command line may be far up the stack.
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
