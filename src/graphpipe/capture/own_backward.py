"""Custom functions, whose gradients need not follow from their results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from graphpipe.capture.classes import Kind, SampleClass
from graphpipe.capture.nodes import inputs_of
from graphpipe.capture.probe_values import ProbeValues
from graphpipe.capture.trial import NUM_SAMPLES, PARTS, is_equal


def treats_samples_alike(
    node: fx.Node, found: Sequence[SampleClass], values: ProbeValues, classes: Mapping[fx.Node, Any]
) -> bool:
    """Return whether the gradients of a custom function's arguments are those of the parts, as its results are.

    Args:
        node: The call of the function.
        found: The class of each of its results.
        values: Of the trial batch.
        classes: Of what it reads.
    """
    if any(f.kind not in (Kind.PER_SAMPLE, Kind.INDEPENDENT) for f in found):
        return False
    results = pytree.tree_leaves(values[node])
    seeds = [torch.rand_like(leaf) if leaf.is_floating_point() else leaf for leaf in results]
    spans = ((0, NUM_SAMPLES), *PARTS)
    gradients = []
    trained = [r for r in inputs_of(node) if isinstance(values[r], Tensor) and values[r].is_floating_point()]
    for span in spans:
        own = {read: _rows_of(values[read], classes[read], span).detach().requires_grad_() for read in trained}
        rest = {read: _rows_of(values[read], classes[read], span) for read in inputs_of(node) if read not in own}
        with torch.enable_grad():
            made = pytree.tree_leaves(values.run(node, {**rest, **own}, span[1] - span[0]))
        given = [_rows_of(seed, f, span) for f, seed in zip(found, seeds, strict=True)]
        pairs = [(m, g) for m, g in zip(made, given, strict=True) if m.requires_grad]
        if not pairs:
            return True
        roots, cotangents = zip(*pairs, strict=True)
        gradients.append(torch.autograd.grad(roots, list(own.values()), cotangents, allow_unused=True))
    for read, full, *parts in zip(trained, *gradients, strict=True):
        if full is None or any(p is None for p in parts):
            if (full is None) != all(p is None for p in parts):
                return False
            continue
        kind = classes[read]
        if kind.kind is Kind.INDEPENDENT:
            if not is_equal(parts[0] + parts[1], full):
                return False
        elif not all(is_equal(kind.part(full, *span, NUM_SAMPLES), p) for span, p in zip(PARTS, parts, strict=True)):
            return False
    return True


def _rows_of(value: Any, found: Any, span: tuple[int, int]) -> Any:
    if isinstance(value, Tensor) and found.kind is Kind.PER_SAMPLE:
        return found.part(value, *span, NUM_SAMPLES)
    return value
