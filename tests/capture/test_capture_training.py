"""Random partitions of a captured model, run stage by stage over micro-batches, train like the model itself."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from graphpipe.capture import Granularity, LossReduction, capture
from graphpipe.models import (
    DLRM,
    MMT,
    CandleUno,
    CandleUnoConfig,
    DLRMConfig,
    MMTConfig,
    SequentialTransformer,
    SequentialTransformerConfig,
)
from tests.capture.conftest import batch_wise

Check = Callable[..., None]


pytestmark = pytest.mark.usefixtures("double")


@pytest.mark.parametrize("granularity", list(Granularity))
@pytest.mark.parametrize(
    ("model_type", "config"),
    [
        (MMT, MMTConfig(num_branches=2, num_layers=2)),
        (DLRM, DLRMConfig.small()),
        (CandleUno, CandleUnoConfig.small()),
        (SequentialTransformer, SequentialTransformerConfig(num_layers=2)),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_paper_models(
    assert_equal_training: Check, model_type: type[nn.Module], config: MMTConfig, granularity: Granularity
) -> None:
    model = model_type(config)
    captured = capture(model, config.example_batch(4), granularity=granularity)
    batch = config.example_batch(9)

    assert captured.loss_reduction is LossReduction.MEAN
    assert batch_wise(captured) == []
    assert_equal_training(captured, model, batch, lambda m: m(**batch))


def clip(**changes: Any) -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {"vocab_size": 99, "max_position_embeddings": 16, "bos_token_id": 0, "eos_token_id": 98, "pad_token_id": 1}
    config = CLIPConfig(
        text_config={**sizes, **text, "projection_dim": 16},
        vision_config={**sizes, "image_size": 16, "patch_size": 8, "projection_dim": 16},
        projection_dim=16,
        **changes,
    )
    return CLIPModel(config).to(torch.float64)


def clip_batch(num_samples: int) -> dict[str, Any]:
    tokens = torch.randint(3, 98, (num_samples, 7))
    tokens[:, -1] = 98
    return {
        "input_ids": tokens,
        "pixel_values": torch.randn(num_samples, 3, 16, 16),
        "attention_mask": torch.ones(num_samples, 7, dtype=torch.long),
        "return_loss": True,
    }


def test_clip(assert_equal_training: Check) -> None:
    model = clip()
    captured = capture(model, clip_batch(3))
    batch = clip_batch(7)

    # The towers treat samples one by one; the products between all images and all texts are one small unit.
    assert batch_wise(captured) == [captured.loss_operator]
    assert captured.loss_reduction is LossReduction.WHOLE
    assert_equal_training(captured, model, batch, lambda m: m(**batch).loss)


def test_frozen_tower(assert_equal_training: Check) -> None:
    model = clip()
    model.vision_model.requires_grad_(False)
    captured = capture(model, clip_batch(3))
    batch = clip_batch(5)

    for operator in captured.graph.operators:
        assert operator.has_backward == (not operator.name.startswith("vision_model"))
        assert (operator.backward_flops > 0) <= operator.has_backward
        assert all(p.is_trainable != p.name.startswith("vision_model") for p in operator.parameters)
    for value in captured.graph.values:
        assert value.carries_gradient == (not value.producer.startswith("vision_model"))
    assert_equal_training(captured, model, batch, lambda m: m(**batch).loss)


class Tied(nn.Module):
    """A language model whose head is its embedding, with one layer used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.layer = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.layer(torch.tanh(self.layer(self.embedding(tokens))))
        return functional.cross_entropy(self.head(hidden[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def test_tied_parameters(assert_equal_training: Check) -> None:
    model = Tied()
    captured = capture(model, torch.randint(11, (4, 5)))
    batch = torch.randint(11, (9, 5))

    assert captured.parameter_names["embedding.weight"] == ("embedding.weight", "head.weight")
    named = {o.name: [p.name for p in o.parameters] for o in captured.graph.operators}
    assert named == {
        "embedding": ["embedding.weight"],
        "layer": ["layer.weight", "layer.bias"],
        "layer#2": ["layer.weight", "layer.bias"],
        "head": ["embedding.weight"],
    }
    assert_equal_training(captured, model, batch, lambda m: m(batch))


class ConvNet(nn.Module):
    """Residual blocks with batch statistics and operations in place."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(6) for _ in range(2))
        self.convs = nn.ModuleList(nn.Conv2d(6, 6, 3, padding=1) for _ in range(2))
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = functional.relu(self.stem(x), inplace=True)
        for norm, conv in zip(self.norms, self.convs, strict=True):
            found = norm(conv(x))
            found += x
            x = functional.relu_(found)
        return functional.cross_entropy(self.head(x.mean((2, 3))), y)


def test_batch_statistics(assert_equal_training: Check) -> None:
    model = ConvNet()
    captured = capture(model, (torch.randn(4, 3, 8, 8), torch.randint(5, (4,))))
    batch = (torch.randn(7, 3, 8, 8), torch.randint(5, (7,)))

    # The convolutions between them still take micro-batches.
    assert batch_wise(captured) == ["norms.0", "norms.1"]
    assert captured.loss_reduction is LossReduction.MEAN
    assert_equal_training(captured, model, batch, lambda m: m(*batch))


def test_frozen_batch_statistics_treat_samples_one_by_one(assert_equal_training: Check) -> None:
    model = ConvNet().train()
    for norm in model.norms:
        norm.eval()
    captured = capture(model, (torch.randn(4, 3, 8, 8), torch.randint(5, (4,))))
    batch = (torch.randn(7, 3, 8, 8), torch.randint(5, (7,)))

    assert batch_wise(captured) == []
    assert_equal_training(captured, model, batch, lambda m: m(*batch))


class UNet(nn.Module):
    """Long skips, and a trunk that feeds two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Conv1d(4, 4, 3, padding=1) for _ in range(3))
        self.up = nn.ModuleList(nn.Conv1d(8, 4, 3, padding=1) for _ in range(3))
        self.heads = nn.ModuleList(nn.Linear(4, 2) for _ in range(2))
        self.scale = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        skips = []
        for down in self.down:
            x = torch.relu(down(x))
            skips.append(x)
        for up in self.up:
            x = torch.relu(up(torch.cat([x, skips.pop()], dim=1)))
        first, second = (head(x.mean(-1)) for head in self.heads)
        # A temperature that two units read, and a penalty that is no function of the batch.
        losses = functional.mse_loss(first * self.scale.exp(), y) + 0.5 * functional.l1_loss(second, y)
        return losses + 0.01 * self.scale.square() + (second * self.scale.exp()).mean()


def test_skips_and_fan_out(assert_equal_training: Check) -> None:
    model = UNet()
    captured = capture(model, {"x": torch.randn(4, 4, 8), "y": torch.randn(4, 2)})
    batch = {"x": torch.randn(9, 4, 8), "y": torch.randn(9, 2)}

    assert captured.loss_reduction is LossReduction.MEAN
    assert all(value.fixed_bytes == 0 for value in captured.graph.values)
    assert_equal_training(captured, model, batch, lambda m: m(**batch), tries=6)


class Regions(nn.Module):
    """What is written as one graph in another: no_grad and autocast; and a branch without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)
        self.target = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.target(x).exp()
        found = self.b(torch.tanh(self.a(x)))
        return functional.mse_loss(found, target) + functional.mse_loss(found, self.target(x).detach())


def test_parts_without_gradient(assert_equal_training: Check) -> None:
    model = Regions()
    captured = capture(model, torch.randn(4, 4))
    batch = torch.randn(5, 4)

    has_backward = {o.name: o.has_backward for o in captured.graph.operators}
    assert has_backward["a"]
    assert has_backward["b"]
    assert not any(found for name, found in has_backward.items() if "target" in name)
    assert_equal_training(captured, model, batch, lambda m: m(batch))


class Centred(nn.Module):
    """A mean over the batch that is read before and after a layer, and buffers that follow the batches."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        with torch.no_grad():
            self.average.mul_(0.9).add_(hidden.mean(0), alpha=0.1)
        self.steps += 1
        mean = hidden.mean(0)
        return self.second(hidden - mean).square().mean() + mean.square().sum() + hidden.mean()


def test_what_mixes_samples_passes_between_stages_that_take_them_all(assert_equal_training: Check) -> None:
    model = Centred()
    captured = capture(model, torch.randn(4, 4))
    batch = torch.randn(7, 4)

    operators = {o.name: o for o in captured.graph.operators}
    assert not operators["first"].is_batch_wise
    assert not operators["second"].is_batch_wise
    (fixed,) = [value for value in captured.graph.values if value.fixed_bytes]
    assert all(operators[name].is_batch_wise for name in (fixed.producer, *fixed.consumers))
    assert_equal_training(captured, model, batch, lambda m: m(batch), tries=6)


class Counter(nn.Module):
    """A buffer that counts steps, whatever the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return self.second(torch.relu(self.first(x))).square().mean()


def test_buffers_are_written_once_a_step(assert_equal_training: Check) -> None:
    model = Counter()
    captured = capture(model, torch.randn(4, 4))
    batch = torch.randn(7, 4)
    assert len(batch_wise(captured)) == 1
    assert not {"first", "second"} & set(batch_wise(captured))
    assert_equal_training(captured, model, batch, lambda m: m(batch))


class LowRank(nn.Module):
    """A weight computed from parameters, which two layers read."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(4, 2))
        self.b = nn.Parameter(torch.randn(2, 4))
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.a @ self.b
        return self.second(torch.relu(self.first(x) @ weight) @ weight).square().mean()


def test_value_that_does_not_depend_on_the_batch(assert_equal_training: Check) -> None:
    model = LowRank()
    captured = capture(model, torch.randn(4, 4))
    batch = torch.randn(7, 4)

    (fixed,) = [value for value in captured.graph.values if value.fixed_bytes]
    assert (fixed.fixed_bytes, fixed.bytes_per_sample, fixed.carries_gradient) == (128, 0, True)
    assert captured.values[fixed.name].layout is None
    assert_equal_training(captured, model, batch, lambda m: m(batch))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 4)
        self.lstm = nn.LSTM(4, 5, num_layers=2, batch_first=True)
        self.gru = nn.GRU(5, 3)
        self.head = nn.Linear(3, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embedding(tokens))
        hidden, _ = self.gru(hidden.transpose(0, 1))
        return self.head(hidden[-1]).square().mean()


def test_recurrent_layers(assert_equal_training: Check) -> None:
    model = Recurrent()
    captured = capture(model, torch.randint(9, (4, 6)))
    batch = torch.randint(9, (7, 6))

    assert [o.name for o in captured.graph.operators] == ["embedding", "lstm", "gru", "head"]
    assert batch_wise(captured) == []
    assert_equal_training(captured, model, batch, lambda m: m(batch))


class InPlace(nn.Module):
    """Tensors that are filled and changed in place, with readers before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        filled = torch.zeros(x.shape[0], 6)
        filled[:, :4] = hidden
        before = filled * 2
        filled[:, 4:] = hidden[:, :2] * 2
        changed = hidden * 1
        changed.add_(1)
        return self.second(torch.relu(filled[:, 1:5]) + changed + before[:, 2:]).square().mean()


def test_operations_in_place(assert_equal_training: Check) -> None:
    model = InPlace()
    captured = capture(model, torch.randn(4, 4))
    batch = torch.randn(7, 4)

    assert [o.name for o in captured.graph.operators] == ["first", "second"]
    assert_equal_training(captured, model, batch, lambda m: m(batch))


def test_loss_outside_of_the_model(assert_equal_training: Check) -> None:
    config = CandleUnoConfig.small()
    model = CandleUno(config)

    def loss_fn(output: Tensor, batch: dict[str, Any]) -> Tensor:
        return functional.l1_loss(output, batch["target"], reduction="sum")

    def batch_of(num_samples: int) -> dict[str, Any]:
        batch = config.example_batch(num_samples)
        return {"features": batch["features"], "target": batch["growth"]}

    captured = capture(model, batch_of(4), loss_fn=loss_fn)
    batch = batch_of(7)

    assert captured.loss_reduction is LossReduction.SUM
    assert_equal_training(captured, model, batch, lambda m: loss_fn(m(batch["features"]), batch))
