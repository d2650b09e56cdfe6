"""What a model returns, as the tensors of a graph and what stands between them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from graphpipe.capture.batch import BatchLayout
from graphpipe.capture.evaluate import evaluate
from graphpipe.capture.export import MODEL, LossFunction, ModelWithLoss
from graphpipe.capture.sizes import size_expression
from graphpipe.errors import CaptureError, GraphPipeError

_NUMBERS: dict[type, type] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}


@dataclass(frozen=True)
class SizeNumber:
    """A number that a model makes from the sizes of its inputs.

    Attributes:
        expression: In the symbols of sizes.
        kind: ``int``, ``float`` or ``bool``.
    """

    expression: sympy.Basic
    kind: type

    def at(self, sizes: Mapping[sympy.Symbol, sympy.Integer]) -> Any:
        """Return the number for these sizes."""
        return self.kind(evaluate(self.expression, sizes))


class UnseenOutput:
    """In the place of an object that a model makes, whose tensors no graph has. Whatever reads it is told so.

    Args:
        name: Of the output.
        kind: Of the object.
    """

    def __init__(self, name: str, kind: str) -> None:
        self._told = (
            f"{name} is a {kind}, which hides its tensors, so a prediction does not have it; return them in a tuple, "
            "list or dict, or register the class with torch.utils._pytree.register_pytree_node"
        )

    def __repr__(self) -> str:
        return f"<{self._told}>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_told":
            raise AttributeError(name)
        raise GraphPipeError(self._told)

    def __getitem__(self, _: Any) -> Any:
        raise GraphPipeError(self._told)

    def __iter__(self) -> Any:
        raise GraphPipeError(self._told)

    def __len__(self) -> int:
        raise GraphPipeError(self._told)

    def __bool__(self) -> bool:
        return True


class OutputShape:
    """What a model returns, but for the tensors.

    Attributes:
        structure: None before the first call.
        constants: The entries that are no tensors, by position.
        sizes: The input and the axis of the size that each symbol stands for.
    """

    def __init__(self) -> None:
        self.structure: pytree.TreeSpec | None = None
        self.constants: dict[int, Any] = {}
        self.sizes: dict[sympy.Symbol, tuple[str, int]] = {}

    def filled(self, tensors: Sequence[Tensor], inputs: Mapping[str, Tensor]) -> Any:
        """Return an output with these tensors, and the numbers that follow from the sizes of the inputs."""
        assert self.structure is not None
        sizes = {symbol: sympy.Integer(inputs[name].shape[axis]) for symbol, (name, axis) in self.sizes.items()}
        between = {i: c.at(sizes) if isinstance(c, SizeNumber) else c for i, c in self.constants.items()}
        left = iter(tensors)
        leaves = [between[i] if i in between else next(left) for i in range(len(tensors) + len(between))]
        return pytree.tree_unflatten(leaves, self.structure)


class ModelOutputs(ModelWithLoss):
    """A model as a function from the flat tensors of a batch to those of its output, and a scalar before them.

    Args:
        model: The user's model.
        layout: The structure of its batches.
        loss_fn: Not called; with one, the batch may have entries that the model does not take.
        shape: Hears of the output's structure. Export undoes what a call leaves in a module.
    """

    def __init__(self, model: nn.Module, layout: BatchLayout, loss_fn: LossFunction | None, shape: OutputShape) -> None:
        super().__init__(model, layout, loss_fn)
        self._shape = shape

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        """Return a scalar that depends on the first tensor of the output, and copies of all of its tensors."""
        output, _ = self._call(tensors)
        leaves, self._shape.structure = pytree.tree_flatten(output)
        found = [leaf.clone() for leaf in leaves if isinstance(leaf, Tensor)]
        if not found:
            raise CaptureError(f"{type(getattr(self, MODEL)).__name__} returns no tensor; there is nothing to predict")
        self._shape.sizes = sizes = {
            size_expression(size): (name, axis)
            for name, tensor in zip(self._layout.inputs, tensors, strict=True)
            for axis, size in enumerate(tensor.shape)
            if size_expression(size).is_Symbol
        }
        names = _leaf_names(output)
        self._shape.constants = {
            i: _between(names[i], leaf, sizes) for i, leaf in enumerate(leaves) if not isinstance(leaf, Tensor)
        }
        return found[0].abs().to(torch.float32).sum(), *found


def _between(name: str, leaf: Any, sizes: Mapping[sympy.Symbol, Any]) -> Any:
    """Return what gives an entry that is no tensor for every batch.

    Raises:
        CaptureError: It depends on the values of tensors, or is text with a size in it.
    """
    if type(leaf) in _NUMBERS:
        expression = size_expression(leaf)
        if not expression.free_symbols <= sizes.keys():
            raise CaptureError(f"{name} is a number made from the values of tensors; return the tensor instead of it")
        return SizeNumber(expression, _NUMBERS[type(leaf)])
    if isinstance(leaf, str):
        if any(re.search(rf"\b{symbol}\b", leaf) for symbol in sizes):
            raise CaptureError(
                f"{name} is text with a size of the batch in it, which differs from batch to batch; return the number"
            )
        return leaf
    return UnseenOutput(name, type(leaf).__name__) if _hides_tensors(leaf) else leaf


def _hides_tensors(leaf: Any) -> bool:
    """Whether an object holds a tensor or symbolic number, however deep."""
    seen: set[int] = set()
    waiting = [leaf]
    while waiting:
        thing = waiting.pop()
        if isinstance(thing, Tensor | torch.SymInt | torch.SymFloat | torch.SymBool):
            return True
        if id(thing) in seen or isinstance(thing, type):
            continue
        seen.add(id(thing))
        if isinstance(thing, Mapping):
            waiting += thing.values()
        elif isinstance(thing, list | tuple | set | frozenset):
            waiting += thing
        slots = [name for cls in type(thing).__mro__ for name in getattr(cls, "__slots__", ())]
        waiting += [getattr(thing, name) for name in slots if hasattr(thing, name)]
        waiting += vars(thing).values() if hasattr(thing, "__dict__") else ()
    return False


def _leaf_names(output: Any) -> list[str]:
    """Return each entry of an output as one writes it."""
    try:
        return [f"output{pytree.keystr(path)}" for path, _ in pytree.tree_flatten_with_path(output)[0]]
    except ValueError:  # a class that does not tell how its entries are reached
        if isinstance(output, Mapping):
            return [f"output[{key!r}]" for key, value in output.items() for _ in pytree.tree_leaves(value)]
        return [f"entry {i} of the output" for i in range(len(pytree.tree_leaves(output)))]
