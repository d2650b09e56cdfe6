"""Find how every tensor of a model depends on the samples of a batch, by trying it.

The class of most operations follows from their arguments: matrix products, and what leaves every row to its sample.
What remains runs on a batch of six samples, and again on the first two and on the last four of them, reading the
matching *rows of the full run's values*, so that what came before cannot blur the answer. If the results are the
matching rows of the full result, the operation treats samples one by one. If the full result is the mean or the sum of
the two, it is a loss that micro-batches may share. Otherwise the operation mixes samples, and needs the whole
mini-batch.

Because each operation is tested by itself, any numbers do: parameters are replaced by random ones, and matrix products
are not computed. So a probe needs no parameter of the model, and works for models on the meta device.

Numbers decide only where structure leaves a choice. Whatever has no rows of its own and is not a known linear
reduction counts as mixing samples: the answer is then exact, if slower.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from graphpipe.capture.classes import COUNT, INDEPENDENT, MEAN, MIXED, WHOLE, Kind, SampleClass
from graphpipe.capture.classification import Classification
from graphpipe.capture.evaluate import value_from_inputs
from graphpipe.capture.filling import has_place_for_each
from graphpipe.capture.keeping import leaf_of
from graphpipe.capture.leaves import ModuleLeaf
from graphpipe.capture.losses import FEW_CLASSES, among_few_classes, counted_targets, ignores_targets, is_classification
from graphpipe.capture.mixing import lasting_mixtures, starts_mixing
from graphpipe.capture.nodes import (
    argument_of,
    inputs_of,
    is_random,
    mixes_in_backward,
    only_drops,
    operator_name,
    subgraphs,
    value_of,
    written_by,
)
from graphpipe.capture.own_backward import treats_samples_alike
from graphpipe.capture.probe_values import ProbeValues
from graphpipe.capture.product_rules import class_of_product
from graphpipe.capture.repeats import signature
from graphpipe.capture.row_rules import class_by_structure
from graphpipe.capture.shared_sums import is_linear, may_reduce, spread
from graphpipe.capture.stand_ins import in_double, perturbed
from graphpipe.capture.training_graph import TrainingGraph
from graphpipe.capture.trial import NUM_SAMPLES, PARTS, is_unchanged, mean_or_sum, rows_by_shape, rows_of_parts
from graphpipe.errors import CaptureError

# Operators that read the shape of a tensor and not its values.
_SHAPE_ONLY = ("zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty")


def classify(graph: TrainingGraph, tensors: Mapping[str, Tensor]) -> Classification:
    """Return the classification of a graph.

    Args:
        graph: The training graph.
        tensors: A flat batch of `NUM_SAMPLES` samples.

    Raises:
        CaptureError: The model does not run on such a batch.
    """
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    default = torch.get_default_dtype()
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        torch.set_default_dtype(torch.float64)
        try:
            torch.manual_seed(0)
            try:
                return _classify(graph, perturbed(graph, tensors), tensors)
            except Exception:  # zeroed integers may be out of the model's range, such as offsets
                return _classify(graph, tensors, tensors)
        except Exception as error:
            raise CaptureError(
                f"the model does not run on {NUM_SAMPLES} samples made of the example batch's: {error}; the samples of "
                "all inputs must be along axis 0, or where `sample_axes` says, and independent of each other"
            ) from error
        finally:
            torch.set_default_dtype(default)


def _classify(graph: TrainingGraph, tensors: Mapping[str, Tensor], example: Mapping[str, Tensor]) -> Classification:
    mixing: set[fx.Node] = set()
    while True:
        torch.manual_seed(0)
        found = _Probe(graph, tensors, example, frozenset(mixing)).run()
        lasting = lasting_mixtures(graph, found.classes, found.batch_wise)
        if not lasting:
            return found
        mixing |= lasting


class _Probe:
    """One pass over a graph.

    Args:
        graph: The training graph.
        tensors: A flat batch.
        example: The same before its numbers were changed.
        mixing: Operations that are known to mix samples for good.
    """

    def __init__(
        self,
        graph: TrainingGraph,
        tensors: Mapping[str, Tensor],
        example: Mapping[str, Tensor],
        mixing: frozenset[fx.Node],
    ) -> None:
        self.graph = graph
        self.example = {placeholder: example[name] for name, placeholder in graph.inputs.items()}
        self.mixing = mixing
        self.device = next(iter(tensors.values())).device
        self.values = ProbeValues(graph, tensors)
        # The parts' own results, for sums, means and counts: they are no rows of the full result.
        self.parts: tuple[dict[fx.Node, Any], ...] = tuple({} for _ in PARTS)
        self.classes: dict[fx.Node, Any] = {}
        self.batch_wise: set[fx.Node] = set()
        self.counted: dict[fx.Node, int] = {}
        self.filled: set[fx.Node] = set()
        self._known: dict[tuple[Any, ...], SampleClass] = {}
        for placeholder in graph.inputs.values():
            axes = [i for i, size in enumerate(value_of(placeholder).shape) if graph.depends_on_batch(size)]
            self.classes[placeholder] = SampleClass(Kind.PER_SAMPLE, axes[0]) if axes else INDEPENDENT
        for node in graph.attributes:
            self.classes[node] = INDEPENDENT

    def run(self) -> Classification:
        """Classify every operation."""
        last_reader = {read: node for node in self.graph.operations for read in inputs_of(node)}
        for node in self.graph.operations:
            self._classify(node)
            for read in inputs_of(node):
                if last_reader[read] is node:
                    self.values.forget(read)
                    for parts in self.parts:
                        parts.pop(read, None)
        batch_wise = spread(self.graph, self.classes, self.batch_wise)
        counted = {node: count for node, count in self.counted.items() if node not in batch_wise}
        return Classification(self.classes, frozenset(batch_wise), counted, frozenset(self.filled))

    def _classify(self, node: fx.Node) -> None:
        by_rule = class_of_product(node, self.classes)
        if by_rule is None and self._fills_each_sample(node):
            by_rule = SampleClass(Kind.PER_SAMPLE)
            self.filled.add(node)
        if by_rule is not None:
            self.classes[node] = by_rule
            self.values.draw_later(node)
            return
        repeated = signature(self.graph, node, self.classes)
        by_structure = class_by_structure(self.graph, node, self.classes) or self._known.get(repeated or ())
        if by_structure is not None:
            self.classes[node] = by_structure
            self.values.run_later(node)
            return
        self._try(node)
        found = self.classes[node]
        if repeated is not None and node not in self.batch_wise and found.kind is Kind.PER_SAMPLE:
            self._known[repeated] = found

    def _try(self, node: fx.Node) -> None:
        """Classify an operation by running it."""
        leaf_code = leaf_of(node)
        if isinstance(leaf_code, ModuleLeaf):
            self._take_as_whole(node)
            return
        reads = [(read, leaf) for read in inputs_of(node) for leaf in pytree.tree_leaves(self.classes[read])]
        kinds = {leaf.kind for _, leaf in reads}
        must_be_whole = (
            Kind.WHOLE in kinds
            or node in self.mixing
            or operator_name(node) == "masked_scatter"
            or self.graph.writes_buffer(node)
            or mixes_in_backward(node)
            or self._writes_shared(node, kinds)
            or ({Kind.MEAN, Kind.SUM} & kinds and not is_linear(node, self.classes))
        )
        draws = is_random(node) and not only_drops(node) and not subgraphs(node)
        if must_be_whole:
            self.batch_wise.add(node)
        given = self._given(node)
        parts: list[Any] | None = None
        if not must_be_whole and not draws:
            try:
                # Before the full run: an operation in place changes what it reads.
                parts = [self._run_part(node, given, k) for k in range(len(PARTS))]
            except Exception:  # whatever an operator says of sizes that don't fit together
                parts = None
        self.values[node] = self.values.run(node, given, NUM_SAMPLES)
        recorded = value_of(node)
        leaves, tree = pytree.tree_flatten(self.values[node])
        fakes = pytree.tree_leaves(recorded)
        part_leaves = [pytree.tree_leaves(part) for part in parts] if parts is not None else []
        found = []
        for i, (leaf, fake) in enumerate(zip(leaves, fakes, strict=True)):
            if not isinstance(leaf, Tensor) or self._is_unused(node, i):
                found.append(INDEPENDENT)
            elif parts is not None:
                compared = self._compare(node, fake, leaf, [p[i] for p in part_leaves], kinds)
                may_mix = Kind.MIXED in kinds or starts_mixing(node)
                # What an empty tensor holds is chance.
                is_chance = Kind.MIXED in kinds and operator_name(node) in _SHAPE_ONLY
                found.append(MIXED if may_mix and (compared is WHOLE or is_chance) else compared)
            else:
                by_shape = rows_by_shape(self.graph, fake)
                found.append(by_shape if by_shape is not None else WHOLE)
                if not draws or by_shape is None or "perm" in operator_name(node):
                    self.batch_wise.add(node)
        if any(f.kind is Kind.WHOLE for f in found):
            # Rows are a matter of convention for the result of an operation that mixes samples; readers are tested.
            self.batch_wise.add(node)
            found = [
                (rows_by_shape(self.graph, fake) or f) if f.kind is Kind.WHOLE else f
                for f, fake in zip(found, fakes, strict=True)
            ]
        elif leaf_code is not None and not treats_samples_alike(node, found, self.values, self.classes):
            self.batch_wise.add(node)
        elif parts is not None:
            if any(f.kind not in (Kind.PER_SAMPLE, Kind.INDEPENDENT) for f in found):
                for own, part in zip(self.parts, parts, strict=True):
                    own[node] = part
            if ignores_targets(node) and MEAN in found:
                # Of the example as it is: the changed one may have another mask.
                source = argument_of(node, "target")
                target = value_from_inputs(self.graph, source, self.example, NUM_SAMPLES)
                self.counted[node] = counted_targets(
                    node, self.values[source] if target is None else target, NUM_SAMPLES
                )
        self.classes[node] = pytree.tree_unflatten(found, tree)

    def _take_as_whole(self, node: fx.Node) -> None:
        """Let an operation mix samples without running it: what it does with others is not known."""
        self.batch_wise.add(node)
        leaves, tree = pytree.tree_flatten(value_of(node))
        self.classes[node] = pytree.tree_unflatten([rows_by_shape(self.graph, leaf) or WHOLE for leaf in leaves], tree)
        made = [torch.zeros(self.graph.shape_at(leaf, NUM_SAMPLES), dtype=leaf.dtype) for leaf in leaves]
        made = [torch.rand_like(in_double(leaf)) if leaf.is_floating_point() else leaf for leaf in made]
        self.values[node] = pytree.tree_unflatten([leaf.to(self.device) for leaf in made], tree)

    def _fills_each_sample(self, node: fx.Node) -> bool:
        """Whether an operation puts rows of each sample into places of that sample, in the example."""
        if operator_name(node) != "masked_scatter":
            return False
        target, mask, source = (argument_of(node, name) for name in ("self", "mask", "source"))
        first = SampleClass(Kind.PER_SAMPLE)
        found: SampleClass = self.classes[source]
        if {self.classes[target], self.classes[mask]} != {first} or found.kind is not Kind.PER_SAMPLE:
            return False
        if found.axis or found.outer != 1 or value_of(mask).dim() != value_of(target).dim():
            return False
        places = value_from_inputs(self.graph, mask, self.example, NUM_SAMPLES)
        if places is None:
            return False
        shapes = [self.graph.shape_at(value_of(argument), NUM_SAMPLES) for argument in (target, source)]
        return has_place_for_each(places.expand(shapes[0]), math.prod(shapes[1]) // NUM_SAMPLES)

    def _given(self, node: fx.Node) -> dict[fx.Node, Any]:
        """The values that an operation is tried on: its arguments, or scores and targets for fewer classes."""
        smaller: dict[fx.Node, Any] = {}
        if is_classification(node):
            scores, target = argument_of(node, "self"), argument_of(node, "target")
            shape = self.graph.shape_at(value_of(scores), NUM_SAMPLES)
            found = self.classes[scores]
            has_rows = found.kind is Kind.INDEPENDENT or (found.kind is Kind.PER_SAMPLE and found.axis != 1)
            if has_rows and len(shape) > 1 and shape[1] > FEW_CLASSES and not value_of(target).is_floating_point():
                smaller[scores] = self.values.numbers((shape[0], FEW_CLASSES, *shape[2:]))
                smaller[target] = among_few_classes(self.values[target], argument_of(node, "ignore_index"))
        return {read: smaller[read] if read in smaller else self.values[read] for read in inputs_of(node)}

    def _is_unused(self, node: fx.Node, i: int) -> bool:
        """Whether nothing reads entry `i` of a tuple, such as the bookkeeping that ``embedding_bag`` returns."""
        readers = self.graph.readers.get(node, ())
        is_flat = isinstance(value_of(node), tuple | list) and all(r.target is operator.getitem for r in readers)
        return is_flat and all(r.args[1] != i for r in readers)

    def _run_part(self, node: fx.Node, given: Mapping[fx.Node, Any], k: int) -> Any:
        start, stop = PARTS[k]
        writes = bool(written_by(node)) or bool(subgraphs(node))
        values: dict[fx.Node, Any] = {}
        for read, value in given.items():
            leaves, tree = pytree.tree_flatten(value)
            own = pytree.tree_leaves(self.parts[k].get(read))
            taken = []
            for i, (leaf, kind) in enumerate(zip(leaves, pytree.tree_leaves(self.classes[read]), strict=True)):
                if not isinstance(leaf, Tensor):
                    taken.append(leaf)
                elif kind.kind is Kind.PER_SAMPLE:
                    taken.append(kind.part(leaf, start, stop, NUM_SAMPLES))
                elif kind.kind is Kind.INDEPENDENT:
                    taken.append(leaf.clone() if writes else leaf)
                else:
                    taken.append(own[i])
            values[read] = pytree.tree_unflatten(taken, tree)
        return self.values.run(node, values, stop - start)

    def _compare(self, node: fx.Node, fake: Tensor, full: Tensor, parts: list[Tensor], kinds: set[Kind]) -> SampleClass:
        axes = [axis for axis, size in enumerate(fake.shape) if self.graph.depends_on_batch(size)]
        if len(axes) == 1:
            rows = rows_of_parts(axes[0], full, parts)
            if rows is not WHOLE:
                return rows
        if kinds <= {Kind.INDEPENDENT, Kind.COUNT}:
            return INDEPENDENT if not axes and is_unchanged(full, parts) else COUNT
        if axes:
            return WHOLE
        if Kind.MEAN not in kinds and Kind.SUM not in kinds and operator_name(node) in _SHAPE_ONLY:
            return INDEPENDENT if is_unchanged(full, parts) else WHOLE
        if not full.is_floating_point() or not full.any() or not (may_reduce(node) or {Kind.MEAN, Kind.SUM} & kinds):
            return WHOLE  # numbers alone prove nothing here: a zero is mean and sum of zeros
        return mean_or_sum(full, parts)

    def _writes_shared(self, node: fx.Node, kinds: set[Kind]) -> bool:
        """Whether an operation in place puts what depends on the batch into a tensor without samples of its own."""
        written = written_by(node)
        if not written:
            return False
        targets = {leaf.kind for w in written for leaf in pytree.tree_leaves(self.classes[w])}
        return bool({Kind.MEAN, Kind.SUM} & kinds) or (Kind.INDEPENDENT in targets and kinds != {Kind.INDEPENDENT})
