"""How tensors depend on the samples of a batch: what may be cut, and what needs the whole mini-batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from graphpipe.capture import CapturedModel, LossReduction, SampleLayout, capture
from graphpipe.errors import BatchError


class Two(nn.Module):
    """Two linear layers, with something between and a loss after them."""

    def __init__(self, between: Callable[[Tensor], Tensor], loss: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.between = between
        self.loss = loss

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.second(self.between(self.first(x))))


def captured_two(
    between: Callable[[Tensor], Tensor] = torch.relu, loss: Callable[[Tensor], Tensor] = torch.mean
) -> Any:
    torch.manual_seed(0)
    return capture(Two(between, loss), torch.randn(4, 3, 4))


def batch_wise(captured: CapturedModel) -> list[str]:
    return [operator.name for operator in captured.graph.operators if operator.is_batch_wise]


@pytest.mark.parametrize(
    "between",
    [
        lambda x: x - x.mean(0),
        lambda x: x / x.norm(),
        lambda x: x.softmax(0),
        lambda x: x.cumsum(0),
        lambda x: x.flip(0),
        lambda x: x.roll(1, 0),
        lambda x: x[torch.randperm(x.shape[0])],
        lambda x: x * (x > 0).any(),
        lambda x: x + torch.arange(x.shape[0]).view(-1, 1, 1),
        lambda x: x * torch.rand(4),
        lambda x: (torch.einsum("bsf,csf->bc", x, x).softmax(1) @ x.flatten(1)).view(x.shape),
        lambda x: x * x.amax((0, 1)),
    ],
    ids=[
        "centre",
        "norm",
        "softmax",
        "cumsum",
        "flip",
        "roll",
        "shuffle",
        "any",
        "count",
        "noise",
        "similarity",
        "max",
    ],
)
def test_mixing_samples_needs_the_whole_mini_batch(between: Callable[[Tensor], Tensor]) -> None:
    captured = captured_two(between)
    found = batch_wise(captured)
    # The layers around it keep their micro-batches.
    assert len(found) == 1
    assert not {"first", "second"} & set(found)
    assert captured.loss_reduction is LossReduction.MEAN


@pytest.mark.parametrize(
    "between",
    [
        lambda x: functional.dropout(x, 0.5),
        lambda x: x / x.norm(dim=(1, 2), keepdim=True),
        lambda x: functional.layer_norm(x, (3, 4)),
        lambda x: x.transpose(0, 1).contiguous().transpose(0, 1).softmax(1),
        lambda x: x[torch.arange(x.shape[0]), x.detach().argmax(1).sum(-1) % 3].unsqueeze(1) + x,
        lambda x: x * torch.rand_like(x),
        lambda x: x.reshape(-1, 4).relu().reshape(x.shape),
        lambda x: torch.eye(x.shape[0]).sum(1).view(-1, 1, 1) * x,
    ],
    ids=["dropout", "norm", "layer norm", "transpose", "gather", "noise", "rows", "eye"],
)
def test_samples_one_by_one(between: Callable[[Tensor], Tensor]) -> None:
    assert batch_wise(captured_two(between)) == []


@pytest.mark.parametrize(
    ("loss", "reduction"),
    [
        (lambda x: x.mean(), LossReduction.MEAN),
        (lambda x: x.sum(), LossReduction.SUM),
        (lambda x: x.sum() / x.shape[0], LossReduction.MEAN),
        (lambda x: x.mean() * x.shape[0], LossReduction.SUM),
        (lambda x: 2 * x.mean() + x.square().mean((0, 1)).sum() - 3, LossReduction.MEAN),
        (lambda x: x.abs().mean().sqrt(), LossReduction.WHOLE),
        (lambda x: x.mean() + x.sum(), LossReduction.WHOLE),
        (lambda x: x.amax(), LossReduction.WHOLE),
        (lambda x: (x.mean() + 1).relu(), LossReduction.WHOLE),
        (lambda x: x.mean() * x.square().mean(), LossReduction.WHOLE),
        (lambda x: x.square().sum() / (x > 0).sum(), LossReduction.WHOLE),
        (lambda x: x.std(), LossReduction.WHOLE),
        (lambda x: (x * 0).sum(), LossReduction.WHOLE),
    ],
    ids=[
        "mean", "sum", "sum by hand", "mean by hand", "linear", "root", "mixed", "max", "clamp", "product", "ratio",
        "std", "zero",
    ],
)  # fmt: skip
def test_loss_reductions(loss: Callable[[Tensor], Tensor], reduction: LossReduction) -> None:
    captured = captured_two(loss=loss)
    assert captured.loss_reduction is reduction
    # A loss of the whole mini-batch is a unit of its own, so the layers keep their micro-batches.
    expected = [captured.loss_operator] if reduction is LossReduction.WHOLE else []
    assert batch_wise(captured) == expected
    assert (captured.loss_operator == "second") == (reduction is not LossReduction.WHOLE)


class SequenceFirst(nn.Module):
    """Attention over (sequence, batch, features), which torch computes on (sequence * batch) rows."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=False)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.project(x.transpose(0, 1))
        return self.head(self.attention(hidden, hidden, hidden, need_weights=True)[0]).mean()


def test_rows_between_the_sequence_and_features() -> None:
    captured = capture(SequenceFirst(), torch.randn(4, 3, 8))
    assert batch_wise(captured) == []
    layouts = {value.name: captured.values[value.name].layout for value in captured.graph.values}
    assert layouts["project"] == SampleLayout(axis=1, rows_per_sample=1)
    # Nothing is cut where samples are not consecutive rows.
    assert all(layout is not None for layout in layouts.values())


def test_several_rows_per_sample() -> None:
    captured = capture(
        nn.Sequential(nn.Linear(4, 4), nn.Flatten(0, 1), nn.Linear(4, 4)),
        torch.randn(4, 3, 4),
        loss_fn=lambda output, batch: output.mean(),
    )
    spec = captured.values["0"]
    assert spec.layout == SampleLayout(axis=0, rows_per_sample=3)
    assert spec.shape == (3, 4)
    assert spec.shape_for(5) == (15, 4)
    assert spec.num_bytes == 48


class Classifier(nn.Module):
    def __init__(self, **changes: Any) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.linear = nn.Linear(4, 3)
        self.changes = changes

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(self.linear(self.first(x)).flatten(0, 1), y.flatten(), **self.changes)


def tokens(*ignored: int) -> dict[str, Tensor]:
    """Four samples of three tokens, of which some targets are ignored."""
    targets = torch.arange(12).view(4, 3) % 3
    for i in ignored:
        targets.view(-1)[i] = -100
    return {"x": torch.randn(4, 3, 4), "y": targets}


def test_ignored_targets_are_counted() -> None:
    # The last token of each sample has no target, as in a language model: the mean is over two tokens a sample.
    captured = capture(Classifier(), tokens(2, 5, 8, 11))
    assert captured.loss_reduction is LossReduction.MEAN
    stage = captured.stage_module([operator.name for operator in captured.graph.operators])
    stage(captured.flatten_batch(tokens(0, 4, 8, 11)), 4)
    with pytest.raises(BatchError, match=r"7 of 12 targets .* ignore_index=-100, and 8 should.*Capture the model with"):
        stage(captured.flatten_batch(tokens(0, 1, 2, 3, 4)), 4)


def test_targets_behind_a_mask_are_counted_as_the_example_has_them() -> None:
    class Masked(Classifier):
        def forward(self, x: Tensor, y: Tensor, keep: Tensor) -> Tensor:
            return super().forward(x, y.masked_fill(~keep, -100))

    # The mask that the capture tries has two tokens for each sample, by chance.
    batch = {**tokens(), "keep": torch.ones(4, 3, dtype=torch.bool)}
    captured = capture(Masked(), batch)
    assert captured.loss_reduction is LossReduction.MEAN
    stage = captured.stage_module([operator.name for operator in captured.graph.operators])
    stage(captured.flatten_batch(batch), 4)
    batch["keep"][0, 1] = False
    with pytest.raises(BatchError, match=r"11 of 12 targets .* and 12 should"):
        stage(captured.flatten_batch(batch), 4)


def test_uneven_ignored_targets_need_the_whole_mini_batch() -> None:
    captured = capture(Classifier(), tokens(0, 1, 11))
    assert captured.loss_reduction is LossReduction.WHOLE
    assert batch_wise(captured) == [captured.loss_operator]
    stage = captured.stage_module([captured.loss_operator])
    flat = captured.flatten_batch(tokens(0, 1, 2, 3))
    logits = {
        name: torch.randn(captured.values[name].shape_for(4)) for name in stage.input_names if name in captured.values
    }
    stage({**flat, **logits}, 4)


def test_class_weights_need_the_whole_mini_batch() -> None:
    captured = capture(Classifier(weight=torch.tensor([1.0, 2.0, 3.0])), tokens())
    assert captured.loss_reduction is LossReduction.WHOLE


def test_smoothed_and_summed_classification() -> None:
    assert capture(Classifier(label_smoothing=0.1), tokens()).loss_reduction is LossReduction.MEAN
    summed = capture(Classifier(reduction="sum"), tokens(0, 1, 5))
    assert summed.loss_reduction is LossReduction.SUM


def test_gradients_scaled_by_frequency_need_the_whole_mini_batch() -> None:
    model = nn.Sequential(nn.Embedding(5, 4, scale_grad_by_freq=True), nn.Linear(4, 2))
    captured = capture(model, torch.randint(5, (4, 3)), loss_fn=lambda output, batch: output.mean())
    assert batch_wise(captured) == ["0"]


def test_lookup_of_the_batch_is_per_sample_and_weights_on_meta_give_the_same() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.EmbeddingBag(5_000_000, 4, mode="mean"), nn.Linear(4, 2), nn.LayerNorm(2))
    captured = capture(model, torch.randint(5_000_000, (4, 3)), loss_fn=lambda output, batch: output.mean())
    assert [o.name for o in captured.graph.operators] == ["0", "1"]
    assert batch_wise(captured) == []
    assert captured.graph.operators[0].parameter_bytes == 80_000_000
    assert all(parameter.is_meta for parameter in captured.stage_module(["0"]).parameters())
