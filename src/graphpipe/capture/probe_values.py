"""The numbers that a probe computes with, each made when an operation that is tried first reads it.

Most operations of a large model are classed by rules, and nobody asks for their numbers. So the tensors of its full
width are never made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from graphpipe.capture.evaluate import run_node
from graphpipe.capture.mixing import grouped_product, is_product_of_rows
from graphpipe.capture.nodes import inputs_of, storages, value_of
from graphpipe.capture.stand_ins import ProbeArguments, RandomNumbers, in_double, random_windows
from graphpipe.capture.training_graph import AttributeKind, TrainingGraph
from graphpipe.capture.trial import NUM_SAMPLES


class _Later:
    """A value that nobody has read yet: the operation that gives it, and what that reads."""

    def __init__(self, make: Callable[[Mapping[fx.Node, Any]], Any], reads: Mapping[fx.Node, _Later]) -> None:
        self._make = make
        self._reads = dict(reads)
        self._value: Any = None
        self._is_made = False

    @classmethod
    def of(cls, value: Any) -> _Later:
        """Return a value that is there."""
        found = cls(lambda _: value, {})
        found._finish()
        return found

    def value(self) -> Any:
        """Return the value; whatever it needs is made first, not by recursion, since networks are deep."""
        waiting = [self]
        while waiting:
            last = waiting[-1]
            missing = [] if last._is_made else [read for read in last._reads.values() if not read._is_made]
            if missing:
                waiting += missing
            else:
                last._finish()
                waiting.pop()
        return self._value

    def _finish(self) -> None:
        if not self._is_made:
            self._value = self._make({node: read._value for node, read in self._reads.items()})
            self._is_made = True
            self._reads = {}


class ProbeValues(Mapping[fx.Node, Any]):
    """The values of a graph's nodes on a trial batch, as long as an operation is left that reads them.

    Args:
        graph: The training graph.
        tensors: The batch by input name.
    """

    def __init__(self, graph: TrainingGraph, tensors: Mapping[str, Tensor]) -> None:
        self._graph = graph
        self._device = next(iter(tensors.values())).device
        self._adapt = ProbeArguments()
        self._numbers = RandomNumbers(self._device)
        self._known = {placeholder: _Later.of(in_double(tensors[name])) for name, placeholder in graph.inputs.items()}

    def __getitem__(self, node: fx.Node) -> Any:
        """Return the value of a node, made now if it was not."""
        if node in self._graph.attributes and node not in self._known:
            self._known[node] = _Later.of(self._stand_in(node))
        return self._known[node].value()

    def __setitem__(self, node: fx.Node, value: Any) -> None:
        """Set the value of a node."""
        self._known[node] = _Later.of(value)

    def __contains__(self, node: object) -> bool:
        """Return whether a node has a value, or will have one when it is read."""
        return node in self._known or node in self._graph.attributes

    def __iter__(self) -> Any:
        """Iterate over the nodes with values."""
        return iter(self._known)

    def __len__(self) -> int:
        """Return the number of nodes with values."""
        return len(self._known)

    def draw_later(self, node: fx.Node) -> None:
        """Let a node have random numbers."""
        shape = self._graph.shape_at(value_of(node), NUM_SAMPLES)
        is_written = bool(storages(node) & self._graph.written_storages)

        def make(_: Mapping[fx.Node, Any]) -> Tensor:
            numbers = self._numbers.draw(shape)
            return numbers.clone() if is_written else numbers

        self._known[node] = _Later(make, {})

    def run_later(self, node: fx.Node) -> None:
        """Let a node have what its operation gives."""
        for read in inputs_of(node):
            if read in self._graph.attributes and read not in self._known:
                self._known[read] = _Later(lambda _, read=read: self._stand_in(read), {})  # type: ignore[misc]
        reads = {read: self._known[read] for read in inputs_of(node)}
        self._known[node] = _Later(lambda values: self.run(node, values, NUM_SAMPLES), reads)

    def run(self, node: fx.Node, values: Mapping[fx.Node, Any], num_samples: int) -> Any:
        """Return what an operation gives for other values than these, in float64."""
        if is_product_of_rows(node):  # not every kernel computes in float64
            return grouped_product(*(values[read] for read in inputs_of(node)))
        return run_node(self._graph, node, values, num_samples, self._adapt)

    def numbers(self, shape: tuple[int, ...]) -> Tensor:
        """Return random numbers to read."""
        return self._numbers.draw(shape)

    def forget(self, node: fx.Node) -> None:
        """Let go of the value of a node that no operation reads any more."""
        self._known.pop(node, None)

    def _stand_in(self, node: fx.Node) -> Tensor:
        """A tensor in the place of one of the model: random for parameters, which may be zero now and not later."""
        attribute = self._graph.attributes[node]
        if attribute.kind is AttributeKind.PARAMETER or attribute.tensor.is_meta:
            if not attribute.tensor.is_floating_point():
                return torch.zeros(attribute.tensor.shape, dtype=attribute.tensor.dtype)
            return random_windows(tuple(attribute.tensor.shape), self._device)
        return in_double(attribute.tensor.detach())
