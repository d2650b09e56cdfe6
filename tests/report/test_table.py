from __future__ import annotations

import re

import pytest

from graphpipe.cluster import Cluster
from graphpipe.estimate import estimate
from graphpipe.report import plan_table, plan_text
from graphpipe.strategy import Strategy
from tests.report.samples import chain, diamond, multi_modal, strategy_of, two_towers


def test_each_stage_and_device_is_mentioned_within_the_width(strategy: Strategy) -> None:
    for width in (60, 80, 120, 200):
        text = plan_text(strategy, estimate(strategy), width=width)
        lines = text.split("\n")
        assert max(map(len, lines)) <= width
        start = next(i for i, line in enumerate(lines) if line.lstrip().startswith("#"))
        count = len(strategy.stages.stages)
        rows = lines[start + 2 : start + 2 + count]
        assert [int(row.split()[0]) for row in rows] == list(range(count))
        # What may not be left out, however narrow.
        assert {"forward", "backward", "holds", "devices"} <= set(lines[start].split())


def test_the_numbers_of_a_stage() -> None:
    text = plan_text(two_towers(), estimate(two_towers()))
    (row,) = [line for line in text.split("\n") if re.match(r"\s*1 +text_model", line)]
    # 8 samples of 1.4 ms; all 32 samples are in flight until the loss has seen them; 7 operators of 5 MB.
    assert re.fullmatch(
        r"1 +text_model\.encoder\.layers\.0-5 \(\+1\) +7 +gpu1 +8 × 4 +35 MB +32 +11\.2 ms +22\.4 ms +4\.5 %", row
    )


def test_columns_that_say_nothing_are_left_out() -> None:
    def headers(strategy: Strategy) -> set[str]:
        return {str(column.header) for column in plan_table(strategy, estimate(strategy)).columns}

    assert not {"repl.", "recom-\npute"} & headers(diamond())
    assert {"repl.", "recom-\npute"} <= headers(multi_modal())


def test_the_summary_and_the_notes_are_there() -> None:
    text = plan_text(two_towers(), estimate(two_towers()))
    for line in (
        r"predicted iteration +\d+ ms",
        r"predicted throughput +\d+ samples/s",
        r"stages +3, at most 2 in sequence",
        r"mini-batch +32 samples",
        r"planner +graphpipe",
        r"lower bound +131 ms",
        r"distance +3\.4 %",
        r"tried micro batch sizes +1, 2, 4, 8",
    ):
        assert re.search(rf"^  {line}$", text, flags=re.MULTILINE), line


def test_replicas_that_are_alike_share_a_row_of_the_devices() -> None:
    text = plan_text(multi_modal(), estimate(multi_modal()))
    assert re.search(r"^gpu0-1 +0 +\d+ % +\d+ %", text, flags=re.MULTILINE)


def test_a_large_cluster_is_cut_off_with_a_word() -> None:
    strategy = chain(40)
    text = plan_text(strategy, estimate(strategy))
    assert "The fullest of 40 devices are shown." in text
    small = chain(4)
    assert "are shown" not in plan_text(small, estimate(small))


def test_names_are_text_and_not_markup() -> None:
    strategy = strategy_of(
        [["[bold]net[/bold] :smile:"]], [], mini_batch_size=2, micro_batch_sizes=[1], devices=[(0,)], name="[red]m[/]"
    )
    text = plan_text(strategy, estimate(strategy))
    assert "[bold]net[/bold] :smile:" in text
    assert text.startswith("[red]m[/]\n")


def test_a_device_without_a_stage_is_shown_as_idle() -> None:
    strategy = strategy_of(
        [["net"]],
        [],
        mini_batch_size=2,
        micro_batch_sizes=[1],
        devices=[(0,)],
        cluster=Cluster.uniform(2, memory_bytes=10**9),
    )
    text = plan_text(strategy, estimate(strategy))
    assert re.search(r"^cpu1 +– +0 % +100 % +0 B", text, flags=re.MULTILINE)
    assert re.search(r"^  devices +1 of 2$", text, flags=re.MULTILINE)
    assert re.search(r"^  mean idle time +0 %$", text, flags=re.MULTILINE)  # Of the devices that are used.
    assert re.search(r"^  stages +1$", text, flags=re.MULTILINE)


def test_too_narrow_a_terminal_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 60 columns, got 59"):
        plan_text(diamond(), estimate(diamond()), width=59)
