"""Measured profiles on disk, so that a second plan for the same model starts at once."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from graphpipe.cost.profile import Profile
from graphpipe.errors import GraphPipeError
from graphpipe.fields import read_json
from graphpipe.files import write_text


def default_cache_dir() -> Path:
    """Return the folder of cached profiles: ``$XDG_CACHE_HOME/graphpipe``, by default in ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "graphpipe"


def cache_path(folder: Path, key: Mapping[str, Any]) -> Path:
    """Return the file of a profile that was measured under the conditions in `key`."""
    text = json.dumps(key, sort_keys=True)
    return folder / f"profile-{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


def read_profile(path: Path, operators: tuple[str, ...], sizes: tuple[int, ...]) -> Profile | None:
    """Return a cached profile, or None where there is none, or a damaged one, or one of something else."""
    try:
        found = Profile.from_json(read_json(path))
    except (OSError, GraphPipeError):
        return None
    return found if (found.operators, found.sizes) == (operators, sizes) else None


def write_profile(path: Path, profile: Profile) -> None:
    """Write a profile, whole or not at all. A folder that cannot be written to is no reason to fail."""
    with suppress(OSError, GraphPipeError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(profile.to_json()))
