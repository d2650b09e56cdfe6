"""Where results that can be found again are kept between runs: measured profiles and captured models."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from graphpipe.errors import GraphPipeError
from graphpipe.files import write_text

SETTING = "GRAPHPIPE_CACHE"


@dataclass(frozen=True, slots=True)
class DiskCache:
    """A folder of files that may be deleted at any time.

    Attributes:
        folder: The folder, which need not exist; None to keep nothing and find nothing.
    """

    folder: Path | None

    @classmethod
    def default(cls) -> DiskCache:
        """Return the user's own.

        That is the folder in ``$GRAPHPIPE_CACHE``, where ``off`` means none; without it ``$XDG_CACHE_HOME/graphpipe``,
        by default in ``~/.cache``.
        """
        setting = os.environ.get(SETTING, "")
        if setting == "off":
            return cls.off()
        if setting:
            return cls(Path(setting))
        return cls(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "graphpipe")

    @classmethod
    def off(cls) -> DiskCache:
        """Return the one that keeps nothing."""
        return cls(None)

    def path(self, name: str) -> Path | None:
        """Return the path of an entry, whether it exists or not; None if nothing is kept."""
        return None if self.folder is None else self.folder / name

    def write(self, name: str, text: str) -> None:
        """Write an entry, whole or not at all. A folder that cannot be written to is no reason to fail."""
        path = self.path(name)
        if path is None:
            return
        with suppress(OSError, GraphPipeError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, text)

    def prune(self, pattern: str, keep: int) -> None:
        """Delete the entries that match a pattern, but for the `keep` that were used last."""
        if self.folder is None:
            return
        with suppress(OSError):
            found = sorted(self.folder.glob(pattern), key=lambda path: path.stat().st_mtime, reverse=True)
            for path in found[keep:]:
                path.unlink(missing_ok=True)

    def used(self, name: str) -> None:
        """Note that an entry was of use."""
        path = self.path(name)
        if path is not None:
            with suppress(OSError):
                os.utime(path)
