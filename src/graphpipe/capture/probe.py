"""Find how every tensor of a model depends on the samples of a batch, by trying it.

The graph runs on a batch of six samples, operation by operation. Each operation is then run again on the first two and
on the last four samples, reading the matching *rows of the full run's values*, so that what came before cannot blur the
answer. If the results are the matching rows of the full result, the operation treats samples one by one. If the full
result is the mean or the sum of the two, it is a loss that micro-batches may share. Otherwise the operation mixes
samples, and needs the whole mini-batch.

Because each operation is tested by itself, any numbers do: parameters are replaced by random ones, and matrix products,
whose classes follow from their shapes, are not computed. So a probe needs no parameter of the model, and works for
models on the meta device.

Numbers decide only where structure leaves a choice. Whatever has no rows of its own and is not a known linear
reduction counts as mixing samples: the answer is then exact, if slower.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from graphpipe.capture.classes import COUNT, INDEPENDENT, MEAN, MIXED, SUM, WHOLE, Kind, SampleClass
from graphpipe.capture.evaluate import run_node, value_from_inputs
from graphpipe.capture.filling import has_place_for_each
from graphpipe.capture.keeping import leaf_of
from graphpipe.capture.leaves import ModuleLeaf
from graphpipe.capture.losses import counted_targets, is_plain_loss
from graphpipe.capture.mixing import grouped_product, is_product_of_rows, lasting_mixtures, starts_mixing
from graphpipe.capture.nodes import (
    argument_of,
    inputs_of,
    is_random,
    is_size,
    mixes_in_backward,
    only_drops,
    operator_name,
    storages,
    subgraphs,
    value_of,
    written_by,
)
from graphpipe.capture.rules import class_by_rule
from graphpipe.capture.stand_ins import ProbeArguments, RandomNumbers, in_double, perturbed, random_windows
from graphpipe.capture.training_graph import AttributeKind, TrainingGraph
from graphpipe.errors import CaptureError

NUM_SAMPLES = 6
_SPLIT = 2  # the parts are samples 0-1 and 2-5

# Operators whose result over samples may be a sum or a weighted mean of those of parts.
_REDUCTIONS = frozenset({"sum", "mean", "matmul", "mm", "bmm", "linear", "dot", "vdot", "mv", "einsum", "nansum"})
# Linear in one argument when the others do not depend on the batch: the index of that argument, or None for all.
_LINEAR: Mapping[str, int | None] = {
    **dict.fromkeys(("add", "sub", "rsub", "stack", "cat"), None),
    **dict.fromkeys(
        ("mul", "div", "true_divide", "neg", "to", "_to_copy", "clone", "alias", "contiguous", "view", "reshape",
         "squeeze", "unsqueeze", "expand", "sum", "mean", "select", "slice", "getitem", "permute", "transpose", "t",
         "view_as", "reshape_as", "type_as", "flatten", "unbind", "float", "double"), 0),
}  # fmt: skip
# Operators that read the shape of a tensor and not its values.
_SHAPE_ONLY = ("zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty")


@dataclass(frozen=True, eq=False)
class Classification:
    """How the tensors of a graph depend on the samples of a batch.

    Attributes:
        classes: By node: a class, or a tuple of them where the operation gives several tensors.
        batch_wise: The operations that need the whole mini-batch.
        counted_targets: For the classification losses that micro-batches share, how many targets of each sample count.
        filled: The operations that put rows into the places of a mask, as many for each sample as it has places. That
            is to be checked for every micro-batch.
    """

    classes: Mapping[fx.Node, Any]
    batch_wise: frozenset[fx.Node]
    counted_targets: Mapping[fx.Node, int]
    filled: frozenset[fx.Node]


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
        self.values: dict[fx.Node, Any] = {}
        # The parts' own results, for sums, means and counts: they are no rows of the full result.
        self.parts: tuple[dict[fx.Node, Any], dict[fx.Node, Any]] = ({}, {})
        self.classes: dict[fx.Node, Any] = {}
        self.batch_wise: set[fx.Node] = set()
        self.counted: dict[fx.Node, int] = {}
        self.filled: set[fx.Node] = set()
        self._known: dict[tuple[Any, ...], SampleClass] = {}
        self._adapt = ProbeArguments()
        self._numbers = RandomNumbers(self.device)
        for name, placeholder in graph.inputs.items():
            self.values[placeholder] = in_double(tensors[name])
            axes = [i for i, size in enumerate(value_of(placeholder).shape) if graph.depends_on_batch(size)]
            self.classes[placeholder] = SampleClass(Kind.PER_SAMPLE, axes[0]) if axes else INDEPENDENT
        for node in graph.attributes:
            self.classes[node] = INDEPENDENT

    def run(self) -> Classification:
        """Classify every operation."""
        last_reader = {read: node for node in self.graph.operations for read in inputs_of(node)}
        for node in self.graph.operations:
            for read in inputs_of(node):
                if read in self.graph.attributes and read not in self.values:
                    self.values[read] = self._stand_in(read)
            self._classify(node)
            for read in list(inputs_of(node)):
                if last_reader[read] is node:
                    for values in (self.values, *self.parts):
                        values.pop(read, None)
        self._spread_over_sums()
        return Classification(self.classes, frozenset(self.batch_wise), self.counted, frozenset(self.filled))

    def _stand_in(self, node: fx.Node) -> Tensor:
        """A tensor in the place of one of the model: random for parameters, which may be zero now and not later."""
        attribute = self.graph.attributes[node]
        if attribute.kind is AttributeKind.PARAMETER or attribute.tensor.is_meta:
            if not attribute.tensor.is_floating_point():
                return torch.zeros(attribute.tensor.shape, dtype=attribute.tensor.dtype)
            return random_windows(tuple(attribute.tensor.shape), self.device)
        return in_double(attribute.tensor.detach())

    def _classify(self, node: fx.Node) -> None:
        by_rule = class_by_rule(node, self.classes)
        if by_rule is None and self._fills_each_sample(node):
            by_rule = SampleClass(Kind.PER_SAMPLE)
            self.filled.add(node)
        if by_rule is not None:
            self.classes[node] = by_rule
            shape = self.graph.shape_at(value_of(node), NUM_SAMPLES)
            numbers = self._numbers.draw(shape)
            is_written = bool(storages(node) & self.graph.written_storages)
            self.values[node] = numbers.clone() if is_written else numbers
            return
        signature = self._signature(node)
        if signature is not None and signature in self._known:
            self.classes[node] = self._known[signature]
            self.values[node] = self._run(node, self.values, NUM_SAMPLES)
            return
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
            or ({Kind.MEAN, Kind.SUM} & kinds and not self._is_linear(node))
        )
        draws = is_random(node) and not only_drops(node) and not subgraphs(node)
        if must_be_whole:
            self.batch_wise.add(node)
        parts: list[Any] | None = None
        if not must_be_whole and not draws:
            try:
                # Before the full run: an operation in place changes what it reads.
                parts = [self._run_part(node, k) for k in (0, 1)]
            except Exception:  # whatever an operator says of sizes that don't fit together
                parts = None
        self.values[node] = self._run(node, self.values, NUM_SAMPLES)
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
                by_shape = _rows_by_shape(self.graph, fake)
                found.append(by_shape if by_shape is not None else WHOLE)
                if not draws or by_shape is None or "perm" in operator_name(node):
                    self.batch_wise.add(node)
        if any(f.kind is Kind.WHOLE for f in found):
            # Rows are a matter of convention for the result of an operation that mixes samples; readers are tested.
            self.batch_wise.add(node)
            found = [
                (_rows_by_shape(self.graph, fake) or f) if f.kind is Kind.WHOLE else f
                for f, fake in zip(found, fakes, strict=True)
            ]
        elif leaf_code is not None and not self._function_treats_samples_alike(node, found):
            self.batch_wise.add(node)
        elif parts is not None:
            for k in (0, 1):
                self.parts[k][node] = parts[k]
            count = counted_targets(node, self.values, NUM_SAMPLES)
            if count is not None and MEAN in found:
                self.counted[node] = count
        self.classes[node] = pytree.tree_unflatten(found, tree)
        if signature is not None and node not in self.batch_wise and found[0].kind is Kind.PER_SAMPLE:
            self._known[signature] = found[0]

    def _take_as_whole(self, node: fx.Node) -> None:
        """Let an operation mix samples without running it: what it does with others is not known."""
        self.batch_wise.add(node)
        leaves, tree = pytree.tree_flatten(value_of(node))
        self.classes[node] = pytree.tree_unflatten([_rows_by_shape(self.graph, leaf) or WHOLE for leaf in leaves], tree)
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

    def _signature(self, node: fx.Node) -> tuple[Any, ...] | None:
        """What decides the class of an operation on floats, such as those that each layer of a model repeats.

        None where values may matter as well, as indices and masks do.
        """
        if written_by(node) or subgraphs(node) or is_random(node) or not isinstance(value_of(node), Tensor):
            return None
        read = []
        for argument in inputs_of(node):
            fake, found = value_of(argument), self.classes[argument]
            is_fixed = (
                argument in self.graph.attributes
                and self.graph.attributes[argument].kind is not AttributeKind.PARAMETER
            )
            if not isinstance(fake, Tensor) or not fake.is_floating_point() or is_fixed:
                return None
            if argument not in self.graph.attributes and found.kind is not Kind.PER_SAMPLE:
                return None
            read.append((self.graph.shape_at(fake, NUM_SAMPLES), found))
        numbers: list[fx.Node] = []
        structure = fx.node.map_arg((node.args, dict(node.kwargs)), lambda a: _place(a, numbers))
        return str(node.target), str(structure), tuple(str(value_of(n)) for n in numbers), tuple(read)

    def _is_unused(self, node: fx.Node, i: int) -> bool:
        """Whether nothing reads entry `i` of a tuple, such as the bookkeeping that ``embedding_bag`` returns."""
        readers = self.graph.readers.get(node, ())
        is_flat = isinstance(value_of(node), tuple | list) and all(r.target is operator.getitem for r in readers)
        return is_flat and all(r.args[1] != i for r in readers)

    def _run_part(self, node: fx.Node, k: int) -> Any:
        start, stop = ((0, _SPLIT), (_SPLIT, NUM_SAMPLES))[k]
        writes = bool(written_by(node)) or bool(subgraphs(node))
        values: dict[fx.Node, Any] = {}
        for read in inputs_of(node):
            leaves, tree = pytree.tree_flatten(self.values[read])
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
        return self._run(node, values, stop - start)

    def _function_treats_samples_alike(self, node: fx.Node, found: Sequence[SampleClass]) -> bool:
        """Whether the gradients of a custom function's arguments are those of the parts, as its results are."""
        if any(f.kind not in (Kind.PER_SAMPLE, Kind.INDEPENDENT) for f in found):
            return False
        results = pytree.tree_leaves(self.values[node])
        seeds = [torch.rand_like(leaf) if leaf.is_floating_point() else leaf for leaf in results]
        spans = ((0, NUM_SAMPLES), (0, _SPLIT), (_SPLIT, NUM_SAMPLES))
        gradients = []
        for start, stop in spans:
            values = {
                read: self._rows_of(read, start, stop).detach().requires_grad_() for read in inputs_of(node)
                if isinstance(self.values[read], Tensor) and self.values[read].is_floating_point()
            }  # fmt: skip
            rest = {read: self._rows_of(read, start, stop) for read in inputs_of(node) if read not in values}
            with torch.enable_grad():
                made = pytree.tree_leaves(self._run(node, {**rest, **values}, stop - start))
            given = [
                f.part(seed, start, stop, NUM_SAMPLES) if f.kind is Kind.PER_SAMPLE else seed
                for f, seed in zip(found, seeds, strict=True)
            ]
            pairs = [(m, g) for m, g in zip(made, given, strict=True) if m.requires_grad]
            if not pairs:
                return True
            roots, cotangents = zip(*pairs, strict=True)
            gradients.append(torch.autograd.grad(roots, list(values.values()), cotangents, allow_unused=True))
        for read, full, *parts in zip(values, *gradients, strict=True):
            if full is None or any(p is None for p in parts):
                if (full is None) != all(p is None for p in parts):
                    return False
                continue
            kind = self.classes[read]
            if kind.kind is Kind.INDEPENDENT:
                if not _equal(parts[0] + parts[1], full):
                    return False
            elif not all(
                _equal(kind.part(full, *span, NUM_SAMPLES), p) for span, p in zip(spans[1:], parts, strict=True)
            ):
                return False
        return True

    def _rows_of(self, read: fx.Node, start: int, stop: int) -> Any:
        value, kind = self.values[read], self.classes[read]
        if isinstance(value, Tensor) and kind.kind is Kind.PER_SAMPLE:
            return kind.part(value, start, stop, NUM_SAMPLES)
        return value

    def _run(self, node: fx.Node, values: Mapping[fx.Node, Any], num_samples: int) -> Any:
        if is_product_of_rows(node):  # not every kernel computes in float64
            return grouped_product(*(values[read] for read in inputs_of(node)))
        return run_node(self.graph, node, values, num_samples, self._adapt)

    def _compare(self, node: fx.Node, fake: Tensor, full: Tensor, parts: list[Tensor], kinds: set[Kind]) -> SampleClass:
        axes = [axis for axis, size in enumerate(fake.shape) if self.graph.depends_on_batch(size)]
        if len(axes) == 1:
            rows = self._rows(axes[0], full, parts)
            if rows is not WHOLE:
                return rows
        if kinds <= {Kind.INDEPENDENT, Kind.COUNT}:
            same = not axes and all(_equal(part, full) for part in parts)
            return INDEPENDENT if same else COUNT
        if axes:
            return WHOLE
        if Kind.MEAN not in kinds and Kind.SUM not in kinds and operator_name(node) in _SHAPE_ONLY:
            return INDEPENDENT if all(_equal(part, full) for part in parts) else WHOLE
        is_reduction = operator_name(node) in _REDUCTIONS or is_plain_loss(node)
        if not full.is_floating_point() or not full.any() or not (is_reduction or {Kind.MEAN, Kind.SUM} & kinds):
            return WHOLE  # numbers alone prove nothing here: a zero is mean and sum of zeros
        weights = (_SPLIT / NUM_SAMPLES, 1 - _SPLIT / NUM_SAMPLES)
        if _equal(parts[0] * weights[0] + parts[1] * weights[1], full):
            return MEAN
        return SUM if _equal(parts[0] + parts[1], full) else WHOLE

    def _rows(self, axis: int, full: Tensor, parts: list[Tensor]) -> SampleClass:
        """The first way to see the axis as ``outer * samples * inner`` that gives the parts."""
        rows, rest = divmod(full.shape[axis], NUM_SAMPLES)
        if rest or [p.shape[axis] for p in parts] != [rows * _SPLIT, rows * (NUM_SAMPLES - _SPLIT)]:
            return WHOLE
        for outer in range(1, rows + 1):
            if rows % outer:
                continue
            found = SampleClass(Kind.PER_SAMPLE, axis, outer, rows // outer)
            spans = ((0, _SPLIT), (_SPLIT, NUM_SAMPLES))
            if all(_equal(found.part(full, *span, NUM_SAMPLES), p) for span, p in zip(spans, parts, strict=True)):
                return found
        return WHOLE

    def _writes_shared(self, node: fx.Node, kinds: set[Kind]) -> bool:
        """Whether an operation in place puts what depends on the batch into a tensor without samples of its own."""
        written = written_by(node)
        if not written:
            return False
        targets = {leaf.kind for w in written for leaf in pytree.tree_leaves(self.classes[w])}
        return bool({Kind.MEAN, Kind.SUM} & kinds) or (Kind.INDEPENDENT in targets and kinds != {Kind.INDEPENDENT})

    def _is_linear(self, node: fx.Node) -> bool:
        """Whether an operation is linear in the means and sums that it reads, all of one kind."""
        name = operator_name(node)
        if name not in _LINEAR:
            return False
        shared = [(r, leaf.kind) for r in inputs_of(node) for leaf in pytree.tree_leaves(self.classes[r])]
        shared = [(r, kind) for r, kind in shared if kind in (Kind.MEAN, Kind.SUM)]
        position = _LINEAR[name]
        if position is None:
            return len({kind for _, kind in shared}) == 1
        first = node.args[position] if node.args else None
        if name == "mul" and len({r for r, _ in shared}) == 1:
            return sum(argument is shared[0][0] for argument in node.args) == 1
        return {r for r, _ in shared} == {first} and sum(argument is first for argument in node.args) == 1

    def _spread_over_sums(self) -> None:
        """Make every operation around a mean or sum batch-wise if one of them is.

        Whoever reads such a value must see it of the same samples as whoever makes it.
        """
        links = [
            (node, reader)
            for node in self.graph.operations
            if any(leaf.kind in (Kind.MEAN, Kind.SUM) for leaf in pytree.tree_leaves(self.classes[node]))
            for reader in self.graph.readers.get(node, ())
        ]
        changed = True
        while changed:
            changed = False
            for a, b in links:
                if (a in self.batch_wise) != (b in self.batch_wise):
                    self.batch_wise |= {a, b}
                    changed = True
        for node in self.batch_wise:
            self.counted.pop(node, None)


def _rows_by_shape(graph: TrainingGraph, fake: Any) -> SampleClass | None:
    """The rows of a tensor with one axis of a multiple of the batch size; None if there is no such axis."""
    if not isinstance(fake, Tensor):
        return None
    axes = [axis for axis, size in enumerate(fake.shape) if graph.depends_on_batch(size)]
    if len(axes) != 1:
        return None
    one, two = (graph.size_at(fake.shape[axes[0]], count) for count in (1, 2))
    return SampleClass(Kind.PER_SAMPLE, axes[0], 1, one) if two == 2 * one else None


def _place(node: fx.Node, numbers: list[fx.Node]) -> str:
    """Stand for a node in printed arguments; sizes are listed beside."""
    if is_size(node):
        numbers.append(node)
        return "size"
    return "tensor"


def _equal(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    if not a.is_floating_point() or torch.equal(a, b):
        return torch.equal(a, b)
    # Both sides are computed from the same numbers in float64, so only the order of additions may differ.
    finite = b[torch.isfinite(b)]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    return torch.allclose(a, b, rtol=1e-7, atol=1e-10 * min(scale, 1e6) + 1e-300, equal_nan=True)
