"""The folder that holds a job's checkpoints, on disk.

::

    checkpoints/
      lock                        held by the job that writes here
      latest                      the name of the newest whole checkpoint
      step-00000200/
        manifest.json             what is in it, with checksums, and everything that is not a tensor
        shard-00001-....safetensors
      step-00000300.draft/        being written

A checkpoint is written as a draft, and renamed once every file and checksum is on disk: a folder called ``step-N`` is
whole. Files are read only after their checksums agree; JSON and safetensors cannot run code.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphpipe.errors import CheckpointError

MANIFEST = "manifest.json"
VERSION = 1

_LATEST = "latest"
_LOCK = "lock"
_DRAFT = ".draft"
_REMOVED = ".removed"
_SET_ASIDE = ".set-aside"
_NAME = re.compile(r"step-(\d{8,18})")
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors")
# A job that is started again may meet the last breath of the one before.
_LOCK_PATIENCE_S = 3.0
_held: set[Path] = set()
_log = logging.getLogger("graphpipe.checkpoint")


@dataclass(frozen=True)
class FileFacts:
    """What must be true of a file.

    Attributes:
        num_bytes: Its size.
        sha256: The hash of its bytes.
    """

    num_bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> FileFacts:
        """Return those of a file on disk."""
        with path.open("rb") as file:
            return cls(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


class CheckpointFolder:
    """The checkpoints in a folder. Only the process that has the lock may change anything.

    Args:
        path: The folder; `lock` makes it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()  # The job may go to another folder.
        self._lock_fd: int | None = None

    # ---- one job at a time

    def lock(self) -> None:
        """Make the folder and keep other jobs out of it until `unlock`, or until this process ends in any way.

        Raises:
            CheckpointError: Another job has it.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"{str(self.path)!r} cannot be a folder of checkpoints: {error.strerror}") from error
        if self.path.resolve() in _held:
            raise CheckpointError(f"this process has {str(self.path)!r} open already; close that `Checkpointer` first")
        fd = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        give_up_s = time.monotonic() + _LOCK_PATIENCE_S
        # A record lock belongs to the process: children that it forked, such as those of a loader, don't inherit it.
        while True:
            try:
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EAGAIN) or time.monotonic() > give_up_s:
                    owner = os.pread(fd, 200, 0).decode(errors="replace").strip()
                    os.close(fd)
                    raise CheckpointError(
                        f"another job writes its checkpoints to {str(self.path)!r} ({owner or 'unknown'}); end it, or "
                        "name another folder"
                    ) from error
                time.sleep(0.1)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        self._lock_fd = fd
        self._held = self.path.resolve()
        _held.add(self._held)

    def unlock(self) -> None:
        """Let other jobs in."""
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None
            _held.discard(self._held)

    # ---- what there is

    def steps(self) -> list[int]:
        """Return the steps of the whole checkpoints, ascending."""
        if not self.path.is_dir():
            return []
        names = (_NAME.fullmatch(path.name) for path in self.path.iterdir() if (path / MANIFEST).is_file())
        return sorted(int(match[1]) for match in names if match)

    def of_step(self, step: int) -> Path:
        """Return the folder of a step's checkpoint."""
        return self.path / f"step-{step:08d}"

    def draft_of_step(self, step: int) -> Path:
        """Return the folder in which a step's checkpoint is written."""
        return self.path / f"step-{step:08d}{_DRAFT}"

    def remove_drafts(self) -> list[int]:
        """Remove what jobs that ended while they were saving have left, and return the steps."""
        for path in self.path.glob(f"step-*{_REMOVED}"):
            shutil.rmtree(path)
        found = []
        for path in sorted(self.path.glob(f"step-*{_DRAFT}")):
            match = _NAME.fullmatch(path.name.removesuffix(_DRAFT))
            if match and path.is_dir():
                shutil.rmtree(path)
                found.append(int(match[1]))
        return found

    # ---- changes

    def begin(self, step: int) -> Path:
        """Make the empty folder for a draft and return it.

        Raises:
            CheckpointError: There is a checkpoint of this step.
        """
        if self.of_step(step).exists():
            raise CheckpointError(f"there is a checkpoint of step {step} in {str(self.path)!r}; it is not overwritten")
        draft = self.draft_of_step(step)
        draft.mkdir()
        return draft

    def finish(self, step: int, content: Mapping[str, Any], files: Mapping[str, FileFacts], keep: int) -> None:
        """Make a draft whose files are on disk a checkpoint, let `latest` name it, and remove old ones.

        Args:
            step: Which one.
            content: JSON data for the manifest.
            files: Every file of the draft.
            keep: How many of the newest checkpoints stay.

        Raises:
            OSError: It is not saved. Once it is, what fails is only told.
        """
        draft, final = self.draft_of_step(step), self.of_step(step)
        whole = {
            "format": "graphpipe-checkpoint",
            "version": VERSION,
            "step": step,
            "files": {name: [facts.num_bytes, facts.sha256] for name, facts in files.items()},
            **content,
        }
        text = json.dumps(whole)
        # One line, and its hash on the next: a flipped bit in the manifest shows as one in any other file does.
        _write_to_disk(draft / MANIFEST, f"{text}\n{hashlib.sha256(text.encode()).hexdigest()}\n")
        _sync_folder(draft)
        draft.rename(final)
        # Old ones are removed last, and before a second try where there was no space for `latest`.
        for work in (self.point_to_latest, lambda: self.keep_last(keep), self.point_to_latest):
            try:
                work()
            except OSError as error:
                _log.warning("step %d is saved, but %s could not be tidied: %s", step, self.path, error)

    def abandon(self, step: int) -> None:
        """Remove a draft that cannot be finished."""
        shutil.rmtree(self.draft_of_step(step), ignore_errors=True)

    def point_to_latest(self) -> None:
        """Let `latest` name the newest whole checkpoint."""
        steps = self.steps()
        if not steps:
            (self.path / _LATEST).unlink(missing_ok=True)
            return
        draft, name = self.path / f"{_LATEST}{_DRAFT}", f"{self.of_step(steps[-1]).name}\n"
        if not self._latest_is(name):
            _write_to_disk(draft, name)
            draft.replace(self.path / _LATEST)
        _sync_folder(self.path)

    def _latest_is(self, name: str) -> bool:
        try:
            return (self.path / _LATEST).read_text(encoding="utf-8") == name
        except (OSError, UnicodeDecodeError):
            return False

    def keep_last(self, count: int) -> None:
        """Remove all but the newest checkpoints."""
        for step in self.steps()[:-count]:
            # Half a removed checkpoint must not look like a whole one.
            doomed = self.of_step(step).rename(self.path / f"{self.of_step(step).name}{_REMOVED}")
            shutil.rmtree(doomed)

    def set_aside_after(self, step: int) -> list[Path]:
        """Rename the checkpoints of later steps, so that they count no more, and return their folders."""
        moved = []
        for later in self.steps():
            if later <= step:
                continue
            for number in range(1, 1000):
                suffix = _SET_ASIDE if number == 1 else f"{_SET_ASIDE}-{number}"
                target = self.path / f"{self.of_step(later).name}{suffix}"
                if not target.exists():
                    self.of_step(later).rename(target)
                    moved.append(target)
                    break
        self.point_to_latest()
        return moved

    # ---- reading

    def read_manifest(self, step: int) -> dict[str, Any]:
        """Return the manifest of a checkpoint.

        Raises:
            CheckpointError: It is missing, damaged, or of another version.
        """
        path = self.of_step(step) / MANIFEST
        try:
            text, _, rest = path.read_text(encoding="utf-8").partition("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise self.damaged(step, f"{MANIFEST} cannot be read: {error}") from error
        if hashlib.sha256(text.encode()).hexdigest() != rest.removesuffix("\n") or not rest.endswith("\n"):
            raise self.damaged(step, f"{MANIFEST} does not have the checksum that it was written with")
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise self.damaged(step, f"{MANIFEST} is not JSON") from error
        if not isinstance(found, dict) or found.get("format") != "graphpipe-checkpoint":
            raise self.damaged(step, f"{MANIFEST} is not that of a checkpoint")
        if found.get("version") != VERSION:
            raise CheckpointError(
                f"the checkpoint of step {step} has version {found.get('version')!r}, this GraphPipe reads {VERSION}; "
                "use the release that wrote it, and export the model there"
            )
        return found

    def files_of(self, step: int, manifest: Mapping[str, Any]) -> dict[str, FileFacts]:
        """Return what must be true of the files of a checkpoint.

        Raises:
            CheckpointError: There are other files than those listed, or the list is malformed.
        """
        try:
            listed = {name: FileFacts(int(size), str(sha256)) for name, (size, sha256) in manifest["files"].items()}
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise self.damaged(step, f"{MANIFEST} has no list of files") from error
        for name in listed:
            if not _FILE_NAME.fullmatch(name):
                raise self.damaged(step, f"{MANIFEST} lists {name!r}, which is not a file of a checkpoint")
        present = {path.name for path in self.of_step(step).iterdir()} - {MANIFEST}
        for name in sorted(set(listed) ^ present):
            raise self.damaged(step, f"file {name} is missing" if name in listed else f"file {name} is not its own")
        for name in listed:
            if not (self.of_step(step) / name).is_file():
                raise self.damaged(step, f"{name} is not a file, but a device or a queue")
        return listed

    def check_files(self, step: int, files: Mapping[str, FileFacts], names: Iterable[str]) -> None:
        """Check some files of a checkpoint against their checksums.

        Raises:
            CheckpointError: One has changed.
        """
        for name in names:
            try:
                found = FileFacts.of(self.of_step(step) / name)
            except OSError as error:
                raise self.damaged(step, f"file {name} cannot be read: {error}") from error
            if found != files[name]:
                raise self.damaged(
                    step,
                    f"file {name} has changed since it was written ({found.num_bytes} bytes of "
                    f"{files[name].num_bytes}, checksum {found.sha256[:8]} instead of {files[name].sha256[:8]})",
                )

    def damaged(self, step: int, why: str) -> CheckpointError:
        """Return the error for a damaged checkpoint, with the ones before it as the way out."""
        older = [s for s in self.steps() if s < step]
        way_out = (
            f"go on from the one of step {older[-1]}: restore({older[-1]}), or --resume-from {older[-1]}"
            if older
            else f"there is no older one in {str(self.path)!r}; name an empty folder to start again"
        )
        return CheckpointError(f"the checkpoint of step {step} is damaged: {why}; {way_out}")


def _write_to_disk(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    """Let the names in a folder outlive a power cut."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
