"""Batches as users hold them, and as flat tensors by name.

A batch is a mapping from names to tensors, plain values, or nested lists, tuples and dicts of these; or a tuple, list
or single tensor of positional arguments. Flattened, each tensor has a name: ``pixel_values``, or ``xs.0`` for the first
entry of a list.
"""

from __future__ import annotations

import difflib
import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from graphpipe.capture.specs import SampleLayout, ValueSpec
from graphpipe.errors import BatchError, CaptureError


@dataclass(frozen=True)
class BatchLayout:
    """The structure of a batch: which tensors it has, which of them hold samples, and the plain values between.

    The number of samples of a batch is the size of the sample axes that the user names. Without one it is the most
    common size of axis 0 among its tensors, of equally common ones the first. A tensor of which nothing is said has its
    samples along axis 0 if it has that size there, and is else taken not to depend on the batch.

    Attributes:
        inputs: The tensors by name, in order.
        constants: The plain values by name.
        num_samples: The samples of the example batch.
        is_positional: Whether the batch is a tuple, list or tensor of positional arguments, not a mapping.
        entries: The names of its top-level entries, in order.
        free_axes: By input, the names of the sizes that may differ from batch to batch, by axis.
    """

    inputs: Mapping[str, ValueSpec]
    constants: Mapping[str, Any]
    num_samples: int
    is_positional: bool
    entries: tuple[str, ...]
    free_axes: Mapping[str, Mapping[int, str]]
    _names: tuple[str, ...]
    _tree: pytree.TreeSpec

    @classmethod
    def of(
        cls,
        example_batch: Any,
        positional_names: Sequence[str],
        free: Mapping[str, Mapping[int, str]],
        sample_axes: Mapping[str, int | None],
    ) -> BatchLayout:
        """Return the layout of an example batch.

        Args:
            example_batch: The batch.
            positional_names: The names of the arguments when the batch is positional.
            free: The names of the sizes that may differ from batch to batch, by axis, for inputs or entries.
            sample_axes: The axis that holds the samples, or None, for inputs or entries of which it is known.

        Raises:
            CaptureError: The batch has no tensor, fewer than 2 samples, or a tensor that needs a gradient; or there is
                no such input or axis.
        """
        is_positional = not isinstance(example_batch, Mapping)
        named = _flatten(example_batch, positional_names)
        tensors = dict(named.tensors)
        free_axes = _free_axes(tensors, free)
        known_axes = _known_axes(tensors, sample_axes, free_axes)
        num_samples = _count_samples(tensors, known_axes, free_axes)
        inputs = {}
        for name, tensor in tensors.items():
            if tensor.requires_grad:
                raise CaptureError(f"input {name!r} of the example batch needs a gradient; detach it")
            own = free_axes.get(name, {})
            holds_samples = tensor.dim() > 0 and tensor.shape[0] == num_samples and 0 not in own
            axis = known_axes.get(name, 0 if holds_samples else None)
            shape = tuple(1 if i == axis else size for i, size in enumerate(tensor.shape))
            named_sizes = tuple(sympy.Symbol(own[i]) if i in own else sympy.Integer(s) for i, s in enumerate(shape))
            layout = None if axis is None else SampleLayout(axis, 1)
            inputs[name] = ValueSpec(name, tensor.dtype, shape, layout, False, named_sizes if own else ())
        constants = {name: leaf for name, leaf in named.leaves if not isinstance(leaf, Tensor)}
        names = tuple(name for name, _ in named.leaves)
        return cls(inputs, constants, num_samples, is_positional, named.entries, free_axes, names, named.tree)

    def flatten(self, batch: Any, needed: Collection[str] | None = None) -> dict[str, Tensor]:
        """Return the tensors of a batch by name.

        Args:
            batch: The batch.
            needed: The inputs that it must have; by default all of them.

        Raises:
            BatchError: A name is missing or unknown; a tensor has another number of dimensions, fixed size or dtype
                than the example's; the tensors disagree on the number of samples; or a plain value differs from the
                example's.
        """
        if isinstance(batch, Mapping) == self.is_positional:
            kind = "a tuple of positional arguments" if self.is_positional else "a mapping from names to tensors"
            raise BatchError(f"the model was captured with {kind}; the batch is a {type(batch).__name__}")
        leaves = dict(_flatten(batch, self.entries).leaves)
        self._check_names(leaves, self._names if needed is None else needed)
        tensors: dict[str, Tensor] = {}
        for name in (n for n in self._names if n in leaves):
            leaf = leaves[name]
            if name in self.inputs:
                if not isinstance(leaf, Tensor):
                    raise BatchError(f"input {name!r} must be a tensor, got {type(leaf).__name__}")
                _check_tensor(self.inputs[name], leaf, self.free_axes.get(name, {}))
                tensors[name] = leaf
            elif isinstance(leaf, Tensor) or leaf != self.constants[name]:
                raise BatchError(
                    f"{name!r} was {self.constants[name]!r} when the model was captured and is "
                    f"{'a tensor' if isinstance(leaf, Tensor) else repr(leaf)} now; capture the model again with it"
                )
        self.num_samples_of(tensors)
        self.sizes_of(tensors)
        return tensors

    def tensors_of(self, batch: Any) -> dict[str, Tensor]:
        """Return the tensors of a batch by name, whatever they are."""
        return dict(_flatten(batch, self.entries).tensors)

    def sizes_of(self, tensors: Mapping[str, Tensor]) -> dict[str, int]:
        """Return the sizes that may differ from batch to batch, by name.

        Raises:
            BatchError: Two inputs disagree on a size.
        """
        found: dict[str, tuple[int, str]] = {}
        for name, axes in self.free_axes.items():
            for axis, size_name in axes.items():
                size = tensors[name].shape[axis]
                expected, other = found.setdefault(size_name, (size, name))
                if size != expected:
                    raise BatchError(
                        f"{size_name!r} is {expected} in input {other!r} and {size} in input {name!r}; a size of one "
                        "name is the same in all inputs"
                    )
        return {size_name: size for size_name, (size, _) in found.items()}

    def num_samples_of(self, tensors: Mapping[str, Tensor]) -> int:
        """Return the number of samples of a flat batch; 0 if none of its tensors holds any.

        Raises:
            BatchError: The tensors disagree.
        """
        counts = {
            name: tensors[name].shape[spec.layout.axis]
            for name, spec in self.inputs.items()
            if spec.layout is not None and name in tensors
        }
        if len(set(counts.values())) > 1:
            first = next(iter(counts))
            other = next(name for name in counts if counts[name] != counts[first])
            raise BatchError(
                f"input {first!r} has {counts[first]} samples and input {other!r} has {counts[other]}; "
                "all inputs of a batch need the same number"
            )
        return next(iter(counts.values()), 0)

    def kind_of(self, batch: Any, free_axes: Mapping[str, Mapping[int, str]]) -> str:
        """Return what a capture of a batch depends on: names, types, values, and sizes that are not free."""
        told = []
        for name, leaf in _flatten(batch, self.entries).leaves:
            if isinstance(leaf, Tensor):
                axis = self.sample_axes.get(name, 0)
                open_axes = free_axes.get(name, {})
                sizes = [open_axes.get(i, s) for i, s in enumerate(leaf.shape) if i != axis]
                told.append(f"{name} {leaf.dtype} {sizes}")
            else:
                told.append(f"{name} {leaf!r}")
        return "; ".join(told)

    def with_several_samples(self, batch: Any) -> Any:
        """Return a batch with its samples twice where it has one alone, which a capture cannot tell from a fixed size.

        A tensor that this layout does not know has its samples along axis 0.
        """
        flat = _flatten(batch, self.entries)
        axes: dict[str, int] = {}
        counts: dict[str, int] = {}
        for name, leaf in flat.tensors:
            axis = self.sample_axes.get(name, 0)
            if axis is not None and axis < leaf.dim():
                axes[name], counts[name] = axis, leaf.shape[axis]
        if {count for name, count in counts.items() if name in self.inputs} != {1}:
            return batch
        leaves = [torch.cat([leaf, leaf], axes[name]) if counts.get(name) == 1 else leaf for name, leaf in flat.leaves]
        return pytree.tree_unflatten(leaves, flat.tree)

    def free_sizes_of(self, batch: Any) -> dict[str, dict[int, str]]:
        """Return the free axes of a batch that another capture can leave free; an export keeps sizes of 1."""
        found: dict[str, dict[int, str]] = {}
        for name, leaf in _flatten(batch, self.entries).tensors:
            axes = {i: n for i, n in self.free_axes.get(name, {}).items() if i < leaf.dim() and leaf.shape[i] > 1}
            found |= {name: axes} if axes else {}
        return found

    @property
    def sample_axes(self) -> dict[str, int | None]:
        """The axis that holds the samples of each input, None for one that does not depend on the batch."""
        return {name: None if spec.layout is None else spec.layout.axis for name, spec in self.inputs.items()}

    def unflatten(self, tensors: Sequence[Tensor]) -> Any:
        """Return the batch of these tensors, in the order of `inputs`, with the example's plain values between."""
        found = iter(tensors)
        return pytree.tree_unflatten(
            [next(found) if name in self.inputs else self.constants[name] for name in self._names], self._tree
        )

    def _check_names(self, leaves: Iterable[str], needed: Collection[str]) -> None:
        given = set(leaves)
        for name in self._names:
            if name not in given and name in needed:
                unknown = [n for n in given if n not in self._names]
                hint = _hint(name, unknown, "it has") or f"; it has {', '.join(sorted(given)) or 'none'}"
                raise BatchError(f"the batch has no input `{name}`{hint}")
        for name in given:
            if name not in self._names:
                raise BatchError(f"the model has no input `{name}`{_hint(name, self._names, 'did you mean')}")


def resize(layout: BatchLayout, tensors: Mapping[str, Tensor], num_samples: int) -> dict[str, Tensor]:
    """Return a flat batch of `num_samples` samples: those of `tensors`, repeated or cut as needed."""
    found = {}
    for name, tensor in tensors.items():
        place = layout.inputs[name].layout
        if place is None:
            found[name] = tensor
        else:
            samples = torch.arange(num_samples, device=tensor.device) % tensor.shape[place.axis]
            found[name] = tensor.index_select(place.axis, samples)
    return found


def closest(name: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate that looks most like `name`, or None if none does."""
    found = difflib.get_close_matches(name, sorted(candidates), n=1, cutoff=0.6)
    return found[0] if found else None


def _hint(name: str, candidates: Iterable[str], words: str) -> str:
    near = closest(name, candidates)
    return f"; {words} `{near}`{'?' if words.startswith('did') else ''}" if near else ""


@dataclass(frozen=True)
class _Flat:
    entries: tuple[str, ...]
    leaves: list[tuple[str, Any]]
    tree: pytree.TreeSpec

    @property
    def tensors(self) -> list[tuple[str, Tensor]]:
        return [(name, leaf) for name, leaf in self.leaves if isinstance(leaf, Tensor)]


def _flatten(batch: Any, positional_names: Sequence[str]) -> _Flat:
    if isinstance(batch, Mapping):
        root: Any = dict(batch)
        entries = {str(key): str(key) for key in root}
    else:
        root = (batch,) if isinstance(batch, Tensor) else tuple(batch)
        # A batch with more entries than the example's keeps their positions as names, to be refused by name.
        entries = {str(i): n for i, n in itertools.zip_longest(range(len(root)), positional_names[: len(root)])}
        entries = {i: n or i for i, n in entries.items()}
    pairs, tree = pytree.tree_flatten_with_path(root)
    leaves = []
    for path, leaf in pairs:
        first, *rest = (_part(key) for key in path)
        leaves.append((".".join([entries[first], *rest]), leaf))
    return _Flat(tuple(entries.values()), leaves, tree)


def _part(key: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def _free_axes(tensors: Mapping[str, Tensor], free: Mapping[str, Mapping[int, str]]) -> dict[str, dict[int, str]]:
    """The named axes of each tensor.

    Raises:
        CaptureError: There is no such tensor or axis, or a name is no identifier or that of the number of samples.
    """
    found: dict[str, dict[int, str]] = {}
    for key, axes in free.items():
        for name in _meant(key, tensors, "whose size is to be free"):
            for axis, size_name in axes.items():
                if not 0 <= axis < tensors[name].dim():
                    raise CaptureError(f"input {name!r} has {tensors[name].dim()} axes; axis {axis} cannot be free")
                if not size_name.isidentifier() or size_name == "batch":
                    raise CaptureError(f"a size cannot be called {size_name!r}; use another word")
                found.setdefault(name, {})[axis] = size_name
    return found


def tensor_names(batch: Any, positional_names: Sequence[str]) -> list[str]:
    """Return the names of the tensors of a batch."""
    return [name for name, _ in _flatten(batch, positional_names).tensors]


def means_any(key: str, names: Iterable[str]) -> bool:
    """Whether a name means one of some inputs: the one of that name, or one of the entry of that name."""
    return any(name == key or name.startswith(key + ".") for name in names)


def _meant(key: str, tensors: Mapping[str, Tensor], why: str) -> list[str]:
    """The inputs that a name means: the one of that name, or those of the entry of that name.

    Raises:
        CaptureError: There is none.
    """
    names = [name for name in tensors if means_any(key, [name])]
    if not names:
        raise CaptureError(f"there is no input `{key}`, {why}{_hint(key, tensors, 'did you mean')}")
    return names


def _known_axes(
    tensors: Mapping[str, Tensor],
    sample_axes: Mapping[str, int | None],
    free_axes: Mapping[str, Mapping[int, str]],
) -> dict[str, int | None]:
    """The sample axis of each tensor of which it is known, None for one without samples.

    Raises:
        CaptureError: There is no such tensor or axis, or its size is free by another name.
    """
    found: dict[str, int | None] = {}
    for key, axis in sample_axes.items():
        for name in _meant(key, tensors, "whose sample axis is given"):
            if axis is not None and not 0 <= axis < tensors[name].dim():
                raise CaptureError(
                    f"input {name!r} has {tensors[name].dim()} axes, so its samples cannot be along axis {axis}; count "
                    "axes from 0, and give None for an input without samples"
                )
            if axis is not None and axis in free_axes.get(name, {}):
                raise CaptureError(
                    f"axis {axis} of input {name!r} is said to hold the samples and to be "
                    f"{free_axes[name][axis]!r}; it can be one of them"
                )
            found[name] = axis
    return found


def _count_samples(
    tensors: Mapping[str, Tensor], known_axes: Mapping[str, int | None], free_axes: Mapping[str, Mapping[int, str]]
) -> int:
    """The samples of an example batch.

    Raises:
        CaptureError: There are fewer than 2, or tensors disagree.
    """
    counts = {name: tensors[name].shape[axis] for name, axis in known_axes.items() if axis is not None}
    if len(set(counts.values())) > 1:
        first, count = next(iter(counts.items()))
        other, another = next((n, c) for n, c in counts.items() if c != count)
        raise CaptureError(
            f"input {first!r} has {count} samples along axis {known_axes[first]} and input {other!r} has {another} "
            f"along axis {known_axes[other]}; all inputs of a batch need the same number"
        )
    sizes = Counter(counts.values()) or Counter(
        t.shape[0] for n, t in tensors.items() if t.dim() and 0 not in free_axes.get(n, {}) and n not in known_axes
    )
    if not sizes:
        raise CaptureError("the example batch has no tensor with a sample axis; pass a batch of at least 2 samples")
    num_samples = sizes.most_common(1)[0][0]
    if num_samples < 2:
        raise CaptureError(
            f"the example batch has {num_samples} sample; pass at least 2, because a size of 1 cannot be told from a "
            "fixed dimension"
        )
    return num_samples


def _check_tensor(spec: ValueSpec, tensor: Tensor, free_axes: Mapping[int, str]) -> None:
    expected = [str(size) for size in spec.shape]
    if spec.layout is not None:
        expected[spec.layout.axis] = "samples"
    for axis, name in free_axes.items():
        expected[axis] = name
    told = f"[{', '.join(expected)}]"
    if tensor.dim() != len(spec.shape):
        raise BatchError(f"input {spec.name!r} has shape {list(tensor.shape)}; the model was captured with {told}")
    for axis, (size, given) in enumerate(zip(spec.shape, tensor.shape, strict=True)):
        is_sample_axis = spec.layout is not None and axis == spec.layout.axis
        if not is_sample_axis and axis not in free_axes and size != given:
            raise BatchError(
                f"input {spec.name!r} has shape {list(tensor.shape)}; the model was captured with {told}. Only the "
                "number of samples may vary, and sizes that are free in the capture: pad or crop the input, or capture "
                "the model again"
            )
    if tensor.dtype != spec.dtype:
        raise BatchError(f"input {spec.name!r} is {tensor.dtype}; the model was captured with {spec.dtype}")
