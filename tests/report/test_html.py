from __future__ import annotations

import re
from html.parser import HTMLParser

from graphpipe.estimate import estimate
from graphpipe.report import html_report
from graphpipe.strategy import Strategy
from tests.report.samples import crowded, long_names, measured_like, multi_modal, two_towers

VOID = {"meta", "br", "hr", "link", "img", "input"}


class Reader(HTMLParser):
    """Checks that elements are nested, and gathers what the tests ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.headings: list[str] = []
        self.tags: set[str] = set()
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.ids += [value or "" for name, value in attrs if name == "id"]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)
        if self.open and self.open[-1] not in {"style", "script"}:
            self.text.append(data)


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    return reader


def test_a_page_has_all_sections(strategy: Strategy) -> None:
    found = estimate(strategy)
    without = read(html_report(strategy, found))
    assert "Measured timeline" not in without.headings
    page = read(html_report(strategy, found, measured_like(found.trace)))
    expected = ["Summary", "Stage graph", "Predicted timeline", "Measured timeline", "Memory by device", "Stages"]
    assert page.headings[:6] == expected
    assert len(page.ids) == len(set(page.ids))


def test_a_page_needs_nothing_else() -> None:
    strategy = two_towers()
    page = html_report(strategy, estimate(strategy))
    assert not {"link", "img", "iframe"} & read(page).tags
    assert not re.search(r"(?:src|href)\s*=|@import|url\((?!#)", page)
    assert set(re.findall(r"https?://[^\"' ]+", page)) == {"http://www.w3.org/2000/svg"}
    assert "prefers-color-scheme:dark" in page


def test_text_from_the_model_and_the_caller_is_escaped() -> None:
    strategy = long_names()
    attack = "</script><script>alert(1)</script>"
    page = html_report(strategy, estimate(strategy), title=attack, facts={attack: attack})
    assert "<script>alert" not in page
    assert page.count("<script") == 1
    reader = read(page)
    assert attack in "".join(reader.text)
    assert "model.<encoder>" in "".join(reader.text)


def test_the_measured_timeline_says_how_far_it_is_from_the_prediction() -> None:
    strategy = two_towers()
    found = estimate(strategy)
    measured = measured_like(found.trace)
    text = "".join(read(html_report(strategy, found, measured)).text)
    ratio = measured.makespan_s / found.iteration_s
    assert f"{ratio:.2f} × the prediction; the scale is the same." in text
    assert "5.38 ms (1.12 ×)" in text  # Forward of stage 0: 4.8 ms, 1.12 times as slow.


def test_a_page_with_a_huge_trace_stays_small() -> None:
    strategy = multi_modal()
    assert len(html_report(strategy, estimate(strategy), crowded(strategy, 2000))) < 2_000_000


def test_the_page_is_the_same_each_time(strategy: Strategy) -> None:
    found = estimate(strategy)
    assert html_report(strategy, found) == html_report(strategy, found)
