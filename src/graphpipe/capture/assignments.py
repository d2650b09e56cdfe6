"""Buffers that a forward pass replaces, as in ``self.average = 0.9 * self.average + ...``.

Export drops such an assignment in every module but the outermost. So it is recorded as an operation of its own, which
becomes a copy into the buffer at the end of the graph: until then, what was read of the buffer keeps its value.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn

from graphpipe.capture.keeping import is_inside_leaf

_library = torch.library.Library("graphpipe", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("assign(Tensor(a!) buffer, Tensor value) -> ()")  # type: ignore[no-untyped-call]


@torch.library.impl(_library, "assign", "CompositeImplicitAutograd")
def _assign(_: Tensor, __: Tensor) -> None:
    pass


@contextlib.contextmanager
def assignments_recorded(model: nn.Module) -> Iterator[None]:
    """Record assignments to buffers of a model in the block."""
    modules = {id(module) for module in model.modules()}
    set_attribute = nn.Module.__setattr__

    def assign(self: nn.Module, name: str, value: Any) -> None:
        buffer = vars(self).get("_buffers", {}).get(name)
        is_new = isinstance(value, Tensor) and isinstance(buffer, Tensor) and value is not buffer
        if is_new and id(self) in modules and not is_inside_leaf():
            torch.ops.graphpipe.assign(buffer, value)
        set_attribute(self, name, value)

    nn.Module.__setattr__ = assign  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__setattr__ = set_attribute  # type: ignore[method-assign]


def assign_at_the_end(graph: fx.Graph) -> None:
    """Turn the recorded assignments of a graph into copies at its end."""
    last: dict[fx.Node, fx.Node] = {}
    replaced: dict[fx.Node, fx.Node] = {}
    output = next(node for node in graph.nodes if node.op == "output")
    for node in [n for n in graph.nodes if n.target is torch.ops.graphpipe.assign.default]:
        buffer, value = node.args
        # A second assignment replaces what the first one put there.
        last[_origin(buffer, replaced)] = value
        replaced[value] = _origin(buffer, replaced)
        graph.erase_node(node)
    for buffer, value in last.items():
        first = next(node for node in graph.nodes if node.op == "call_function")
        readers = list(buffer.users)
        with graph.inserting_before(first):
            read = graph.call_function(torch.ops.aten.clone.default, (buffer,))
            read.meta = {**buffer.meta, "val": torch.empty_like(buffer.meta["val"])}
        for reader in readers:
            reader.replace_input_with(buffer, read)
        with graph.inserting_before(output):
            detached = graph.call_function(torch.ops.aten.detach.default, (read if value is buffer else value,))
            detached.meta = dict(value.meta)
            copied = graph.call_function(torch.ops.aten.copy_.default, (buffer, detached))
            copied.meta = {**value.meta, "val": buffer.meta["val"]}


def _origin(node: fx.Node, replaced: dict[fx.Node, fx.Node]) -> fx.Node:
    return replaced.get(node, node)
