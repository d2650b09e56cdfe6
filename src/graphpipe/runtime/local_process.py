"""Processes of this machine, as the operating system tells of them."""

from __future__ import annotations

import os
import signal
import socket
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class LocalProcess:
    """A process, and how to tell it from another one with the same number.

    Attributes:
        machine: Where it is: the host's name, and what names its boot and its space of process numbers.
        pid: Its number there.
        born: When it was started, in the machine's own count; empty where that is unknown.
    """

    machine: str
    pid: int
    born: str

    @classmethod
    def of(cls, pid: int) -> LocalProcess:
        """Return the process with a number on this machine."""
        return cls(_this_machine(), pid, _born(pid))

    @property
    def is_here(self) -> bool:
        """Whether it is, or was, a process of this machine."""
        return self.machine == _this_machine()

    def kill(self) -> None:
        """End the process, if it is one of this machine and still the same."""
        if self.is_here and self.born == _born(self.pid):
            kill(self.pid)


def _this_machine() -> str:
    try:
        # Containers may have the same name.
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return socket.gethostname()


def _born(pid: int) -> str:
    return (_stat_of(pid)[19:20] or [""])[0]


def kill(pid: int) -> None:
    """End the process with a number, if there is one."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _stat_of(pid: int) -> list[str]:
    """Return the fields of Linux's ``/proc/PID/stat`` after the process's name; none elsewhere."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def state_of(pid: int) -> str:
    """Return the letter that Linux has for the state of a process: T for one that is stopped."""
    return next(iter(_stat_of(pid)), "")


def parent_of(pid: int) -> int | None:
    """Return the number of the process that another one is a child of; None where that is unknown."""
    fields = _stat_of(pid)
    return int(fields[1]) if fields else None
