"""The gradients of one process, over random models and strategies on four real processes."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from graphpipe.runtime.process_transports import TransportKind
from tests.distributed.harness import run_case
from tests.distributed.random_cases import CASES_PATH, RandomCase
from tests.runtime.test_random_programs import graph_models, stage_graphs

pytestmark = pytest.mark.distributed
NUM_PROCESSES = 4
RELATIVE = 1e-9


@st.composite
def random_cases(draw: st.DrawFn) -> RandomCase:
    """Draw a model and a strategy for up to four devices, more than one of them used."""
    model = draw(graph_models())
    stages = draw(stage_graphs(model))
    assume(1 < len(stages.devices) <= NUM_PROCESSES)
    return RandomCase(
        shapes=model.shapes,
        seed=model.seed,
        reduction=model.loss_reduction,
        stages=stages.stages,
        mini_batch_size=stages.mini_batch_size,
        order=stages.order,
        k=draw(st.integers(1, 3)),
        kind=draw(st.sampled_from(list(TransportKind))),
    )


def draw_cases(count: int) -> list[RandomCase]:
    """Return other cases on every run."""
    found: list[RandomCase] = []

    @settings(
        max_examples=count,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=random_cases())
    def collect(case: RandomCase) -> None:
        found.append(case)

    collect()
    return found


def test_loss_and_gradients_are_those_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = draw_cases(30)
    assert len(cases) == 30
    (tmp_path / "cases").write_bytes(pickle.dumps(cases))
    monkeypatch.setenv(CASES_PATH, str(tmp_path / "cases"))
    ranks = run_case("random_cases.random_programs", NUM_PROCESSES)
    assert len(ranks) == NUM_PROCESSES
    for results in ranks:
        assert len(results) == len(cases)
        for case, result in zip(cases, results, strict=True):
            assert result["loss"] < RELATIVE, case
            assert result["gradient"] < RELATIVE, case
            assert result["copies_equal"], case
