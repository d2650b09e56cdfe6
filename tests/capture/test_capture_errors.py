"""What cannot be captured is refused, with the thing, the user's line and the way out."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from graphpipe.capture import CapturedModel, capture
from graphpipe.errors import BatchError, CaptureError


class Net(nn.Module):
    def __init__(self, body: Callable[[Net, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls = 0
        self.body = body or (lambda net, x: net.linear(x))

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.body(self, pixel_values), labels)


def batch(num_samples: int = 4) -> dict[str, Any]:
    return {"pixel_values": torch.randn(num_samples, 4), "labels": torch.arange(num_samples) % 4}


def test_misspelt_input() -> None:
    example = batch()
    with pytest.raises(CaptureError, match=r"has no `pixel_values`, .* it has `pixel_value`"):
        capture(Net(), {"pixel_value": example["pixel_values"], "labels": example["labels"]})
    with pytest.raises(CaptureError, match="Net has no input `label`; its inputs are pixel_values, labels"):
        capture(Net(), {**example, "label": example["labels"]})


def test_misspelt_optional_input() -> None:
    class Optional(nn.Module):
        def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> Tensor:
            return pixel_values.mean()

    example = batch()
    with pytest.raises(CaptureError, match="Optional has no input `lables`; did you mean `labels`"):
        capture(Optional(), {"pixel_values": example["pixel_values"], "lables": example["labels"]})


def branches_on_values(net: Net, x: Tensor) -> Tensor:
    return net.linear(x) if x.sum() > 0 else x


def fixes_the_batch(net: Net, x: Tensor) -> Tensor:
    return net.linear(x.view(4, -1))


def branches_on_the_batch_size(net: Net, x: Tensor) -> Tensor:
    return net.linear(x) if x.shape[0] == 4 else x


def branches_on_a_large_batch(net: Net, x: Tensor) -> Tensor:
    return net.linear(x) if x.shape[0] > 5 else x


def writes_its_input(net: Net, x: Tensor) -> Tensor:
    x.mul_(2)
    return net.linear(x)


def takes_a_size_from_values(net: Net, x: Tensor) -> Tensor:
    kept = x[x[:, 0] > 0]
    return net.linear(x) + kept.sum()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (branches_on_values, r"branches or takes a size from the values of a tensor at .*test_capture_errors.py:\d+"),
        (fixes_the_batch, r"batch size of Net was fixed to 4 at .*test_capture_errors.py:\d+ `return .*view\(4, -1"),
        (branches_on_the_batch_size, r"batch size of Net was fixed to 4 at .*test_capture_errors.py:\d+ `return"),
        (
            branches_on_a_large_batch,
            r"batch sizes than 4 at .*test_capture_errors.py:\d+ `return .*shape\[0\] > 5",
        ),
        (writes_its_input, r"modifies its input 'pixel_values' in place at .*test_capture_errors.py:\d+"),
        (takes_a_size_from_values, r"depends on the values of a tensor at .*test_capture_errors.py:\d+"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_refused_with_the_line(body: Callable[[Net, Tensor], Tensor], message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        capture(Net(body), batch())


def counts_calls(net: Net, x: Tensor) -> Tensor:
    net.calls += 1
    return net.linear(x)


def hooks_a_gradient(net: Net, x: Tensor) -> Tensor:
    found: Tensor = net.linear(x)
    if found.requires_grad:
        found.register_hook(lambda gradient: 2 * gradient)
    return found


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (hooks_a_gradient, "gradient hook"),
        (counts_calls, "changes its attribute 'calls' from 0 to 1"),
        (lambda net, x: net.linear(x) * random.random(), "random generator"),
    ],
    ids=["hook", "state", "random"],
)
def test_what_a_graph_would_lose(body: Callable[[Net, Tensor], Tensor], message: str) -> None:
    model = Net(body)
    with pytest.raises(CaptureError, match=message):
        capture(model, batch())
    assert model.calls == 0


def test_backward_hook_on_a_module() -> None:
    model = Net()
    model.register_full_backward_hook(lambda *_: None)
    with pytest.raises(CaptureError, match="backward hook on 'Net'"):
        capture(model, batch())


def test_loss_that_is_no_scalar() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(CaptureError, match=r"must return a scalar loss .* got a tensor of shape .*pass a loss_fn"):
        capture(model, torch.randn(4, 4))
    with pytest.raises(CaptureError, match=r"loss_fn must return a scalar loss.*reduce it with .mean"):
        capture(model, torch.randn(4, 4), loss_fn=lambda output, batch: output)


def test_example_batch_with_one_sample() -> None:
    with pytest.raises(CaptureError, match="has 1 sample; pass at least 2"):
        capture(Net(), batch(1))
    with pytest.raises(CaptureError, match="no tensor with a sample axis"):
        capture(Net(), {"pixel_values": torch.tensor(1.0), "labels": 3})


@pytest.fixture(scope="module")
def captured() -> CapturedModel:
    class Nested(nn.Module):
        def forward(self, xs: list[Tensor], flag: bool, table: Tensor) -> Tensor:
            return (xs[0] + xs[1]).mean() + table.sum()

    return capture(Nested(), {"xs": [torch.randn(4, 3), torch.randn(4, 3)], "flag": True, "table": torch.randn(5)})


def test_flat_names_and_layouts(captured: CapturedModel) -> None:
    assert list(captured.inputs) == ["xs.0", "xs.1", "table"]
    assert captured.inputs["xs.1"].shape_for(7) == (7, 3)
    assert captured.inputs["table"].layout is None
    flat = captured.flatten_batch({"table": torch.ones(5), "flag": True, "xs": [torch.ones(2, 3), torch.zeros(2, 3)]})
    assert captured.num_samples(flat) == 2
    assert not flat["xs.1"].any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"flag": False}, "'flag' was True when the model was captured and is False now"),
        ({"xs": [torch.ones(2, 3), torch.ones(3, 3)]}, "'xs.0' has 2 samples and input 'xs.1' has 3"),
        ({"xs": [torch.ones(2, 3), torch.ones(2, 4)]}, r"'xs.1' has shape \[2, 4\]; .* with \[samples, 3\]"),
        ({"xs": [torch.ones(2, 3), torch.ones(2)]}, r"'xs.1' has shape \[2\]"),
        ({"xs": [torch.ones(2, 3), torch.ones(2, 3).long()]}, "'xs.1' is torch.int64; .* torch.float32"),
        ({"xs": [torch.ones(2, 3)]}, "no input `xs.1`"),
        ({"tabel": torch.ones(5)}, "no input `tabel`; did you mean `table`"),
        ({"table": 3}, "'table' must be a tensor, got int"),
    ],
)
def test_batches_that_do_not_fit(captured: CapturedModel, change: dict[str, Any], message: str) -> None:
    good = {"xs": [torch.ones(2, 3), torch.ones(2, 3)], "flag": True, "table": torch.ones(5)}
    with pytest.raises(BatchError, match=message):
        captured.flatten_batch({**good, **change})


def test_missing_name_is_told_with_the_closest_one(captured: CapturedModel) -> None:
    with pytest.raises(BatchError, match="no input `table`; it has `tables`"):
        captured.flatten_batch({"xs": [torch.ones(2, 3), torch.ones(2, 3)], "flag": True, "tables": torch.ones(5)})
    with pytest.raises(BatchError, match="a mapping from names to tensors; the batch is a tuple"):
        captured.flatten_batch((torch.ones(2, 3),))


def test_stages_must_be_convex_sets_of_operators() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    captured = capture(model, torch.randn(4, 4), loss_fn=lambda output, batch: output.mean())
    with pytest.raises(ValueError, match="not convex: a path leaves it and comes back at '2'"):
        captured.stage_module(["0", "2"])
    with pytest.raises(ValueError, match="has no operator 'x'"):
        captured.stage_module(["x"])
    with pytest.raises(ValueError, match="repeated"):
        captured.stage_module(["0", "0"])
    with pytest.raises(ValueError, match="at least one"):
        captured.stage_module([])
    with pytest.raises(ValueError, match="the stage reads '0'"):
        captured.stage_module(["1"])({}, 2)
