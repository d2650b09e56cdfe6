"""Which devices: the replicas of a stage inside a node, and stages that exchange much next to each other."""

from __future__ import annotations

from graphpipe.cluster import Cluster
from graphpipe.planner.draft import Draft

# By group the bytes that it exchanges with each other group.
Traffic = dict[int, dict[int, float]]


def place(cluster: Cluster, plan: Draft, traffic: Traffic) -> dict[int, tuple[int, ...]]:
    """Return the devices of each group of stages.

    Groups are placed largest first, equal ones in the order of the stages. Each goes to the node with room for it whose
    stages it exchanges most bytes with; ties go to the fullest node, then to the first. A group that no node has room
    for is spread over the emptiest ones. Then groups of equal size change places while that keeps more bytes inside
    the nodes.

    Args:
        cluster: The devices.
        plan: The stages.
        traffic: By group the bytes that it exchanges with each other group.
    """
    size = {stage.group: stage.choice.num_replicas for stage in plan.stages}
    free: dict[int, list[int]] = {}
    for number, device in enumerate(cluster.devices):
        free.setdefault(device.node, []).append(number)
    if len(free) == 1:
        return _in_order(size)
    home: dict[int, int] = {}
    found: dict[int, tuple[int, ...]] = {}
    for group in sorted(size, key=lambda group: -size[group]):
        rooms = [node for node, left in free.items() if len(left) >= size[group]]
        if rooms:
            exchanged = _exchanged(traffic, home, group)
            home[group] = min(rooms, key=lambda node: (-exchanged.get(node, 0), len(free[node]), node))
            chosen = [home[group]]
        else:
            chosen = sorted(free, key=lambda node: (-len(free[node]), node))
        taken: list[int] = []
        for node in chosen:
            count = min(size[group] - len(taken), len(free[node]))
            taken += free[node][:count]
            free[node] = free[node][count:]
        found[group] = tuple(sorted(taken))
    _change_places(size, traffic, home, found)
    return found


def _in_order(size: dict[int, int]) -> dict[int, tuple[int, ...]]:
    found, used = {}, 0
    for group, count in size.items():
        found[group] = tuple(range(used, used + count))
        used += count
    return found


def _exchanged(traffic: Traffic, home: dict[int, int], group: int) -> dict[int, float]:
    """Return by node the bytes that a group exchanges with the groups there."""
    found: dict[int, float] = {}
    for other, num_bytes in traffic[group].items():
        if other in home:
            found[home[other]] = found.get(home[other], 0) + num_bytes
    return found


def _change_places(
    size: dict[int, int], traffic: Traffic, home: dict[int, int], found: dict[int, tuple[int, ...]]
) -> None:
    """Swap groups of equal size that are whole in their nodes, while more bytes stay inside the nodes."""
    residents: dict[int, set[int]] = {}
    for group, node in home.items():
        residents.setdefault(node, set()).add(group)
    is_better = True
    while is_better:
        is_better = False
        for group in sorted(home):
            for node in sorted({home[other] for other in traffic[group] if other in home} - {home[group]}):
                for other in sorted(residents[node]):
                    if size[other] == size[group] and _gain(traffic, home, group, other) > 0:
                        residents[node] ^= {group, other}
                        residents[home[group]] ^= {group, other}
                        home[group], home[other] = home[other], home[group]
                        found[group], found[other] = found[other], found[group]
                        is_better = True
                        break


def _gain(traffic: Traffic, home: dict[int, int], a: int, b: int) -> float:
    """Return how many more bytes stay inside nodes when two groups change places."""
    with_a, with_b = _exchanged(traffic, home, a), _exchanged(traffic, home, b)
    between = traffic[a].get(b, 0)
    here, there = home[a], home[b]
    after = with_a.get(there, 0) + with_b.get(here, 0) - 2 * between
    return after - with_a.get(here, 0) - with_b.get(there, 0)
