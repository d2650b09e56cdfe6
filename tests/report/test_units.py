from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphpipe.report.units import format_seconds, format_share, format_ticks, round_ticks


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (12.3456, "12.3 s"),
        (0.9999, "1 s"),
        (0.99949, "999 ms"),
        (0.0034, "3.4 ms"),
        (120e-6, "120 µs"),
        (2e-9, "0.002 µs"),
        (4321.0, "4321 s"),
    ],
)
def test_seconds_have_three_digits_and_a_unit_that_suits(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_shares_never_round_to_nothing_or_everything_by_accident() -> None:
    assert [format_share(s) for s in (0, 0.004, 0.0949, 0.5, 1)] == ["0 %", "0.4 %", "9.5 %", "50 %", "100 %"]


@given(st.floats(1e-8, 1e5), st.integers(3, 12))
def test_ticks_are_round_and_few_and_reach_close_to_the_end(end: float, at_most: int) -> None:
    ticks = round_ticks(end, at_most)
    step = ticks[1]
    assert f"{step:.0e}"[0] in "125"
    assert len(ticks) <= at_most + 1
    assert ticks[0] == 0
    assert ticks[-1] <= end * (1 + 1e-6) < ticks[-1] + 1.001 * step
    # One more step would have been too coarse: at least a fifth of what is allowed is used.
    assert len(ticks) - 1 >= at_most / 5 - 1


def test_ticks_share_one_unit() -> None:
    assert format_ticks(round_ticks(0.012, 6)) == ("0", "2 ms", "4 ms", "6 ms", "8 ms", "10 ms", "12 ms")
    assert format_ticks(round_ticks(0.0009, 3)) == ("0", "500 µs")
    assert format_ticks(round_ticks(3.0, 3)) == ("0", "1 s", "2 s", "3 s")
    assert round_ticks(0.0, 5) == (0.0,)
