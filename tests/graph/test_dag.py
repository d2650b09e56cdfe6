"""Algorithms on directed acyclic graphs against networkx."""

from __future__ import annotations

import random
import time

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphpipe.graph.dag import (
    ancestors,
    bits,
    components,
    descendants,
    is_convex,
    longest_path,
    members,
    topological_order,
    transitive_reduction,
)
from tests.strategies import random_edges

Successors = tuple[tuple[int, ...], ...]


def as_networkx(successors: Successors) -> nx.DiGraph:
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(successors)))
    graph.add_edges_from((u, v) for u, out in enumerate(successors) for v in out)
    return graph


@given(st.sets(st.integers(0, 200)))
def test_sets_survive_as_bits(nodes: set[int]) -> None:
    assert list(members(bits(nodes))) == sorted(nodes)


@given(random_edges())
def test_reduction_equals_networkx(successors: Successors) -> None:
    wanted = nx.transitive_reduction(as_networkx(successors))
    assert {(u, v) for u, out in enumerate(transitive_reduction(successors)) for v in out} == set(wanted.edges)


@given(random_edges())
def test_reachability_equals_networkx(successors: Successors) -> None:
    graph = as_networkx(successors)
    assert [set(members(m)) for m in descendants(successors)] == [nx.descendants(graph, u) for u in graph]
    assert [set(members(m)) for m in ancestors(successors)] == [nx.ancestors(graph, u) for u in graph]


@given(random_edges(), st.data())
def test_a_set_is_convex_when_no_path_leaves_it_and_comes_back(successors: Successors, data: st.DataObject) -> None:
    graph = as_networkx(successors)
    chosen = data.draw(st.sets(st.sampled_from(range(len(successors)))))
    outside = [w for w in graph if w not in chosen]
    leaves = any(nx.has_path(graph, u, w) and nx.has_path(graph, w, v) for u in chosen for w in outside for v in chosen)
    assert is_convex(bits(chosen), descendants(successors), ancestors(successors)) is not leaves


@given(random_edges(), st.data())
def test_topological_order_follows_edges_and_then_priority(successors: Successors, data: st.DataObject) -> None:
    rank = data.draw(st.permutations(range(len(successors))))
    wanted = nx.lexicographical_topological_sort(as_networkx(successors), key=lambda u: rank[u])
    assert topological_order(successors, lambda u: rank[u]) == tuple(wanted)


@given(random_edges(), st.data())
def test_components_equal_networkx(successors: Successors, data: st.DataObject) -> None:
    nodes = sorted(data.draw(st.sets(st.sampled_from(range(len(successors))))))
    wanted = nx.weakly_connected_components(as_networkx(successors).subgraph(nodes))
    assert components(nodes, successors) == tuple(sorted(tuple(sorted(part)) for part in wanted))


@given(random_edges(), st.data())
def test_longest_path_equals_networkx(successors: Successors, data: st.DataObject) -> None:
    weight = [data.draw(st.integers(1, 9)) for _ in successors]
    graph = as_networkx(successors)
    # The weight of a node on each edge into it, and a source before everything.
    graph.add_edges_from(("source", u) for u in range(len(successors)))
    for _, v, attributes in graph.edges(data=True):
        attributes["weight"] = weight[v]
    assert longest_path(successors, weight) == nx.dag_longest_path_length(graph)


@pytest.mark.parametrize("function", [descendants, ancestors, transitive_reduction, lambda s: longest_path(s, [1, 1])])
def test_an_edge_that_goes_backwards_is_refused(function) -> None:
    with pytest.raises(ValueError, match="backwards"):
        function(((), (0,)))


def test_a_cycle_has_no_order() -> None:
    with pytest.raises(ValueError, match="2 nodes are on a cycle"):
        topological_order(((), (2,), (1,)))


def test_two_thousand_nodes_take_a_moment() -> None:
    rng = random.Random(0)
    count = 2000
    successors = tuple(
        tuple(sorted({rng.randrange(u + 1, min(u + 40, count)) for _ in range(6)} if u < count - 1 else set()))
        for u in range(count)
    )
    start = time.process_time()
    transitive_reduction(successors)
    assert time.process_time() - start < 0.5
