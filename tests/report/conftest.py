"""The sample strategies as fixtures."""

from __future__ import annotations

import pytest

from graphpipe.strategy import Strategy
from tests.report.samples import SAMPLES


@pytest.fixture(params=list(SAMPLES))
def strategy(request: pytest.FixtureRequest) -> Strategy:
    return SAMPLES[request.param]()
