"""Devices for stages: every group its own, whole in a node where a node has room."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from graphpipe.cluster import Cluster
from graphpipe.planner.costs import Choice
from graphpipe.planner.draft import Draft, DraftStage
from graphpipe.planner.placement import Traffic, place
from graphpipe.stage import Recompute


def chain(*num_bytes: float) -> Traffic:
    """What the stages of a chain exchange."""
    found: Traffic = {x: {} for x in range(len(num_bytes) + 1)}
    for x, each in enumerate(num_bytes):
        found[x][x + 1] = found[x + 1][x] = each
    return found


def one_each(replicas: list[int]) -> Draft:
    """An operator a stage."""
    return Draft(tuple(DraftStage((i,), 8, Choice(r, Recompute.NONE), i) for i, r in enumerate(replicas)))


@given(st.lists(st.sampled_from((1, 2, 3, 4)), min_size=1, max_size=6), st.integers(1, 4))
def test_every_group_has_devices_of_its_own(replicas: list[int], per_node: int) -> None:
    cluster = Cluster.uniform(sum(replicas) + 1, memory_bytes=1, devices_per_node=per_node)
    found = place(cluster, one_each(replicas), chain(*[4.0] * (len(replicas) - 1)))
    assert [len(found[i]) for i in range(len(replicas))] == replicas
    taken = [device for devices in found.values() for device in devices]
    assert len(set(taken)) == len(taken)
    assert set(taken) <= set(range(len(cluster)))


@given(st.lists(st.sampled_from((1, 2, 4)), min_size=1, max_size=8))
def test_powers_of_two_never_straddle_nodes(replicas: list[int]) -> None:
    nodes = -(-sum(replicas) // 4)
    cluster = Cluster.uniform(4 * nodes, memory_bytes=1, devices_per_node=4)
    found = place(cluster, one_each(replicas), chain(*[4.0] * (len(replicas) - 1)))
    assert all(len({device // 4 for device in devices}) == 1 for devices in found.values())


def test_stages_that_exchange_much_share_a_node() -> None:
    cluster = Cluster.uniform(4, memory_bytes=1, devices_per_node=2)
    # A heavy edge in the middle: 0 | 1 = 2 | 3 does not fit in order, so 3 joins 0.
    found = place(cluster, one_each([1, 1, 1, 1]), chain(1.0, 1000.0, 1.0))
    assert {device // 2 for device in (*found[1], *found[2])} in ({0}, {1})
