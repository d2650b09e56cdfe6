"""Stage graphs with one operator a stage, for tests of what comes after planning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from graphpipe.cluster import Cluster
from graphpipe.cost import ADAM, OptimizerCost, Profile
from graphpipe.graph import ComputationGraph, Operator, Parameter, Value
from graphpipe.schedule import Schedule, kfkb
from graphpipe.stage import Stage, StageGraph
from graphpipe.strategy import Strategy

Edges = Sequence[tuple[int, int]]


def make_graph(edges: Edges, *, batch_wise: Sequence[int] = (), value_bytes: int = 4) -> ComputationGraph:
    """Return operators ``o0``, ``o1``, ... with a parameter of 100 bytes each and one value an edge."""
    count = 1 + max((max(e) for e in edges), default=0)
    return ComputationGraph(
        "test",
        tuple(
            Operator(name=f"o{i}", parameters=(Parameter(f"w{i}", 100),), is_batch_wise=i in batch_wise)
            for i in range(count)
        ),
        tuple(
            Value(name=f"v{u}-{v}", producer=f"o{u}", consumers=(f"o{v}",), bytes_per_sample=value_bytes)
            for u, v in edges
        ),
    )


def make_stages(
    edges: Edges,
    *,
    mini_batch_size: int,
    sizes: int | Sequence[int] = 1,
    devices: Sequence[tuple[int, ...]] | None = None,
    batch_wise: Sequence[int] = (),
    value_bytes: int = 4,
) -> StageGraph:
    """Return a stage for each operator; by default each on a device of its own."""
    graph = make_graph(edges, batch_wise=batch_wise, value_bytes=value_bytes)
    count = len(graph.operators)
    each = [sizes] * count if isinstance(sizes, int) else sizes
    places = devices or [(i,) for i in range(count)]
    stages = (Stage(operators=(f"o{i}",), micro_batch_size=each[i], devices=places[i]) for i in range(count))
    return StageGraph(graph, tuple(stages), mini_batch_size)


def flat_profile(
    graph: ComputationGraph, *, forward_s: float = 1.0, backward_s: float = 2.0, saved_bytes: float = 10.0
) -> Profile:
    """Return a profile in which every operator costs the same a sample."""
    ones = np.ones((1, len(graph.operators)))
    names = tuple(o.name for o in graph.operators)
    return Profile(names, (1,), forward_s * ones, backward_s * ones, saved_bytes * ones)


def make_strategy(
    stages: StageGraph, *, schedule: Schedule | None = None, optimizer: OptimizerCost = ADAM, num_devices: int = 0
) -> Strategy:
    """Return a strategy on a cluster that is just large enough, with a flat profile."""
    return Strategy(
        stages=stages,
        schedule=schedule or kfkb(stages),
        profile=flat_profile(stages.graph),
        cluster=Cluster.uniform(num_devices or 1 + max(stages.devices), memory_bytes=10**9),
        optimizer=optimizer,
    )


def frozen_first(edges: Edges, mini_batch_size: int) -> StageGraph:
    """Return stages of which the first is frozen: no gradient comes back to it."""
    stages = make_stages(edges, mini_batch_size=mini_batch_size)
    graph = stages.graph
    operators = (replace(graph.operators[0], has_backward=False, parameters=()), *graph.operators[1:])
    values = tuple(replace(v, carries_gradient=v.producer != "o0") for v in graph.values)
    return StageGraph(ComputationGraph("frozen", operators, values), stages.stages, mini_batch_size)


CHAIN_3 = ((0, 1), (1, 2))
CHAIN_4 = ((0, 1), (1, 2), (2, 3))
DIAMOND = ((0, 1), (0, 2), (1, 3), (2, 3))
TWO_TOWERS = ((0, 2), (1, 2))
