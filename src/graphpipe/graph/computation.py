"""The computation graph: operators, and the values that pass between them.

An *operator* is the smallest piece of a model that a planner may place: what capture leaves after it has folded light
tensor operations into their neighbours. A *value* is one tensor that an operator produces and other operators read. A
value with several readers in one stage is sent to that stage once, which is why values, not edges, are stored; the
edges follow from them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Any

from graphpipe.errors import GraphPipeError
from graphpipe.fields import Field


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of the model, under its original name.

    Attributes:
        name: As ``model.named_parameters()`` gives it. Tied parameters share one name.
        num_bytes: Its size.
        is_trainable: Whether it needs a gradient.
    """

    name: str
    num_bytes: int
    is_trainable: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """The smallest piece of a model that a planner may place.

    Attributes:
        name: Unique in its graph.
        module: The path of the module that a person would look for, such as ``vision_model.encoder.layers.0``.
        parameters: The parameters that it reads.
        inputs: The names of the model's inputs that it reads. They are at hand on every device.
        is_batch_wise: It mixes samples (an exact contrastive loss, batch statistics), so the stage that holds it takes
            the whole mini-batch as one micro-batch and cannot be replicated.
        has_backward: Whether a gradient flows through it. False for a frozen part with nothing trainable before it.
        forward_flops: Floating-point operations of the forward pass, per sample.
        moved_bytes: Activation bytes that the forward pass reads and writes, per sample.
        saved_bytes: Activation bytes of its own results that backward needs, per sample.
        backward_flops: Floating-point operations of the backward pass, per sample.
    """

    name: str
    module: str = ""
    parameters: tuple[Parameter, ...] = ()
    inputs: tuple[str, ...] = ()
    is_batch_wise: bool = False
    has_backward: bool = True
    forward_flops: float = 0.0
    backward_flops: float = 0.0
    moved_bytes: float = 0.0
    saved_bytes: float = 0.0

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters that the operator reads."""
        return sum(p.num_bytes for p in self.parameters)

    @property
    def trainable_bytes(self) -> int:
        """Bytes of the parameters that need a gradient."""
        return sum(p.num_bytes for p in self.parameters if p.is_trainable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """One tensor that an operator produces and other operators read.

    Attributes:
        name: Unique in its graph.
        producer: The operator that computes it.
        consumers: The operators that read it, in the graph's order; not empty.
        bytes_per_sample: Its size for one sample; 0 when it does not depend on the batch.
        fixed_bytes: Its size when it does not depend on the batch, such as a temperature; else 0.
        carries_gradient: Whether a gradient comes back for it.
    """

    name: str
    producer: str
    consumers: tuple[str, ...]
    bytes_per_sample: int = 0
    fixed_bytes: int = 0
    carries_gradient: bool = True

    def num_bytes(self, num_samples: int) -> int:
        """Return the size of the value for `num_samples` samples."""
        return self.fixed_bytes + self.bytes_per_sample * num_samples


@dataclass(frozen=True)
class ComputationGraph:
    """A directed acyclic graph of operators, stored in a topological order.

    Attributes:
        name: What the model is called in tables and pictures.
        operators: In a topological order.
        values: Everything that passes between operators.

    Raises:
        GraphPipeError: Two operators or values share a name, a value names an unknown operator or has no reader, or
            the operators are not in a topological order (so there may be a cycle).
    """

    name: str
    operators: tuple[Operator, ...]
    values: tuple[Value, ...] = field(default=())

    def __post_init__(self) -> None:
        if not self.operators:
            raise GraphPipeError(f"computation graph {self.name!r} has no operators")
        if len(self.index) != len(self.operators):
            raise GraphPipeError(f"two operators of {self.name!r} are called {_first_repeat(self._operator_names())!r}")
        if len({v.name for v in self.values}) != len(self.values):
            raise GraphPipeError(
                f"two values of {self.name!r} are called {_first_repeat(v.name for v in self.values)!r}"
            )
        for value in self.values:
            if not value.consumers:
                raise GraphPipeError(f"value {value.name!r} of {self.name!r} is read by no operator")
            for name in (value.producer, *value.consumers):
                if name not in self.index:
                    raise GraphPipeError(f"value {value.name!r} names operator {name!r}, which {self.name!r} lacks")
            for consumer in value.consumers:
                if self.index[consumer] <= self.index[value.producer]:
                    raise GraphPipeError(
                        f"operator {consumer!r} reads {value.name!r} before {value.producer!r} has produced it: "
                        f"the operators of {self.name!r} are not in a topological order"
                    )

    def _operator_names(self) -> Iterable[str]:
        return (operator.name for operator in self.operators)

    @cached_property
    def index(self) -> Mapping[str, int]:
        """The position of each operator by name."""
        return {name: i for i, name in enumerate(self._operator_names())}

    @cached_property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """The pairs (producer, consumer) of operator positions, sorted, each once."""
        pairs = {(self.index[v.producer], self.index[c]) for v in self.values for c in v.consumers}
        return tuple(sorted(pairs))

    @cached_property
    def successors(self) -> tuple[tuple[int, ...], ...]:
        """For each operator position, the positions of those that read from it, ascending."""
        found: list[list[int]] = [[] for _ in self.operators]
        for u, v in self.edges:
            found[u].append(v)
        return tuple(map(tuple, found))

    @cached_property
    def predecessors(self) -> tuple[tuple[int, ...], ...]:
        """For each operator position, the positions of those that it reads from, ascending."""
        found: list[list[int]] = [[] for _ in self.operators]
        for u, v in self.edges:
            found[v].append(u)
        return tuple(map(tuple, found))

    @cached_property
    def fingerprint(self) -> str:
        """A hash of everything in the graph, to tell whether a strategy belongs to a model."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_json(self) -> dict[str, Any]:
        """Return the graph as plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: object) -> ComputationGraph:
        """Return the graph that `to_json` wrote.

        Raises:
            GraphPipeError: A field is missing, or the graph is not valid.
        """
        graph = Field(data, "<the computation graph>")
        return cls(
            name=graph["name"].text(),
            operators=tuple(_operator(given) for given in graph["operators"].elements()),
            values=tuple(_value(given) for given in graph["values"].elements()),
        )


def _operator(given: Field) -> Operator:
    given.members(_OPERATOR)
    return Operator(
        name=given["name"].text(),
        module=given.get("module", "").text(),
        parameters=tuple(_parameter(p) for p in given.get("parameters", ()).elements()),
        inputs=given.get("inputs", ()).texts(),
        is_batch_wise=given.get("is_batch_wise", default=False).boolean(),
        has_backward=given.get("has_backward", default=True).boolean(),
        forward_flops=given.get("forward_flops", 0.0).number(),
        backward_flops=given.get("backward_flops", 0.0).number(),
        moved_bytes=given.get("moved_bytes", 0.0).number(),
        saved_bytes=given.get("saved_bytes", 0.0).number(),
    )


def _parameter(given: Field) -> Parameter:
    given.members(_PARAMETER)
    return Parameter(
        name=given["name"].text(),
        num_bytes=given["num_bytes"].integer(),
        is_trainable=given.get("is_trainable", default=True).boolean(),
    )


def _value(given: Field) -> Value:
    given.members(_VALUE)
    return Value(
        name=given["name"].text(),
        producer=given["producer"].text(),
        consumers=given["consumers"].texts(),
        bytes_per_sample=given.get("bytes_per_sample", 0).integer(),
        fixed_bytes=given.get("fixed_bytes", 0).integer(),
        carries_gradient=given.get("carries_gradient", default=True).boolean(),
    )


_OPERATOR, _PARAMETER, _VALUE = (frozenset(f.name for f in fields(kind)) for kind in (Operator, Parameter, Value))


def _first_repeat(names: Iterable[str]) -> str:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    raise AssertionError("nothing is repeated")
