from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from graphpipe.report.layers import WAYPOINT, Layers, layered, places
from graphpipe.report.layers import _apart as apart
from graphpipe.strategy import Strategy
from tests.report.graphs import drawn_strategies
from tests.report.samples import chain, diamond, multi_modal, skips


@given(drawn_strategies())
@settings(max_examples=40, deadline=None)
def test_every_edge_goes_on_by_one_layer_through_waypoints_of_its_own(strategy: Strategy) -> None:
    layers = layered(strategy.stages)
    placed = sorted(u for nodes in layers.order for u in nodes)
    assert placed == list(range(len(layers.stage_of)))
    passed: list[int] = []
    for edge, path in zip(strategy.stages.edges, layers.paths, strict=True):
        assert (path[0], path[-1]) == (edge.source, edge.target)
        assert all(layers.layer_of[v] == layers.layer_of[u] + 1 for u, v in pairwise(path))
        passed += path[1:-1]
    assert sorted(passed) == [u for u, x in enumerate(layers.stage_of) if x == WAYPOINT]


@given(drawn_strategies(), st.floats(1, 50))
@settings(max_examples=40, deadline=None)
def test_neighbours_in_a_layer_keep_their_distance(strategy: Strategy, gap: float) -> None:
    layers = layered(strategy.stages)
    sizes = [10.0 if x == WAYPOINT else 80.0 for x in layers.stage_of]
    centre = places(layers, sizes, gap)
    for nodes in layers.order:
        for u, v in pairwise(nodes):
            assert centre[v] - centre[u] >= (sizes[u] + sizes[v]) / 2 + gap - 1e-6
    assert abs(min(c - s / 2 for c, s in zip(centre, sizes, strict=True))) < 1e-9


def test_branches_are_straight_parallel_lanes() -> None:
    strategy = multi_modal()  # Stages 0-2, 3-5, 6-8 and 9-11 are branches.
    layers = layered(strategy.stages)
    assert layers.num_crossings == 0
    centre = places(layers, [80.0] * 13, 20.0)
    for first in (0, 3, 6, 9):
        assert max(centre[first : first + 3]) - min(centre[first : first + 3]) < 1
    # The join is at the middle of the branches.
    assert abs(centre[12] - sum(centre[x] for x in (2, 5, 8, 11)) / 4) < 1


def test_crossings_are_counted_and_avoided() -> None:
    # 0 > 3, 1 > 2: drawn in the order of their numbers they cross once.
    crossed = Layers((0, 1, 2, 3), ((0, 1), (2, 3)), ((0, 3), (1, 2)))
    assert crossed.num_crossings == 1
    assert layered(diamond().stages).num_crossings == 0
    assert layered(skips().stages).num_crossings <= 2
    assert layered(chain().stages).order == tuple((x,) for x in range(12))


def test_places_out_of_order_meet_at_their_weighted_mean() -> None:
    # Both want what the other has: they meet at 2.5, the heavier one's wish counting thrice, and keep a distance of 2.
    assert apart([4.0, 0.0], [3.0, 1.0], [2.0]) == [2.5, 4.5]
    assert apart([0.0, 5.0, 9.0], [1.0, 1.0, 1.0], [2.0, 2.0]) == [0.0, 5.0, 9.0]
