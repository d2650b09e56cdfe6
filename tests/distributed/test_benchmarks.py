from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import runtime
from tests.distributed.harness import run

pytestmark = pytest.mark.distributed


def test_towers_writes_its_figures(tmp_path: Path) -> None:
    done = run([sys.executable, "-m", "benchmarks", "towers", "--json", str(tmp_path / "towers.json")])
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "towers.json").read_text())["figures"]
    assert {f["name"] for f in figures} == {
        f"towers/{count}-micro-batches/{what}"
        for count in (2, 4)
        for what in (
            "graph_s",
            "chain_s",
            "torch_1f1b_s",
            "graph_over_chain",
            "graph_over_torch_1f1b",
            "torch_1f1b_over_chain",
            "measured_over_predicted",
        )
    }
    for figure in figures:
        assert set(figure) == {"name", "value", "unit", "goal", "paper", "holds"}
        assert figure["value"] > 0
        assert figure["holds"] == (figure["goal"] is None or figure["value"] >= figure["goal"])


def test_emulated_compute_takes_no_less_than_the_simulator_says() -> None:
    found = runtime.measure(3, 0.002, 4, 1, 1)
    assert found["simulated"] == pytest.approx({"graph": 30e-3, "chain": 36e-3, "torch": 36e-3}, rel=0.05)
    for name, seconds in found["wall"].items():
        # A pass alone takes the time asked in the median; a little less is chance.
        assert seconds > 0.9 * found["simulated"][name], name
    assert all(seconds > 0 for seconds in found["busy"].values())
