from __future__ import annotations

from dataclasses import replace

import pytest

from graphpipe.errors import GraphPipeError
from graphpipe.program import Matching, Program, Send, lower
from graphpipe.runtime.in_process import run_in_process
from graphpipe.schedule import kfkb
from graphpipe.stage import Stage, StageGraph
from tests.graph_models import GraphModel, OperatorShape, make_batch


def chain(matching: Matching) -> tuple[GraphModel, Program]:
    model = GraphModel([OperatorShape(()), OperatorShape((0,)), OperatorShape((1,))])
    stages = tuple(Stage(operators=(f"op{i}",), micro_batch_size=1, devices=(i,)) for i in range(3))
    graph = StageGraph(model.graph, stages, 4)
    return model, lower(graph, kfkb(graph), matching=matching)


def test_posts_that_run_free_do_not_get_through() -> None:
    model, free = chain(Matching.TAG)
    with pytest.raises(GraphPipeError, match="out of order: two devices begin with different messages"):
        run_in_process(model, replace(free, matching=Matching.ORDER), make_batch(4), timeout_s=2)


def test_two_sends_that_change_places_are_told() -> None:
    model, program = chain(Matching.ORDER)
    first = list(program.instructions[0])
    a, b = [i for i, found in enumerate(first) if isinstance(found, Send)][:2]
    # Both are sent after the second forward pass, the later one first.
    first[a : b + 1] = [*first[a + 1 : b], first[b], first[a]]
    wrong = replace(program, instructions=(tuple(first), *program.instructions[1:]))
    with pytest.raises(GraphPipeError, match="out of order"):
        run_in_process(model, wrong, make_batch(4), timeout_s=2)
