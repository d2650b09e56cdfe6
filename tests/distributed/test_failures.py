"""Whatever happens to a rank, wherever it is: all processes end within ten seconds, the first cause is named first."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.forked import Ended, JobServer

pytestmark = pytest.mark.distributed
LIMIT_S = 10.0
# How, rank, place, limit of progress (seconds), and what is said first.
INCIDENTS = [
    ("exception", 2, "1F1", 60, "rank 2 failed at task 1F1 (stage 1, micro-batch 1, forward"),
    ("exception", 0, "0B1", 60, "rank 0 failed at task 0B1 (stage 0, micro-batch 1, backward"),
    ("exception", 3, "optimizer", 60, "rank 3 failed at the optimizer's step"),
    ("exception", 1, "outside", 60, "rank 1 left the job while others go on, after step 4: ZeroDivisionError"),
    ("kill", 0, "0F0", 60, "rank 0 died at task 0F0 (stage 0, micro-batch 0, forward"),
    ("kill", 3, "2B1", 60, "rank 3 died at task 2B1 (stage 2, micro-batch 1, backward"),
    ("kill", 2, "wait 1B0", 60, "rank 2 died at the receive of gradient of b [0:2] from stage 3, micro-batch 0"),
    ("kill", 1, "sum", 60, "rank 1 died at the sum of gradients over devices [0, 1]"),
    ("kill", 2, "saving", 60, "rank 2 died at the saving of a checkpoint"),
    ("stop", 1, "saving", 60, "rank 1 has been stopped (SIGSTOP) for N s, at the saving of a checkpoint"),
    ("stop", 0, "0F1", 60, "rank 0 has been stopped (SIGSTOP)"),
    ("stop", 2, "3B2", 60, "rank 2 has been stopped (SIGSTOP)"),
    ("stop", 3, "outside", 60, "rank 3 has been stopped (SIGSTOP)"),
    ("kill-both", 0, "0F1", 60, "the watchdog of rank 0 is gone: its process was killed or stopped"),
    ("stop-both", 0, "0F1", 60, "the watchdog of rank 0 "),
    ("stop-both", 2, "1F1", 60, "rank 2 and its watchdog have not answered for N s; it was last at"),
    ("loop", 3, "2F3", 60, "rank 3 has made no progress for N s, at task 2F3"),
    ("loop", 1, "outside", 3, "rank 1 has made no progress for N s, at the code between two steps"),
    ("c-loop", 2, "3F1", 60, "rank 2 has not answered for N s, at task 3F1"),
    ("c-loop", 1, "wait 0B0", 60, "rank 1 has not answered for N s, at the receive of gradient of a"),
]

Incidents = dict[tuple[str, int, str], tuple[Ended, Path]]


@pytest.fixture(scope="module")
def server() -> Iterator[JobServer]:
    server = JobServer()
    yield server
    server.close()


@pytest.fixture(scope="module")
def ended(
    server: JobServer, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, int, str], tuple[Ended, Path]]:
    """Run all incidents, four at a time: most of the time they wait."""
    found = {}
    for first in range(0, len(INCIDENTS), 4):
        running = {}
        for how, rank, place, timeout_s, _ in INCIDENTS[first : first + 4]:
            folder = tmp_path_factory.mktemp("incident")
            arguments = {"how": how, "rank": rank, "place": place, "timeout_s": timeout_s}
            server.start(folder, 4, "tests.distributed.failures:train", folder=str(folder), **arguments)
            running[how, rank, place] = folder
        found.update({key: (server.wait(folder), folder) for key, folder in running.items()})
    return found


@pytest.mark.parametrize(("how", "rank", "place", "timeout_s", "message"), INCIDENTS)
@pytest.mark.timeout(300)
def test_the_job_ends_and_names_the_first_cause(
    ended: Incidents,
    how: str,
    rank: int,
    place: str,
    timeout_s: int,
    message: str,
) -> None:
    # C24: within ten seconds, rank, stage, micro-batch and modules by name, nobody left over.
    end, folder = ended[how, rank, place]
    assert all(end.codes), end.output
    assert end.times_s[-1] - float((folder / "failed_at").read_text()) < LIMIT_S
    assert not end.left_over
    errors = [line for line in end.output.splitlines() if line.startswith("error:")]
    assert len(errors) == 1, end.output
    assert re.sub(r"\d+\.\d s", "N s", errors[0]).startswith(f"error: {message}"), errors[0]
    assert "in step 5" in errors[0] or place == "outside" or how.endswith("-both")
    # Only the rank that failed says more, and before its own exception there is no other rank's.
    assert end.output.count("Traceback") == (how == "exception"), end.output


def test_a_waiting_rank_is_named_with_its_edge(ended: Incidents) -> None:
    end, _ = ended["stop", 0, "0F1"]
    first, then = re.fullmatch(r".*error: (.*?)\. Then: (.*?)\n.*", end.output, re.DOTALL).groups()  # type: ignore[union-attr]
    assert "at task 0F1 (stage 0, micro-batch 1, forward pass of samples 4 to 5, operators 'a' to 'a', edges" in first
    assert "rank 3 waits at the receive of" in then
    assert re.search(r"edge \d→\d in step 5", then)


def test_the_first_cause_is_named_over_the_transport_with_nccl_order_as_well(server: JobServer, tmp_path: Path) -> None:
    arguments = {"how": "kill", "rank": 2, "place": "1F1", "transport": "ordered"}
    end = server.wait(server.start(tmp_path, 4, "tests.distributed.failures:train", folder=str(tmp_path), **arguments))
    assert all(end.codes), end.output
    assert end.times_s[-1] - float((tmp_path / "failed_at").read_text()) < LIMIT_S
    assert "error: rank 2 died at task 1F1 (stage 1, micro-batch 1, forward" in end.output
    assert not end.left_over


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("kill", r"rank 3 died at task \dF0 \(stage .*\) of an evaluation in step 1"),
        ("loop", r"rank 3 has made no progress for N s, at task \dF0 \(stage .*\) of an evaluation in step 1"),
        ("refuse", r"rank 3 left the job while others go on, after step 1: GraphPipeError\('planted'\)"),
    ],
)
def test_a_rank_that_fails_in_an_evaluation_is_named(server: JobServer, tmp_path: Path, how: str, message: str) -> None:
    end = server.wait(
        server.start(tmp_path, 4, "tests.distributed.failures:evaluate", folder=str(tmp_path), how=how, rank=3)
    )
    assert all(end.codes), end.output
    assert end.times_s[-1] - float((tmp_path / "failed_at").read_text()) < LIMIT_S
    assert re.search(f"error: {message}", re.sub(r"\d+\.\d s", "N s", end.output)), end.output
    assert not end.left_over


def test_two_jobs_do_not_save_to_one_folder(server: JobServer, tmp_path: Path) -> None:
    saved = str(tmp_path / "checkpoints")
    first = tmp_path / "first"
    server.start(first, 4, "tests.distributed.failures:hold", folder=str(first), checkpoints=saved)
    until_s = time.monotonic() + 30.0
    while not all((first / f"ready-{rank}").exists() for rank in range(4)) and time.monotonic() < until_s:
        time.sleep(0.02)
    second = tmp_path / "second"
    server.start(second, 4, "tests.distributed.failures:hold", folder=str(second), checkpoints=saved)
    end = server.wait(second)
    assert all(code == 1 for code in end.codes), end.output
    assert end.output.count(f"CheckpointError: another job writes its checkpoints to '{saved}' (process ") == 4
    assert not end.left_over
    (first / "go").touch()
    end = server.wait(first)
    assert end.codes == [0] * 4, end.output
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-00000001\n"


def test_a_long_task_is_no_failure(server: JobServer, tmp_path: Path) -> None:
    end = server.wait(server.start(tmp_path, 4, "tests.distributed.failures:slow", seconds=12.0))
    assert end.codes == [0] * 4, end.output
    assert not end.left_over
    assert end.output.count("loss") == 4
    assert "error" not in end.output
