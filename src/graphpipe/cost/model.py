"""The one place that turns a graph, a profile and a cluster into seconds and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from graphpipe.cluster import Cluster
from graphpipe.cost.collectives import ring_all_reduce_s
from graphpipe.cost.profile import Profile
from graphpipe.errors import GraphPipeError
from graphpipe.fields import Field
from graphpipe.graph import ComputationGraph


@dataclass(frozen=True, slots=True)
class OptimizerCost:
    """What an optimizer keeps for each byte of a trainable parameter.

    Attributes:
        name: Shown to people.
        state_bytes_per_parameter_byte: 0 for SGD, 1 with momentum, 2 for Adam. The parameter itself and its gradient
            are not counted here.
    """

    name: str = "adam"
    state_bytes_per_parameter_byte: float = 2.0

    def __post_init__(self) -> None:
        if self.state_bytes_per_parameter_byte < 0:
            raise GraphPipeError(
                f"optimizer {self.name!r} cannot keep {self.state_bytes_per_parameter_byte} bytes a byte"
            )

    def to_json(self) -> dict[str, Any]:
        """Return the cost as plain data."""
        return {"name": self.name, "state_bytes_per_parameter_byte": self.state_bytes_per_parameter_byte}

    @classmethod
    def from_json(cls, data: object) -> OptimizerCost:
        """Return the cost that `to_json` wrote.

        Raises:
            GraphPipeError: A field is missing or not valid.
        """
        cost = Field(data, "<the cost of the optimizer>")
        return cls(cost["name"].text(), cost["state_bytes_per_parameter_byte"].number())


SGD = OptimizerCost("sgd", 0.0)
MOMENTUM = OptimizerCost("momentum", 1.0)
ADAM = OptimizerCost("adam", 2.0)


@dataclass(frozen=True, slots=True)
class MemoryParts:
    """What the memory of one device holds, in bytes.

    Attributes:
        parameters: Parameters, frozen ones included.
        gradients: Gradients of the trainable parameters.
        optimizer: The optimizer's state.
        activations: The largest sum, over the mini-batch, of saved activations and received values.
    """

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0

    @property
    def total(self) -> float:
        """All of it, in bytes."""
        return self.parameters + self.gradients + self.optimizer + self.activations

    def __add__(self, other: MemoryParts) -> MemoryParts:
        return MemoryParts(
            self.parameters + other.parameters,
            self.gradients + other.gradients,
            self.optimizer + other.optimizer,
            self.activations + other.activations,
        )


@dataclass(frozen=True, eq=False)
class CostModel:
    """Seconds and bytes of sets of operators, given by their positions in the graph.

    A set of operators costs the sum of its operators at the samples that one replica takes at a time; costs are looked
    up at that size, never scaled from another one.

    Attributes:
        graph: The operators.
        profile: Their costs on this cluster's devices.
        cluster: The devices and links.
        optimizer: What the optimizer keeps.

    Raises:
        GraphPipeError: The profile is of another graph.
    """

    graph: ComputationGraph
    profile: Profile
    cluster: Cluster
    optimizer: OptimizerCost = ADAM

    def __post_init__(self) -> None:
        if self.profile.operators != tuple(o.name for o in self.graph.operators):
            raise GraphPipeError(
                f"the profile is of another model: it has {len(self.profile.operators)} operators, "
                f"{self.graph.name!r} has {len(self.graph.operators)}, or their names differ"
            )

    @cached_property
    def has_backward(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """``[operators]`` whether a gradient flows through the operator."""
        return np.array([o.has_backward for o in self.graph.operators], dtype=np.bool_)

    def forward_s(self, operators: Sequence[int], num_samples: int) -> float:
        """Return the seconds of one forward pass of these operators over `num_samples` samples."""
        return float(self.profile.at(num_samples).forward_s[list(operators)].sum())

    def backward_s(self, operators: Sequence[int], num_samples: int) -> float:
        """Return the seconds of one backward pass of these operators over `num_samples` samples."""
        return float(self.profile.at(num_samples).backward_s[list(operators)].sum())

    def saved_bytes(self, operators: Sequence[int], num_samples: int) -> float:
        """Return the bytes that these operators keep from a forward pass until its backward pass."""
        return float(self.profile.at(num_samples).saved_bytes[list(operators)].sum())

    def parameter_bytes(self, operators: Sequence[int]) -> tuple[int, int]:
        """Return the bytes of all and of the trainable parameters of these operators, each parameter once."""
        found = {p.name: p for i in operators for p in self.graph.operators[i].parameters}
        return (
            sum(p.num_bytes for p in found.values()),
            sum(p.num_bytes for p in found.values() if p.is_trainable),
        )

    def state_memory(self, operators: Sequence[int]) -> MemoryParts:
        """Return the memory of these operators' parameters, gradients and optimizer state."""
        total, trainable = self.parameter_bytes(operators)
        return MemoryParts(
            parameters=total,
            gradients=trainable,
            optimizer=trainable * self.optimizer.state_bytes_per_parameter_byte,
        )

    def all_reduce_s(self, operators: Sequence[int], devices: Sequence[int]) -> float:
        """Return the seconds to sum the gradients of these operators over the replicas on `devices`."""
        _, trainable = self.parameter_bytes(operators)
        return ring_all_reduce_s(trainable, len(devices), self.cluster.slowest_link(devices))
