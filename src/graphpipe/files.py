"""Files that appear whole or not at all, whatever happens while they are written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from graphpipe.errors import GraphPipeError


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Let a block write a draft beside `path`, which takes its place when the block ends.

    Where the block raises, or the process is killed, the file that was there before is untouched.

    Args:
        path: The file to write. Its folder must exist.

    Yields:
        The path of the draft.

    Raises:
        GraphPipeError: It cannot be written; the message says why.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield draft
        with draft.open("rb") as written:
            os.fsync(written.fileno())  # Before the name: else a power failure could leave the name of an empty file.
        draft.replace(path)
    except OSError as error:
        raise GraphPipeError(f"{str(path)!r} cannot be written: {error.strerror or error}") from error
    finally:
        draft.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file in UTF-8, whole or not at all.

    Raises:
        GraphPipeError: It cannot be written.
    """
    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8")
