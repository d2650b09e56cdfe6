"""The shape of a model for a terminal: a tree of branches, with their share of the work."""

from __future__ import annotations

from collections.abc import Iterator

from graphpipe.estimate import format_bytes
from graphpipe.graph import ComputationGraph
from graphpipe.report.outline import Part, PartKind, knots, longest_path_share, num_branches, outline
from graphpipe.report.units import format_number, format_share


def outline_text(graph: ComputationGraph, *, every_operator: bool = False) -> str:
    """Return a line about a model and the tree of its parts.

    Args:
        graph: The model.
        every_operator: Give each operator a line of its own.
    """
    root = outline(graph, every_operator=every_operator)
    return "\n".join((f"{graph.name}: {summary(graph, root)}", "", *_tree(root, "", "")))


def summary(graph: ComputationGraph, root: Part) -> str:
    """Return the size of a model and what its branches are worth."""
    flops = sum(o.forward_flops + o.backward_flops for o in graph.operators)
    found = [
        counted(len(graph.operators), "operator"),
        f"{format_bytes(root.parameter_bytes)} of parameters",
        f"{format_number(flops / 1e9)} GFLOP a sample",
        f"{counted(num_branches(root), 'branch', 'branches')} side by side",
        counted(len(knots(root)), "knot"),
        f"{format_share(longest_path_share(graph))} of the work on the longest path",
    ]
    return ", ".join(found)


def counted(number: int, singular: str, plural: str | None = None) -> str:
    """Return a number of things, such as ``1 knot``."""
    return f"{number} {singular if number == 1 else plural or singular + 's'}"


def facts(part: Part) -> str:
    """Return the size of a part, and whether it mixes samples."""
    mixes = ", mixes samples" if part.is_batch_wise and not part.children else ""
    return f"{counted(len(part.operators), 'operator')}, {format_bytes(part.parameter_bytes)}{mixes}"


def title(part: Part) -> str:
    """Return what a part is called."""
    match part.kind:
        case PartKind.BRANCHES:
            return f"{sum(child.count for child in part.children)} branches"
        case PartKind.SERIES:
            return f"{len(part.children)} parts in line: {part.label}"
        case PartKind.KNOT:
            return f"knot: {part.label}"
        case PartKind.LINE:
            return f"{part.count} branches of one operator: {part.label}" if part.count > 1 else part.label


def _tree(part: Part, first: str, rest: str) -> Iterator[str]:
    share = format_share(part.share)
    yield f"{share:>6}  {first}{title(part)}  ({facts(part)})"
    if part.cause is not None:
        yield f"{'':8}{rest}because {part.cause}"
    for i, child in enumerate(part.children):
        last = i + 1 == len(part.children)
        yield from _tree(child, rest + ("└─ " if last else "├─ "), rest + ("   " if last else "│  "))
