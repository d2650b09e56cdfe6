"""Hypothesis strategies that the test-suite shares: small graphs, profiles, clusters, problems and stage graphs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from graphpipe.cluster import Cluster, Link
from graphpipe.cost import ADAM, MOMENTUM, SGD, OptimizerCost, Profile
from graphpipe.graph import ComputationGraph, Operator, Parameter, Value
from graphpipe.graph.dag import topological_order
from graphpipe.planner.base import PlanningProblem, divisors
from graphpipe.schedule import ModelCosts, kfkb
from graphpipe.stage import Recompute, Stage, StageGraph
from graphpipe.strategy import Strategy

PROFILE_SIZES = (1, 2, 4, 8)


@st.composite
def random_edges(draw: st.DrawFn, max_nodes: int = 8) -> tuple[tuple[int, ...], ...]:
    """Successor lists of a directed acyclic graph whose nodes are numbered in a topological order."""
    count = draw(st.integers(1, max_nodes))
    chosen = {(u, v) for u in range(count) for v in range(u + 1, count) if draw(st.sampled_from((False, False, True)))}
    return tuple(tuple(v for v in range(count) if (u, v) in chosen) for u in range(count))


@st.composite
def series_parallel_edges(draw: st.DrawFn, max_nodes: int = 7) -> tuple[tuple[int, ...], ...]:
    """Successor lists of a series-parallel order: chains of nodes and of blocks whose branches are chains again."""
    budget = [draw(st.integers(2, max_nodes))]
    edges: list[list[int]] = []

    def node() -> tuple[list[int], list[int]]:
        budget[0] -= 1
        edges.append([])
        return [len(edges) - 1], [len(edges) - 1]

    def part(depth: int) -> tuple[list[int], list[int]]:
        if depth and budget[0] > 1 and draw(st.booleans()):
            branches = [chain(depth - 1) for _ in range(draw(st.integers(2, 3))) if budget[0] > 0]
            return [u for first, _ in branches for u in first], [u for _, last in branches for u in last]
        return node()

    def chain(depth: int) -> tuple[list[int], list[int]]:
        first, last = part(depth)
        while budget[0] > 0 and draw(st.booleans()):
            after, end = part(depth)
            for u in last:
                edges[u].extend(after)
            last = end
        return first, last

    first, last = chain(2)
    del first
    while budget[0] > 0:
        after, end = part(2)
        for u in last:
            edges[u].extend(after)
        last = end
    order = topological_order(edges)
    place = {u: at for at, u in enumerate(order)}
    return tuple(tuple(sorted(place[v] for v in edges[u])) for u in order)


@st.composite
def computation_graphs(
    draw: st.DrawFn,
    edges: st.SearchStrategy[tuple[tuple[int, ...], ...]] | None = None,
    *,
    may_mix_samples: bool = True,
    may_be_frozen: bool = True,
    may_be_fixed: bool = True,
) -> ComputationGraph:
    """Computation graphs of a few operators.

    An operator makes one value for all of its readers, now and then one that does not depend on the batch. Some
    operators have no parameters, share one, or are frozen; the last one may mix samples.
    """
    successors = draw(edges if edges is not None else random_edges())
    count = len(successors)
    frozen = draw(st.integers(0, count)) if may_be_frozen and draw(st.booleans()) else 0
    operators: list[Operator] = []
    needs_gradient = [False] * count
    for u in range(count):
        shared = draw(st.integers(0, 9)) == 0
        name = "shared.weight" if shared else f"op{u}.weight"
        num_bytes = 64 if shared else draw(st.sampled_from((0, 8, 64, 200)))
        trainable = u >= frozen or shared
        parameters = (Parameter(name, num_bytes, trainable),) if num_bytes else ()
        before = any(needs_gradient[p] for p in range(u) if u in successors[p])
        needs_gradient[u] = before or (trainable and bool(parameters)) or not frozen
        operators.append(
            Operator(
                name=f"op{u}",
                module=f"part.{u}",
                parameters=parameters,
                is_batch_wise=may_mix_samples and u == count - 1 and draw(st.booleans()),
                has_backward=needs_gradient[u],
                saved_bytes=draw(st.sampled_from((0, 4, 16, 40))) if needs_gradient[u] else 0,
            )
        )
    values = []
    for u in range(count):
        if successors[u]:
            fixed = may_be_fixed and draw(st.integers(0, 9)) == 0
            values.append(
                Value(
                    name=f"value{u}",
                    producer=f"op{u}",
                    consumers=tuple(f"op{v}" for v in successors[u]),
                    bytes_per_sample=0 if fixed else draw(st.sampled_from((4, 16, 60))),
                    fixed_bytes=32 if fixed else 0,
                    carries_gradient=needs_gradient[u],
                )
            )
    return ComputationGraph("random", tuple(operators), tuple(values))


@st.composite
def profiles(draw: st.DrawFn, graph: ComputationGraph, sizes: Sequence[int] = PROFILE_SIZES) -> Profile:
    """Costs that grow with the samples, from proportional to hardly at all, each operator in its own way."""
    seconds = np.array([draw(st.integers(1, 12)) for _ in graph.operators], dtype=np.float64) * 1e-3
    fixed = np.array([draw(st.sampled_from((0.0, 0.0, 0.5, 4.0))) for _ in graph.operators])
    samples = np.array(sizes, dtype=np.float64)[:, None]
    forward_s = seconds * (samples + fixed)
    backward = np.array([draw(st.sampled_from((1.0, 2.0))) if o.has_backward else 0.0 for o in graph.operators])
    saved_bytes = np.array([o.saved_bytes for o in graph.operators]) * samples
    names = tuple(o.name for o in graph.operators)
    return Profile(names, tuple(sizes), forward_s, forward_s * backward, saved_bytes)


LINKS = (
    Link(latency_s=0.0, bandwidth_bytes_per_s=1e9),
    Link(latency_s=1e-4, bandwidth_bytes_per_s=1e5),
)


@st.composite
def clusters(draw: st.DrawFn, max_devices: int = 4, memory_bytes: Sequence[int] = (10**9,)) -> Cluster:
    """A few equal devices, in one node or two to a node."""
    return Cluster.uniform(
        draw(st.integers(1, max_devices)),
        memory_bytes=draw(st.sampled_from(tuple(memory_bytes))),
        devices_per_node=draw(st.sampled_from((None, 2))),
        inside_node=draw(st.sampled_from(LINKS)),
        between_nodes=draw(st.sampled_from(LINKS)),
    )


OPTIMIZERS: tuple[OptimizerCost, ...] = (SGD, MOMENTUM, ADAM)


@st.composite
def problems(
    draw: st.DrawFn,
    graphs: st.SearchStrategy[ComputationGraph] | None = None,
    max_devices: int = 4,
    memory_bytes: Sequence[int] = (10**9,),
) -> PlanningProblem:
    """A graph with a profile, a cluster, and a mini-batch of up to eight samples."""
    graph = draw(graphs if graphs is not None else computation_graphs())
    return PlanningProblem(
        graph=graph,
        profile=draw(profiles(graph)),
        cluster=draw(clusters(max_devices, memory_bytes)),
        mini_batch_size=draw(st.sampled_from((1, 2, 4, 6, 8))),
        optimizer=draw(st.sampled_from(OPTIMIZERS)),
    )


@st.composite
def partitions(draw: st.DrawFn, graph: ComputationGraph, max_stages: int = 4) -> tuple[tuple[int, ...], ...]:
    """Convex parts of a graph in a topological order.

    Any topological order cut into runs gives convex parts whose quotient is acyclic, and every such partition comes
    from one.
    """
    rank = draw(st.permutations(range(len(graph.operators))))
    order = topological_order(graph.successors, lambda u: rank[u])
    count = draw(st.integers(1, min(max_stages, len(order))))
    cuts = sorted(draw(st.permutations(range(1, len(order))))[: count - 1]) if count > 1 else []
    bounds = [0, *cuts, len(order)]
    return tuple(tuple(sorted(order[a:b])) for a, b in itertools.pairwise(bounds))


@st.composite
def stage_graphs(
    draw: st.DrawFn,
    graphs: st.SearchStrategy[ComputationGraph] | None = None,
    *,
    max_stages: int = 4,
    max_samples: int = 8,
    equal_sizes: bool = False,
) -> StageGraph:
    """Stage graphs with micro-batch sizes, replicas and recomputation of their own; some stages share their devices."""
    graph = draw(graphs if graphs is not None else computation_graphs())
    batch = draw(st.integers(1, max_samples))
    common = draw(st.sampled_from(divisors(batch)))
    stages: list[Stage] = []
    used = 0
    for part in draw(partitions(graph, max_stages)):
        whole = any(graph.operators[u].is_batch_wise for u in part)
        size = batch if whole else common if equal_sizes else draw(st.integers(1, batch))
        homes = [s.devices for s in stages if len(s.devices) <= size and (len(s.devices) == 1 or not whole)]
        if homes and draw(st.integers(0, 3)) == 0:
            devices = draw(st.sampled_from(homes))
        else:
            replicas = 1 if whole else draw(st.integers(1, min(3, size)))
            devices = tuple(range(used, used + replicas))
            used += replicas
        stages.append(
            Stage(
                operators=tuple(graph.operators[u].name for u in part),
                micro_batch_size=size,
                devices=devices,
                recompute=draw(st.sampled_from((Recompute.NONE, Recompute.NONE, Recompute.ALL))),
            )
        )
    return StageGraph(graph, tuple(stages), batch)


@st.composite
def strategies(draw: st.DrawFn, graphs: st.SearchStrategy[ComputationGraph] | None = None) -> Strategy:
    """Strategies under 1F1B or with longer rounds, on a cluster that has the devices."""
    stages = draw(stage_graphs(graphs))
    profile = draw(profiles(stages.graph))
    cluster = Cluster.uniform(
        max(stages.devices) + 1 + draw(st.integers(0, 1)),
        memory_bytes=10**9,
        devices_per_node=draw(st.sampled_from((None, 2))),
        inside_node=draw(st.sampled_from(LINKS)),
        between_nodes=draw(st.sampled_from(LINKS)),
    )
    optimizer = draw(st.sampled_from(OPTIMIZERS))
    problem = PlanningProblem(
        graph=stages.graph,
        profile=profile,
        cluster=cluster,
        mini_batch_size=stages.mini_batch_size,
        optimizer=optimizer,
    )
    schedule = kfkb(stages, ModelCosts(problem.cost_model, stages), k=draw(st.integers(1, 3)))
    return Strategy(stages, schedule, profile, cluster, optimizer, "random", {"drawn": True})
