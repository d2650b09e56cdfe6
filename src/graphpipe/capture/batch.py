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

    The number of samples of a batch is the most common size of axis 0 among its tensors, of equally common ones the
    first; a tensor of another size along axis 0, or without axes, is taken not to depend on the batch.

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
        cls, example_batch: Any, positional_names: Sequence[str], free: Mapping[str, Mapping[int, str]]
    ) -> BatchLayout:
        """Return the layout of an example batch.

        Args:
            example_batch: The batch.
            positional_names: The names of the arguments when the batch is positional.
            free: The names of the sizes that may differ from batch to batch, by axis, for inputs or entries.

        Raises:
            CaptureError: The batch has no tensor, fewer than 2 samples, or a tensor that needs a gradient.
        """
        is_positional = not isinstance(example_batch, Mapping)
        named = _flatten(example_batch, positional_names)
        tensors = {name: leaf for name, leaf in named.leaves if isinstance(leaf, Tensor)}
        free_axes = _free_axes(tensors, free)
        sizes = Counter(t.shape[0] for n, t in tensors.items() if t.dim() and 0 not in free_axes.get(n, {}))
        if not sizes:
            raise CaptureError("the example batch has no tensor with a sample axis; pass a batch of at least 2 samples")
        num_samples = sizes.most_common(1)[0][0]
        if num_samples < 2:
            raise CaptureError(
                f"the example batch has {num_samples} sample; pass at least 2, because a size of 1 along axis 0 cannot "
                "be told from a fixed dimension"
            )
        inputs = {}
        for name, tensor in tensors.items():
            if tensor.requires_grad:
                raise CaptureError(f"input {name!r} of the example batch needs a gradient; detach it")
            own = free_axes.get(name, {})
            holds_samples = tensor.dim() > 0 and tensor.shape[0] == num_samples and 0 not in own
            shape = (1, *tensor.shape[1:]) if holds_samples else tuple(tensor.shape)
            named_sizes = tuple(sympy.Symbol(own[i]) if i in own else sympy.Integer(s) for i, s in enumerate(shape))
            layout = SampleLayout(0, 1) if holds_samples else None
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
        held = [name for name, spec in self.inputs.items() if spec.layout is not None and name in tensors]
        counts = {name: tensors[name].shape[0] for name in held}
        if len(set(counts.values())) > 1:
            first = next(iter(counts))
            other = next(name for name in counts if counts[name] != counts[first])
            raise BatchError(
                f"input {first!r} has {counts[first]} samples and input {other!r} has {counts[other]}; "
                "all inputs of a batch need the same number"
            )
        return next(iter(counts.values()), 0)

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
                raise BatchError(f"the batch has no input `{name}`{_hint(name, unknown, 'it has')}")
        for name in given:
            if name not in self._names:
                raise BatchError(f"the model has no input `{name}`{_hint(name, self._names, 'did you mean')}")


def resize(layout: BatchLayout, tensors: Mapping[str, Tensor], num_samples: int) -> dict[str, Tensor]:
    """Return a flat batch of `num_samples` samples: those of `tensors`, repeated or cut as needed."""
    found = {}
    for name, tensor in tensors.items():
        if layout.inputs[name].layout is None:
            found[name] = tensor
        else:
            found[name] = tensor[torch.arange(num_samples, device=tensor.device) % tensor.shape[0]]
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
        names = [name for name in tensors if name == key or name.startswith(key + ".")]
        if not names:
            raise CaptureError(
                f"there is no input `{key}`, whose size is to be free{_hint(key, tensors, 'did you mean')}"
            )
        for name in names:
            for axis, size_name in axes.items():
                if not 0 <= axis < tensors[name].dim():
                    raise CaptureError(f"input {name!r} has {tensors[name].dim()} axes; axis {axis} cannot be free")
                if not size_name.isidentifier() or size_name == "batch":
                    raise CaptureError(f"a size cannot be called {size_name!r}; use another word")
                found.setdefault(name, {})[axis] = size_name
    return found


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
