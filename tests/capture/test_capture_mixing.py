"""Rows that leave the order of the samples: when they count as treated one by one, and when not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from graphpipe.capture import capture
from graphpipe.errors import BatchError
from tests.capture.conftest import batch_wise

Check = Callable[..., None]


pytestmark = pytest.mark.usefixtures("double")


class Experts(nn.Module):
    """Sends each token to an expert: sorts, works, and puts back."""

    def __init__(self, inner: Callable[[Experts, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.gate = nn.Linear(4, 3)
        self.scales = nn.Parameter(torch.randn(3, 4))
        self.last = nn.Linear(4, 2)
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        experts = self.gate(hidden).argmax(-1)
        return self.last(self.inner(self, hidden, experts)).square().mean()


def sorted_and_back(net: Experts, hidden: Tensor, experts: Tensor) -> Tensor:
    found, order = torch.sort(experts)
    rows = torch.tanh(hidden[order] * net.scales[found])
    back = torch.empty_like(order)
    back[order] = torch.arange(order.shape[0])
    return rows[back]


def with_a_limit(net: Experts, hidden: Tensor, experts: Tensor) -> Tensor:
    """Drops the tokens of an expert that has enough of them, which random tokens may never show."""
    found, order = torch.sort(experts)
    counts = torch.histc(found.double(), bins=3, min=0, max=2).long()
    starts = counts.cumsum(0) - counts
    rank = torch.arange(found.shape[0]) - starts[found]
    rows = hidden[order] * net.scales[found] * (rank < 100).unsqueeze(-1)
    back = torch.empty_like(order)
    back[order] = torch.arange(order.shape[0])
    return rows[back]


def never_back(net: Experts, hidden: Tensor, experts: Tensor) -> Tensor:
    found, order = torch.sort(experts, stable=True)
    return hidden + (hidden[order] * net.scales[found]).flip(0)


@pytest.mark.parametrize(
    ("inner", "is_whole"),
    [(sorted_and_back, False), (with_a_limit, True), (never_back, True)],
    ids=["back", "limit", "never back"],
)
def test_sorted_rows(assert_equal_training: Check, inner: Callable[..., Tensor], is_whole: bool) -> None:
    model = Experts(inner)
    captured = capture(model, torch.randn(5, 4))
    batch = torch.randn(9, 4)

    assert bool(batch_wise(captured)) == is_whole
    assert not {"first", "last"} & set(batch_wise(captured))
    assert_equal_training(captured, model, batch, lambda m: m(batch))


class Captions(nn.Module):
    """Puts two features of each picture into the places of a sentence."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Linear(3, 8)
        self.embedding = nn.Embedding(9, 4)
        self.head = nn.Linear(4, 9)

    def forward(self, picture: Tensor, words: Tensor) -> Tensor:
        hidden = self.embedding(words)
        mask = (words == 8).unsqueeze(-1).expand_as(hidden)
        hidden = hidden.masked_scatter(mask, self.tower(picture).view(-1, 4))
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), words.flatten())


def captions(places: list[int]) -> dict[str, Any]:
    words = torch.randint(0, 8, (len(places), 6))
    for i, count in enumerate(places):
        words[i, :count] = 8
    return {"picture": torch.randn(len(places), 3), "words": words}


def test_places_of_a_mask_are_filled_sample_by_sample(assert_equal_training: Check) -> None:
    model = Captions()
    captured = capture(model, captions([2, 2, 2, 2]))
    batch = captions([2] * 7)

    assert batch_wise(captured) == []
    assert_equal_training(captured, model, batch, lambda m: m(**batch))
    (stage,) = [captured.stage_module([o.name for o in captured.graph.operators])]
    with pytest.raises(BatchError, match="16 numbers for 20 places of a mask"):
        stage(captured.flatten_batch(captions([3, 2])), 2)


def test_places_that_differ_are_filled_at_once(assert_equal_training: Check) -> None:
    model = Captions()
    captured = capture(model, captions([1, 3, 2, 2]))
    batch = captions([2, 4, 1, 0, 3, 2, 2])

    assert len(batch_wise(captured)) == 1
    assert_equal_training(captured, model, batch, lambda m: m(**batch))
