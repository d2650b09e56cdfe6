"""Where the boxes of a stage graph go: layers by longest path, an order in each layer, and a place across.

The method is Sugiyama's. An edge that skips layers passes through a *waypoint* in each of them, so that it keeps a
lane of its own and never crosses a box. "Across" is down the page for a picture that runs from left to right, and
along the line for one that runs down a terminal.

Source:
    Sugiyama, Tagawa and Toda, IEEE Transactions on Systems, Man, and Cybernetics 11(2), 1981: barycentres.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from graphpipe.stage import StageGraph

_SWEEPS = 12
WAYPOINT = -1
"""The stage of a node that is no stage."""


@dataclass(frozen=True)
class Layers:
    """The nodes of a drawing. Those before ``len(stages)`` are the stages themselves, in their order; then waypoints.

    Attributes:
        stage_of: ``[nodes]`` the stage, or `WAYPOINT`.
        order: ``[layers]`` the nodes of each layer, from one side to the other.
        paths: For each edge of the stage graph, in its order, the nodes that it passes: source, waypoints, target.
    """

    stage_of: tuple[int, ...]
    order: tuple[tuple[int, ...], ...]
    paths: tuple[tuple[int, ...], ...]

    @cached_property
    def layer_of(self) -> tuple[int, ...]:
        """``[nodes]`` the layer of each node."""
        found = [0] * len(self.stage_of)
        for at, nodes in enumerate(self.order):
            for node in nodes:
                found[node] = at
        return tuple(found)

    @cached_property
    def neighbours(self) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
        """``[nodes]`` the nodes before, and ``[nodes]`` the nodes after each node, ascending."""
        before: list[set[int]] = [set() for _ in self.stage_of]
        after: list[set[int]] = [set() for _ in self.stage_of]
        for path in self.paths:
            for u, v in pairwise(path):
                before[v].add(u)
                after[u].add(v)
        return tuple(tuple(sorted(b)) for b in before), tuple(tuple(sorted(a)) for a in after)

    @cached_property
    def num_crossings(self) -> int:
        """How often lines between neighbouring layers cross, drawn straight."""
        place = {node: i for nodes in self.order for i, node in enumerate(nodes)}
        found = 0
        for nodes in self.order:
            ends = [[place[v] for v in self.neighbours[1][u]] for u in nodes]
            found += sum(a > b for i, upper in enumerate(ends) for lower in ends[i + 1 :] for a in upper for b in lower)
        return found


def layered(stages: StageGraph) -> Layers:
    """Return the stages in layers, each right after the latest stage that feeds it, with few crossings."""
    count = len(stages.stages)
    layer = [0] * count
    for edge in stages.edges:  # Sorted by source, and a source comes before its targets.
        layer[edge.target] = max(layer[edge.target], layer[edge.source] + 1)
    stage_of = list(range(count))
    order: list[list[int]] = [[] for _ in range(max(layer) + 1)]
    for x in range(count):
        order[layer[x]].append(x)
    paths = []
    for edge in stages.edges:
        waypoints = range(len(stage_of), len(stage_of) + layer[edge.target] - layer[edge.source] - 1)
        for at, node in enumerate(waypoints, start=layer[edge.source] + 1):
            stage_of.append(WAYPOINT)
            order[at].append(node)
        paths.append((edge.source, *waypoints, edge.target))
    return _with_few_crossings(Layers(tuple(stage_of), tuple(map(tuple, order)), tuple(paths)))


def _with_few_crossings(layers: Layers) -> Layers:
    """Return the layers with each in the order of its neighbours' mean place: the best of some sweeps."""
    best = layers
    order = [list(nodes) for nodes in layers.order]
    for sweep in range(_SWEEPS):
        towards_end = sweep % 2 == 0
        neighbours = layers.neighbours[0 if towards_end else 1]
        place = {node: i for nodes in order for i, node in enumerate(nodes)}
        for nodes in order if towards_end else reversed(order):
            mean = {
                u: sum(place[v] for v in neighbours[u]) / len(neighbours[u]) if neighbours[u] else float(place[u])
                for u in nodes
            }
            nodes.sort(key=lambda u: (mean[u], place[u]))
            place.update((node, i) for i, node in enumerate(nodes))
        found = Layers(layers.stage_of, tuple(map(tuple, order)), layers.paths)
        if found.num_crossings < best.num_crossings:
            best = found
        if not best.num_crossings:
            break
    return best


def places(layers: Layers, sizes: Sequence[float], gap: float) -> tuple[float, ...]:
    """Return the centre of each node across the drawing, close to its neighbours' and at least `gap` from the next box.

    Args:
        layers: The nodes in their order.
        sizes: ``[nodes]`` what each takes across.
        gap: Between two nodes.

    Returns:
        ``[nodes]`` centres; the first box begins at 0.
    """
    centre = [0.0] * len(sizes)
    for nodes in layers.order:
        total = sum(sizes[u] for u in nodes) + gap * (len(nodes) - 1)
        at = -total / 2
        for u in nodes:
            centre[u] = at + sizes[u] / 2
            at += sizes[u] + gap
    before, after = layers.neighbours
    for sweep in range(_SWEEPS):
        for nodes in layers.order if sweep % 2 == 0 else layers.order[::-1]:
            # A full sweep looks one way, the last ones both ways, which centres a fork as well as a join.
            sides = [before, after] if sweep >= _SWEEPS - 4 else [before if sweep % 2 == 0 else after]
            wanted = []
            weights = []
            for u in nodes:
                near = [v for side in sides for v in side[u]]
                wanted.append(sum(centre[v] for v in near) / len(near) if near else centre[u])
                # Waypoints pull harder, so that long edges stay straight.
                weights.append((3.0 if layers.stage_of[u] == WAYPOINT else 1.0) if near else 0.1)
            distances = [(sizes[u] + sizes[v]) / 2 + gap for u, v in pairwise(nodes)]
            for u, at in zip(nodes, _apart(wanted, weights, distances), strict=True):
                centre[u] = at
    lowest = min(centre[u] - sizes[u] / 2 for u in range(len(sizes)))
    return tuple(at - lowest for at in centre)


def _apart(wanted: Sequence[float], weights: Sequence[float], distances: Sequence[float]) -> list[float]:
    """Return the places nearest to those wanted (weighted least squares) that keep their order and distances.

    With the distances taken off, places only have to ascend, which is isotonic regression: neighbours that are out of
    order are pooled at their mean.
    """
    offset = [0.0]
    for distance in distances:
        offset.append(offset[-1] + distance)
    pools: list[tuple[float, float, int]] = []  # Mean, weight, members.
    for want, weight, taken in zip(wanted, weights, offset, strict=True):
        pool = (want - taken, weight, 1)
        while pools and pools[-1][0] > pool[0]:
            mean, heavy, members = pools.pop()
            total = heavy + pool[1]
            pool = ((mean * heavy + pool[0] * pool[1]) / total, total, members + pool[2])
        pools.append(pool)
    level = [mean for mean, _, members in pools for _ in range(members)]
    return [mean + taken for mean, taken in zip(level, offset, strict=True)]
