from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from graphpipe.capture import CapturedModel, capture
from graphpipe.cost.profile import ProfileSource
from graphpipe.disk_cache import DiskCache
from graphpipe.errors import GraphPipeError
from graphpipe.models import MMT, MMTConfig
from graphpipe.profiler import measure as measure_module
from graphpipe.profiler import measure_profile

CONFIG = MMTConfig(num_branches=2, num_layers=1)


@pytest.fixture(scope="module")
def captured() -> CapturedModel:
    return capture(MMT(CONFIG), CONFIG.example_batch(4))


def test_times_are_positive_and_backward_follows_gradients(captured: CapturedModel, tmp_path: Path) -> None:
    profile = measure_profile(captured, [4, 1], CONFIG.example_batch(2), cache=DiskCache(tmp_path))

    assert profile.sizes == (1, 4)
    assert profile.source is ProfileSource.MEASURED
    assert profile.operators == tuple(o.name for o in captured.graph.operators)
    assert (profile.forward_s > 0).all()
    assert (profile.backward_s > 0).all()


def test_saved_bytes_match_a_run_of_the_whole_model(captured: CapturedModel, tmp_path: Path) -> None:
    size = 4
    model = MMT(CONFIG)
    batch = CONFIG.example_batch(size)
    free = {p.untyped_storage().data_ptr() for p in model.parameters()}
    free |= {t.untyped_storage().data_ptr() for t in [*batch["modalities"], batch["labels"]]}
    alive: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        alive.setdefault(tensor.untyped_storage().data_ptr(), tensor.detach())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(**batch)
    whole = sum(t.untyped_storage().nbytes() for address, t in alive.items() if address not in free)
    del loss

    profile = measure_profile(captured, [size], batch, cache=DiskCache(tmp_path))
    # By operators, and by operators as capture accounts for them without running anything.
    assert profile.saved_bytes.sum() == pytest.approx(whole, rel=0.02)
    assert size * sum(o.saved_bytes for o in captured.graph.operators) == pytest.approx(whole, rel=0.02)
    counted = size * np.array([o.saved_bytes for o in captured.graph.operators])
    np.testing.assert_allclose(profile.saved_bytes[0], counted, rtol=0.02, atol=64)


def test_cached_until_damaged(captured: CapturedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = CONFIG.example_batch(2)
    first = measure_profile(captured, [2], batch, cache=DiskCache(tmp_path), repeats=1)
    (entry,) = tmp_path.iterdir()

    with monkeypatch.context() as patch:
        patch.setattr(measure_module, "_measure_size", None)  # would fail if it were called
        again = measure_profile(captured, [2], batch, cache=DiskCache(tmp_path), repeats=1)
    assert (again.forward_s == first.forward_s).all()

    entry.write_text(entry.read_text()[:40])
    measured = measure_profile(captured, [2], batch, cache=DiskCache(tmp_path), repeats=1)
    assert (measured.forward_s != first.forward_s).any()
    assert [path.name for path in tmp_path.iterdir()] == [entry.name]
    measure_profile(captured, [3], batch, cache=DiskCache(tmp_path), repeats=1)
    assert len(list(tmp_path.iterdir())) == 2


def test_model_is_left_alone(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    captured = capture(model, torch.randn(4, 4), loss_fn=lambda output, batch: output.mean())
    before = {name: t.clone() for name, t in model.state_dict().items()}
    profile = measure_profile(captured, [2, 4], torch.randn(3, 4), cache=DiskCache(tmp_path), repeats=1)

    assert len(profile.operators) == 3  # linear, batch statistics, linear
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert all(p.grad is None for p in model.parameters())


def test_other_work_on_the_machine_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    captured = capture(nn.Linear(4, 1), torch.randn(4, 4), loss_fn=lambda output, batch: output.mean())
    # Of the warm-up and five measurements only one forward and another backward pass are left in peace. A forward pass
    # is timed from its first reading of the clock to the second, a backward pass from the third to the fourth.
    forward_s, backward_s = [9.0, 0.5, 0.3, 0.01, 0.5, 0.2], [9.0, 0.4, 0.02, 0.6, 0.5, 0.3]
    readings = []
    for forward, backward in zip(forward_s, backward_s, strict=True):
        readings += [0.0, forward, 0.0, backward]
    clock = itertools.cycle(readings)
    monkeypatch.setattr(measure_module, "_now", lambda _: next(clock))
    profile = measure_profile(captured, [2], torch.randn(2, 4), cache=DiskCache(tmp_path))

    assert (profile.forward_s == 0.01).all()
    assert (profile.backward_s == 0.02).all()


def test_frozen_operator_has_no_backward(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    model[0].requires_grad_(False)
    captured = capture(model, torch.randn(4, 4), loss_fn=lambda output, batch: output.mean())
    profile = measure_profile(captured, [2], torch.randn(2, 4), cache=DiskCache(tmp_path))

    assert profile.backward_s[0, 0] == 0
    assert profile.backward_s[0, 1] > 0


def test_meta_parameters_cannot_be_measured(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = MMT(CONFIG)
    captured = capture(model, CONFIG.example_batch(4))
    with pytest.raises(GraphPipeError, match="meta device and has no values"):
        measure_profile(captured, [2], CONFIG.example_batch(4), cache=DiskCache(tmp_path))


@pytest.mark.parametrize(("sizes", "repeats"), [([], 3), ([0, 2], 3), ([2], 0)])
def test_wrong_arguments(captured: CapturedModel, sizes: list[int], repeats: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="got"):
        measure_profile(captured, sizes, CONFIG.example_batch(4), cache=DiskCache(tmp_path), repeats=repeats)
