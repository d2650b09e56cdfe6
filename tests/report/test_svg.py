from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from graphpipe.report.svg import element, fit, label, number, shorten, text_width
from tests.report.pictures import parse


@given(st.text(alphabet=st.characters(codec="utf-16", exclude_categories=[]), max_size=40))
def test_any_text_survives_in_markup(text: str) -> None:
    found = parse(element("g", label(0, 0, text), note=text))
    assert len(found) == 1
    shown = "".join(found[0].itertext())
    assert len(shown.replace("\n", "")) == len(text.replace("\r\n", "\n").replace("\r", "\n").replace("\n", ""))


def test_characters_that_xml_forbids_are_replaced() -> None:
    assert parse(label(0, 0, "a\x00b\x1b\ud800")).text == "a\ufffdb\ufffd\ufffd"


@given(st.text(max_size=60), st.integers(0, 40))
def test_shortened_text_fits_and_keeps_both_ends(text: str, at_most: int) -> None:
    shown = shorten(text, at_most)
    assert len(shown) <= at_most
    if len(text) > at_most >= 3:
        assert shown[0] == text[0]
        assert shown[-1] == text[-1]
        assert "…" in shown


@given(st.text(max_size=60), st.floats(0, 300))
def test_fitted_text_fits(text: str, width: float) -> None:
    assert text_width(fit(text, width, 11), 11) <= width


def test_numbers_are_short() -> None:
    assert [number(v) for v in (1.0, 1.25, 0.001, -0.001, 100.0, -2.5)] == ["1", "1.25", "0", "0", "100", "-2.5"]
