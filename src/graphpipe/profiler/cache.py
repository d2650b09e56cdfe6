"""Measured profiles on disk, so that a second plan for the same model starts at once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graphpipe.cost.profile import Profile
from graphpipe.errors import GraphPipeError
from graphpipe.fields import read_json


def entry_name(key: Mapping[str, Any]) -> str:
    """Return the name of the entry of a profile that was measured under the conditions in `key`."""
    text = json.dumps(key, sort_keys=True)
    return f"profile-{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


def read_profile(path: Path | None, operators: tuple[str, ...], sizes: tuple[int, ...]) -> Profile | None:
    """Return a cached profile, or None where there is none, or a damaged one, or one of something else."""
    if path is None:
        return None
    try:
        found = Profile.from_json(read_json(path))
    except (OSError, GraphPipeError):
        return None
    return found if (found.operators, found.sizes) == (operators, sizes) else None
