"""Rows that leave the order of the samples and come back to it, as tokens do that are sorted by their expert.

A mixture of experts sorts the tokens of a batch, multiplies those of each expert by its matrix, and puts them back.
Each operation by itself mixes samples; all of them together do not. So from the sort on, the parts of a batch are
followed by themselves, as mixed values, until rows are those of the whole batch again. If all that reads mixed values
ends so, the operations between form one unit that treats samples one by one.

A test with numbers could miss what happens for other numbers only, such as tokens that are dropped once an expert has
enough of them. Therefore mixed integers may only be used to move rows, and nothing may be compared.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from graphpipe.capture.classes import Kind
from graphpipe.capture.nodes import inputs_of, is_grouped_product, operator_name, tensors_of, value_of
from graphpipe.capture.training_graph import TrainingGraph

_SORTS = ("sort", "argsort")
_MOVES = frozenset({
    *_SORTS, "index", "index_select", "gather", "index_put_", "index_put", "scatter_", "scatter", "histc", "bincount",
    "cumsum", "floor_divide", "getitem", "to", "_to_copy", "view", "reshape", "flatten", "unsqueeze", "squeeze",
    "slice", "select", "clone", "contiguous", "empty_like", "zeros_like", "arange", "alias", "expand",
})  # fmt: skip


def starts_mixing(node: fx.Node) -> bool:
    """Return whether an operation sorts integers, such as the experts of tokens."""
    read = next(inputs_of(node), None)
    if operator_name(node) not in _SORTS or read is None:
        return False
    return isinstance(value_of(read), Tensor) and not value_of(read).is_floating_point()


def lasting_mixtures(
    graph: TrainingGraph, classes: Mapping[fx.Node, Any], batch_wise: Collection[fx.Node]
) -> set[fx.Node]:
    """Return the operations that start mixing samples and whose mixed rows do not all come back in order.

    Args:
        graph: The training graph.
        classes: Of its operations.
        batch_wise: The operations that need the whole mini-batch.
    """
    mixed = {node for node in graph.operations if any(k is Kind.MIXED for k in _kinds(classes[node]))}
    neighbours: defaultdict[fx.Node, set[fx.Node]] = defaultdict(set)
    failing: list[fx.Node] = []
    for node in graph.operations:
        reads = [read for read in inputs_of(node) if read in mixed]
        for read in reads:
            neighbours[read].add(node)
            neighbours[node].add(read)
        is_whole = (reads or node in mixed) and node in batch_wise
        is_mixed_loss = node is graph.loss and node in mixed
        if is_whole or is_mixed_loss or (reads and not _only_moves(node, reads)):
            failing.append(node)
    reached: set[fx.Node] = set()
    while failing:
        node = failing.pop()
        if node not in reached:
            reached.add(node)
            failing += neighbours[node]
    return {node for node in reached if node in mixed and starts_mixing(node)}


def grouped_product(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Return the product of each group of rows with its matrix, in any dtype.

    Args:
        rows: ``[rows, inner]``, group by group.
        matrices: ``[groups, inner, outer]``.
        ends: ``[groups]`` the row at which each group ends.
    """
    found = rows.new_zeros(rows.shape[0], matrices.shape[2])
    start = 0
    for i, end in enumerate(ends.tolist()):
        found[start:end] = rows[start:end] @ matrices[i]
        start = end
    return found


def is_product_of_rows(node: fx.Node) -> bool:
    """Return whether a grouped product has rows in groups, and a matrix for each."""
    reads = list(inputs_of(node))
    dims = [value_of(read).dim() for read in reads if isinstance(value_of(read), Tensor)]
    return is_grouped_product(node) and dims == [2, 3, 1]


def _only_moves(node: fx.Node, reads: list[fx.Node]) -> bool:
    if any(tensor.dtype is torch.bool for tensor in tensors_of(node)):
        return False
    if is_grouped_product(node):
        return True
    reads_integers = any(not tensor.is_floating_point() for read in reads for tensor in tensors_of(read))
    return not reads_integers or operator_name(node) in _MOVES


def _kinds(classes: Any) -> list[Kind]:
    return [leaf.kind for leaf in pytree.tree_leaves(classes)]
