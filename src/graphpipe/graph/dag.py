"""Small algorithms on directed acyclic graphs whose nodes are numbered in a topological order.

A graph is a list of successor lists. Sets of nodes are the bits of an integer, which keeps reachability of a few
thousand nodes in kilobytes and makes union and intersection one operation.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence

Successors = Sequence[Sequence[int]]


def bits(nodes: Iterable[int]) -> int:
    """Return a set of nodes as an integer."""
    found = 0
    for node in nodes:
        found |= 1 << node
    return found


def members(mask: int) -> Iterator[int]:
    """Yield the nodes of a set, ascending."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def descendants(successors: Successors) -> tuple[int, ...]:
    """Return for each node the set of nodes that a path leads to, itself left out.

    Raises:
        ValueError: An edge leads to an earlier node, so the numbers are not in a topological order.
    """
    found = [0] * len(successors)
    for u in reversed(range(len(successors))):
        for v in successors[u]:
            if v <= u:
                raise ValueError(f"edge {u} -> {v} goes backwards: the nodes are not in a topological order")
            found[u] |= found[v] | 1 << v
    return tuple(found)


def ancestors(successors: Successors) -> tuple[int, ...]:
    """Return for each node the set of nodes from which a path leads to it, itself left out.

    Raises:
        ValueError: An edge leads to an earlier node.
    """
    found = [0] * len(successors)
    for u in range(len(successors)):
        for v in successors[u]:
            if v <= u:
                raise ValueError(f"edge {u} -> {v} goes backwards: the nodes are not in a topological order")
            found[v] |= found[u] | 1 << u
    return tuple(found)


def transitive_reduction(successors: Successors) -> tuple[tuple[int, ...], ...]:
    """Return the graph without the edges that another path makes superfluous.

    The reduction of an acyclic graph is unique. An edge that goes adds no order; what passes along it stays.

    Raises:
        ValueError: An edge leads to an earlier node.

    Source:
        Aho, Garey and Ullman, SIAM J. Comput. 1(2), 1972.
    """
    below = descendants(successors)
    reduced = []
    for out in successors:
        kept: list[int] = []
        covered = 0
        # Ascending: whatever reaches v comes before v.
        for v in sorted(set(out)):
            if not covered >> v & 1:
                kept.append(v)
                covered |= below[v]
        reduced.append(tuple(kept))
    return tuple(reduced)


def is_convex(mask: int, below: Sequence[int], above: Sequence[int]) -> bool:
    """Return whether no path leaves a set of nodes and comes back into it.

    Args:
        mask: The set.
        below: `descendants` of the graph.
        above: `ancestors` of the graph.
    """
    after = before = 0
    for node in members(mask):
        after |= below[node]
        before |= above[node]
    return after & before & ~mask == 0


def topological_order(successors: Successors, priority: Callable[[int], object] | None = None) -> tuple[int, ...]:
    """Return the nodes so that every edge leads forward; of the nodes that may come next, the least priority first.

    Args:
        successors: The graph. Here its nodes may be numbered in any order.
        priority: A key for a node that is free to come next; by default its number.

    Raises:
        ValueError: The graph has a cycle.
    """
    missing = [0] * len(successors)
    for out in successors:
        for v in out:
            missing[v] += 1
    key = priority or (lambda node: node)
    ready: list[tuple[object, int]] = [(key(u), u) for u, count in enumerate(missing) if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        _, u = heapq.heappop(ready)
        order.append(u)
        for v in successors[u]:
            missing[v] -= 1
            if not missing[v]:
                heapq.heappush(ready, (key(v), v))
    if len(order) < len(successors):
        raise ValueError(f"{len(successors) - len(order)} nodes are on a cycle or behind one")
    return tuple(order)


def longest_path(successors: Successors, weight: Sequence[float]) -> float:
    """Return the largest sum of weights over the nodes of a path; 0 for no nodes.

    Raises:
        ValueError: An edge leads to an earlier node.
    """
    after = [0.0] * len(successors)
    for u in reversed(range(len(successors))):
        if any(v <= u for v in successors[u]):
            raise ValueError(f"an edge of node {u} goes backwards: the nodes are not in a topological order")
        after[u] = weight[u] + max((after[v] for v in successors[u]), default=0.0)
    return max(after, default=0.0)


def components(nodes: Sequence[int], successors: Successors) -> tuple[tuple[int, ...], ...]:
    """Return the weakly connected components of the subgraph on `nodes`, each ascending, by their first node."""
    leader = {node: node for node in nodes}

    def find(node: int) -> int:
        while leader[node] != node:
            leader[node] = leader[leader[node]]
            node = leader[node]
        return node

    for u in nodes:
        for v in successors[u]:
            if v in leader:
                a, b = find(u), find(v)
                leader[max(a, b)] = min(a, b)
    groups: dict[int, list[int]] = {}
    for node in sorted(nodes):
        groups.setdefault(find(node), []).append(node)
    return tuple(map(tuple, groups.values()))
