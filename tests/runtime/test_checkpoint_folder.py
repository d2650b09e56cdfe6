from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from graphpipe.errors import CheckpointError
from graphpipe.runtime.checkpoint_folder import CheckpointFolder, FileFacts

HOLD = """
import sys, time
from pathlib import Path
from graphpipe.runtime.checkpoint_folder import CheckpointFolder
CheckpointFolder(Path(sys.argv[1])).lock()
print("locked", flush=True)
time.sleep(60)
"""


def add(folder: CheckpointFolder, step: int, content: bytes = b"abc") -> Path:
    path = folder.begin(step) / "shard.safetensors"
    path.write_bytes(content)
    folder.finish(step, {"batches": step}, {path.name: FileFacts.of(path)}, keep=9)
    return folder.of_step(step)


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    found = CheckpointFolder(tmp_path / "checkpoints")
    found.path.mkdir()
    return found


def test_latest_names_the_newest_whole_checkpoint(folder: CheckpointFolder) -> None:
    add(folder, 3)
    folder.begin(6)
    assert folder.steps() == [3]
    assert (folder.path / "latest").read_text() == "step-00000003\n"
    add(folder, 9)
    assert (folder.path / "latest").read_text() == "step-00000009\n"
    assert folder.read_manifest(9)["batches"] == 9


def test_a_checkpoint_is_never_overwritten(folder: CheckpointFolder) -> None:
    add(folder, 3)
    with pytest.raises(CheckpointError, match="not overwritten"):
        folder.begin(3)
    folder.begin(4)
    with pytest.raises(FileExistsError):
        folder.begin(4)


def test_what_an_interrupted_job_leaves_is_removed(folder: CheckpointFolder) -> None:
    add(folder, 3)
    (folder.begin(6) / "shard.safetensors").write_bytes(b"half")
    (folder.path / "step-00000001.removed").mkdir()
    (folder.path / "step-mine.draft").mkdir()
    assert folder.remove_drafts() == [6]
    assert sorted(p.name for p in folder.path.iterdir()) == ["latest", "step-00000003", "step-mine.draft"]


def test_the_newest_are_kept(folder: CheckpointFolder) -> None:
    for step in range(1, 6):
        add(folder, step)
    folder.keep_last(2)
    assert folder.steps() == [4, 5]


def test_going_back_keeps_the_later_ones_under_another_name(folder: CheckpointFolder) -> None:
    for _ in range(2):
        add(folder, 6)
        folder.set_aside_after(3)
    assert folder.steps() == []
    assert sorted(p.name for p in folder.path.iterdir()) == ["step-00000006.set-aside", "step-00000006.set-aside-2"]


def test_every_flipped_byte_is_found(folder: CheckpointFolder) -> None:
    add(folder, 3)
    final = add(folder, 6, bytes(range(40)))
    for path in final.iterdir():
        whole = path.read_bytes()
        for position in range(len(whole)):
            changed = whole[position] ^ (1 << position % 8)
            path.write_bytes(whole[:position] + bytes([changed]) + whole[position + 1 :])
            with pytest.raises(CheckpointError, match=r"step 6 is damaged: .*restore\(3\)"):
                check(folder, 6)
        path.write_bytes(whole)
    check(folder, 6)


def test_what_is_saved_stays_so_when_there_is_no_space_for_latest(
    folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    add(folder, 3)
    add(folder, 6)

    def full(self: CheckpointFolder) -> None:
        if len(self.steps()) > 1:
            raise OSError(28, "No space left on device")
        point(self)

    point = CheckpointFolder.point_to_latest
    monkeypatch.setattr(CheckpointFolder, "point_to_latest", full)
    folder.begin(9)
    folder.finish(9, {}, {}, keep=1)  # Removing the old ones makes space.
    assert (folder.path / "latest").read_text() == "step-00000009\n"
    assert folder.steps() == [9]
    assert "step 9 is saved, but" in caplog.text


def test_a_job_may_go_to_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = CheckpointFolder(Path("checkpoints"))
    folder.lock()
    add(folder, 3)
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    add(folder, 6)
    folder.unlock()
    monkeypatch.chdir(tmp_path)
    again = CheckpointFolder(Path("checkpoints"))
    again.lock()
    assert again.steps() == [3, 6]
    again.unlock()


def check(folder: CheckpointFolder, step: int) -> None:
    files = folder.files_of(step, folder.read_manifest(step))
    folder.check_files(step, files, files)


def test_a_missing_and_a_foreign_file_are_found(folder: CheckpointFolder) -> None:
    final = add(folder, 6)
    (final / "other.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"other\.safetensors is not its own; there is no older one"):
        check(folder, 6)
    (final / "other.safetensors").unlink()
    (final / "shard.safetensors").unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        check(folder, 6)


@pytest.mark.parametrize("name", ["../../outside.safetensors", "/etc/passwd", "x.pt", ".metadata", ".safetensors"])
def test_a_manifest_names_only_files_of_its_own(folder: CheckpointFolder, name: str) -> None:
    folder.begin(6)
    folder.finish(6, {}, {name: FileFacts(0, "")}, keep=9)
    with pytest.raises(CheckpointError, match="not a file of a checkpoint"):
        check(folder, 6)


def test_another_version_is_refused(folder: CheckpointFolder) -> None:
    folder.begin(6)
    folder.finish(6, {"version": 99}, {}, keep=9)
    with pytest.raises(CheckpointError, match="version 99"):
        folder.read_manifest(6)


def test_one_job_at_a_time_and_a_killed_one_lets_go(folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphpipe.runtime.checkpoint_folder._LOCK_PATIENCE_S", 0.3)
    other = subprocess.Popen([sys.executable, "-c", HOLD, str(folder.path)], stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    try:
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(CheckpointError, match=rf"another job writes .*process {other.pid} on "):
            folder.lock()
    finally:
        os.kill(other.pid, signal.SIGKILL)
        other.communicate()
    folder.lock()
    with pytest.raises(CheckpointError, match="open already"):
        CheckpointFolder(folder.path).lock()
    folder.unlock()
    folder.lock()
    folder.unlock()
