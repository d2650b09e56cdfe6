"""Classes of single operations."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from graphpipe.capture.batch import BatchLayout, resize
from graphpipe.capture.classes import COUNT, INDEPENDENT, MEAN, SUM, Kind, SampleClass
from graphpipe.capture.classification import Classification
from graphpipe.capture.export import Mode, ModelWithLoss, export_graph
from graphpipe.capture.probe import classify
from graphpipe.capture.training_graph import TrainingGraph, clean
from graphpipe.capture.trial import NUM_SAMPLES


class Body(nn.Module):
    def __init__(self, body: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(4))
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x * self.scale)


def exported(model: nn.Module, batch: Tensor) -> tuple[TrainingGraph, dict[str, Tensor]]:
    """Return the graph of a model that returns its loss, and a batch to probe it with."""
    layout = BatchLayout.of(batch, ["x"], {}, {})
    flat = layout.flatten(batch)
    module, leaves = export_graph(ModelWithLoss(model, layout, None), list(flat.values()), layout, {}, Mode.TRAIN)
    return clean(module, model, layout, {}, leaves), resize(layout, flat, NUM_SAMPLES)


def probe(body: Callable[[Tensor], Tensor]) -> tuple[TrainingGraph, Classification]:
    graph, batch = exported(Body(body), torch.randn(4, 3, 4))
    return graph, classify(graph, batch)


def class_of(name: str, body: Callable[[Tensor], Tensor]) -> SampleClass:
    graph, classification = probe(body)
    return next(classification.classes[node] for node in graph.operations if node.name == name)


def per_sample(axis: int, outer: int = 1, inner: int = 1) -> SampleClass:
    return SampleClass(Kind.PER_SAMPLE, axis, outer, inner)


@pytest.mark.parametrize(
    ("name", "body", "expected"),
    [
        # The scale is zero now, and need not be after a step: the class does not depend on it.
        ("mul", lambda x: x.mean(), per_sample(0)),
        ("transpose", lambda x: x.transpose(0, 1).mean(), per_sample(1)),
        ("view", lambda x: x.view(-1, 4).mean(), per_sample(0, 1, 3)),
        ("reshape", lambda x: x.transpose(0, 1).reshape(-1, 4).mean(), per_sample(0, 3, 1)),
        ("reshape", lambda x: x.view(-1, 3, 2, 2).permute(2, 0, 1, 3).reshape(-1, 2).mean(), per_sample(0, 2, 3)),
        ("arange", lambda x: (x * torch.arange(x.shape[0]).sum()).mean(), COUNT),
        ("ones", lambda x: (x * torch.ones(4)).mean(), INDEPENDENT),
        ("mean", lambda x: x.mean(0).sum(), MEAN),
        ("sum_1", lambda x: x.sum(0).mean(), SUM),
        ("mm", lambda x: torch.mm(x[:, 0].t(), x[:, 0]).sum(), SUM),
    ],
)  # fmt: skip
def test_classes(name: str, body: Callable[[Tensor], Tensor], expected: SampleClass) -> None:
    assert class_of(name, body) == expected


def test_attention_under_a_mask_that_mixes_samples() -> None:
    def body(x: Tensor) -> Tensor:
        heads = x.unsqueeze(1)
        mask = (x @ x.transpose(1, 2)).amax(0)
        return nn.functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask).mean()

    graph, classification = probe(body)
    assert {node.name for node in classification.batch_wise} == {"amax", "scaled_dot_product_attention"}
    assert classification.classes[graph.loss] == MEAN


def test_all_operations_around_a_mean_see_the_same_samples() -> None:
    graph, classification = probe(lambda x: (2 * x.mean(0)).square().sum())
    # x * scale is done sample by sample; the mean must be that of all samples before it is squared.
    assert [node.name for node in graph.operations] == ["mul", "mean", "mul_1", "square", "sum_1"]
    assert {node.name for node in classification.batch_wise} == {"mean", "mul_1", "square", "sum_1"}
