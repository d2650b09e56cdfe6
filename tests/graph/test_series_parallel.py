"""The shape of graphs: what is built as series-parallel is found, and the shape says no more than the order."""

from __future__ import annotations

import itertools
import time

import networkx as nx
from hypothesis import given

from graphpipe.graph import ComputationGraph, Operator, Value
from graphpipe.graph.series_parallel import Knot, Leaf, Node, Parallel, Series, decompose, knots_of, operators_of
from tests.strategies import computation_graphs, random_edges, series_parallel_edges


def graph_of(edges: list[tuple[int, int]], count: int, num_bytes: dict[int, int] | None = None) -> ComputationGraph:
    """A graph whose operator `u` makes one value for all of its readers."""
    values = []
    for u in range(count):
        readers = tuple(f"op{v}" for a, v in sorted(edges) if a == u)
        if readers:
            size = (num_bytes or {}).get(u, 4)
            values.append(Value(name=f"value{u}", producer=f"op{u}", consumers=readers, bytes_per_sample=size))
    return ComputationGraph("graph", tuple(Operator(name=f"op{u}") for u in range(count)), tuple(values))


def order_of(shape: Node) -> set[tuple[int, int]]:
    """The pairs (before, after) that a shape states."""
    match shape:
        case Leaf():
            return set()
        case Knot(operators):
            return {(u, v) for i, u in enumerate(operators) for v in operators[i + 1 :]}
        case Parallel(children):
            return set().union(*(order_of(child) for child in children))
        case Series(children):
            found = set().union(*(order_of(child) for child in children))
            for i, child in enumerate(children):
                for later in children[i + 1 :]:
                    found |= {(u, v) for u in operators_of(child) for v in operators_of(later)}
            return found


def closure(graph: ComputationGraph) -> set[tuple[int, int]]:
    found = nx.DiGraph(list(graph.edges))
    found.add_nodes_from(range(len(graph.operators)))
    return set(nx.transitive_closure(found).edges)


@given(computation_graphs(random_edges(9)))
def test_the_shape_holds_every_operator_once_in_a_topological_order(graph: ComputationGraph) -> None:
    order = operators_of(decompose(graph))
    assert sorted(order) == list(range(len(graph.operators)))
    place = {u: at for at, u in enumerate(order)}
    assert all(place[u] < place[v] for u, v in graph.edges)


@given(computation_graphs(random_edges(9)))
def test_the_shape_states_the_order_of_the_graph_and_more_only_in_knots(graph: ComputationGraph) -> None:
    shape = decompose(graph)
    stated, wanted = order_of(shape), closure(graph)
    assert wanted <= stated
    knotted = set().union(*(order_of(knot) for knot in knots_of(shape))) if knots_of(shape) else set()
    assert stated - wanted <= knotted


@given(computation_graphs(series_parallel_edges(9)))
def test_a_series_parallel_graph_has_no_knots(graph: ComputationGraph) -> None:
    assert not knots_of(decompose(graph))
    assert order_of(decompose(graph)) == closure(graph)


def test_two_towers_and_a_loss() -> None:
    graph = graph_of([(0, 1), (2, 3), (1, 4), (3, 4)], 5)
    towers = Parallel((Series((Leaf(0), Leaf(1))), Series((Leaf(2), Leaf(3)))))
    assert decompose(graph) == Series((towers, Leaf(4)))


def test_skips_and_masks_are_no_structure() -> None:
    # 0 makes a mask for everybody, 1 feeds the residual around 2.
    graph = graph_of([(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)], 4)
    assert decompose(graph) == Series((Leaf(0), Leaf(1), Leaf(2), Leaf(3)))


def test_blocks_may_meet_without_a_cut_vertex() -> None:
    graph = graph_of([(0, 2), (0, 3), (1, 2), (1, 3)], 4)
    assert decompose(graph) == Series((Parallel((Leaf(0), Leaf(1))), Parallel((Leaf(2), Leaf(3)))))


def test_a_knot_is_put_in_line_and_reported() -> None:
    # The N: 0 -> 2, 1 -> 2, 1 -> 3.
    shape = decompose(graph_of([(0, 2), (1, 2), (1, 3)], 4))
    assert isinstance(shape, Knot)
    assert knots_of(shape) == (shape,)


def test_a_knot_is_put_in_line_with_few_bytes_alive() -> None:
    # The graph's order would keep 0's large value alive behind 1 and 2.
    graph = graph_of([(0, 4), (1, 2), (1, 3), (2, 4)], 5, {0: 1000, 1: 4, 2: 4})
    shape = decompose(graph)
    assert isinstance(shape, Knot)
    place = {u: at for at, u in enumerate(shape.operators)}
    assert place[4] == place[0] + 1


def test_a_thousand_operators_take_a_moment() -> None:
    edges = []
    for branch in range(10):
        nodes = list(range(1 + branch * 100, 101 + branch * 100))
        edges += [(0, nodes[0]), *itertools.pairwise(nodes), (nodes[-1], 1001)]
    start = time.process_time()
    shape = decompose(graph_of(edges, 1002))
    assert time.process_time() - start < 1.0
    assert isinstance(shape, Series)
    assert len(shape.children) == 3
