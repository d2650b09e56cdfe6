from __future__ import annotations

import re
from itertools import combinations

from hypothesis import given, settings

from graphpipe.estimate import estimate
from graphpipe.report import stage_graph_svg
from graphpipe.report.svg import text_width
from graphpipe.strategy import Strategy
from tests.report.graphs import drawn_strategies
from tests.report.pictures import SVG, Box, box_of, canvas, parse, texts, titles, with_class
from tests.report.samples import chain, long_names, two_towers


def picture(strategy: Strategy) -> str:
    return stage_graph_svg(strategy, estimate(strategy))


def check(strategy: Strategy) -> None:
    root = parse(picture(strategy))
    stages = with_class(root, "g", "stage")
    assert [int(g.attrib["data-stage"]) for g in stages] == list(range(len(strategy.stages.stages)))
    boxes = [box_of(with_class(g, "rect", "box")[0]) for g in stages]
    for box in boxes:
        assert canvas(root).holds(box)
    for a, b in combinations(boxes, 2):
        assert not a.overlaps(b)
    for group, box in zip(stages, boxes, strict=True):
        for text in group.iter(f"{SVG}text"):
            name = text.attrib["class"].split()
            if "mid" in name:
                continue
            end = float(text.attrib["x"]) + text_width(
                text.text or "", float(text.attrib["font-size"]), mono="mono" in name
            )
            assert end <= box.right
    edges = with_class(root, "path", "edge")
    assert len(edges) == len(strategy.stages.edges)
    for edge in edges:
        points = re.findall(r"(-?[\d.]+) (-?[\d.]+)", edge.attrib["d"])
        assert all(canvas(root).holds(Box(float(x), float(y), float(x), float(y))) for x, y in points)


def test_each_stage_is_drawn_once_in_a_box_of_its_own_that_holds_its_text(strategy: Strategy) -> None:
    check(strategy)


@given(drawn_strategies())
@settings(max_examples=40, deadline=None)
def test_any_graph_is_drawn_without_overlaps(strategy: Strategy) -> None:
    check(strategy)


def test_full_names_are_in_the_tooltips() -> None:
    strategy = long_names()
    found = titles(parse(picture(strategy)))
    names = [o.module for o in strategy.graph.operators]
    assert any(names[0] in title for title in found)
    assert not any(names[0] in text for text in texts(parse(picture(strategy))))


def test_edges_are_labelled_with_the_bytes_of_a_micro_batch_and_dashed_on_one_device() -> None:
    root = parse(picture(two_towers()))
    # 100 kB a sample; micro-batches of 4 and 8 samples. The vision tower shares its device with the loss.
    assert {"400 kB", "800 kB"} <= set(texts(root))
    dashed = [title for e in with_class(root, "path", "local") for title in titles(e)]
    assert len(dashed) == 1
    assert dashed[0].startswith("Stage 0 to stage 2: 400 kB for 4 samples")


def test_a_deep_graph_goes_on_in_further_rows() -> None:
    wide = canvas(parse(picture(chain(24))))
    assert wide.right < 1500
    assert canvas(parse(picture(chain(4)))).bottom < wide.bottom


def test_the_picture_stands_alone_and_is_the_same_each_time(strategy: Strategy) -> None:
    text = picture(strategy)
    assert text == picture(strategy)
    assert "href" not in text
    assert "@import" not in text
    assert text.count("http") == 1  # The namespace.
