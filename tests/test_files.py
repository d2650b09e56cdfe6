from __future__ import annotations

import os
from pathlib import Path

import pytest

from graphpipe.errors import GraphPipeError
from graphpipe.files import replacing, write_text


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_text(path, "old")
    with replacing(path) as draft:
        draft.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["a.json"]  # noqa: PTH208


def test_a_failed_write_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_text(path, "old")
    with pytest.raises(ZeroDivisionError), replacing(path) as draft:  # noqa: PT012
        draft.write_text("half")
        raise ZeroDivisionError
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_a_full_disk_is_said_and_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_text(path, "old")
    with pytest.raises(GraphPipeError, match=r"a.json' cannot be written: No space left"), replacing(path):
        raise OSError(28, "No space left on device")
    assert path.read_text() == "old"


def test_a_folder_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(GraphPipeError, match=r"b.json' cannot be written: No such file or directory"):
        write_text(tmp_path / "nowhere" / "b.json", "text")
