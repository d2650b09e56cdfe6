"""Classes that follow from the arguments of an operation are those that trying it would give."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from graphpipe.capture import probe
from graphpipe.capture.classes import INDEPENDENT, Kind
from graphpipe.capture.probe import classify
from graphpipe.capture.row_rules import class_by_structure
from tests.capture.test_capture_probe import exported

# Of ``x [samples, 3, 4]``, ``w [4, 4]`` that is trained, and ``c [3, 4]``.
BODIES: tuple[Callable[[Tensor, Tensor, Tensor], Tensor], ...] = (
    # Rows stay with their sample, if on another axis or among others.
    lambda x, w, c: x.transpose(0, 1),
    lambda x, w, c: x.permute(2, 0, 1).softmax(0),
    lambda x, w, c: x.transpose(0, -1).reshape(12, -1),
    lambda x, w, c: x.reshape(-1, 4),
    lambda x, w, c: x.transpose(0, 1).reshape(-1, 4).log_softmax(-1),
    lambda x, w, c: x.transpose(0, 1).reshape(-1, 2, 2).unsqueeze(1),
    lambda x, w, c: x.view(-1, 3, 2, 2).permute(2, 0, 1, 3).reshape(-1, 2).relu(),
    lambda x, w, c: x.unflatten(2, (2, 2)).transpose(1, 2).flatten(0, 1),
    lambda x, w, c: x.expand(2, -1, -1, -1).flatten(0, 1),
    lambda x, w, c: x.permute(2, 0, 1).reshape(-1) + x.permute(2, 0, 1).flatten(),
    lambda x, w, c: x.repeat_interleave(2, 0),
    lambda x, w, c: torch.cat([x, x.exp()], -1) + torch.cat([x, x], 2),
    lambda x, w, c: torch.stack([x, x + 1], 1) * torch.stack([x, x], 1),
    lambda x, w, c: torch.stack([x, x], -1).select(1, 0),
    lambda x, w, c: x[:, 0] + x[:, -1] * x[..., 1:, :].mean(1),
    lambda x, w, c: x.transpose(0, 1)[1] + (x[:, 0] + x.transpose(0, 1)).amax(0),
    lambda x, w, c: x[:, 0] * c.sum(1)[:, None, None],
    lambda x, w, c: torch.stack(sum(x.split(2, 2)).unbind(1)),
    lambda x, w, c: nn.functional.layer_norm(x, (4,), w[0], w[1]),
    lambda x, w, c: nn.functional.layer_norm(x.transpose(0, 1), (4,)),
    lambda x, w, c: x.sum((1, 2), keepdim=True) * x.amax(-1, keepdim=True),
    lambda x, w, c: x.transpose(0, 1).mean(0).logsumexp(1),
    lambda x, w, c: x.cumsum(1).where(x > 0, c),
    lambda x, w, c: (x * c + w.square().sum(0)).masked_fill(x < 0, 0.5),
    lambda x, w, c: x.to(torch.float32).type_as(x).clone().contiguous(),
    lambda x, w, c: nn.functional.group_norm(x.detach() + x, 3, c[:, 0]) * nn.functional.group_norm(x, 1),
    lambda x, w, c: nn.functional.interpolate(nn.functional.avg_pool1d(x, 2), scale_factor=2),
    # The batch decides what they give.
    lambda x, w, c: x * x.shape[0],
    lambda x, w, c: w * x.shape[0],
    lambda x, w, c: c.expand(x.shape[0], -1, -1) * x,
    # They mix samples.
    lambda x, w, c: x + x.flip(0),
    lambda x, w, c: x.softmax(0),
    lambda x, w, c: nn.functional.avg_pool1d(x.transpose(0, 1), 2),
    lambda x, w, c: nn.functional.group_norm(x.transpose(0, 1), 1),
    lambda x, w, c: x.cumsum(0),
    lambda x, w, c: x.sum((0, 1)),
    lambda x, w, c: x[0] + x,
    lambda x, w, c: torch.cat([x, x.tanh()], 0),
    lambda x, w, c: x.reshape(-1, 4) + x.transpose(0, 1).reshape(-1, 4),
)  # fmt: skip


class Bodies(nn.Module):
    """Everything at once: one graph is quicker to export than many."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4))
        self.c: Tensor
        self.register_buffer("c", torch.randn(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = x.sin()
        return torch.stack([body(x, self.w, self.c).sum() for body in BODIES]).sum()


def test_rules_agree_with_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, batch = exported(Bodies(), torch.randn(4, 3, 4))
    by_rules = classify(graph, batch)
    ruled = [n for n in graph.operations if class_by_structure(graph, n, by_rules.classes) is not None]
    monkeypatch.setattr(probe, "class_by_structure", lambda *_: None)
    by_trials = classify(graph, batch)
    for node in graph.operations:
        assert by_rules.classes[node] == by_trials.classes[node], node.format_node()
    assert by_rules.batch_wise == by_trials.batch_wise
    # Most rules were asked for: of some operators, for rows on each axis.
    kinds = [by_rules.classes[n] for n in ruled if not isinstance(by_rules.classes[n], list | tuple)]
    assert INDEPENDENT in kinds
    assert {c.axis for c in kinds if c.kind is Kind.PER_SAMPLE} == {0, 1, 2}
    assert len(ruled) > 80
