"""``graphpipe show --model``."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from graphpipe.cli.show import command

JOB = """
from graphpipe.models import MMT, MMTConfig

def job():
    config = MMTConfig.small()
    return MMT(config), config.example_batch(2)
"""


def test_a_model_is_printed_and_drawn(tmp_path: Path) -> None:
    (tmp_path / "shown_model.py").write_text(JOB)
    picture = tmp_path / "model.svg"
    result = CliRunner().invoke(command, ["--model", f"{tmp_path / 'shown_model.py'}:job", "--svg", str(picture)])
    assert result.exit_code == 0, result.output
    assert "4 branches side by side, 0 knots" in result.output
    assert "├─ towers.2.layers.0-1  (10 operators" in result.output
    assert "towers.3.layers.0-1" in picture.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either a STRATEGY or --model"),
        (["strategy.json", "--model", "m:f"], "give either a STRATEGY or --model"),
        (["--model", "m:f", "--schedule"], "a model has none"),
        (["strategy.json", "--operators"], "belongs to --model"),
    ],
)
def test_options_that_contradict_each_other(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 2
    assert message in result.output
