from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpipe.report import stage_graph_text
from graphpipe.report.stage_graph_text import _tracks as tracks
from graphpipe.strategy import Strategy
from tests.report.graphs import drawn_strategies
from tests.report.samples import chain, diamond, strategy_of
from tests.stage_graphs import make_stages, make_strategy


def stages_in(text: str) -> list[int]:
    return sorted(int(number) for number in re.findall(r"(?:│|[─┌├└]) (\d+): ", text))


def test_a_diamond_in_boxes() -> None:
    assert stage_graph_text(diamond()) == (
        "          ┌──────────────────┐\n"
        "          │ 0: stem          │\n"
        "          │ gpu0             │\n"
        "          │ 2 × 8            │\n"
        "          └─────────┬────────┘\n"
        "                    │ 200 kB\n"
        "          ┌─────────┴───────────┐\n"
        "          ▼                     ▼\n"
        "┌──────────────────┐  ┌──────────────────┐\n"
        "│ 1: left.block1-2 │  │ 2: right.*       │\n"
        "│ gpu1             │  │ gpu2             │\n"
        "│ 2 × 8            │  │ 2 × 8            │\n"
        "└─────────┬────────┘  └─────────┬────────┘\n"
        "          │ 200 kB              │ 200 kB\n"
        "          └─────────┬───────────┘\n"
        "                    ▼\n"
        "          ┌──────────────────┐\n"
        "          │ 3: head          │\n"
        "          │ gpu3             │\n"
        "          │ 2 × 8            │\n"
        "          └──────────────────┘"
    )


def test_each_stage_is_drawn_once_within_the_width(strategy: Strategy) -> None:
    for width in (20, 50, 100):
        text = stage_graph_text(strategy, max_width=width)
        assert max(map(len, text.split("\n"))) <= width
        assert stages_in(text) == list(range(len(strategy.stages.stages)))


@given(drawn_strategies(), st.integers(20, 120))
@settings(max_examples=60, deadline=None)
def test_any_graph_stays_within_the_width_with_whole_boxes(strategy: Strategy, width: int) -> None:
    text = stage_graph_text(strategy, max_width=width)
    assert max(map(len, text.split("\n"))) <= width
    assert stages_in(text) == list(range(len(strategy.stages.stages)))
    # No line is drawn over text: every name is either a list's or stands between the two sides of a box.
    if "▼" in text:
        assert len(re.findall(r"│ \d+: [^│]*│", text)) == len(strategy.stages.stages)


@given(drawn_strategies())
@settings(max_examples=60, deadline=None)
def test_every_line_leads_on(strategy: Strategy) -> None:
    text = stage_graph_text(strategy)
    if "└" not in text or "▼" not in text:
        return  # A list, or boxes without lines.
    text = re.sub(r"[^─│┌┐└┘├┤┬┴┼▼\n]", " ", text)
    rows = [line.ljust(100) for line in text.split("\n")]
    up, down = set("│└┘├┤┴┼▼"), set("│┌┐├┤┬┼")
    for above, below in pairwise(rows):
        for a, b in zip(above, below, strict=True):
            # A box begins under an arrow, or under nothing.
            assert (a in down) == (b in up), text
    left, right = set("─┐┘┤┬┴┼"), set("─┌└├┬┴┼")
    for row in rows:
        for a, b in pairwise(row):
            # A horizontal line may pass under a vertical one.
            assert (a in right) == (b in left) or (a in right and b == "│") or (a == "│" and b in left), text


@given(drawn_strategies())
@settings(max_examples=60, deadline=None)
def test_lines_lead_from_each_stage_to_those_that_it_feeds(strategy: Strategy) -> None:
    text = stage_graph_text(strategy, max_width=200)
    rows = [line.ljust(200) for line in text.split("\n")]
    boxes = {}
    for r, row in enumerate(rows):
        for match in re.finditer(r"│ (\d+): [^│]*│", row):
            boxes[int(match[1])] = (r - 1, range(match.start(), match.end()))
    if len(boxes) < len(strategy.stages.stages):
        return  # A list.
    for x, edges in enumerate(strategy.stages.outgoing):
        top, inside = boxes[x]
        forks = [c for c in inside if rows[top + 4][c] == "┬"]
        assert len(forks) == (1 if edges else 0)
        reached = {
            y for r, c in ends_of_lines(rows, top + 5, forks) for y, (t, b) in boxes.items() if t == r + 1 and c in b
        }
        assert reached == {edge.target for edge in edges}, text


def ends_of_lines(rows: list[str], row: int, columns: list[int]) -> set[tuple[int, int]]:
    """Return the arrow heads that are reached by going down and sideways."""
    right, left, down = set("─└├┬┴┼"), set("─┘┤┬┴┼"), set("│┌┐├┤┬┼")
    found = set()
    seen = set()
    going = [(row, c, "down") for c in columns]
    while going:
        r, c, direction = going.pop()
        if (r, c, direction) in seen:
            continue
        seen.add((r, c, direction))
        here = rows[r][c]
        if here == "▼":
            found.add((r, c))
        elif here == "│" and direction != "down":  # It passes under another line.
            going.append((r, c + (1 if direction == "right" else -1), direction))
        else:
            if here in down:
                going.append((r + 1, c, "down"))
            if here in right and direction != "left":
                going.append((r, c + 1, "right"))
            if here in left and direction != "right":
                going.append((r, c - 1, "left"))
    return found


def test_a_line_that_ends_under_the_start_of_another_turns_below_it() -> None:
    # The third line comes down in column 20, where the second one starts; the second one is below the first.
    assert tracks({0: {0}, 1: {20}, 2: {30}}, {0: {10}, 1: {5}, 2: {20}}) == {0: 0, 1: 1, 2: 2}


def test_many_branches_or_stages_become_a_list() -> None:
    branches = strategy_of(
        [["first"], *([f"branch{i}"] for i in range(20)), ["last"]],
        [(0, i) for i in range(1, 21)] + [(i, 21) for i in range(1, 21)],
        mini_batch_size=2,
        micro_batch_sizes=[1] * 22,
        devices=[(i,) for i in range(22)],
    )
    lines = stage_graph_text(branches).split("\n")
    assert len(lines) == 22
    assert lines[-1].endswith("◀ 1-20")
    assert len(stage_graph_text(chain(41)).split("\n")) == 41


def test_too_narrow_a_terminal_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 20 columns, got 19"):
        stage_graph_text(diamond(), max_width=19)


@pytest.mark.parametrize("num_branches", [1, 2, 4])
def test_labels_of_arrows_stay_within_every_width(num_branches: int) -> None:
    # The arrow below the rightmost box has its label to the right, beyond a narrow box.
    branches = [(i, num_branches + i) for i in range(num_branches)]
    strategy = make_strategy(make_stages(branches, mini_batch_size=2, value_bytes=200_000))
    for width in range(20, 121):
        lines = stage_graph_text(strategy, max_width=width).split("\n")
        assert max(map(len, lines)) <= width
