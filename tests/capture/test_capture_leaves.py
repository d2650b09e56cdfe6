"""Code that a graph cannot hold stays as it is: modules kept whole, and custom autograd functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from graphpipe.capture import capture
from graphpipe.errors import CaptureError
from tests.capture.conftest import batch_wise

Check = Callable[..., None]


pytestmark = pytest.mark.usefixtures("double")


class Towers(nn.Module):
    """A tower with a special module between two layers, beside a plain one."""

    def __init__(self, special: nn.Module) -> None:
        super().__init__()
        self.towers = nn.ModuleList(
            [
                nn.Sequential(nn.Linear(4, 4), special, nn.Linear(4, 4)),
                nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)),
            ]
        )
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = torch.cat([tower(x) for tower in self.towers], 1)
        return functional.cross_entropy(self.head(hidden), y)


def batch_of(num_samples: int) -> dict[str, Any]:
    return {"x": torch.randn(num_samples, 4), "y": torch.arange(num_samples) % 3}


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return self.a(x) if x.sum() > 0 else self.b(x)


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.a(x)
        if found.requires_grad:
            found.register_hook(lambda gradient: gradient * gradient.mean())
        return found


class Reentrant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda t: torch.tanh(self.a(t)), x, use_reentrant=True)  # type: ignore[no-any-return]


class ByNumpy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * (int(x.detach().numpy().argmax()) % 2 + 1)


class WithHook(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.register_full_backward_hook(lambda m, given, made: tuple(2 * g for g in given))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.a(x))


@pytest.mark.parametrize(
    ("special", "reason"),
    [
        (Branches, r"values of a tensor at .*test_capture_leaves.py:\d+ `return self.a"),
        (Hooked, "gradient hook"),
        (Reentrant, "CheckpointFunction"),
        (ByNumpy, "Towers"),
        (WithHook, "backward hook on 'towers.0.1'"),
    ],
)
def test_kept_whole(assert_equal_training: Check, special: type[nn.Module], reason: str) -> None:
    model = Towers(special())
    with pytest.warns(
        UserWarning, match=rf"`towers.0.1` is kept whole and takes the whole mini-batch at once: .*{reason}"
    ):
        captured = capture(model, batch_of(4))

    assert list(captured.kept_whole) == ["towers.0.1"]
    assert batch_wise(captured) == ["towers.0.1"]
    assert [o.name for o in captured.graph.operators if o.name.startswith("towers.1")] == ["towers.1.0", "towers.1.2"]
    (whole,) = [o for o in captured.graph.operators if o.name == "towers.0.1"]
    assert whole.forward_flops == 2 * 4 * 4
    assert whole.backward_flops == (3 if special is Reentrant else 2) * whole.forward_flops
    for size in (7, 4, 3):
        batch = batch_of(size)
        assert_equal_training(captured, model, batch, lambda m, batch=batch: m(**batch))


class Halves(nn.Module):
    """Takes as many rows as are positive: the module around it must be kept whole as well."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        kept = x[x[:, 0] > 0]
        return self.a(kept)


class Summed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Halves()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x).sum(0)


def test_the_module_around_is_kept_whole_if_need_be(assert_equal_training: Check) -> None:
    model = Towers(Summed())
    with pytest.warns(UserWarning, match="`towers.0.1` is kept whole"):
        captured = capture(model, batch_of(4))
    assert list(captured.kept_whole) == ["towers.0.1"]
    batch = batch_of(6)
    assert_equal_training(captured, model, batch, lambda m: m(**batch))


class Counts(nn.Module):
    """A counter in Python has no place in a graph, nor in a module that each stage copies."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls if x.sum() > 0 else x


def test_counters_are_refused_in_modules_that_are_kept_whole() -> None:
    with pytest.raises(CaptureError, match="changes its attribute"):
        capture(Towers(Counts()), batch_of(4))


class Scaled(torch.autograd.Function):
    """Several tensors, a number, a size and a result without gradient; its backward is not that of its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, k: int, count: int) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        ctx.k = k
        return x * weight * k * (count / count), torch.ones(x.shape[0], dtype=torch.long)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        return 7 * gradient * weight * ctx.k, (gradient * x).sum(0), None, None


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        found, ones = Scaled.apply(x, self.weight, 3, x.shape[0])
        return found * ones.unsqueeze(1)  # type: ignore[no-any-return]


def test_custom_functions_keep_their_backward(assert_equal_training: Check) -> None:
    model = Towers(Scale())
    captured = capture(model, batch_of(4))
    assert batch_wise(captured) == []
    assert not captured.kept_whole
    batch = batch_of(7)
    assert_equal_training(captured, model, batch, lambda m: m(**batch))
    assert torch.autograd.Function.apply.__func__.__module__.startswith("torch")  # type: ignore[attr-defined]


class MeanGradient(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient - gradient.mean(0)


class Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return MeanGradient.apply(x)  # type: ignore[no-any-return]


def test_custom_functions_that_mix_samples_in_backward_alone(assert_equal_training: Check) -> None:
    model = Towers(Centred())
    captured = capture(model, batch_of(4))
    assert len(batch_wise(captured)) == 1
    batch = batch_of(7)
    assert_equal_training(captured, model, batch, lambda m: m(**batch))


class Averages(nn.Module):
    """Replaces a buffer twice, and reads it before, between and after."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.full((4,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        before = x * self.average
        self.average = self.average * 0.9 + x.detach().mean(0)
        between = before * self.average
        self.average = self.average + 1
        return between + self.average


def test_buffers_that_are_replaced(assert_equal_training: Check) -> None:
    model = Towers(Averages())
    captured = capture(model, batch_of(4))
    assert torch.equal(model.get_buffer("towers.0.1.average"), torch.full((4,), 0.5))
    batch = batch_of(7)
    assert_equal_training(captured, model, batch, lambda m: m(**batch))


class BranchesOnTwo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return self.a(x + z) if x.sum() > 0 else self.a(x - z)


class OfTwoInputs(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(x, z))).square().mean()


def test_a_module_of_several_inputs_is_kept_whole(assert_equal_training: Check) -> None:
    model = OfTwoInputs(BranchesOnTwo())
    captured = capture(model, {"x": torch.randn(4, 4), "z": torch.randn(4, 4)})
    assert list(captured.kept_whole) == ["inner"]
    batch = {"x": torch.randn(7, 4), "z": torch.randn(7, 4)}
    assert_equal_training(captured, model, batch, lambda m: m(**batch))


def test_a_module_of_another_free_size_is_refused() -> None:
    batch = {"x": torch.randn(4, 4), "z": torch.randn(5, 4)}
    with pytest.raises(CaptureError, match="'inner' must be kept whole, and then no other size"):
        capture(OfTwoInputs(BranchesOnTwo()), batch, free_sizes={"z": {0: "length"}})


class BranchesWithGrid(nn.Module):
    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return x * (12 // int(z.sum())) if z.sum() > 0 else x[z.sum() :].reshape(int(z[0]), -1)


def test_the_first_reason_is_told_where_keeping_a_module_whole_does_not_help() -> None:
    batch = {"x": torch.randn(4, 4), "z": torch.ones(4, dtype=torch.int64)}
    expected = (
        r"values of a tensor at .*test_capture_leaves.py:\d+ `return x \* \(12.*Keeping a module whole does not help: "
    )
    with pytest.raises(CaptureError, match=expected + "module 'inner' .* does not run on random numbers and zeros"):
        capture(OfTwoInputs(BranchesWithGrid()), batch)
