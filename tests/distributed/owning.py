"""A model on the meta device whose parameters are made by the ranks that own them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from graphpipe.capture import capture, eager_loss
from graphpipe.errors import GraphPipeError
from graphpipe.runtime.initialise import FromSeed, fill_own
from graphpipe.runtime.pipeline import Pipeline
from tests.distributed.parity import hand_made, sgd


class TiedTowers(nn.Module):
    """Two towers with batch statistics, and a head tied to one tower's embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(12, 8)
        self.text = nn.Linear(8, 8)
        self.image = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
        self.join = nn.Linear(16, 8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor, pixels: Tensor, labels: Tensor) -> Tensor:
        text, image = torch.tanh(self.text(self.words(tokens))), torch.tanh(self.image(pixels))
        return nn.functional.cross_entropy(self.head(self.join(torch.cat([text, image], 1))), labels)


def batch_of(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "tokens": torch.randint(12, (8,), generator=generator),
        "pixels": torch.randn(8, 8, generator=generator),
        "labels": torch.randint(12, (8,), generator=generator),
    }


def build() -> TiedTowers:
    with torch.device("meta"):
        return TiedTowers()


def train(disagreeing: str = "") -> dict[str, Any]:
    """Two steps on three ranks, the text tower on two of them, beside one process with the same parameters."""
    model = build()
    captured = capture(model, batch_of(0))
    parts = [("words text", 2, (0, 1)), ("image", 8, (2,)), ("", 4, (2,))]
    strategy = hand_made(captured, parts, 8, num_devices=3)
    refused = ""
    try:
        Pipeline(captured, strategy)
    except GraphPipeError as error:
        refused = str(error)
    rank = torch.distributed.get_rank()
    if disagreeing:
        try:
            Pipeline(captured, strategy, init=FromSeed(rank))
        except GraphPipeError as error:
            return {"error": str(error)}
    pipeline = Pipeline(captured, strategy, init=FromSeed(3), optimizer=sgd)
    with_memory = sorted(n for n, t in model.state_dict().items() if not t.is_meta)
    reference = build()
    fill_own(reference, {**dict(reference.named_parameters()), **dict(reference.named_buffers())}, FromSeed(3))
    optimizer = sgd(reference.parameters())
    losses = []
    for seed in range(2):
        optimizer.zero_grad()
        loss = eager_loss(reference, batch_of(seed))
        loss.backward()
        optimizer.step()
        losses.append(abs(pipeline.step(batch_of(seed)).loss - float(loss)))
    trained = pipeline.gather_state_dict()
    expected = reference.state_dict()
    return {
        "refused": refused,
        "with_memory": with_memory,
        "own": sorted(pipeline.parameters),
        "all": sorted(expected),
        "gathered": sorted(trained),
        "loss": max(losses),
        "parameter": max(float((trained[n] - expected[n]).abs().max()) for n in expected),
    }
