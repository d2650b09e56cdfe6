from __future__ import annotations

import pytest

from tests.distributed.harness import run_case

pytestmark = pytest.mark.distributed


def test_two_thousand_steps_hold_no_more_than_a_thousand() -> None:
    for result in run_case("long_cases.two_thousand_steps", 2):
        early, late = result["objects"]
        assert late - early < 20
        # Tensors, works and messages: 32 bytes a step would show, and a few kilobytes come and go.
        early, late = result["heap_bytes"]
        assert late - early < 32_000
        # The C library takes a megabyte or two at a time for its threads, of which it has given out less.
        early, late = result["resident_bytes"]
        assert late - early < 3e6
