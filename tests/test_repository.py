"""Promises of the repository as a whole: what an import costs, what is released, what its files may say."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CONTRACTS = {contract["id"]: contract for contract in PROJECT["tool"]["importlinter"]["contracts"]}
CORE: list[str] = CONTRACTS["core-without-torch"]["source_modules"]


def run_python(code: str) -> str:
    """Run `code` in a fresh interpreter and return what it prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_installed_package_is_this_checkout() -> None:
    package = Path(run_python("import graphpipe; print(graphpipe.__file__)"))
    assert package == ROOT / "src" / "graphpipe" / "__init__.py", (
        "the environment is another checkout's: make clean setup"
    )


def test_import_takes_little_cpu_time_and_no_torch() -> None:
    # CPU time, since other processes may hold the cores; the best of three, since the first may compile.
    code = (
        "import sys, time; start = time.process_time(); import graphpipe; seconds = time.process_time() - start;"
        "assert 'torch' not in sys.modules, 'import graphpipe imports torch'; print(seconds)"
    )
    assert min(float(run_python(code)) for _ in range(3)) < 0.5


def test_the_core_works_without_torch() -> None:
    # None in sys.modules makes `import torch` raise ImportError, however deep it is hidden.
    code = (
        "import importlib, pkgutil, sys\n"
        f"sys.modules.update(dict.fromkeys({CONTRACTS['core-without-torch']['forbidden_modules']}))\n"
        f"for name in {CORE}:\n"
        "    module = importlib.import_module(name)\n"
        "    for part in pkgutil.walk_packages(getattr(module, '__path__', ()), name + '.'):\n"
        "        importlib.import_module(part.name)\n"
        "print('ok')"
    )
    assert run_python(code) == "ok"


def test_the_core_is_the_lower_part_of_the_layers() -> None:
    # Otherwise a core module could import one that imports torch, or a new layer could escape the rule.
    layers = [f"graphpipe.{layer.strip('()')}" for layer in CONTRACTS["layers"]["layers"]]
    assert layers[-len(CORE) :] == CORE


def test_the_version_is_the_newest_of_the_changelog() -> None:
    newest = re.search(r"^## \[(\d+\.\d+\.\d+)\]", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert newest is not None
    assert importlib.metadata.version(PROJECT["project"]["name"]) == newest[1]


def test_the_pins_are_exact_and_within_the_ranges_for_users() -> None:
    # `packaging` comes with pytest.
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    pins = {canonicalize_name(name): version for name, version in pins.items()}
    extras = PROJECT["project"]["optional-dependencies"]
    for text in [*PROJECT["project"]["dependencies"], *(line for extra in extras.values() for line in extra)]:
        requirement = Requirement(text)
        name = canonicalize_name(requirement.name)
        if name != PROJECT["project"]["name"]:
            assert name in pins, f"pin {name} in constraints.txt"
            assert pins[name] in requirement.specifier, f"{name} is pinned to {pins[name]}, but users get {text}"


def test_no_file_names_a_path_of_one_machine() -> None:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    # Files that git tracks, and those that the next commit may add.
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    forbidden = re.compile("|".join(("/" + "work/", "shared" + "/docs", re.escape(f"{ROOT}/"))))
    found = []
    for name in sorted(set(listing.stdout.decode().split("\0")) - {""}):
        path = ROOT / name
        if not path.is_file():  # Deleted, but not yet for git.
            continue
        for number, line in enumerate(path.read_bytes().decode(errors="replace").splitlines(), start=1):
            if match := forbidden.search(line):
                found.append(f"{name}:{number}: {match[0]}")
    assert not found, "\n".join(found)
