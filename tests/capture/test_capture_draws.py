"""What dropout drops follows from the sample, and not from how the model is cut and where it runs."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from graphpipe.capture import CapturedModel, Draws, capture
from graphpipe.program import lower
from graphpipe.runtime.in_process import run_in_process
from graphpipe.schedule import kfkb
from graphpipe.stage import Recompute, Stage, StageGraph
from tests.capture.conftest import random_partition

CPU = torch.device("cpu")
DRAWS = Draws(seed=3, step=5)


class Dropping(nn.Module):
    """Dropout of rows, in place, of whole channels, of a sequence-major attention and of a table without samples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.position = nn.Parameter(torch.randn(5, 8))
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3)
        self.first, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(5)
        self.channels, self.last = nn.Dropout2d(0.4), nn.Linear(8, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x) + functional.dropout(self.position, 0.5)
        hidden = self.layer(hidden.transpose(0, 1)).transpose(0, 1)
        hidden = self.channels(torch.tanh(hidden).unsqueeze(-1)).squeeze(-1)
        return functional.dropout(self.last(self.norm(hidden)), 0.2, inplace=True).square().mean()


def batch_of(num_samples: int) -> dict[str, Tensor]:
    return {"x": torch.randn(num_samples, 5, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)}


def run(captured: CapturedModel, batch: Any, stages: list[Stage], draws: Draws = DRAWS) -> tuple[float, dict[str, Any]]:
    graph = StageGraph(captured.graph, tuple(stages), len(batch["x"]))
    result = run_in_process(captured, lower(graph, kfkb(graph)), batch, draws=draws)
    return result.loss, {n: g for own in result.gradients for n, g in own.items()}


@pytest.mark.parametrize("seed", range(6))
def test_every_strategy_drops_the_same_entries(seed: int) -> None:
    batch, rng = batch_of(7), random.Random(seed)
    captured = capture(Dropping(), batch)
    names = tuple(o.name for o in captured.graph.operators)
    loss, gradients = run(captured, batch, [Stage(operators=names, micro_batch_size=7, devices=(0,))])
    mixing = {o.name for o in captured.graph.operators if o.is_batch_wise}
    stages = []
    for i, part in enumerate(random_partition(captured, 4, rng)):
        size = 7 if mixing & set(part) else rng.randint(2, 7)
        devices = (2 * i, 2 * i + 1) if size < 7 else (2 * i,)
        recompute = rng.choice(list(Recompute))
        stages.append(Stage(operators=tuple(part), micro_batch_size=size, devices=devices, recompute=recompute))
    found_loss, found = run(captured, batch, stages)
    assert found_loss == pytest.approx(loss, rel=1e-9)
    assert found.keys() == gradients.keys()
    largest = max(float(g.abs().max()) for g in gradients.values())
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-12 * largest, msg=name)
    assert run(captured, batch, stages, Draws(seed=3, step=6))[0] != pytest.approx(loss, rel=1e-6)
    assert run(captured, batch, stages, Draws(seed=4, step=5))[0] != pytest.approx(loss, rel=1e-6)
    assert run(captured, batch, stages, Draws(seed=3, step=5, turn=1))[0] != pytest.approx(loss, rel=1e-6)


def test_recomputation_updates_running_statistics_once() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(1)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x).square().mean()

    # C27: the samples 1 to 8, whose mean is 4.5; the statistics are those of the whole mini-batch.
    batch = {"x": torch.arange(1.0, 9.0).reshape(8, 1)}
    for recompute in Recompute:
        model = Normed()
        captured = capture(model, batch)
        names = tuple(o.name for o in captured.graph.operators)
        module = captured.stage_module(names)
        stage = Stage(operators=names, micro_batch_size=8, devices=(0,), recompute=recompute)
        graph = StageGraph(captured.graph, (stage,), 8)
        run_in_process(_Uncopied(captured, module), lower(graph, kfkb(graph)), batch)
        assert float(model.norm.running_mean) == pytest.approx(0.45)  # type: ignore[arg-type]
        assert int(model.norm.num_batches_tracked) == 1  # type: ignore[arg-type]


class _Uncopied:
    """A captured model whose stage keeps the model's own buffers when it is copied for a device."""

    def __init__(self, captured: CapturedModel, module: nn.Module) -> None:
        self._captured, self._module = captured, module
        module.__deepcopy__ = lambda memo: module  # type: ignore[assignment]

    def sized(self, _: Any) -> Any:
        return self

    def stage_module(self, _: Any) -> Any:
        return self._module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._captured, name)


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_entries_are_dropped_with_their_probability_and_independently(probability: float) -> None:
    kept = DRAWS.keeps("o", (64, 4000), probability, (0, 1, 1), CPU).double()
    deviation = math.sqrt(probability * (1 - probability))
    assert float(kept.mean()) == pytest.approx(1 - probability, abs=5 * deviation / math.sqrt(kept.numel()))
    other = DRAWS.keeps("another", (64, 4000), probability, (0, 1, 1), CPU).double()
    later = Draws(seed=3, step=6).keeps("o", (64, 4000), probability, (0, 1, 1), CPU).double()
    neighbours = [(kept[1:], kept[:-1]), (kept[:, 1:], kept[:, :-1]), (kept, other), (kept, later)]
    for a, b in neighbours:
        correlation = float(((a - 1 + probability) * (b - 1 + probability)).mean()) / deviation**2
        assert abs(correlation) < 5 / math.sqrt(a.numel())


@pytest.mark.parametrize("probability", [0.0, 1e-12, 1 - 1e-12, 1.0])
def test_all_entries_or_none_are_kept_at_the_ends(probability: float) -> None:
    kept = DRAWS.keeps("o", (64, 4000), probability, (0, 1, 1), CPU)
    assert bool((kept == (probability < 0.5)).all())


def test_samples_keep_their_masks_wherever_they_lie() -> None:
    # The batch axis in the middle, with two slower and three faster rows of each sample.
    whole = DRAWS.keeps("o", (4, 2 * 6 * 3, 5), 0.5, (1, 2, 3), CPU).reshape(4, 2, 6, 3, 5)
    part = Draws(seed=3, step=5, first_sample=2).keeps("o", (4, 2 * 3 * 3, 5), 0.5, (1, 2, 3), CPU)
    assert torch.equal(part.reshape(4, 2, 3, 3, 5), whole[:, :, 2:5])
    assert not torch.equal(whole[:, :, 0], whole[:, :, 1])


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("mask", ["none", "bool", "float"])
def test_attention_is_that_of_torch_but_for_its_draws(is_causal: bool, mask: str) -> None:
    class Attention(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
            given = None if mask == "none" or is_causal else (m > 0 if mask == "bool" else m)
            grouped = q.shape[1] != k.shape[1]
            out = functional.scaled_dot_product_attention(
                q, k, v, given, dropout_p=1e-9, is_causal=is_causal, scale=0.3, enable_gqa=grouped
            )
            return (out**2).mean()

    generator = torch.Generator().manual_seed(0)
    shapes = {"q": (4, 4, 6, 8), "k": (4, 2, 6, 8), "v": (4, 2, 6, 8), "m": (4, 1, 6, 6)}
    batch = {n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in shapes.items()}
    batch["m"][..., 0] = 1.0
    captured = capture(Attention(), batch)
    module = captured.stage_module([o.name for o in captured.graph.operators])
    found = module(captured.flatten_batch(batch), 4)["loss"]
    torch.testing.assert_close(found, Attention()(**batch), rtol=1e-9, atol=0)


def test_other_draws_are_the_same_whenever_a_strategy_runs_again() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8).double()

        def forward(self, x: Tensor) -> Tensor:
            return (self.linear(x) + torch.randn_like(x)).square().mean()

    batch = batch_of(6)
    captured = capture(Noisy(), batch)
    names = tuple(o.name for o in captured.graph.operators)
    before = torch.get_rng_state()
    stages = [[Stage(operators=names, micro_batch_size=2, devices=(0,), recompute=r)] for r in Recompute]
    losses, gradients = zip(*(run(captured, batch, s) for s in stages), strict=True)
    assert losses[0] == losses[1] != run(captured, batch, stages[0], Draws(seed=9))[0]
    assert all(torch.equal(gradients[0][n], gradients[1][n]) for n in gradients[0])
    assert torch.equal(torch.get_rng_state(), before)
