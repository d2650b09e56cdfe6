from __future__ import annotations

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from graphpipe.cli.model_options import ModelOptions, model_options
from graphpipe.cli.show import command
from graphpipe.disk_cache import DiskCache

JOB = """
import torch

import graphpipe as gp
from graphpipe.models import MMT, MMTConfig

def job():
    torch.manual_seed(0)
    config = MMTConfig(num_branches=2, num_layers=1)
    return gp.Job(model=MMT(config), example_batch=config.example_batch(2), keep_whole=["towers.0"])
"""


@pytest.mark.parametrize(
    "given",
    [
        ModelOptions("jobs:job", (), (), DiskCache.default()),
        ModelOptions("jobs:job", ("a.0", "a.1"), ("b",), DiskCache.off()),
    ],
)
def test_another_process_gets_the_same_options(given: ModelOptions) -> None:
    found: list[ModelOptions] = []

    @click.command()
    @model_options("For a test.")
    def listen(model: ModelOptions) -> None:
        found.append(model)

    result = CliRunner().invoke(listen, given.arguments())
    assert result.exit_code == 0, result.output
    assert found == [given]


def shown(folder: Path, *options: str) -> str:
    result = CliRunner().invoke(command, ["--model", f"{folder / 'model_of_the_test.py'}:job", *options])
    assert result.exit_code == 0, result.output
    return result.output


def test_a_model_is_divided_as_the_job_and_the_options_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model_of_the_test.py").write_text(JOB)
    kept = tmp_path / "kept"
    monkeypatch.setenv("GRAPHPIPE_CACHE", str(kept))
    assert "towers.1.layers.0  (5 operators" in shown(tmp_path, "--operators", "--no-cache")
    assert not kept.exists()
    output = shown(tmp_path, "--operators", "--keep-whole", "towers.1")
    assert output.count("(1 operator, 34.2 kB)") == 2
    assert len(list(kept.iterdir())) == 1
    assert shown(tmp_path, "--operators", "--keep-whole", "towers.1") == output
    assert len(list(kept.iterdir())) == 1


@pytest.mark.parametrize("option", [("--split-at", "a"), ("--keep-whole", "a"), ("--no-cache",)])
def test_options_without_a_model_are_refused(option: tuple[str, ...]) -> None:
    result = CliRunner().invoke(command, ["strategy.json", *option])
    assert result.exit_code == 2
    assert "belong to --model" in result.output
