"""Names of units that a person finds in the model, the same in every process."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import fx

from graphpipe.capture.export import MODEL
from graphpipe.capture.nodes import module_path, module_type, operator_name

# Modules of torch.nn that run several heavy operations, so their path alone does not tell which one is meant.
_COMPOSITE = ("MultiheadAttention", "Transformer", "container")


def unit_names(units: Sequence[Sequence[fx.Node]], heavy: Collection[fx.Node]) -> list[str]:
    """Return a unique name for each unit: the module path of its first heavy operation, with the operator's name.

    The operator is left out where the path says it, as for a linear layer of torch.nn. Repeated names get a number.
    """
    found: list[str] = []
    taken: set[str] = set()
    for nodes in units:
        name = _name([n for n in nodes if n in heavy] or list(nodes))
        unique, count = name, 1
        while unique in taken:
            count += 1
            unique = f"{name}#{count}"
        taken.add(unique)
        found.append(unique)
    return found


def _name(nodes: list[fx.Node]) -> str:
    path, kind = module_path(nodes[0], MODEL), module_type(nodes[0])
    if path and kind.startswith("torch.nn.modules") and not any(word in kind for word in _COMPOSITE):
        return path
    return f"{path}.{operator_name(nodes[0])}" if path else operator_name(nodes[0])


def place_of(nodes: Sequence[fx.Node], heavy: Collection[fx.Node]) -> str:
    """Return the path of the module that a person would look for: the first heavy operation's block, or its own."""
    first = next((node for node in nodes if node in heavy), nodes[0])
    return block_of(first) or module_path(first, MODEL)


def block_of(node: fx.Node) -> str:
    """Return the path up to the last entry of a list of modules, such as ``encoder.layers.3``; empty without one."""
    parts = module_path(node, MODEL).split(".")
    for i in range(len(parts) - 1, -1, -1):
        if parts[i].isdigit() and i < len(parts) - 1:
            return ".".join(parts[: i + 1])
    return ""
