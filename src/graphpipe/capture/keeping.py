"""Leaves as operations of a graph, and the choice of the modules that become one.

A leaf is a call of ``graphpipe::leaf``, which tracers record as it is and autograd sees through.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from graphpipe.capture.leaf_sizes import LeafSizes
from graphpipe.capture.leaves import FunctionLeaf, Leaf, ModuleLeaf, Structure, UntraceableModuleError

_library = torch.library.Library("graphpipe", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("leaf(Tensor[] tensors, SymInt[] sizes, int number) -> Tensor[]")  # type: ignore[no-untyped-call]

_HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip

_leaves: weakref.WeakValueDictionary[int, Leaf] = weakref.WeakValueDictionary()
_sizes: weakref.WeakKeyDictionary[ModuleLeaf, LeafSizes] = weakref.WeakKeyDictionary()
_numbers = itertools.count()
_depth = 0


def is_inside_leaf() -> bool:
    """Return whether the code of a leaf runs at the moment."""
    return _depth > 0


@torch.library.impl(_library, "leaf", "CompositeImplicitAutograd")
def _run(tensors: list[Tensor], sizes: list[Any], number: int) -> list[Tensor]:
    leaf = _leaves[number]
    held = leaf.own_tensors if isinstance(leaf, ModuleLeaf) else []
    try:
        return run_leaf(leaf, tensors, sizes)
    finally:
        if isinstance(leaf, ModuleLeaf):
            leaf.hold(held)


def run_leaf(leaf: Leaf, tensors: Sequence[Tensor], sizes: Sequence[Any]) -> list[Tensor]:
    """Run a leaf; one that needs values gives tensors of the right shapes where there are none."""
    global _depth  # noqa: PLW0603
    _depth += 1
    try:
        is_fake = any(isinstance(tensor, FakeTensor) for tensor in tensors)
        if is_fake and isinstance(leaf, ModuleLeaf) and not leaf.is_traceable:
            if leaf not in _sizes:
                _sizes[leaf] = LeafSizes(leaf, tensors)
            return _sizes[leaf].made_from(tensors)
        return leaf.run(tensors, sizes)
    finally:
        _depth -= 1


def leaf_of(node: fx.Node) -> Leaf | None:
    """Return the leaf that a node runs, None for another operation."""
    if node.target is not torch.ops.graphpipe.leaf.default:
        return None
    number = node.args[2]
    assert isinstance(number, int)
    return _leaves[number]


def untraceable_costs(node: fx.Node, num_samples: int) -> tuple[float, float, float] | None:
    """Return the saved bytes, forward and backward operations of a module that ran on random tensors; else None."""
    leaf = leaf_of(node)
    if not isinstance(leaf, ModuleLeaf) or leaf not in _sizes:
        return None
    return _sizes[leaf].costs(num_samples)


def own_arguments(node: fx.Node, leaf: ModuleLeaf) -> list[fx.Node]:
    """Return the parameters and buffers among the arguments of a module that is kept whole."""
    tensors = node.args[0]
    assert isinstance(tensors, list | tuple)
    return list(tensors[len(tensors) - leaf.num_own :])


def buffers_of(node: fx.Node) -> list[fx.Node]:
    """Return the buffers among the arguments of a module that is kept whole."""
    leaf = leaf_of(node)
    if not isinstance(leaf, ModuleLeaf):
        return []
    own = own_arguments(node, leaf)
    return [tensor for tensor, is_buffer in zip(own, leaf.is_buffer, strict=True) if is_buffer]


@contextlib.contextmanager
def leaves_made(
    model: nn.Module, kept_whole: Mapping[str, bool], free_examples: frozenset[int]
) -> Iterator[list[Leaf]]:
    """Let custom autograd functions and some modules become leaves while a model is exported in the block.

    Args:
        model: The model.
        kept_whole: The paths of the modules; for each, whether it can run on tensors without values.
        free_examples: The values, in the example batch, of the sizes that are free besides the number of samples.

    Yields:
        The leaves that were made, which the graph does not keep alive.
    """
    made: list[Leaf] = []
    apply_method = torch.autograd.Function.__dict__["apply"]

    def make(leaf: Leaf, tensors: list[Tensor], sizes: list[Any]) -> Any:
        number = next(_numbers)
        _leaves[number] = leaf
        made.append(leaf)
        results = torch.ops.graphpipe.leaf(tensors, sizes, number)
        assert leaf.made is not None
        return leaf.made.fill(results, [])

    def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        if is_inside_leaf() or cls.__module__.split(".")[0] == "torch" or kwargs:
            return apply_method.__func__(cls, *args, **kwargs)
        given, tensors, sizes = Structure.of(args)
        return make(FunctionLeaf(given, cls, apply_method.__func__), tensors, sizes)

    def forward_of(module: nn.Module, path: str, *, is_traceable: bool) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            given, tensors, sizes = Structure.of((args, kwargs))
            leaf = ModuleLeaf(given, path, module, is_traceable=is_traceable, free_examples=free_examples)
            # What the module's hooks do is done by the leaf.
            leaf.take_hooks(hooks[path])
            return make(leaf, [*tensors, *leaf.own_tensors], sizes)

        return forward

    hooks: dict[str, dict[str, Any]] = {}
    forwards: dict[str, Any] = {}
    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment,method-assign]
    try:
        for path, is_traceable in kept_whole.items():
            module = model.get_submodule(path)
            forwards[path] = vars(module).get("forward")
            hooks[path] = {name: vars(module)[name] for name in _HOOKS}
            vars(module).update({name: type(found)() for name, found in hooks[path].items()})
            vars(module)["forward"] = forward_of(module, path, is_traceable=is_traceable)
        yield made
    finally:
        torch.autograd.Function.apply = apply_method  # type: ignore[method-assign]
        for path, found in hooks.items():
            module = model.get_submodule(path)
            vars(module).pop("forward", None)
            vars(module).update(found)
            if forwards.get(path) is not None:
                vars(module)["forward"] = forwards[path]


def next_kept(model: nn.Module, kept_whole: Mapping[str, bool], needed: UntraceableModuleError) -> dict[str, bool]:
    """Return the modules to keep whole after one more could not be followed.

    That one, or the module around it if keeping it whole did not help.

    Raises:
        UntraceableModuleError: Only the model as a whole is left.
    """
    path, is_traceable = needed.path, needed.is_traceable
    for kept in kept_whole:
        if path == kept or path.startswith(kept + "."):
            # It may have been run without values, which it turns out to need.
            path = kept if kept_whole[kept] and not is_traceable else kept.rpartition(".")[0]
            is_traceable = False
    while path and type(model.get_submodule(path)).forward is nn.Module.forward:  # a list of modules has none
        path = path.rpartition(".")[0]
    if not path:
        raise needed
    found = {kept: t for kept, t in kept_whole.items() if not kept.startswith(path + ".")}
    return {**found, path: is_traceable}


def innermost_module(model: nn.Module, frames: Sequence[Any]) -> str:
    """Return the path of the innermost module of a model among frames, outermost frame first; empty for the model."""
    paths = {id(module): path for path, module in model.named_modules()}
    for frame in reversed(frames):
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and id(module) in paths:
            return str(paths[id(module)])
    return ""
