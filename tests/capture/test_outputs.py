"""What stands between the tensors of an output is right for every batch, or refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphpipe.capture import capture_prediction
from graphpipe.errors import CaptureError, GraphPipeError


class Cached:
    """Holds a tensor where no one looks for it."""

    def __init__(self, tensor: Tensor) -> None:
        self.layers = [{"keys": tensor}]


class Returns(nn.Module):
    """Returns what a function makes of its input."""

    def __init__(self, output: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.output = output

    def forward(self, x: Tensor) -> Any:
        return self.output(self.layer(x))


def test_numbers_follow_from_the_sizes_of_each_batch() -> None:
    settings = object()

    def output(x: Tensor) -> dict[str, Any]:
        rows, length = x.shape[:2]
        numbers = (rows, rows * length + 1, rows / length, rows**0.5, rows % 3, rows > 6, x.numel())
        return {"x": x, "numbers": numbers, "shape": x.shape, "same": (8, "text", None, settings), "last": x.sum()}

    model = Returns(output)
    _, structured = capture_prediction(model, {"x": torch.randn(8, 5, 3)}, free_sizes={"x": {1: "length"}})
    for shape in ((8, 5, 3), (5, 5, 3), (11, 2, 3), (1, 7, 3)):
        x = torch.randn(shape)
        expected = model(x)
        found = structured([expected["x"], expected["last"]], {"x": x})
        assert {k: v for k, v in found.items() if k not in ("x", "last")} == {
            k: v for k, v in expected.items() if k not in ("x", "last")
        }
        assert [type(n) for n in found["numbers"]] == [type(n) for n in expected["numbers"]]
        assert found["x"] is expected["x"]


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (
            lambda x: {"x": x, "sum": [x.sum().item()]},
            r"output\['sum'\]\[0\] is a number made from the values of tensors",
        ),
        (lambda x: (x, f"{x.shape[0]} rows"), r"output\[1\] is text with a size of the batch in it"),
    ],
)
def test_what_differs_from_batch_to_batch_otherwise_is_refused(output: Callable[[Tensor], Any], message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        capture_prediction(Returns(output), {"x": torch.randn(8, 3)})


def test_an_object_that_hides_tensors_says_so_when_it_is_read() -> None:
    model = Returns(lambda x: {"x": x, "cache": Cached(x)})
    _, structured = capture_prediction(model, {"x": torch.randn(8, 3)})
    x = torch.randn(8, 3)
    cache = copy.deepcopy(structured([x], {"x": x})["cache"])
    for read in (lambda: cache.layers, lambda: cache[0], lambda: list(cache), lambda: len(cache)):
        with pytest.raises(GraphPipeError, match=r"output\['cache'\] is a Cached, which hides its tensors"):
            read()
