"""Problems that several tests of the planners share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from graphpipe.cluster import Cluster
from graphpipe.cost import ADAM, OptimizerCost, Profile
from graphpipe.graph import ComputationGraph, Operator, Parameter, Value
from graphpipe.planner.base import PlanningProblem


def towers(
    num_towers: int,
    length: int,
    *,
    num_devices: int,
    mini_batch_size: int = 32,
    tail: Sequence[str] = ("loss",),
    is_batch_wise: bool = False,
    seconds: float = 1e-3,
    overhead_s: float = 3e-4,
    parameter_bytes: int = 4_000_000,
    value_bytes: int = 4096,
    memory_bytes: int = 10**10,
    optimizer: OptimizerCost = ADAM,
    sizes: Sequence[int] = (1, 2, 4, 8, 16, 32),
) -> PlanningProblem:
    """Equal towers of `length` operators, then light operators in line, of which the last may mix samples."""
    operators, values = [], []
    for tower in range(num_towers):
        for i in range(length):
            weight = (Parameter(f"tower{tower}.{i}.weight", parameter_bytes),) if parameter_bytes else ()
            operators.append(Operator(name=f"tower{tower}.{i}", parameters=weight, saved_bytes=4 * value_bytes))
            reader = f"tower{tower}.{i + 1}" if i + 1 < length else tail[0]
            values.append(
                Value(
                    name=f"value{tower}.{i}",
                    producer=f"tower{tower}.{i}",
                    consumers=(reader,),
                    bytes_per_sample=value_bytes,
                )
            )
    for at, name in enumerate(tail):
        last = at == len(tail) - 1
        operators.append(Operator(name=name, is_batch_wise=is_batch_wise and last, saved_bytes=100))
        if not last:
            values.append(
                Value(name=f"value.{name}", producer=name, consumers=(tail[at + 1],), bytes_per_sample=value_bytes)
            )
    graph = ComputationGraph("towers", tuple(operators), tuple(values))
    weight_s = np.array([1.0 if o.name.startswith("tower") else 0.05 for o in operators])
    samples = np.array(sizes, dtype=np.float64)[:, None]
    forward_s = weight_s * (seconds * samples + overhead_s)
    saved_bytes = np.array([o.saved_bytes for o in operators]) * samples
    profile = Profile(tuple(o.name for o in operators), tuple(sizes), forward_s, 2 * forward_s, saved_bytes)
    return PlanningProblem(
        graph=graph,
        profile=profile,
        cluster=Cluster.uniform(num_devices, memory_bytes=memory_bytes),
        mini_batch_size=mini_batch_size,
        optimizer=optimizer,
    )
