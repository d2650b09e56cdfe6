"""Root buffers and constants (C18), batch sizes (C20), tied weights (C16), evaluation (C19)
and control flow on data (C21)."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from graphpipe.capture import Mode, capture
from graphpipe.errors import CaptureError

Check = Callable[..., None]


pytestmark = pytest.mark.usefixtures("double")


class Rotary(nn.Module):
    """A table that four layers read, a constant made in forward, positions on the input's device, an unsaved buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.register_buffer("frequencies", torch.rand(4))
        self.register_buffer("scale", torch.tensor(1.5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        half = torch.tensor(0.5)
        positions = torch.arange(x.shape[1], device=x.device)
        angles = positions.unsqueeze(1) * self.frequencies
        for layer in self.layers:
            x = layer(x * angles.cos() + half * angles.sin()) * self.scale
        return x.square().mean()


def test_buffers_of_the_root_and_constants_go_wherever_they_are_read(assert_equal_training: Check) -> None:
    model = Rotary()
    captured = capture(model, torch.randn(4, 5, 4))
    batch = torch.randn(7, 5, 4)
    layers = [o.name for o in captured.graph.operators]
    assert layers == [f"layers.{i}" for i in range(4)]
    # Every layer makes the angles for itself.
    assert len(captured.graph.values) == 3
    assert {n for n, _ in captured.stage_module(["layers.2"]).named_buffers()} == {"frequencies", "scale"}
    assert_equal_training(captured, model, batch, lambda m: m(batch), tries=6)


class Reshapes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 4)
        self.second = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        count = x.shape[0]
        rows = self.first(x.view(count * 2, 6)).view(count, -1)
        first = rows[torch.arange(count, device=x.device)]
        return self.second(torch.relu(first)).square().mean()


@pytest.mark.parametrize("num_samples", [1, 2, 8])
def test_batch_sizes_in_views_and_ranges_follow_the_micro_batch(num_samples: int) -> None:
    model = Reshapes()
    captured = capture(model, torch.randn(4, 2, 6))
    batch = torch.randn(num_samples, 2, 6)
    alone = copy.deepcopy(model)
    expected = alone(batch)
    expected.backward()
    tensors: dict[str, Tensor] = dict(captured.flatten_batch(batch))
    for operator in captured.graph.operators:
        tensors |= captured.stage_module([operator.name])(tensors, num_samples)
    tensors[captured.loss].backward()
    torch.testing.assert_close(tensors[captured.loss], expected, rtol=1e-12, atol=0)
    for found, parameter in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(found.grad, parameter.grad, rtol=1e-9, atol=1e-12)


def test_a_batch_size_that_is_fixed_is_named_with_its_line() -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(4, 3))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.table).sum()

    with pytest.raises(CaptureError, match=r"fixed to 4 at .*test_capture_cases.py:\d+ `return \(x \* self.table"):
        capture(Fixed(), torch.randn(4, 3))


class LanguageModel(nn.Module):
    """A head that is the embedding, at the two ends."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.middle = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.embedding(words)
        for layer in self.middle:
            hidden = torch.tanh(layer(hidden))
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), words.flatten())


def test_tied_weights_at_both_ends_are_one_parameter_with_one_name(assert_equal_training: Check) -> None:
    model = LanguageModel()
    captured = capture(model, torch.randint(11, (4, 5)))
    batch = torch.randint(11, (7, 5))
    ends = captured.stage_module(["embedding"]), captured.stage_module(["head"])
    for stage in ends:
        assert [n for n, _ in stage.named_parameters()] == ["embedding.weight"]
        assert next(stage.parameters()) is model.embedding.weight
    assert captured.parameter_names["embedding.weight"] == ("embedding.weight", "head.weight")
    assert_equal_training(captured, model, batch, lambda m: m(batch), tries=6)


def test_control_flow_on_data_in_the_model_itself_is_refused_with_the_ways_out() -> None:
    class Branches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.sum() > 0:
                x = x * 2
            return x.mean()

    expected = r"values of a tensor at .*test_capture_cases.py:\d+ `if x.sum\(\) > 0:`.*use torch.where, or"
    with pytest.raises(CaptureError, match=expected):
        capture(Branches(), torch.randn(4, 3))


class Regular(nn.Module):
    """Dropout and batch statistics, of which the user keeps one in eval mode."""

    def __init__(self, probability: float = 0.5) -> None:
        super().__init__()
        self.probability = probability
        self.layers = nn.Sequential(
            nn.Linear(4, 4),
            nn.BatchNorm1d(4),
            nn.Dropout(probability),
            nn.Linear(4, 4),
            nn.BatchNorm1d(4),
            nn.Linear(4, 4),
        )

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.dropout(self.layers(x), self.probability, training=self.training)
        return hidden.square().mean()


def test_train_and_eval() -> None:
    model = Regular()
    model.layers[4].eval()
    with torch.no_grad():
        for norm in (model.layers[1], model.layers[4]):
            assert isinstance(norm, nn.BatchNorm1d)
            norm.running_mean.normal_()  # type: ignore[union-attr]
    modes = [m.training for m in model.modules()]
    batch = torch.randn(7, 4)
    trained = capture(model, torch.randn(4, 4))
    evaluated = capture(model, torch.randn(4, 4), mode=Mode.EVAL)
    assert [m.training for m in model.modules()] == modes

    assert [o.name for o in trained.graph.operators if o.is_batch_wise] == ["layers.1"]
    assert not any(o.is_batch_wise for o in evaluated.graph.operators)
    before = copy.deepcopy(dict(model.named_buffers()))
    losses = []
    for start, stop in ((0, 4), (4, 7)):
        tensors: dict[str, Tensor] = evaluated.flatten_batch(batch[start:stop])
        for operator in evaluated.graph.operators:
            with torch.no_grad():
                tensors |= evaluated.stage_module([operator.name])(tensors, stop - start)
        losses.append(tensors[evaluated.loss] * (stop - start) / 7)
    assert all(torch.equal(before[n], b) for n, b in model.named_buffers())
    torch.testing.assert_close(sum(losses), copy.deepcopy(model).eval()(batch), rtol=1e-12, atol=0)

    # Training goes on as if nothing had been evaluated; a stage's dropout draws other entries than torch's generator.
    plain = Regular(0.0)
    plain.load_state_dict(model.state_dict())
    plain.layers[4].eval()
    trained = capture(plain, torch.randn(4, 4))
    capture(plain, torch.randn(4, 4), mode=Mode.EVAL)
    alone = copy.deepcopy(plain)
    expected = alone(batch)
    expected.backward()
    whole = copy.deepcopy(trained.stage_module([o.name for o in trained.graph.operators]))
    loss = whole(trained.flatten_batch(batch), 7)[trained.loss]
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    for name, parameter in alone.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(whole.get_parameter(name).grad, parameter.grad, rtol=1e-9, atol=1e-12)
    for name, buffer in whole.named_buffers():
        torch.testing.assert_close(buffer, alone.get_buffer(name), rtol=1e-12, atol=0)


def test_a_stage_is_in_the_mode_of_its_capture() -> None:
    model = Regular(1.0)  # training drops everything
    batch = torch.randn(4, 4)
    trained, evaluated = capture(model, batch), capture(model, batch, mode=Mode.EVAL)
    stages = {
        captured.mode: copy.deepcopy(captured.stage_module([o.name for o in captured.graph.operators]))
        for captured in (trained, evaluated)
    }
    assert all(module.training for module in stages[Mode.TRAIN].train().modules())
    assert not any(module.training for module in stages[Mode.EVAL].eval().modules())
    assert float(stages[Mode.TRAIN](trained.flatten_batch(batch), 4)[trained.loss]) == 0
    expected = copy.deepcopy(model).eval()(batch)
    found = stages[Mode.EVAL](evaluated.flatten_batch(batch), 4)[evaluated.loss]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    assert float(expected) > 0
    # What a training stage would do in eval mode is not in its graph.
    with pytest.raises(ValueError, match=r"captured in train mode and cannot be put into eval mode.*mode=Mode.EVAL"):
        nn.ModuleList([stages[Mode.TRAIN]]).eval()
    with pytest.raises(ValueError, match=r"captured in eval mode and cannot be put into train mode"):
        stages[Mode.EVAL].train()
