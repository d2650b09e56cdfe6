from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from graphpipe.cluster import Cluster
from graphpipe.estimate import estimate
from graphpipe.report import memory_svg
from graphpipe.report.memory import memory_parts
from graphpipe.strategy import Strategy
from tests.report.pictures import SVG, box_of, canvas, parse, texts, titles, with_class
from tests.report.samples import diamond, measured_like


def test_the_parts_of_a_bar_add_up_to_the_peak(strategy: Strategy) -> None:
    found = estimate(strategy)
    for device, parts in enumerate(found.memory):
        assert sum(num_bytes for _, num_bytes in memory_parts(parts)) == pytest.approx(found.peak_bytes[device])


def test_each_device_has_a_bar_without_gaps_inside_the_picture(strategy: Strategy) -> None:
    root = parse(memory_svg(strategy, estimate(strategy)))
    for device in strategy.cluster.devices:
        bars = [
            box_of(rect)
            for rect in root.iter(f"{SVG}rect")
            if any(title.startswith(f"{device.name}: ") for title in titles(rect))
        ]
        assert len(bars) == 5
        for a, b in pairwise(bars):
            assert a.right == pytest.approx(b.left, abs=0.02)
        assert canvas(root).holds(bars[-1])
        assert device.name in texts(root)


def test_the_available_memory_is_marked_where_the_bars_stay_readable() -> None:
    strategy = diamond()
    found = estimate(strategy)
    roomy = parse(memory_svg(strategy, found))  # 4 GB
    assert "available" not in texts(roomy)
    need = int(max(found.peak_bytes))
    tight = replace(strategy, cluster=Cluster.uniform(4, memory_bytes=2 * need))
    root = parse(memory_svg(tight, found))
    assert len(with_class(root, "line", "limit")) == 5  # A line a device, and one in the legend.
    assert any("(50 %)" in text for text in texts(root))


def test_measured_peaks_are_marked_where_they_are_known() -> None:
    strategy = diamond()
    found = estimate(strategy)
    assert not with_class(parse(memory_svg(strategy, found, found.trace)), "polygon", "mark")
    root = parse(memory_svg(strategy, found, measured_like(found.trace)))
    assert [t for t in titles(root) if "measured" in t] == [
        f"gpu{d}: measured peak {300 + 100 * d} MB" for d in range(4)
    ]
