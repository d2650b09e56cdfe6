"""The shape of a model in few parts, as text and as a picture."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from itertools import combinations

import networkx as nx
import pytest
from hypothesis import given

from graphpipe.graph import ComputationGraph, Operator, Parameter, Value
from graphpipe.graph.series_parallel import decompose, knots_of
from graphpipe.report.outline import Part, PartKind, knot_cause, knots, longest_path_share, num_branches, outline
from graphpipe.report.outline_svg import outline_svg
from graphpipe.report.outline_text import outline_text
from graphpipe.report.svg import text_width
from tests.report.pictures import SVG, box_of, canvas, parse, titles, with_class
from tests.strategies import computation_graphs, random_edges


def graph_of(edges: list[tuple[str, str]], work: dict[str, float], places: dict[str, str]) -> ComputationGraph:
    operators = tuple(
        Operator(
            name=name,
            module=places.get(name, name),
            forward_flops=flops / 4,
            backward_flops=3 * flops / 4,
            parameters=(Parameter(f"{name}.weight", 4),),
            is_batch_wise=name == "loss",
        )
        for name, flops in work.items()
    )
    makers = dict.fromkeys(a for a, _ in edges)
    order = list(work)
    values = tuple(
        Value(name=f"{m}:out", producer=m, consumers=tuple(sorted((b for a, b in edges if a == m), key=order.index)))
        for m in makers
    )
    return ComputationGraph("model", operators, values)


def two_towers() -> ComputationGraph:
    """A tower of a block with three products side by side and an output, one of a single table, and a loss."""
    edges = [("in", "q"), ("in", "k"), ("q", "out"), ("k", "out"), ("out", "loss"), ("table", "loss")]
    work = {"in": 10.0, "q": 10.0, "k": 10.0, "out": 20.0, "table": 40.0, "loss": 10.0}
    return graph_of(edges, work, dict.fromkeys(("q", "k", "out"), "layers.0"))


def knot() -> ComputationGraph:
    edges = [("a", "c"), ("b", "c"), ("b", "d"), ("c", "e"), ("d", "e")]
    return graph_of(edges, dict.fromkeys("abcde", 1.0), {})


def leaves(part: Part) -> list[Part]:
    return [leaf for child in part.children for leaf in leaves(child)] or [part]


def test_branches_inside_one_module_are_part_of_the_line_and_towers_are_not() -> None:
    graph = two_towers()
    root = outline(graph)
    assert [child.kind for child in root.children] == [PartKind.BRANCHES, PartKind.LINE]
    tower, table = root.children[0].children
    assert (tower.kind, tower.operators, tower.share, tower.parameter_bytes) == (PartKind.LINE, (0, 1, 2, 3), 0.5, 16)
    assert (table.share, root.children[0].share, root.share) == (0.4, 0.9, 1.0)
    assert root.children[1].is_batch_wise
    assert not tower.is_batch_wise
    # in, q or k, out, loss
    assert longest_path_share(graph) == pytest.approx(0.5)
    assert num_branches(root) == 2


def test_every_operator_can_have_a_part_of_its_own() -> None:
    root = outline(two_towers(), every_operator=True)
    assert sorted(leaf.operators for leaf in leaves(root)) == [(i,) for i in range(6)]
    assert num_branches(root) == 3


def test_many_branches_of_one_operator_are_drawn_as_one() -> None:
    tables = [f"table{i}" for i in range(9)]
    edges = [("dense", "more"), ("more", "loss"), *((table, "loss") for table in tables)]
    graph = graph_of(edges, dict.fromkeys(("dense", "more", *tables, "loss"), 1.0), {})
    first, loss = outline(graph).children
    assert [child.count for child in first.children] == [1, 9]
    assert sorted(i for leaf in (*leaves(first), loss) for i in leaf.operators) == list(range(12))
    assert num_branches(outline(graph)) == 10
    assert "9 branches of one operator" in outline_text(graph)


def test_a_knot_says_what_caused_it() -> None:
    graph = knot()
    (found,) = knots(outline(graph))
    assert found.operators == (0, 1, 2, 3)
    assert str(found.cause) == "c waits for a and b, while d waits for b and not for a"
    assert f"because {found.cause}" in outline_text(graph)
    assert any(str(found.cause) in title for title in titles(parse(outline_svg(graph))))


@given(computation_graphs(random_edges(9)))
def test_the_cause_of_a_knot_is_an_order_that_no_series_or_branches_have(graph: ComputationGraph) -> None:
    after = nx.transitive_closure(nx.DiGraph(list(graph.edges))).edges
    for found in knots_of(decompose(graph)):
        cause = knot_cause(graph, found.operators)
        names = (cause.other, cause.one, cause.after_both, cause.after_one)
        a, b, c, d = (graph.index[name] for name in names)
        assert {a, b, c, d} <= set(found.operators)
        assert {(x, y) for x in (a, b, c, d) for y in (a, b, c, d) if (x, y) in after} == {(a, c), (b, c), (b, d)}


def test_a_chain_has_no_cause() -> None:
    graph = graph_of([("a", "b"), ("b", "c")], dict.fromkeys("abc", 1.0), {})
    with pytest.raises(ValueError, match="series-parallel"):
        knot_cause(graph, (0, 1, 2))


@given(computation_graphs(random_edges(9)))
def test_every_operator_is_in_one_part_and_shares_sum_to_one(graph: ComputationGraph) -> None:
    for every_operator in (False, True):
        found = leaves(outline(graph, every_operator=every_operator))
        assert sorted(i for leaf in found for i in leaf.operators) == list(range(len(graph.operators)))
        assert sum(leaf.share for leaf in found) == pytest.approx(1.0)


def test_the_tree_as_text() -> None:
    heading, *tree = outline_text(two_towers()).split("\n")
    assert heading == (
        "model: 6 operators, 24 B of parameters, 1e-07 GFLOP a sample, 2 branches side by side, 0 knots, "
        "50 % of the work on the longest path"
    )
    assert tree == [
        "",
        " 100 %  2 parts in line: layers.0 (+3)  (6 operators, 24 B)",
        "  90 %  ├─ 2 branches  (5 operators, 20 B)",
        "  50 %  │  ├─ layers.0 (+1)  (4 operators, 16 B)",
        "  40 %  │  └─ table  (1 operator, 4 B)",
        "  10 %  └─ loss  (1 operator, 4 B, mixes samples)",
    ]


def check_picture(picture: str) -> ET.Element:
    root = parse(picture)
    groups = with_class(root, "g", "part")
    boxes = [box_of(with_class(group, "rect", "box")[0]) for group in groups]
    assert all(canvas(root).holds(box) for box in boxes)
    assert not any(a.overlaps(b) for a, b in combinations(boxes, 2))
    for group, box in zip(groups, boxes, strict=True):
        for text in group.iter(f"{SVG}text"):
            style = text.attrib["class"].split()
            if "end" in style:
                continue
            width = text_width(text.text or "", float(text.attrib["font-size"]), mono="mono" in style)
            assert float(text.attrib["x"]) + width <= box.right
    return root


@given(computation_graphs(random_edges(9)))
def test_boxes_of_any_picture_hold_their_text_and_do_not_touch(graph: ComputationGraph) -> None:
    check_picture(outline_svg(graph))
    check_picture(outline_svg(graph, every_operator=True))


def test_a_picture_has_a_box_a_part_with_its_share() -> None:
    root = check_picture(outline_svg(two_towers()))
    shown = [e.text for e in with_class(root, "text", "end")]
    assert shown == ["50 %", "40 %", "10 %"]
    # A fork and a join with two branches each, and the way from the join to the loss.
    assert len(with_class(root, "path", "edge")) == 5
