from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from graphpipe.graph import ComputationGraph, Operator, Parameter
from graphpipe.program import Reduction
from graphpipe.runtime.sharding import ParameterSharing, parameter_owners


def graph_of(**sizes: int) -> ComputationGraph:
    return ComputationGraph(
        "test", (Operator(name="o", parameters=tuple(Parameter(n, b) for n, b in sizes.items())),), ()
    )


def test_owners_take_turns_by_bytes_and_over_all_groups() -> None:
    graph = graph_of(a=60, b=50, c=40, d=10, alone=1000)
    reductions = [Reduction((0, 1), ("a", "b", "c"), 150), Reduction((1, 2), ("d",), 10)]
    # a goes to 0, b to 1, c to 1 with the fewer bytes; d to 2, which owns nothing.
    assert parameter_owners(graph, reductions) == {"a": 0, "b": 1, "c": 1, "d": 2}


class Recorder:
    """A transport that notes broadcasts, and stands for owners that send ones."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[int, ...], int, int]] = []

    def broadcast(self, devices: Sequence[int], source: int, tensor: Tensor) -> None:
        self.calls.append((tuple(devices), source, tensor.numel()))
        if source != 1:
            tensor.fill_(1.0)


def test_every_rank_takes_what_others_own() -> None:
    parameters = {name: nn.Parameter(torch.zeros(2, 3)) for name in ("a", "b", "c", "d")}
    reductions = [Reduction((0, 1), ("a", "b", "c"), 72), Reduction((2, 3), ("e",), 24), Reduction((1, 2), ("d",), 24)]
    owners = {"a": 0, "b": 1, "c": 0, "d": 2, "e": 3}
    transport = Recorder()
    ParameterSharing(1, parameters, reductions, owners, transport, bucket_bytes=24).share()  # type: ignore[arg-type]
    assert transport.calls == [((0, 1), 0, 6), ((0, 1), 0, 6), ((0, 1), 1, 6), ((1, 2), 2, 6)]
    assert {name for name, p in parameters.items() if p.detach().eq(1).all()} == {"a", "c", "d"}
    assert not parameters["b"].detach().any()
