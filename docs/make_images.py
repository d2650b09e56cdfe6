"""Draws the picture of the README: two towers and a joint head, as a graph and as a chain of stages.

Run ``python docs/make_images.py`` after the pictures of `graphpipe.report` have changed.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from graphpipe.cluster import Cluster, Link
from graphpipe.cost import SGD, Profile
from graphpipe.estimate import estimate
from graphpipe.graph import ComputationGraph, Operator, Value
from graphpipe.report import stage_graph_svg, timeline_svg
from graphpipe.schedule import ModelCosts, kfkb
from graphpipe.stage import Stage, StageGraph
from graphpipe.strategy import Strategy

FOLDER = Path(__file__).parent / "images"
NAMES = (
    "image tower, first half",
    "image tower, second half",
    "text tower, first half",
    "text tower, second half",
    "head",
)
GRAPH = ((0, 1), (2, 3), (1, 4), (3, 4))
CHAIN = (*GRAPH, (1, 2))
FREE = Link(latency_s=0.0, bandwidth_bytes_per_s=1e15)


def strategy(edges: tuple[tuple[int, int], ...]) -> Strategy:
    """Return five stages of equal cost on five devices, with six micro-batches."""
    graph = ComputationGraph(
        "two towers",
        tuple(Operator(name=name) for name in NAMES),
        tuple(
            Value(name=f"{u} to {v}", producer=NAMES[u], consumers=(NAMES[v],), bytes_per_sample=4096) for u, v in edges
        ),
    )
    ones = np.full((1, len(NAMES)), 0.01)
    stages = StageGraph(
        graph,
        tuple(Stage(operators=(name,), micro_batch_size=1, devices=(i,)) for i, name in enumerate(NAMES)),
        6,
    )
    cluster = Cluster.uniform(len(NAMES), memory_bytes=10**9, kind="V100-16GB", inside_node=FREE)
    profile = Profile(NAMES, (1,), ones, 2 * ones, ones)
    draft = Strategy(stages, kfkb(stages), profile, cluster, SGD)
    return Strategy(stages, kfkb(stages, ModelCosts(draft.cost_model, stages)), profile, cluster, SGD)


def stack(parts: list[tuple[str, str]], width: int = 1200) -> str:
    """Return one picture of several, one above the other, each under its caption."""
    y, body = 10.0, []
    for caption, drawn in parts:
        picture = drawn.replace("(prefers-color-scheme:dark)", " not all")  # The paper is white.
        root = re.search(r"<svg[^>]*>", picture)
        assert root is not None
        height = float(re.search(r'viewBox="\S+ \S+ \S+ (\S+)"', root[0])[1])  # type: ignore[index]
        text = (
            f'<text x="14" y="{y + 16:g}" font-family="sans-serif" font-size="15" font-weight="bold">{caption}</text>'
        )
        body += [text, picture.replace("<svg ", f'<svg x="0" y="{y + 26:g}" ', 1)]
        y += height + 34
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y:g}" width="{width}" height="{y:g}">'
    return f'{head}<rect width="100%" height="100%" fill="white"/>{"".join(body)}</svg>'


def main() -> None:
    """Draw the pictures."""
    FOLDER.mkdir(exist_ok=True)
    graph, chain = strategy(GRAPH), strategy(CHAIN)
    found = {name: estimate(s) for name, s in (("graph", graph), ("chain", chain))}
    end_s = max(e.iteration_s for e in found.values())
    parts = [
        ("Two towers and a head as a graph of stages", stage_graph_svg(graph, found["graph"])),
        ("the towers run at the same time", timeline_svg(found["graph"].trace, graph, end_s=end_s, prefix="graph-")),
        ("the same stages in a chain", timeline_svg(found["chain"].trace, chain, end_s=end_s, prefix="chain-")),
    ]
    (FOLDER / "graph-and-chain.svg").write_text(stack(parts))
    print({name: round(e.iteration_s, 4) for name, e in found.items()})


if __name__ == "__main__":
    main()
