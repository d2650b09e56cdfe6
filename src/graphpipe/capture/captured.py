"""A captured model: its computation graph, and modules for any part of it."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

from torch import Tensor, fx, nn

from graphpipe.capture.autocast import Autocast
from graphpipe.capture.batch import BatchLayout, resize
from graphpipe.capture.classes import SampleClass
from graphpipe.capture.classification import Classification
from graphpipe.capture.describe import LOSS, Description
from graphpipe.capture.export import LossFunction, Mode
from graphpipe.capture.nodes import is_random, read_sparsely
from graphpipe.capture.specs import LossReduction, ValueSpec
from graphpipe.capture.stage_module import StageModule, build_stage
from graphpipe.capture.training_graph import TrainingGraph
from graphpipe.capture.units import Units
from graphpipe.errors import BatchError
from graphpipe.graph.computation import ComputationGraph


class CapturedModel:
    """A model as a graph of operators, any convex set of which can be had as a module.

    Attributes:
        model: The module that was captured; stages share its parameters and buffers.
        graph: The operators and the values between them.
        values: The type of each value.
        inputs: The type of each tensor of a batch, such as ``pixel_values`` or ``xs.0``.
        loss: The name of the loss among the outputs of the stage that computes it.
        loss_operator: The operator that computes the loss.
        loss_reduction: How the loss of a mini-batch follows from those of its micro-batches.
        parameter_names: For each parameter in the graph, all of the model's names for it, its own name first. Tied
            parameters have several.
        loss_fn: What the loss was computed with; None for a model that returns it.
        mode: What the model was captured for, and its stages run in.
        autocast: What the model was captured under, and its stages run under.
        kept_whole: The paths of the modules that are one operator each, since they cannot be followed inside, and why.
    """

    def __init__(
        self,
        model: nn.Module,
        description: Description,
        layout: BatchLayout,
        loss_reduction: LossReduction,
        parameter_names: Mapping[str, tuple[str, ...]],
        training_graph: TrainingGraph,
        classification: Classification,
        units: Units,
        autocast: Autocast,
        kept_whole: Mapping[str, str],
        loss_fn: LossFunction | None = None,
        mode: Mode = Mode.TRAIN,
    ) -> None:
        self.model = model
        self.loss_fn = loss_fn
        self.mode = mode
        self.graph: ComputationGraph = description.graph
        self.values: Mapping[str, ValueSpec] = description.values
        self.inputs: Mapping[str, ValueSpec] = layout.inputs
        self.loss = LOSS
        self.loss_reduction = loss_reduction
        self.parameter_names = parameter_names
        self.autocast = autocast
        self.kept_whole = kept_whole
        self._layout = layout
        self._value_names = description.value_names
        self._training_graph = training_graph
        self._classification = classification
        self._units = units
        self._position = {operator.name: i for i, operator in enumerate(self.graph.operators)}
        position = next(i for i, nodes in enumerate(units.members) if training_graph.loss in nodes)
        self.loss_operator = self.graph.operators[position].name

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the model's operations and how they are connected, to tell another model from this one.

        Unlike that of the graph it does not depend on what operations cost, on which are grouped, or on which
        parameters are frozen. Numbers such as a dropout probability are no part of it.
        """
        return self._training_graph.fingerprint

    @property
    def is_random(self) -> bool:
        """Whether the forward pass draws random numbers, as dropout does."""
        return any(map(is_random, self._training_graph.operations))

    @cached_property
    def sparse_parameters(self) -> frozenset[str]:
        """The names of the embedding tables whose gradients are sparse, as ``nn.Embedding(sparse=True)`` makes them."""
        attributes = self._training_graph.attributes
        tables = [read_sparsely(node) for node in self._training_graph.operations]
        return frozenset(attributes[table].name for table in tables if table is not None and table in attributes)

    @property
    def draws_alike(self) -> bool:
        """Whether the forward pass draws the same numbers whatever the micro-batches are, as keyed dropout does."""
        module = self.stage_module([operator.name for operator in self.graph.operators])
        return not module.draws_by_micro_batch

    @property
    def outputs(self) -> tuple[tuple[str, SampleClass], ...]:
        """The names of the wanted results besides the loss, and how each depends on the samples."""
        names, classes = self._value_names, self._classification.classes
        return tuple((names[node], classes[node]) for node in self._training_graph.outputs)

    def flatten_batch(self, batch: Any, needed: Collection[str] | None = None) -> dict[str, Tensor]:
        """Return the tensors of a batch by input name.

        Args:
            batch: The batch.
            needed: The inputs that it must have; by default all of them. Where other sizes than the number of samples
                are free, it must have all, since the sizes follow from them.

        Raises:
            BatchError: A name is missing or unknown; a tensor has another number of dimensions, fixed size or dtype
                than the example's; the tensors disagree on the number of samples; a plain value differs from the
                example's; or the model does something else for a free size of the batch.
        """
        flat = self._layout.flatten(batch, None if self._layout.free_axes else needed)
        for free in self._training_graph.free_sizes.values():
            size = flat[free.input].shape[free.axis]
            if not free.holds(size):
                bounds = f"{free.least} or more" if free.most is None else f"{free.least} to {free.most}"
                raise BatchError(
                    f"{free.name!r} is {size} in input {free.input!r}; the model was captured with {free.example}, and "
                    f"its code tells sizes of {bounds} from others: pad or crop the input, or capture the model again"
                )
        return flat

    def fits_free_sizes(self, batch: Any) -> bool:
        """Return whether the model does the same for the free sizes of a batch as for those of the example."""
        tensors = self._layout.tensors_of(batch)
        return all(
            free.holds(tensors[free.input].shape[free.axis]) for free in self._training_graph.free_sizes.values()
        )

    @property
    def sample_axes(self) -> Mapping[str, int | None]:
        """The axis that holds the samples of each input, None for one that does not depend on the batch."""
        return self._layout.sample_axes

    @property
    def free_sizes(self) -> Mapping[str, Mapping[int, str]]:
        """By input, the names of the sizes that may differ from batch to batch, by axis."""
        return self._layout.free_axes

    def kind_of(self, batch: Any, free_sizes: Mapping[str, Mapping[int, str]]) -> str:
        """Return what another capture of a batch would depend on besides the model.

        Args:
            batch: The batch.
            free_sizes: The sizes that it would not depend on, nor on the number of samples.
        """
        return self._layout.kind_of(batch, free_sizes)

    def free_sizes_of(self, batch: Any) -> Mapping[str, Mapping[int, str]]:
        """Return the sizes that another capture of a batch can leave open, as `capture` takes them.

        These are the free ones of the inputs that the batch has, but for sizes of 1, which an exported graph keeps.
        """
        return self._layout.free_sizes_of(batch)

    def with_several_samples(self, batch: Any) -> Any:
        """Return a batch that another capture can take: one of a single sample has it twice."""
        return self._layout.with_several_samples(batch)

    def num_samples(self, flat: Mapping[str, Tensor]) -> int:
        """Return the number of samples of a flat batch; 0 if none of its tensors holds any.

        Raises:
            BatchError: The tensors disagree.
        """
        return self._layout.num_samples_of(flat)

    def sized(self, flat: Mapping[str, Tensor]) -> CapturedModel:
        """Return this model with the types that its values have for a flat batch, where sizes may differ."""
        sizes = self._layout.sizes_of(flat)
        if not sizes:
            return self
        found = copy.copy(self)
        found.values = {name: spec.at(sizes) for name, spec in self.values.items()}
        found.inputs = {name: spec.at(sizes) for name, spec in self.inputs.items()}
        return found

    def resize_batch(self, flat: Mapping[str, Tensor], num_samples: int) -> dict[str, Tensor]:
        """Return a flat batch of `num_samples` samples: those of `flat`, repeated or cut as needed."""
        return resize(self._layout, flat, num_samples)

    def stage_module(self, operators: Sequence[str]) -> StageModule:
        """Return the module that runs these operators.

        Args:
            operators: Names of the graph's operators. A convex set: no path leaves it and comes back.

        Raises:
            ValueError: A name is unknown or repeated, there is none, or the set is not convex.
        """
        positions = self._checked(operators)
        own = [node for i in positions for node in self._units.members[i]]
        nodes = {*own, *self._units.repeated_for(own)}
        inside = set(own)
        readers = self._training_graph.readers
        unit_nodes = {node for members in self._units.members for node in members}

        def leaves(node: fx.Node) -> bool:
            if node is self._training_graph.loss or node in self._training_graph.outputs:
                return True
            return any(r in unit_nodes and r not in inside for r in readers.get(node, ()))

        outputs = [node for node in sorted(own, key=self._training_graph.order.__getitem__) if leaves(node)]
        is_batch_wise = any(self.graph.operators[i].is_batch_wise for i in positions)
        counted = {} if is_batch_wise else self._classification.counted_targets
        filled = frozenset[fx.Node]() if is_batch_wise else self._classification.filled
        return build_stage(
            self._training_graph,
            nodes,
            self._value_names,
            outputs,
            counted,
            filled,
            self.autocast,
            self._classification.classes,
            self.mode,
        )

    def adopt(self, tensors: Mapping[int, Tensor]) -> None:
        """Let stages take other tensors in the place of the model's own, such as ones with memory for ones without.

        Args:
            tensors: The new tensor for the identity of each old one.
        """
        self._training_graph = self._training_graph.with_tensors(tensors)

    def _checked(self, operators: Sequence[str]) -> list[int]:
        if not operators:
            raise ValueError("a stage needs at least one operator")
        for name in operators:
            if name not in self._position:
                raise ValueError(f"{self.graph.name!r} has no operator {name!r}")
        if len(set(operators)) != len(operators):
            raise ValueError(f"an operator is repeated in {list(operators)}")
        inside = {self._position[name] for name in operators}
        after: set[int] = set()
        for i, reads in enumerate(self.graph.predecessors):
            if i in inside and after & set(reads):
                raise ValueError(
                    f"the stage is not convex: a path leaves it and comes back at {self.graph.operators[i].name!r}"
                )
            if i not in inside and (inside | after) & set(reads):
                after.add(i)
        return sorted(inside)
