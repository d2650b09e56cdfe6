"""Where a model runs in eval mode, and how the outputs of micro-batches are put together."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from graphpipe.capture import CapturedModel, capture, capture_evaluation, capture_prediction
from graphpipe.capture.classes import COUNT, INDEPENDENT, MEAN, SUM, Kind, SampleClass
from graphpipe.errors import CaptureError, GraphPipeError
from graphpipe.runtime.evaluation import evaluation_stages, holders, join
from graphpipe.runtime.evaluations import Evaluations
from graphpipe.runtime.meeting import Meeting
from graphpipe.stage import SampleRange, Stage, StageGraph


class Normed(nn.Module):
    """In eval mode the normalisation is a light operation after the first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.a(x))
        if not self.training:
            hidden = hidden - hidden.mean(0)
        return self.b(hidden).square().mean()


class Chain(nn.Module):
    """Two layers that no sample leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x))).square().mean()


def training(devices: tuple[tuple[int, ...], ...], model: nn.Module | None = None) -> tuple[CapturedModel, StageGraph]:
    captured = capture(model or Normed(), {"x": torch.randn(6, 4)})
    names = [o.name for o in captured.graph.operators]
    stages = tuple(
        Stage(operators=(name,), micro_batch_size=6 if name == "norm" else 2, devices=d)
        for name, d in zip(names, devices, strict=True)
    )
    return captured, StageGraph(captured.graph, stages, 6)


def test_operators_go_to_the_stage_that_holds_most_of_their_parameters() -> None:
    trained, stages = training(((0,), (1,), (2,)))
    captured = capture_evaluation(trained.model, {"x": torch.randn(6, 4)})
    found = evaluation_stages(trained, stages, captured, 5)
    assert not any(found.has_backward)
    homes = {name: stage.devices for stage in found.stages for name in stage.operators}
    assert homes["a"] == (0,)
    assert homes["b"] == (2,)
    (mixing,) = (stage for stage in found.stages if "mean" in stage.operators)
    assert mixing.micro_batch_size == 5
    held = holders(trained, stages)
    assert held["a.weight"] == (0,)
    assert held["norm.running_mean"] == held["norm.weight"] == (1,)


def test_replicas_that_a_small_batch_has_no_sample_for_are_left_out() -> None:
    trained, stages = training(((0,), (2, 3)), Chain())
    captured = capture_evaluation(trained.model, {"x": torch.randn(6, 4)})
    for num_samples, devices in ((1, (2,)), (2, (2, 3)), (5, (2, 3))):
        found = evaluation_stages(trained, stages, captured, num_samples)
        assert [stage.devices for stage in found.stages] == [(0,), devices]
        assert [stage.micro_batch_size for stage in found.stages] == [min(2, num_samples)] * 2


def test_operators_that_mix_samples_in_eval_mode_run_on_the_first_of_the_devices() -> None:
    trained, stages = training(((0,), (1,), (2, 3)))
    captured = capture_evaluation(trained.model, {"x": torch.randn(6, 4)})
    found = evaluation_stages(trained, stages, captured, 6)
    assert [(stage.operators, stage.micro_batch_size, stage.devices) for stage in found.stages] == [
        (("a",), 2, (0,)),
        (("mean",), 6, (2,)),
        (("b",), 2, (2,)),
    ]


class Doubling(nn.Module):
    """Only in eval mode does the length decide what is done."""

    def __init__(self, doubles: Callable[[int], bool]) -> None:
        super().__init__()
        self.a, self.doubles = nn.Linear(4, 4), doubles

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        return hidden * 2 if not self.training and self.doubles(x.shape[1]) else hidden


@pytest.mark.parametrize("doubles", [lambda length: length > 4, lambda length: length % 2 == 0], ids=["long", "even"])
def test_sizes_that_cannot_be_free_in_eval_mode_are_captured_one_by_one(doubles: Callable[[int], bool]) -> None:
    model = Doubling(doubles)
    captured = capture(
        model, {"x": torch.randn(6, 3, 4)}, loss_fn=lambda o, _: o.mean(), free_sizes={"x": {1: "length"}}
    )
    evaluations = Evaluations(captured, *(mock.Mock() for _ in range(5)))
    model.eval()
    found = {}
    for length in (3, 6, 3):
        x = torch.randn(6, length, 4)
        kind, evaluated, _ = evaluations._captured_for(Meeting.PREDICTION, {"x": x})
        ((name, _),) = evaluated.outputs
        whole = evaluated.stage_module([operator.name for operator in evaluated.graph.operators])
        torch.testing.assert_close(whole({"x": x}, 6)[name], model(x))
        assert found.setdefault(kind, evaluated) is evaluated
    assert len(found) == 2


def test_the_model_is_left_as_it_was() -> None:
    model = Normed()
    model.norm.eval()
    model.a.bias.requires_grad_(False)
    captured, structured = capture_prediction(model, {"x": torch.randn(6, 4)})
    assert model.training
    assert not model.norm.training
    assert [p.requires_grad for p in model.parameters()] == [True, False, True, True, True, True]
    assert len(captured.outputs) == 1
    assert structured([torch.tensor(1.0)], {"x": torch.randn(6, 4)}) == 1.0
    with pytest.raises(CaptureError, match="returns no tensor"):
        capture_prediction(Nothing(), {"x": torch.randn(6, 4)})


class Nothing(nn.Module):
    """Returns no tensor."""

    def forward(self, x: Tensor) -> int:
        return x.dim()


def test_pieces_are_joined_by_what_they_are() -> None:
    ranges = [SampleRange(0, 2), SampleRange(2, 6)]
    whole = torch.arange(2 * 3 * 6 * 2.0).reshape(2, 3 * 6 * 2)
    place = SampleClass(Kind.PER_SAMPLE, axis=1, outer=3, inner=2)
    pieces = [(s, place.part(whole, s.start, s.stop, 6)) for s in ranges]
    assert torch.equal(join(pieces, place), whole)
    numbers = [(s, torch.tensor(float(len(s)))) for s in ranges]
    assert float(join(numbers, MEAN)) == pytest.approx((2 * 2 + 4 * 4) / 6)
    assert float(join(numbers, SUM)) == 6.0
    assert float(join(numbers, INDEPENDENT)) == 2.0
    with pytest.raises(GraphPipeError, match="depends on the number of samples alone"):
        join(numbers, COUNT)
