"""Which devices: the replicas of a stage inside a node, and stages that exchange much next to each other."""

from __future__ import annotations

from graphpipe.cluster import Cluster
from graphpipe.graph import ComputationGraph
from graphpipe.planner.draft import Draft


def place(graph: ComputationGraph, cluster: Cluster, plan: Draft) -> dict[int, tuple[int, ...]]:
    """Return the devices of each group of stages.

    Groups are placed largest first, equal ones in the order of the stages. Each goes to the node with room for it whose
    stages it exchanges most bytes with; ties go to the fullest node, then to the first. A group that no node has room
    for is spread over the emptiest ones.
    """
    size = {stage.group: stage.choice.num_replicas for stage in plan.stages}
    order = sorted(size, key=lambda group: -size[group])
    traffic = _traffic(graph, plan)
    free: dict[int, list[int]] = {}
    for number, device in enumerate(cluster.devices):
        free.setdefault(device.node, []).append(number)
    home: dict[int, set[int]] = {}
    found: dict[int, tuple[int, ...]] = {}
    for group in order:
        exchanged = dict.fromkeys(free, 0)
        for other, nodes in home.items():
            for node in nodes:
                exchanged[node] += traffic.get((min(group, other), max(group, other)), 0)
        rooms = [node for node, left in free.items() if len(left) >= size[group]]
        if rooms:
            chosen = [min(rooms, key=lambda node: (-exchanged[node], len(free[node]), node))]
        else:
            chosen = sorted(free, key=lambda node: (-len(free[node]), node))
        taken: list[int] = []
        for node in chosen:
            count = min(size[group] - len(taken), len(free[node]))
            taken += free[node][:count]
            free[node] = free[node][count:]
            if count:
                home.setdefault(group, set()).add(node)
        found[group] = tuple(sorted(taken))
    return found


def _traffic(graph: ComputationGraph, plan: Draft) -> dict[tuple[int, int], int]:
    """Return the bytes that pairs of groups exchange for one sample."""
    owner = {u: stage.group for stage in plan.stages for u in stage.operators}
    found: dict[tuple[int, int], int] = {}
    for value in graph.values:
        source = owner[graph.index[value.producer]]
        for target in {owner[graph.index[c]] for c in value.consumers} - {source}:
            pair = (min(source, target), max(source, target))
            found[pair] = found.get(pair, 0) + value.num_bytes(1) * (1 + value.carries_gradient)
    return found
