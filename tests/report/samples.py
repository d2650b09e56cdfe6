"""Strategies to draw: made by hand, so that pictures are tested without a planner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from graphpipe.cluster import Cluster
from graphpipe.cost import ADAM, Profile
from graphpipe.graph import ComputationGraph, Operator, Parameter, Value
from graphpipe.schedule import kfkb
from graphpipe.stage import Recompute, Stage, StageGraph
from graphpipe.strategy import Strategy
from graphpipe.trace import Span, SpanKind, Trace, TraceSource

MEGABYTE = 10**6


def strategy_of(
    modules: Sequence[Sequence[str]],
    edges: Sequence[tuple[int, int]],
    *,
    mini_batch_size: int,
    micro_batch_sizes: Sequence[int],
    devices: Sequence[tuple[int, ...]],
    cluster: Cluster | None = None,
    forward_ms: Sequence[float] = (),
    recompute: Recompute = Recompute.NONE,
    notes: Mapping[str, Any] | None = None,
    name: str = "sample",
) -> Strategy:
    """Return a strategy whose stage `x` holds an operator for each of ``modules[x]``.

    A stage hands 0.1 MB a sample to each stage after it; ``forward_ms`` is for each sample, backward
    takes twice that.
    """
    names = [[f"{x}/{i}/{module}" for i, module in enumerate(held)] for x, held in enumerate(modules)]
    operators = tuple(
        Operator(
            name=name,
            module=module,
            parameters=(Parameter(f"{name}.weight", 5 * MEGABYTE),),
        )
        for held, paths in zip(names, modules, strict=True)
        for name, module in zip(held, paths, strict=True)
    )
    inner = [(a, b) for held in names for a, b in pairwise(held)]
    outer = [(names[u][-1], names[v][0]) for u, v in edges]
    values = tuple(
        Value(name=f"{a}>{b}", producer=a, consumers=(b,), bytes_per_sample=MEGABYTE // 10) for a, b in inner + outer
    )
    graph = ComputationGraph(name, operators, values)
    stages = StageGraph(
        graph,
        tuple(
            Stage(operators=tuple(held), micro_batch_size=size, devices=group, recompute=recompute)
            for held, size, group in zip(names, micro_batch_sizes, devices, strict=True)
        ),
        mini_batch_size,
    )
    forward_s = np.array(
        [(forward_ms[x] if forward_ms else 1.0) * 1e-3 / len(held) for x, held in enumerate(names) for _ in held]
    )
    sizes = np.array([[1.0], [float(mini_batch_size)]])
    profile = Profile(
        operators=tuple(o.name for o in operators),
        sizes=(1, mini_batch_size) if mini_batch_size > 1 else (1,),
        forward_s=(sizes * forward_s)[: 2 if mini_batch_size > 1 else 1],
        backward_s=(2 * sizes * forward_s)[: 2 if mini_batch_size > 1 else 1],
        saved_bytes=(sizes * np.full(len(operators), 2.0 * MEGABYTE))[: 2 if mini_batch_size > 1 else 1],
    )
    cluster = cluster or Cluster.uniform(
        max(d for group in devices for d in group) + 1, memory_bytes=4 * 10**9, kind="V100-16GB"
    )
    draft = Strategy(stages, kfkb(stages), profile, cluster, ADAM, planner="graphpipe", notes=notes or {})
    return replace(draft, schedule=kfkb(stages, draft.costs))


def two_towers() -> Strategy:
    """A text and a vision tower, each on a device, and the loss beside the vision tower."""
    return strategy_of(
        [
            [f"vision_model.encoder.layers.{i}" for i in range(6)] + ["vision_model.embeddings"],
            [f"text_model.encoder.layers.{i}" for i in range(6)] + ["text_model.final_layer_norm"],
            ["logit_scale", "loss"],
        ],
        [(0, 2), (1, 2)],
        mini_batch_size=32,
        micro_batch_sizes=[4, 8, 32],
        devices=[(0,), (1,), (0,)],
        forward_ms=[1.2, 1.4, 0.05],
        name="clip-like",
        notes={
            "lower_bound_s": 0.1307,
            "distance": 0.034,
            "num_candidates": 1284,
            "search": {"wall_s": 0.82, "stopped_early": False},
            "tried_micro_batch_sizes": [1, 2, 4, 8],
        },
    )


def diamond() -> Strategy:
    """One stage, two beside each other, one."""
    return strategy_of(
        [["stem"], ["left.block1", "left.block2"], ["right.block1", "right.norm", "right.act"], ["head"]],
        [(0, 1), (0, 2), (1, 3), (2, 3)],
        mini_batch_size=16,
        micro_batch_sizes=[2, 2, 2, 2],
        devices=[(0,), (1,), (2,), (3,)],
    )


def multi_modal() -> Strategy:
    """Four branches of three stages and a join, on sixteen devices; three stages have two replicas."""
    modules = [[f"branches.{b}.layers.{4 * s + i}" for i in range(4)] for b in range(4) for s in range(3)]
    modules.append(["fusion.concat", "fusion.linear", "head"])
    edges = [(3 * b + s, 3 * b + s + 1) for b in range(4) for s in range(2)] + [(3 * b + 2, 12) for b in range(4)]
    devices: list[tuple[int, ...]] = []
    free = 0
    for x in range(13):
        count = 2 if x in {0, 3, 6} else 1
        devices.append(tuple(range(free, free + count)))
        free += count
    return strategy_of(
        modules,
        edges,
        mini_batch_size=64,
        micro_batch_sizes=[8] * 12 + [4],
        devices=devices,
        cluster=Cluster.summit(16),
        forward_ms=[1.0, 0.8, 0.9] * 4 + [0.4],
        recompute=Recompute.ALL,
        name="mmt",
        notes={"lower_bound_s": 0.21, "distance": 0.12},
    )


def chain(depth: int = 12) -> Strategy:
    """A sequence of stages, a device each."""
    return strategy_of(
        [[f"transformer.h.{2 * x}", f"transformer.h.{2 * x + 1}"] for x in range(depth)],
        [(x, x + 1) for x in range(depth - 1)],
        mini_batch_size=32,
        micro_batch_sizes=[2] * depth,
        devices=[(x,) for x in range(depth)],
    )


def long_names() -> Strategy:
    """Names of eighty characters with markup in them, a skip over two layers, and micro-batches of all sizes."""
    odd = "model.<encoder>.layers['a&b\"c'].self_attention.very_long_projection_name_with_suffix_0{}"
    return strategy_of(
        [[odd.format(1)], [odd.format(2), "x<y>&z"], [odd.format(3)], ["short"], [odd.format(4)]],
        [(0, 1), (1, 2), (2, 4), (0, 4), (0, 3), (3, 4)],
        mini_batch_size=24,
        micro_batch_sizes=[2, 3, 8, 24, 12],
        devices=[(0,), (1, 2), (3,), (4,), (0,)],
        name='a <model> & its "name"',
    )


def skips() -> Strategy:
    """A deep graph in which edges skip layers, also from one row of the picture to the next."""
    return strategy_of(
        [[f"net.block{x}"] for x in range(9)],
        [(x, x + 1) for x in range(8)] + [(0, 4), (2, 7), (3, 6), (1, 8)],
        mini_batch_size=8,
        micro_batch_sizes=[2] * 9,
        devices=[(x % 5,) for x in range(9)],
    )


SAMPLES = {f.__name__: f for f in (two_towers, diamond, multi_modal, chain, long_names, skips)}


def measured_like(trace: Trace, *, slower: float = 1.12) -> Trace:
    """Return what a run could have measured: everything a little slower, and peaks of memory."""
    spans = tuple(
        replace(s, start_s=s.start_s * slower * (1 + 0.01 * s.device), stop_s=s.stop_s * slower * (1 + 0.01 * s.device))
        for s in trace.spans
    )
    return Trace(
        TraceSource.MEASURED, trace.num_devices, spans, tuple(10**8 * (3 + d) for d in range(trace.num_devices))
    )


def crowded(strategy: Strategy, num_spans: int) -> Trace:
    """Return a trace of so many spans on each device that they cannot all be seen."""
    kinds = (SpanKind.FORWARD, SpanKind.FORWARD, SpanKind.BACKWARD)
    spans = tuple(
        Span(d, kinds[i % 3], i * 1e-4, (i + 0.7) * 1e-4, stage=d % len(strategy.stages.stages), micro_batch=i)
        for d in range(len(strategy.cluster))
        for i in range(num_spans)
    )
    return Trace(TraceSource.MEASURED, len(strategy.cluster), spans)
