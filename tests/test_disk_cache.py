from __future__ import annotations

import os
from pathlib import Path

import pytest

from graphpipe.disk_cache import DiskCache


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"GRAPHPIPE_CACHE": "off"}, None),
        ({"GRAPHPIPE_CACHE": "/somewhere"}, Path("/somewhere")),
        ({"XDG_CACHE_HOME": "/caches"}, Path("/caches/graphpipe")),
        ({"HOME": "/home/me"}, Path("/home/me/.cache/graphpipe")),
    ],
)
def test_where_the_users_own_is(
    variables: dict[str, str], folder: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GRAPHPIPE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert DiskCache.default() == DiskCache(folder)


def test_off_keeps_nothing() -> None:
    cache = DiskCache.off()
    cache.write("a.json", "{}")
    cache.prune("*", 0)
    assert cache.path("a.json") is None


def test_a_folder_that_cannot_be_written_to_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    DiskCache(tmp_path / "file" / "folder").write("a.json", "{}")
    DiskCache(tmp_path / "file").write("a.json", "{}")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_the_entries_used_last_stay(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path)
    for i, name in enumerate(["a-1", "a-2", "a-3", "b-1"]):
        cache.write(name, "{}")
        os.utime(tmp_path / name, (i, i))
    cache.used("a-1")
    cache.prune("a-*", 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a-1", "a-3", "b-1"]
