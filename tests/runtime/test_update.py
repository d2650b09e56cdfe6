"""Clipping and schedules as torch has them on one device."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from graphpipe.errors import GraphPipeError
from graphpipe.runtime.update import Update, counted_parameters, make_optimizer, sum_of_squares
from graphpipe.stage import Stage, StageGraph
from tests.stage_graphs import CHAIN_3, make_graph


def alone(number: float) -> float:
    """Sum over one rank."""
    return number


def parameters(scale: float = 1.0) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    found = {}
    for name, shape in (("a", (3, 2)), ("b", (4,)), ("without gradient", (2,))):
        found[name] = nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))
        if name != "without gradient":
            found[name].grad = scale * torch.randn(shape, generator=generator, dtype=torch.float64)
    return found


@pytest.mark.parametrize("scale", [0.0, 0.01, 100.0])
@pytest.mark.parametrize("max_norm", [0.5, math.inf])
def test_clipping_is_that_of_torch(scale: float, max_norm: float) -> None:
    mine, theirs = parameters(scale), parameters(scale)
    result = Update(mine, mine, alone, max_gradient_norm=max_norm).apply()
    expected = nn.utils.clip_grad_norm_(theirs.values(), max_norm)
    assert result.gradient_norm == pytest.approx(float(expected), rel=1e-9)
    for name, parameter in mine.items():
        assert (parameter.grad is None) == (theirs[name].grad is None)
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, theirs[name].grad, rtol=1e-9, atol=0)


def test_a_norm_that_is_not_finite_is_not_hidden() -> None:
    mine, theirs = parameters(), parameters()
    for found in (mine, theirs):
        assert found["a"].grad is not None
        found["a"].grad[0, 0] = math.inf
    result = Update(mine, mine, alone, max_gradient_norm=1.0).apply()
    nn.utils.clip_grad_norm_(theirs.values(), 1.0)
    assert result.gradient_norm == math.inf
    for name in ("a", "b"):
        torch.testing.assert_close(mine[name].grad, theirs[name].grad, equal_nan=True)


def test_what_others_count_is_left_out_of_the_norm_and_clipped_all_the_same() -> None:
    mine = parameters(10.0)
    before = {name: p.grad.clone() for name, p in mine.items() if p.grad is not None}
    result = Update(mine, {"a"}, alone, max_gradient_norm=1.0).apply()
    assert result.gradient_norm == pytest.approx(float(before["a"].norm()), rel=1e-9)
    for name, gradient in before.items():
        torch.testing.assert_close(mine[name].grad, gradient / (float(before["a"].norm()) + 1e-6), rtol=1e-9, atol=0)


def test_each_parameter_is_counted_on_the_lowest_device_that_holds_it() -> None:
    # o0 on devices 1 and 2, o1 on 0, and o2, which shares w0, on 3.
    graph = make_graph(CHAIN_3)
    shared = graph.operators[2].__class__(name="o2", parameters=graph.operators[0].parameters)
    graph = graph.__class__(graph.name, (*graph.operators[:2], shared), graph.values)
    stages = tuple(
        Stage(operators=(f"o{i}",), micro_batch_size=2, devices=d) for i, d in enumerate([(1, 2), (0,), (3,)])
    )
    found = [counted_parameters(StageGraph(graph, stages, 4), device) for device in range(4)]
    assert found == [{"w1"}, {"w0"}, frozenset(), frozenset()]


def test_squares_of_sparse_gradients_add_up_first() -> None:
    sparse = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.tensor([3.0, 1.0]), (4,))
    assert float(sum_of_squares([sparse, None, torch.tensor(3.0)])) == 25.0
    assert float(sum_of_squares([])) == 0.0


def test_a_schedule_is_stepped_unless_it_needs_a_metric() -> None:
    mine = parameters()
    optimizer = torch.optim.SGD(mine.values(), lr=1.0)
    Update(mine, mine, alone, optimizer=optimizer, lr_scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1)).apply()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    Update(mine, mine, alone, optimizer=optimizer, lr_scheduler=plateau).apply()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)


def test_an_empty_group_of_pairs_is_explained() -> None:
    pairs = list(parameters().items())
    with pytest.raises(GraphPipeError, match="parameter group is empty on this rank"):
        make_optimizer(lambda p: torch.optim.SGD([{"params": list(p)}, {"params": []}], lr=0.1), pairs)
    with pytest.raises(ValueError, match="must be above 0, got 0"):
        Update({}, (), alone, max_gradient_norm=0.0)
