"""The most memory that a rank has used."""

from __future__ import annotations

import resource
import sys

import torch


def peak_memory_bytes(device: torch.device) -> int:
    """Return the memory peak of this process.

    On a GPU these are the bytes that torch's allocator had given out at once, since the process began or the user reset
    that statistic. On a CPU they are those of the whole process that were resident at once, Python and torch's
    libraries included, some hundreds of megabytes.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts in bytes, Linux in kilobytes
