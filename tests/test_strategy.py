from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpipe.errors import GraphPipeError, StrategyError
from graphpipe.estimate import estimate
from graphpipe.strategy import Strategy
from tests.stage_graphs import CHAIN_3, DIAMOND, make_graph, make_stages, make_strategy


@pytest.fixture
def strategy() -> Strategy:
    return make_strategy(make_stages(DIAMOND, mini_batch_size=8, sizes=2, devices=[(0, 1), (2,), (3,), (2,)]))


def test_a_strategy_survives_its_file(strategy: Strategy, tmp_path: Path) -> None:
    strategy.save(tmp_path / "strategy.json")
    loaded = Strategy.load(tmp_path / "strategy.json")
    assert loaded.to_json() == strategy.to_json()
    assert estimate(loaded).iteration_s == estimate(strategy).iteration_s
    assert [p.name for p in tmp_path.iterdir()] == ["strategy.json"]


def test_a_strategy_is_printed_in_short(strategy: Strategy) -> None:
    first, *stages = str(strategy).splitlines()
    assert first.startswith("test: 4 stages, at most 3 in sequence, on 4 of 4 devices, mini-batch of 8")
    assert stages[0] == "  stage 0 on cpu0, cpu1: 1 operators, o0; 4 × 2 samples"
    assert len(stages) == 4


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"kind": "graphpipe-strategy"}', "[" * 100_000])
def test_a_file_that_is_no_strategy_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text(text)
    with pytest.raises(StrategyError, match=r"graphpipe plan|plan again"):
        Strategy.load(tmp_path / "s.json")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(StrategyError, match=r"no strategy file .*nowhere.json.*graphpipe plan"):
        Strategy.load(tmp_path / "nowhere.json")


def _paths(tree: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [here] if here else []
    if isinstance(tree, dict):
        for key, value in tree.items():
            found += _paths(value, (*here, key))
    elif isinstance(tree, list):
        for i, value in enumerate(tree):
            found += _paths(value, (*here, i))
    return found


BASE = make_strategy(make_stages(CHAIN_3, mini_batch_size=4, devices=[(0,), (1,), (0,)])).to_json()
# Everything that is not only for people to read.
PATHS = [p for p in _paths(BASE) if p[0] not in ("notes", "planner") and p[-1] not in ("name", "device", "module")]


@settings(max_examples=300, deadline=None)
@given(
    path=st.sampled_from(PATHS),
    junk=st.sampled_from([None, -1, 10**9, "x", [], {}, float("nan"), float("inf"), "0F9", [[[]]], True]),
)
def test_a_damaged_strategy_is_refused_or_still_consistent(path: tuple[Any, ...], junk: Any) -> None:
    data = json.loads(json.dumps(BASE))
    node = data
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = junk
    try:
        loaded = Strategy.from_json(data)
    except GraphPipeError:
        return  # With a reason, and not another kind of exception.
    estimate(loaded)


def test_another_model_is_refused_with_the_first_difference(strategy: Strategy) -> None:
    strategy.check_model(make_graph(DIAMOND))
    with pytest.raises(StrategyError, match="it has operator 'o3', this model lacks it"):
        strategy.check_model(make_graph(CHAIN_3))
    with pytest.raises(StrategyError, match="is_batch_wise of operator 'o3' was False and is True"):
        strategy.check_model(make_graph(DIAMOND, batch_wise=[3]))
    with pytest.raises(StrategyError, match="what passes between the operators differs"):
        strategy.check_model(make_graph(DIAMOND, value_bytes=8))


def test_another_number_of_processes_is_refused_with_both_numbers(strategy: Strategy) -> None:
    strategy.check_world_size(4)
    with pytest.raises(StrategyError, match=r"for 4 devices, the job has 3 processes; start 4"):
        strategy.check_world_size(3)
