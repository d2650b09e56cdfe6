"""Measured profiles on disk, so that a second plan for the same model starts at once."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graphpipe.cost.profile import Profile
from graphpipe.errors import GraphPipeError


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
        found = Profile.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, AttributeError, GraphPipeError):
        return None
    return found if (found.operators, found.sizes) == (operators, sizes) else None


def write_profile(path: Path, profile: Profile) -> None:
    """Write a profile, whole or not at all. A folder that cannot be written to is no reason to fail."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps(profile.to_json()), encoding="utf-8")
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
