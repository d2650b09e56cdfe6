"""Operations that each stage repeats for itself, instead of receiving their results.

Masks, positions, shifted labels and casts follow from the model's inputs alone, position tables and temperatures from
small parameters alone. They cost less to compute than to send, and without them no integer or boolean tensor passes
between stages.
"""

from __future__ import annotations

from torch import fx
from torch.utils import _pytree as pytree

from graphpipe.capture.accounting import Accounting
from graphpipe.capture.classes import Kind
from graphpipe.capture.classification import Classification
from graphpipe.capture.grouping import Groups
from graphpipe.capture.nodes import inputs_of, is_heavy, is_random, operator_name, storages, written_by
from graphpipe.capture.training_graph import AttributeKind, TrainingGraph

# The share of the model's operations that a matrix product may cost and still be repeated, such as rotary tables.
_LIGHT_SHARE = 0.01


def is_light(node: fx.Node, classification: Classification, accounting: Accounting) -> bool:
    """Return whether an operation is too small to be placed by itself."""
    if not is_heavy(node):
        return True
    independent = all(leaf.kind is Kind.INDEPENDENT for leaf in pytree.tree_leaves(classification.classes[node]))
    if operator_name(node) == "embedding":
        return independent  # a table of positions, looked up at constants
    total = sum(costs.forward_flops for costs in accounting.costs.values())
    is_trained = node in accounting.requires_grad
    return independent and not is_trained and accounting.costs[node].forward_flops <= _LIGHT_SHARE * total


def repeated_operations(
    graph: TrainingGraph, classification: Classification, accounting: Accounting, groups: Groups
) -> frozenset[fx.Node]:
    """Return the operations that each stage repeats for itself.

    They are light, not wanted themselves, the same each time, read nothing but inputs, tensors of the model and each
    other, treat samples one by one, and read parameters only if they don't depend on the batch. Operations that belong
    together are repeated together or not at all.

    Args:
        graph: The training graph.
        classification: How its tensors depend on the samples.
        accounting: Its costs.
        groups: The operations that belong together.
    """
    written = graph.written_storages
    own = {s for node in (*graph.attributes, *graph.inputs.values()) for s in storages(node)}

    def qualifies(node: fx.Node) -> bool:
        if node is graph.loss or node in graph.outputs or node in classification.batch_wise or is_random(node):
            return False
        if any(storages(w) & own for w in written_by(node)) or not is_light(node, classification, accounting):
            return False
        leaves = pytree.tree_leaves(classification.classes[node])
        if all(leaf.kind is Kind.INDEPENDENT for leaf in leaves):
            return True
        reads_parameter = any(
            r in graph.attributes and graph.attributes[r].kind is AttributeKind.PARAMETER for r in inputs_of(node)
        )
        return not reads_parameter and node not in accounting.requires_grad

    def reads_sources(node: fx.Node, found: set[fx.Node]) -> bool:
        for read in inputs_of(node):
            if read in graph.attributes and storages(read) & written:
                return False
            if read.op == "call_function" and read not in found:
                return False
        return True

    found: set[fx.Node] = set()
    candidates = [members for members in groups.members() if all(qualifies(node) for node in members)]
    changed = True
    while changed:
        changed = False
        for members in candidates:
            if members[0] in found:
                continue
            together = found | set(members)
            if all(reads_sources(node, together) for node in members):
                found |= set(members)
                changed = True
    return frozenset(found)
