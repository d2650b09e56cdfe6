"""Names of units that a person finds in the model, the same in every process."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import fx

from graphpipe.capture.export import MODEL
from graphpipe.capture.keeping import leaf_of
from graphpipe.capture.leaves import ModuleLeaf
from graphpipe.capture.nodes import module_path, module_type, operator_name
from graphpipe.capture.training_graph import Attribute

# Modules of torch.nn that run several heavy operations, so their path alone does not tell which one is meant.
_COMPOSITE = ("MultiheadAttention", "Transformer", "container")


def unit_names(
    units: Sequence[Sequence[fx.Node]], heavy: Collection[fx.Node], attributes: Mapping[fx.Node, Attribute]
) -> list[str]:
    """Return a unique name for each unit: the path of the module of its heavy operations.

    Where a module of torch.nn has one operation, as a linear layer does, its path says which one is meant; elsewhere
    the name of the weight or of the operator is added. Repeated names get a number.
    """
    found: list[str] = []
    taken: set[str] = set()
    for nodes in units:
        name = _name([n for n in nodes if n in heavy] or list(nodes[:1]), attributes)
        unique, count = name, 1
        while unique in taken:
            count += 1
            unique = f"{name}#{count}"
        taken.add(unique)
        found.append(unique)
    return found


def _name(nodes: list[fx.Node], attributes: Mapping[fx.Node, Attribute]) -> str:
    first = nodes[0]
    if len(nodes) > 1:
        common = _common_path(nodes)
        if common:
            return common
    leaf = leaf_of(first)
    if isinstance(leaf, ModuleLeaf):
        return leaf.path
    path, kind = module_path(first, MODEL), module_type(first)
    if path and kind.startswith("torch.nn.modules") and not any(word in kind for word in _COMPOSITE):
        return path
    for read in first.all_input_nodes:
        weight = attributes[read].name if read in attributes else ""
        if weight.endswith("weight") and weight.startswith(path):
            return weight.removesuffix("weight").rstrip("._") or operator_name(first)
    return f"{path}.{operator_name(first)}" if path else operator_name(first)


def _common_path(nodes: list[fx.Node]) -> str:
    common: list[str] = []
    for parts in zip(*(module_path(node, MODEL).split(".") for node in nodes), strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common)


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
