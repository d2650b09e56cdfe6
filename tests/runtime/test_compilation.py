from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from graphpipe.capture import CapturedModel, capture
from graphpipe.errors import GraphPipeError
from graphpipe.program import lower
from graphpipe.runtime.clock import WallClock
from graphpipe.runtime.compilation import Compilation
from graphpipe.runtime.executor import Executor
from graphpipe.runtime.in_process import Hub, InProcessTransport, run_in_process
from graphpipe.schedule import kfkb
from graphpipe.stage import Recompute, Stage, StageGraph

Backend = Callable[..., Callable[..., Any]]


class Dropping(nn.Module):
    """Two stages; the first drops entries, and its running statistics are written."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh(), nn.Linear(4, 4))
        self.second = nn.Sequential(nn.Linear(4, 4), nn.GELU())
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.second(self.first(x)).square().mean()
        return loss


def batch_of(num_samples: int) -> dict[str, Tensor]:
    return {"x": torch.randn(num_samples, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)}


def two_stages(captured: CapturedModel, recompute: Recompute) -> StageGraph:
    """Return two stages of one device, over ten samples with micro-batches of 4, 4 and 2."""
    names = [o.name for o in captured.graph.operators]
    parts = [[n for n in names if n.startswith("first")], [n for n in names if not n.startswith("first")]]
    stages = (Stage(operators=tuple(p), micro_batch_size=4, devices=(0,), recompute=recompute) for p in parts)
    return StageGraph(captured.graph, tuple(stages), 10)


def run(captured: CapturedModel, stages: StageGraph, compilation: Compilation) -> dict[str, Tensor]:
    """Return the gradients of one device whose stages are compiled."""
    modules = {x: captured.stage_module(s.operators) for x, s in enumerate(stages.stages)}
    compilation.compile(modules)
    executor = Executor(0, captured, modules, InProcessTransport(Hub(), 0), WallClock())
    executor.compilation = compilation
    captured.model.zero_grad()
    executor.run(lower(stages, kfkb(stages)), batch_of(10))
    return {name: p.grad for name, p in executor.parameters.items() if p.grad is not None}


@pytest.mark.parametrize("recompute", list(Recompute))
def test_compiled_stages_have_the_gradients_of_those_that_are_not(recompute: Recompute) -> None:
    captured = capture(Dropping(), batch_of(4))
    stages = two_stages(captured, recompute)
    (expected,) = run_in_process(captured, lower(stages, kfkb(stages)), batch_of(10)).gradients
    compiled = []

    def backend(graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
        compiled.append(graph)
        return graph.forward

    found = run(captured, stages, Compilation(backend=backend, left_out=(1,)))
    # What draws is left as it is: the graph breaks there, and there alone. Sizes become free with the second one.
    forms = 2 if recompute is Recompute.NONE else 4
    assert len(compiled) == 2 * forms
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-12, atol=0)


def test_what_cannot_be_compiled_is_told_with_its_stage() -> None:
    captured = capture(Dropping(), batch_of(4))
    stages = two_stages(captured, Recompute.NONE)

    def backend(graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
        if any("gelu" in str(node.target) for node in graph.graph.nodes):
            raise RuntimeError("no gelu here")
        return graph.forward

    with pytest.raises(
        GraphPipeError,
        match=r"stage 1 \(operators 'second.* cannot be compiled with the backend 'backend': .*no gelu here.*"
        r"run it as it is with Compilation\(left_out=\(1,\)\)",
    ):
        run(captured, stages, Compilation(backend=backend))
    assert run(captured, stages, Compilation(backend=backend, left_out=(1,)))


def test_an_error_of_the_model_is_none_of_the_compiler() -> None:
    compilation = Compilation(backend="eager")
    captured = capture(Dropping(), batch_of(4))
    assert compilation.failure(0, two_stages(captured, Recompute.NONE).stages[0], ValueError("x")) is None


def test_a_stage_that_is_left_out_exists() -> None:
    with pytest.raises(GraphPipeError, match=r"names stage 2, and the strategy has 2 stages, 0 to 1"):
        Compilation(left_out=(0, 2)).check(2)
