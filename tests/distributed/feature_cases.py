"""What each rank does in a case about kinds of models and batches: one job of three ranks for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from graphpipe.capture import capture
from graphpipe.runtime import evaluations
from graphpipe.runtime.compilation import Compilation
from graphpipe.runtime.pipeline import Pipeline
from graphpipe.runtime.process_transports import TransportKind
from graphpipe.runtime.sharding import OptimizerStates
from tests.distributed import parity
from tests.distributed.cases import Fork, batch_of, mean_square
from tests.distributed.parity import Part, compare, hand_made, relative, sgd
from tests.distributed.training_cases import train_both


def compiled() -> dict[str, Any]:
    """Three stages with unequal micro-batches, the first with two replicas, are compiled."""
    parts = [("a b", 3, (0, 1)), ("c", 4, (2,)), ("", 5, (2,))]
    batches = [batch_of(10, seed=s) for s in range(2)]
    return compare(Fork(), parts, batches, 10, loss_fn=mean_square, compilation=Compilation(backend="aot_eager"))


class Tables(nn.Module):
    """A table and a bag of rows, and a last layer that may be the table."""

    def __init__(self, *, sparse: bool, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(11, 4, sparse=sparse)
        self.bag = nn.EmbeddingBag(7, 4, mode="sum", sparse=sparse)
        self.head = nn.Linear(4, 11, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids: Tensor, bags: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(torch.tanh(self.table(ids)) + self.bag(bags)), labels)


def rows_of(num_samples: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "ids": torch.randint(0, 11, (num_samples,), generator=generator),
        "bags": torch.randint(0, 7, (num_samples, 3), generator=generator),
        "labels": torch.randint(0, 11, (num_samples,), generator=generator),
    }


def adagrad(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=0.1)


def sparse() -> dict[str, Any]:
    """Tables with sparse gradients beside dense ones: on one device, with replicas, and tied to a dense layer."""
    batches = [rows_of(6, seed) for seed in range(4)]
    alone = [("table", 2, (0,)), ("bag", 3, (1,)), ("", 6, (2,))]
    replicas = [("table bag", 3, (0, 1)), ("", 4, (2,))]
    return {
        "alone": beside_dense(alone, batches),
        "replicas": beside_dense(replicas, batches, accumulated=2, optimizer_states=OptimizerStates.SHARDED),
        "tied": beside_dense(replicas, batches, tied=True),
    }


def beside_dense(parts: Sequence[Part], batches: Sequence[Any], *, tied: bool = False, **options: Any) -> Any:
    """Train tables with sparse gradients by a strategy, and dense ones in one process."""
    sparse, dense = Tables(sparse=True, tied=tied), Tables(sparse=False, tied=tied)
    return train_both(sparse, parts, batches, alone=dense, optimizer=adagrad, max_gradient_norm=0.5, **options)


class SequenceFirst(nn.Module):
    """Reads sequences ``[length, samples, width]`` and positions ``[length, width]``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, tokens: Tensor, positions: Tensor, scale: Tensor) -> dict[str, Any]:
        hidden = torch.tanh(self.second(torch.tanh(self.first(tokens + positions.unsqueeze(1))) * scale))
        return {"hidden": hidden, "score": self.last(hidden).mean((0, 2)), "given": [positions * 2, tokens]}


SEQUENCE_AXES = {"tokens": 1, "positions": None}
SEQUENCE_SIZES = {"tokens": {0: "length"}, "positions": {0: "length"}}


def sequence_first_of(num_samples: int, length: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "tokens": torch.randn(length, num_samples, 4, generator=generator),
        "positions": torch.randn(length, 4, generator=generator),
        "scale": torch.tensor(0.7),
        "labels": torch.randn(num_samples, generator=generator),
    }


def score_error(output: dict[str, Any], batch: dict[str, Tensor]) -> Tensor:
    return functional.mse_loss(output["score"], batch["labels"])


def other_axes() -> dict[str, Any]:
    """Train, evaluate and predict where samples are along axis 1 of one input and a second has none, in any length."""
    model, alone = SequenceFirst(), SequenceFirst()
    # The first is as long as it has samples. One that is as short as an export can keep is captured by itself.
    batches = [sequence_first_of(*sizes, seed) for seed, sizes in enumerate(((6, 6), (5, 6), (8, 3), (6, 1), (6, 9)))]
    axes: dict[str, Any] = {"free_sizes": SEQUENCE_SIZES, "sample_axes": SEQUENCE_AXES}
    captured = capture(model, batches[0], loss_fn=score_error, **axes)
    strategy = hand_made(captured, [("first", 2, (0,)), ("second", 3, (1, 2)), ("", 4, (0,))], 6)
    options: dict[str, Any] = {"loss_fn": score_error, "optimizer": sgd, "transport": parity.kind}
    pipeline = Pipeline(model, strategy, example_batch=batches[0], **axes, **options)
    optimizer = sgd(alone.parameters())
    errors: dict[str, list[float]] = {"train": [], "evaluation": [], "prediction": []}
    with (
        mock.patch.object(evaluations, "capture_evaluation", wraps=evaluations.capture_evaluation) as evaluated,
        mock.patch.object(evaluations, "capture_prediction", wraps=evaluations.capture_prediction) as predicted,
    ):
        for batch in batches:
            output = alone(*(batch[name] for name in ("tokens", "positions", "scale")))
            loss = score_error(output, batch)
            errors["evaluation"].append(relative(torch.tensor(pipeline.evaluate(batch).loss), loss.detach()))
            found = pipeline.predict({name: batch[name] for name in ("tokens", "positions", "scale")})
            pairs = zip(pytree.tree_leaves(found), pytree.tree_leaves(output), strict=True)
            errors["prediction"] += [relative(a, b.detach()) for a, b in pairs]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            errors["train"].append(relative(torch.tensor(pipeline.step(batch).loss), loss.detach()))
            gradients = pipeline.gather_gradients()
            errors["train"] += [
                relative(gradients[n], p.grad) for n, p in alone.named_parameters() if p.grad is not None
            ]
    return {
        "errors": {name: max(found) for name, found in errors.items()},
        "captures": [evaluated.call_count, predicted.call_count],
    }


class Tokens(nn.Module):
    """A layer of tokens, with losses of several kinds. One of them is born in a middle stage."""

    def __init__(self, loss: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = loss
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 5)

    def forward(self, x: Tensor, labels: Tensor, keep: Tensor, count: Tensor) -> Tensor:
        first = torch.tanh(self.a(x))
        second = torch.tanh(self.b(first))
        scores = self.c(second).flatten(0, 1)
        kept = labels.masked_fill(~keep, -100).flatten()
        match self.kind:
            case "mean":
                losses = functional.cross_entropy(scores, labels.flatten(), reduction="none").view(labels.shape)
                return (losses * keep).sum() / keep.sum()
            case "mean of samples":
                losses = functional.cross_entropy(scores, labels.flatten(), reduction="none").view(labels.shape)
                return ((losses * keep).sum(1) / keep.sum(1)).mean()
            case "ignored":
                return functional.cross_entropy(scores, kept)
            case "sum":
                return functional.cross_entropy(scores, kept, reduction="sum") / count
            case "auxiliary":
                balance = (first.mean((0, 1)) * second.mean((0, 1))).sum()
                return functional.cross_entropy(scores, labels.flatten()) + 0.1 * second.square().mean() + balance
            case _:
                raise AssertionError(self.kind)


def tokens_of(num_samples: int, seed: int, *, ragged: bool) -> dict[str, Tensor]:
    """Return samples of three tokens; of a ragged batch from one to all of a sample's count."""
    generator = torch.Generator().manual_seed(seed)
    keep = torch.ones(num_samples, 3, dtype=torch.bool)
    for i in range(num_samples if ragged else 0):
        keep[i, 1 + i % 3 :] = False
    return {
        "x": torch.randn(num_samples, 3, 4, generator=generator),
        "labels": torch.randint(0, 5, (num_samples, 3), generator=generator),
        "keep": keep,
        "count": keep.sum(),
    }


def masks() -> dict[str, Any]:
    """Means over valid tokens, and losses of several parts, over unequal micro-batches and replicas."""
    found = {}
    for loss in ("mean", "mean of samples", "ignored", "sum", "auxiliary"):
        # In the example batch all tokens may count: that is not to be mistaken for a rule.
        batches = [tokens_of(10, seed, ragged=seed > 0 or loss == "ignored") for seed in range(3)]
        captured = capture(Tokens(loss), batches[0])
        whole = any(operator.is_batch_wise for operator in captured.graph.operators)
        parts = [
            ("a", 3, (0, 1)),
            ("b", 4, (2,)),
            *([("c", 3, (2,))] if whole else []),
            ("", 10 if whole else 5, (2,)),
        ]
        found[loss] = {**compare(Tokens(loss), parts, batches, 10), "whole": whole}
    return found


def features() -> dict[str, Any]:
    """Run every case; the slow one, which messages have no part in, over one transport."""
    slow = {"compiled": compiled()} if parity.kind is TransportKind.ORDERED else {}
    return {"sparse": sparse(), "masks": masks(), "other axes": other_axes(), **slow}
