"""The search of one micro-batch size against brute force over the same stages."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpipe.cluster import Cluster
from graphpipe.cost import SGD, Profile
from graphpipe.graph import ComputationGraph, Operator, Value
from graphpipe.graph.series_parallel import decompose
from graphpipe.planner.base import PlanningProblem
from graphpipe.planner.layout import lay_out, line
from graphpipe.planner.operators import OperatorTable
from graphpipe.planner.search import PRECISION, Search, make_setting, replica_counts
from graphpipe.planner.space import ChainSpace
from graphpipe.stage import Recompute
from tests.planner.oracle import Oracle
from tests.strategies import LINKS, computation_graphs, problems, profiles, random_edges, series_parallel_edges

SMALL = computation_graphs(series_parallel_edges(6))
SCARCE = (600, 1000, 1600)


@st.composite
def tight_problems(draw: st.DrawFn) -> PlanningProblem:
    """Problems in which activations fill the memory, so that it matters how many micro-batches a stage holds."""
    drawn = draw(computation_graphs(series_parallel_edges(6), may_be_frozen=False, may_mix_samples=False))
    saved = draw(st.lists(st.sampled_from((0, 20, 60, 150)), min_size=6, max_size=6))
    operators = tuple(
        replace(o, parameters=(), saved_bytes=each) for o, each in zip(drawn.operators, saved, strict=False)
    )
    values = tuple(replace(v, fixed_bytes=0, bytes_per_sample=draw(st.sampled_from((1, 8)))) for v in drawn.values)
    graph = ComputationGraph(drawn.name, operators, values)
    memory_bytes = draw(st.integers(150, 1200))
    return PlanningProblem(
        graph=graph,
        profile=draw(profiles(graph)),
        cluster=Cluster.uniform(draw(st.integers(2, 5)), memory_bytes=memory_bytes, inside_node=LINKS[0]),
        mini_batch_size=8,
        optimizer=SGD,
        micro_batch_sizes=(1,),
    )


def search_and_oracle(problem: PlanningProblem, size: int, *, in_line: bool = False) -> tuple[float, float]:
    """Return the least target by search and by brute force; infinite where nothing fits."""
    table = OperatorTable(problem)
    chain = lay_out(problem.graph, decompose(problem.graph), table)
    if in_line:
        chain = line(range(len(problem.graph.operators)))
    search = Search(make_setting(table, chain, size, (Recompute.NONE,), 1), chain)
    found = search.least_target_s(0.0, search.slowest_s())
    wanted = Oracle(problem, size).least_target_s(chain, replica_counts(size, len(problem.cluster)))
    return math.inf if found is None else found, wanted


@given(problems(SMALL), st.data())
@settings(max_examples=100, deadline=None)
def test_the_least_target_equals_brute_force(problem: PlanningProblem, data: st.DataObject) -> None:
    found, wanted = search_and_oracle(problem, data.draw(st.sampled_from(problem.micro_batch_sizes)))
    assert found == pytest.approx(wanted, rel=2 * PRECISION)


@given(problems(SMALL, memory_bytes=SCARCE), st.data())
@settings(max_examples=100, deadline=None)
def test_the_least_target_equals_brute_force_where_memory_is_scarce(
    problem: PlanningProblem, data: st.DataObject
) -> None:
    found, wanted = search_and_oracle(problem, data.draw(st.sampled_from(problem.micro_batch_sizes)))
    assert found == pytest.approx(wanted, rel=2 * PRECISION)


@given(tight_problems())
@settings(max_examples=200, deadline=None)
def test_the_least_target_equals_brute_force_where_activations_fill_the_memory(problem: PlanningProblem) -> None:
    found, wanted = search_and_oracle(problem, 1)
    assert found == pytest.approx(wanted, rel=2 * PRECISION)


@pytest.mark.parametrize("num_devices", [2, 3, 4])
@pytest.mark.parametrize("branches", [(1, 1, 1), (2, 1, 1), (2, 2)])
def test_forks_joins_and_groups_equal_brute_force_at_every_memory(branches: tuple[int, ...], num_devices: int) -> None:
    # 0 feeds all branches one value; all branches feed the last operator.
    last = 1 + sum(branches)
    values, at = [], 1
    heads = []
    for length in branches:
        heads.append(at)
        for i in range(at, at + length):
            reader = i + 1 if i + 1 < at + length else last
            values.append(Value(name=f"v{i}", producer=f"op{i}", consumers=(f"op{reader}",), bytes_per_sample=8))
        at += length
    values.append(Value(name="v0", producer="op0", consumers=tuple(f"op{h}" for h in heads), bytes_per_sample=30))
    graph = ComputationGraph(
        "block", tuple(Operator(name=f"op{i}", saved_bytes=60) for i in range(last + 1)), tuple(values)
    )
    ones = np.ones((1, last + 1)) * 1e-3
    profile = Profile(tuple(o.name for o in graph.operators), (1,), ones, ones, 60e3 * ones)
    for memory_bytes in range(150, 1500, 90):
        cluster = Cluster.uniform(num_devices, memory_bytes=memory_bytes, inside_node=LINKS[0])
        problem = PlanningProblem(graph=graph, profile=profile, cluster=cluster, mini_batch_size=8, optimizer=SGD)
        found, wanted = search_and_oracle(problem, 1)
        assert found == pytest.approx(wanted, rel=2 * PRECISION), memory_bytes


@given(problems(computation_graphs(random_edges(5)), memory_bytes=SCARCE), st.data())
@settings(max_examples=60, deadline=None)
def test_in_line_stages_hold_at_least_what_they_need(problem: PlanningProblem, data: st.DataObject) -> None:
    # Stages in line count as one after the other, also where they could run side by side.
    found, wanted = search_and_oracle(problem, data.draw(st.sampled_from(problem.micro_batch_sizes)), in_line=True)
    assert found >= wanted * (1 - 2 * PRECISION)


@given(problems(SMALL, memory_bytes=(*SCARCE, 10**9)), st.data())
@settings(max_examples=60, deadline=None)
def test_found_stages_keep_what_they_promise(problem: PlanningProblem, data: st.DataObject) -> None:
    size = data.draw(st.sampled_from(problem.micro_batch_sizes))
    table = OperatorTable(problem)
    chain = lay_out(problem.graph, decompose(problem.graph), table)
    search = Search(make_setting(table, chain, size, (Recompute.NONE,), 1), chain)
    target_s = search.least_target_s(0.0, search.slowest_s())
    if target_s is None:
        return
    oracle = Oracle(problem, size)
    for found in search.near(target_s, lambda _: True):
        cover = tuple(frozenset(piece.operators) for piece in found.pieces)
        assert sorted(u for part in cover for u in part) == list(range(len(problem.graph.operators)))
        assert sum(piece.choice.num_replicas for piece in found.pieces) <= len(problem.cluster)
        slowest_s = max(oracle.stage_s(frozenset(p.operators), p.choice.num_replicas) for p in found.pieces)
        assert found.slowest_s == pytest.approx(slowest_s, rel=1e-9)
        for piece, part, level in zip(found.pieces, cover, oracle.levels(cover), strict=True):
            assert oracle.fits(part, piece.choice.num_replicas, level)


@given(st.integers(1, 40), st.integers(1, 40))
def test_replicas_never_leave_samples_to_nobody(size: int, devices: int) -> None:
    counts = replica_counts(size, devices)
    shares = [-(-size // count) for count in counts]
    assert counts[0] == 1
    assert all(count <= min(size, devices) for count in counts)
    assert shares == sorted(set(shares), reverse=True)


def test_a_group_of_branches_receives_a_shared_value_once() -> None:
    # 0 feeds three branches; over a slow link that takes longer than computing.
    values = (Value(name="v0", producer="op0", consumers=("op1", "op2", "op3"), bytes_per_sample=3000),)
    graph = ComputationGraph("fan", tuple(Operator(name=f"op{i}") for i in range(4)), values)
    ones = np.ones((1, 4)) * 1e-3
    problem = PlanningProblem(
        graph=graph,
        profile=Profile(tuple(o.name for o in graph.operators), (1,), ones, ones, 0 * ones),
        cluster=Cluster.uniform(4, memory_bytes=10**9, inside_node=LINKS[1]),
        mini_batch_size=8,
    )
    table = OperatorTable(problem)
    chain = lay_out(graph, decompose(graph), table)
    block = ChainSpace(make_setting(table, chain, 1, (Recompute.NONE,), 1), chain).blocks[0]
    assert block.group_counts.tolist() == [[2]]
    assert block.groups.seconds[0, 0] == pytest.approx(Oracle(problem, 1).stage_s(frozenset({1, 2}), 1))
    assert block.groups.seconds[0, 0] == pytest.approx(3000 / LINKS[1].bandwidth_bytes_per_s)
