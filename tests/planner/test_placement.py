"""Devices for stages: every group its own, whole in a node where a node has room."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from graphpipe.cluster import Cluster
from graphpipe.graph import ComputationGraph, Operator, Value
from graphpipe.planner.costs import Choice
from graphpipe.planner.draft import Draft, DraftStage
from graphpipe.planner.placement import place
from graphpipe.stage import Recompute


def chain(*value_bytes: int) -> ComputationGraph:
    operators = tuple(Operator(name=f"op{i}") for i in range(len(value_bytes) + 1))
    values = tuple(
        Value(name=f"v{i}", producer=f"op{i}", consumers=(f"op{i + 1}",), bytes_per_sample=size)
        for i, size in enumerate(value_bytes)
    )
    return ComputationGraph("chain", operators, values)


def one_each(replicas: list[int]) -> Draft:
    """An operator a stage."""
    return Draft(tuple(DraftStage((i,), 8, Choice(r, Recompute.NONE), i) for i, r in enumerate(replicas)))


@given(st.lists(st.sampled_from((1, 2, 3, 4)), min_size=1, max_size=6), st.integers(1, 4))
def test_every_group_has_devices_of_its_own(replicas: list[int], per_node: int) -> None:
    cluster = Cluster.uniform(sum(replicas) + 1, memory_bytes=1, devices_per_node=per_node)
    found = place(chain(*[4] * (len(replicas) - 1)), cluster, one_each(replicas))
    assert [len(found[i]) for i in range(len(replicas))] == replicas
    taken = [device for devices in found.values() for device in devices]
    assert len(set(taken)) == len(taken)
    assert set(taken) <= set(range(len(cluster)))


@given(st.lists(st.sampled_from((1, 2, 4)), min_size=1, max_size=8))
def test_powers_of_two_never_straddle_nodes(replicas: list[int]) -> None:
    nodes = -(-sum(replicas) // 4)
    cluster = Cluster.uniform(4 * nodes, memory_bytes=1, devices_per_node=4)
    found = place(chain(*[4] * (len(replicas) - 1)), cluster, one_each(replicas))
    assert all(len({device // 4 for device in devices}) == 1 for devices in found.values())


def test_stages_that_exchange_much_share_a_node() -> None:
    cluster = Cluster.uniform(4, memory_bytes=1, devices_per_node=2)
    # A heavy edge in the middle: 0 | 1 = 2 | 3 does not fit in order, so 3 joins 0.
    found = place(chain(1, 1000, 1), cluster, one_each([1, 1, 1, 1]))
    assert {device // 2 for device in (*found[1], *found[2])} in ({0}, {1})
