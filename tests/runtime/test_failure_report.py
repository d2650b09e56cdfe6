"""The launcher tells one error: the watchdog's verdict, else the first one that a process has left."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from graphpipe.runtime.failure_report import (
    ERROR_FOLDER,
    expect_no_verdict,
    expect_verdict,
    first_error,
    report_failure,
    report_verdict,
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(ERROR_FOLDER, str(tmp_path))
    return tmp_path


def test_nothing_is_told_of_a_job_that_said_nothing(folder: Path) -> None:
    assert first_error(folder) is None


def test_the_first_report_is_told_with_its_rank(folder: Path) -> None:
    report_failure("no disk", 2)
    report_failure("connection lost", 0)
    assert first_error(folder) == "rank 2: no disk"


def test_what_all_ranks_say_is_told_once(folder: Path) -> None:
    for rank in range(3):
        report_failure("the batch has no input", rank)
    assert first_error(folder) == "the batch has no input"


def test_a_verdict_comes_first_with_the_traceback_of_its_rank(folder: Path) -> None:
    report_failure("Traceback of rank 0", 0)
    report_failure("Traceback of rank 1", 1)
    report_verdict("rank 1 failed", 1)
    assert first_error(folder) == "rank 1 failed\nTraceback of rank 1"


def test_the_launcher_waits_for_a_verdict_that_may_come(folder: Path) -> None:
    report_failure("connection lost", 0)
    expect_verdict()
    late = threading.Timer(0.2, report_verdict, ("rank 1 died", 1))
    late.start()
    assert first_error(folder) == "rank 1 died"
    late.join()


def test_the_launcher_waits_no_longer_than_the_watchdog_runs(folder: Path) -> None:
    report_failure("connection lost", 0)
    expect_verdict()
    late = threading.Timer(0.2, expect_no_verdict)
    late.start()
    assert first_error(folder, patience_s=60.0) == "rank 0: connection lost"
    late.join()
    expect_verdict()
    start_s = time.monotonic()
    assert first_error(folder, patience_s=0.1) == "rank 0: connection lost"  # A watchdog that was killed.
    assert time.monotonic() - start_s >= 0.1


def test_without_a_launcher_errors_are_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(ERROR_FOLDER, raising=False)
    report_failure("no disk", 2)
    report_failure("no file", None)
    report_verdict("rank 1 died", 1)
    assert capsys.readouterr().err == "[rank 2] error: no disk\nerror: no file\nerror: rank 1 died\n"
