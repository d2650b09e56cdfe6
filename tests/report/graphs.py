"""Random stage graphs to lay out."""

from __future__ import annotations

from hypothesis import strategies as st

from graphpipe.strategy import Strategy
from tests.report.samples import strategy_of


@st.composite
def drawn_strategies(draw: st.DrawFn) -> Strategy:
    """Strategies of up to ten stages with any edges, on devices that they may share."""
    count = draw(st.integers(1, 10))
    pairs = [(u, v) for v in range(count) for u in range(v)]
    edges = sorted(draw(st.sets(st.sampled_from(pairs), max_size=14))) if pairs else []
    modules = [
        [draw(st.sampled_from(["a", "enc.layers.1", "x" * 70, "<b> & \"c\" 'd'", "层.7"]))] for _ in range(count)
    ]
    return strategy_of(
        modules,
        edges,
        mini_batch_size=8,
        micro_batch_sizes=[draw(st.sampled_from([2, 4, 8])) for _ in range(count)],
        devices=[(draw(st.integers(0, count - 1)),) for _ in range(count)],
    )
