"""Profiles on disk, so that a model is measured once per device."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graphpipe.cost.profile import Profile
from graphpipe.errors import GraphPipeError


def default_cache_dir() -> Path:
    """Return where profiles are kept if nothing else is said: ``~/.cache/graphpipe``."""
    return Path.home() / ".cache" / "graphpipe"


def cache_path(directory: Path, key: Mapping[str, Any]) -> Path:
    """Return the file of the profile that was measured under these circumstances."""
    text = json.dumps(key, sort_keys=True)
    return directory / f"profile-{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


def load_profile(path: Path, operators: tuple[str, ...]) -> Profile | None:
    """Return a stored profile; None if there is none, or it is damaged or of other operators."""
    try:
        profile = Profile.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, GraphPipeError):
        return None
    return profile if profile.operators == operators else None


def store_profile(path: Path, profile: Profile) -> None:
    """Store a profile. Another process sees the whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(profile.to_json(), file)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
