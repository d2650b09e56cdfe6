"""Python code that is kept as it is, as one operation of a graph: custom autograd functions, and modules kept whole.

An exported graph holds tensor operations of the forward pass only. Code that runs in backward, or that branches on the
values of tensors, has no place in it. So it becomes a leaf, which runs the original Python; autograd sees through it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from graphpipe.errors import CaptureError


class UntraceableModuleError(CaptureError):
    """A module cannot be followed inside.

    Attributes:
        path: Its path; empty if it is the model itself, which cannot be kept whole.
        is_traceable: Whether it can run on tensors without values.
    """

    def __init__(self, message: str, path: str, *, is_traceable: bool = False) -> None:
        super().__init__(message)
        self.path = path
        self.is_traceable = is_traceable


class _Place(Enum):
    """Where a tensor or a size goes among arguments or results."""

    TENSOR = "tensor"
    SIZE = "size"


@dataclass(frozen=True, eq=False)
class Structure:
    """Nested arguments or results, with places for their tensors and sizes."""

    leaves: tuple[Any, ...]
    tree: pytree.TreeSpec

    @classmethod
    def of(cls, value: Any) -> tuple[Structure, list[Tensor], list[Any]]:
        """Return the structure of a value, its tensors and its sizes."""
        leaves, tree = pytree.tree_flatten(value)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        sizes = [leaf for leaf in leaves if isinstance(leaf, torch.SymInt)]
        places = [
            _Place.TENSOR if isinstance(leaf, Tensor) else _Place.SIZE if isinstance(leaf, torch.SymInt) else leaf
            for leaf in leaves
        ]
        return cls(tuple(places), tree), tensors, sizes

    def fill(self, tensors: Sequence[Tensor], sizes: Sequence[Any]) -> Any:
        """Return the value with these tensors and sizes."""
        left, numbers = iter(tensors), iter(sizes)
        leaves = [next(left) if x is _Place.TENSOR else next(numbers) if x is _Place.SIZE else x for x in self.leaves]
        return pytree.tree_unflatten(leaves, self.tree)


class Leaf(ABC):
    """Python code as an operation from tensors and sizes to tensors.

    Attributes:
        given: The structure of its arguments.
        made: The structure of its result, known once it has run.
    """

    def __init__(self, given: Structure) -> None:
        self.given = given
        self.made: Structure | None = None

    @abstractmethod
    def run(self, tensors: Sequence[Tensor], sizes: Sequence[Any]) -> list[Tensor]:
        """Return the tensors of the result."""

    def _results(self, value: Any) -> list[Tensor]:
        self.made, tensors, sizes = Structure.of(value)
        if sizes:
            raise CaptureError(f"{self} gives a size that depends on the batch; let it give tensors only")
        return tensors


class FunctionLeaf(Leaf):
    """A call of a custom autograd function."""

    def __init__(self, given: Structure, function: type[torch.autograd.Function], apply: Callable[..., Any]) -> None:
        super().__init__(given)
        self.function = function
        self._apply = apply

    def __str__(self) -> str:
        return f"the torch.autograd.Function {self.function.__qualname__!r}"

    def run(self, tensors: Sequence[Tensor], sizes: Sequence[Any]) -> list[Tensor]:
        """Return the tensors of the result."""
        return self._results(self._apply(self.function, *self.given.fill(tensors, sizes)))


class ModuleLeaf(Leaf):
    """A call of a module, whose parameters and buffers are among the tensors, after its arguments.

    Args:
        given: The structure of its positional and named arguments.
        path: Of the module.
        module: The module; a copy of its tree is run, which holds whatever tensors it is given.
        is_traceable: Whether it can run on tensors without values.
        free_examples: The values, in the example batch, of the sizes that are free besides the number of samples.
    """

    def __init__(
        self,
        given: Structure,
        path: str,
        module: nn.Module,
        *,
        is_traceable: bool,
        free_examples: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__(given)
        self.path = path
        self.free_examples = free_examples
        self.is_traceable = is_traceable
        self._hold(_copy_tree(module, {}))

    def _hold(self, body: nn.Module) -> None:
        self._body = body
        self._modes = [(part, part.training) for part in body.modules()]
        self._slots, self._first = _slots(body)

    def copy(self) -> ModuleLeaf:
        """Return a leaf with a module tree of its own, for other tensors."""
        return ModuleLeaf(
            self.given, self.path, self._body, is_traceable=self.is_traceable, free_examples=self.free_examples
        )

    def hold(self, tensors: Sequence[Tensor]) -> None:
        """Put these tensors in the places of its own."""
        for holder, key, i in self._slots:
            holder[key] = tensors[i]

    def take_hooks(self, hooks: Mapping[str, Any]) -> None:
        """Let the module have these hooks, by the names of torch's attributes for them."""
        vars(self._body).update(hooks)

    def __str__(self) -> str:
        return f"module {self.path!r}"

    @property
    def num_own(self) -> int:
        """The parameters and buffers."""
        return len(self._first)

    @property
    def own_tensors(self) -> list[Tensor]:
        """The parameters and buffers that the module holds."""
        return [holder[key] for holder, key in self._first]

    @property
    def is_buffer(self) -> list[bool]:
        """For each of its own tensors, whether it is a buffer."""
        buffers = [id(part._buffers) for part in self._body.modules()]
        return [id(holder) in buffers for holder, _ in self._first]

    def run(self, tensors: Sequence[Tensor], sizes: Sequence[Any]) -> list[Tensor]:
        """Return the tensors of the result; buffers are updated in place."""
        count = len(tensors) - len(self._first)
        own = tensors[count:]
        self.hold(own)
        for part, mode in self._modes:
            part.training = mode
        args, kwargs = self.given.fill(tensors[:count], sizes)
        versions = [tensor._version for tensor in tensors[:count]]
        result = self._body(*args, **kwargs)
        if versions != [tensor._version for tensor in tensors[:count]]:
            raise CaptureError(f"{self} modifies its input in place and is kept whole; let it work on a copy")
        for holder, key, i in self._slots:
            if holder[key] is not own[i]:  # the forward pass has put another tensor there
                with torch.no_grad():
                    own[i].copy_(holder[key])
                holder[key] = own[i]
        return self._results(result)


def _copy_tree(module: nn.Module, known: dict[int, nn.Module]) -> nn.Module:
    """Return a copy of a module and its submodules that shares everything else, hooks and tensors included."""
    if id(module) not in known:
        copied = object.__new__(type(module))
        known[id(module)] = copied
        copied.__dict__.update(module.__dict__)
        copied.__dict__.pop("forward", None)
        copied.__dict__["_parameters"] = dict(module._parameters)
        copied.__dict__["_buffers"] = dict(module._buffers)
        copied.__dict__["_modules"] = {
            name: None if part is None else _copy_tree(part, known) for name, part in module._modules.items()
        }
    return known[id(module)]


def _slots(module: nn.Module) -> tuple[list[tuple[dict[str, Any], str, int]], list[tuple[dict[str, Any], str]]]:
    """Every place of a tensor in a tree with the tensor's number, and the first place of each."""
    numbers: dict[int, int] = {}
    slots: list[tuple[dict[str, Any], str, int]] = []
    first: list[tuple[dict[str, Any], str]] = []
    for part in module.modules():
        holders: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
        for holder in holders:
            for key, tensor in holder.items():
                if tensor is None:
                    continue
                if id(tensor) not in numbers:
                    numbers[id(tensor)] = len(first)
                    first.append((holder, key))
                slots.append((holder, key, numbers[id(tensor)]))
    return slots, first
