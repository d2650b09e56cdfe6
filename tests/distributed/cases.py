"""What each rank does in a case. The models are small; every one is captured as a user's would be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from graphpipe.capture import capture
from graphpipe.runtime.checkpoint import Checkpointer
from graphpipe.runtime.pipeline import Pipeline
from graphpipe.runtime.sharding import OptimizerStates
from graphpipe.stage import Recompute
from tests.distributed import parity
from tests.distributed.parity import Part, compare, hand_made


def batch_of(num_samples: int, width: int = 4, seed: int = 0, **more: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(num_samples, width, generator=generator),
        "y": torch.randn(num_samples, width, generator=generator),
        **more,
    }


def mean_square(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return ((output - batch["y"]) ** 2).mean()


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight)


class Chain(nn.Module):
    """Four layers in a row."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.d = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.d(torch.tanh(self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))))


def unequal_micro_batches() -> dict[str, Any]:
    """y = c (b (a x)) on samples 1 to 10, micro-batches of 4, 4 and 2."""

    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = Scale(), Scale(), Scale()

        def forward(self, x: Tensor) -> Tensor:
            return (self.c(self.b(self.a(x))) ** 2).mean()

    batch = {"x": torch.arange(1.0, 11.0).reshape(10, 1)}
    return compare(Product(), [("a", 4, (0,)), ("b", 4, (1,)), ("", 4, (2,))], [batch], 10)


def replicas() -> dict[str, Any]:
    """A chain of four, two replicas of the first stage, eight micro-batches, three steps."""
    parts = [("a", 2, (0, 1)), ("b", 2, (2,)), ("c", 2, (3,)), ("", 2, (4,))]
    return compare(Chain(), parts, [batch_of(16, seed=s) for s in range(3)], 16, loss_fn=mean_square)


def shared_optimizer_states(folder: str) -> dict[str, Any]:
    """Three replicas of the first two layers share the states of AdamW: no device has all, and all are used.

    A checkpoint of them is taken up by replicas that share and by some that do not.
    """

    def adamw(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.01)

    parts = [("a b", 3, (0, 1, 2)), ("", 2, (3,))]
    batches = [batch_of(12, seed=s) for s in range(3)]
    found = compare(
        Chain(), parts, batches, 12, loss_fn=mean_square, make_optimizer=adamw, optimizer_states=OptimizerStates.SHARDED
    )

    def pipeline(states: OptimizerStates) -> Pipeline:
        captured = capture(Chain(), batches[0], loss_fn=mean_square)
        strategy = hand_made(captured, parts, 12)
        return Pipeline(captured, strategy, optimizer=adamw, optimizer_states=states, transport=parity.kind)

    path = Path(folder) / parity.kind
    first = pipeline(OptimizerStates.SHARDED)
    with Checkpointer(first, path) as checkpoints:
        checkpoints.restore()
        first.step(batches[0])
        checkpoints.save()
    for batch in batches[1:]:
        first.step(batch)
    expected = first.gather_parameters()
    resumed = []
    for states in OptimizerStates:
        second = pipeline(states)
        with Checkpointer(second, path) as checkpoints:
            checkpoints.restore()
        for batch in batches[1:]:
            second.step(batch)
        resumed.append(all(torch.equal(t, expected[n]) for n, t in second.gather_parameters().items()))
    return {**found, "resumed": resumed}


class Towers(nn.Module):
    """Two towers, and a contrastive loss over the whole batch with a temperature."""

    def __init__(self, train_towers: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.image, self.text = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        if not train_towers:
            for tower in (self.image, self.text):
                nn.init.eye_(tower.weight)
        self.temperature = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.image(x) @ self.text(y).T * self.temperature.exp()
        labels = torch.arange(x.shape[0], device=x.device)
        return (functional.cross_entropy(logits, labels) + functional.cross_entropy(logits.T, labels)) / 2


def contrastive_loss_of_one_hot() -> dict[str, Any]:
    """One-hot embeddings, eight samples, towers with micro-batches of two, the loss with its tower's device."""
    batch = {"x": torch.eye(8), "y": torch.eye(8)}
    return compare(Towers(False), [("image", 2, (0,)), ("text", 2, (1,)), ("", 8, (0,))], [batch], 8)


def contrastive_loss_trained() -> dict[str, Any]:
    """The same, trained, with two replicas of a tower."""
    batches = [batch_of(8, 8, seed=s) for s in range(3)]
    return compare(Towers(True), [("image", 2, (0, 1)), ("text", 4, (2,)), ("", 8, (2,))], batches, 8)


class Mixed(nn.Module):
    """Sends hidden values, an int64 id, a mask and a table without gradient to two later stages."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.a(x)
        ids = (hidden.detach()[:, :1] * 0).long() + 100003
        mask = hidden.detach() > 0
        table = hidden.detach().cumsum(1)
        middle = torch.tanh(self.b(hidden)) * mask + table + (ids - 100003)
        last = self.c(middle) * mask + table * 0.1 + (ids == 100003)
        return ((last - y) ** 2).mean()


def values_without_gradient() -> dict[str, Any]:
    return compare(Mixed(), [("a", 2, (0,)), ("b", 2, (1,)), ("", 3, (2,))], [batch_of(12, seed=s) for s in (0, 1)], 12)


class Edges(nn.Module):
    """Three values leave the first stage: one is used, one only without its gradient, and one not at all."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("used", "detached", "unused")})
        self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        used, detached, unused = (layer(x) for layer in self.first.values())
        hidden = torch.tanh(self.b(used)) * detached.detach()
        return {"result": self.c(hidden) + detached.detach(), "unused": unused}


def result_error(output: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    return mean_square(output["result"], batch)


def edges_without_gradient() -> dict[str, Any]:
    parts = [("first", 2, (0,)), ("b", 4, (1,)), ("", 3, (2,))]
    return compare(Edges(), parts, [batch_of(8, seed=s) for s in range(2)], 8, loss_fn=result_error)


class Statistics(nn.Module):
    """A batch normalisation behind a layer that changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.norm, self.b = nn.Linear(1, 1, bias=False), nn.BatchNorm1d(1), nn.Linear(1, 1)
        nn.init.ones_(self.a.weight)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.b(torch.tanh(self.norm(self.a(x)))).square().mean()
        return loss


def batch_statistics() -> dict[str, Any]:
    """Samples 1 to 8 under plans of other cuts, replicas and micro-batches, and with recomputation."""
    plans: dict[str, list[Part]] = {
        "three": [("a", 2, (0,)), ("norm", 8, (1,)), ("", 2, (2,))],
        "replicas": [("a", 4, (0, 1)), ("norm", 8, (2,)), ("", 4, (2,))],
        "recomputed": [("a", 2, (0,)), ("norm", 8, (1,)), ("", 2, (2,))],
    }
    batch = {"x": torch.arange(1.0, 9.0).reshape(8, 1)}
    found: dict[str, Any] = {}
    for name, parts in plans.items():
        model = Statistics()
        result = compare(model, parts, [batch], 8, recompute=Recompute.ALL if name == "recomputed" else Recompute.NONE)
        # The rank of the layer has its buffers, and the others those that they began with.
        mine = dict(model.norm.named_buffers())
        found[name] = {**result, "mean": mine["running_mean"].item(), "batches": int(mine["num_batches_tracked"])}
    return found


class Skips(nn.Module):
    """s0 → s1 → s2 → s3, and s0's output is also used by s2 and s3."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.s0, self.s1, self.s2, self.s3 = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        first = torch.tanh(self.s0(x))
        second = torch.tanh(self.s1(first))
        third = torch.tanh(self.s2(second + first))
        return self.s3(third * first)


def skips() -> dict[str, Any]:
    """1F1B and 2F2B, with 1, 2 and 8 micro-batches."""
    results = {}
    for k in (1, 2):
        for size in (8, 4, 1):
            parts = [(name, size, (i,)) for i, name in enumerate(("s0", "s1", "s2", ""))]
            results[f"k={k} size={size}"] = compare(Skips(), parts, [batch_of(8)], 8, loss_fn=mean_square, k=k)
    return results


class LateInputs(nn.Module):
    """A keyword first used in the last stage, one input unused, one default left out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, *, late: Tensor, unused: Tensor, scale: float = 2.0) -> Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x))))) * scale + late


def late_inputs() -> dict[str, Any]:
    more = {"late": batch_of(6, seed=1)["x"], "unused": torch.zeros(6, 2)}
    parts = [("a", 2, (0,)), ("b", 2, (1,)), ("", 2, (2,))]
    return compare(LateInputs(), parts, [batch_of(6, **more)], 6, loss_fn=mean_square)


class Fork(nn.Module):
    """Two branches joined: a graph of depth three."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        first = torch.tanh(self.a(x))
        return self.d(torch.tanh(self.b(first)) + torch.tanh(self.c(first)))


def few_micro_batches() -> dict[str, Any]:
    """A chain and a graph with 1, 2 and 3 micro-batches; rounds of k above them and k that does not divide them."""
    results = {}
    for name, model in (("chain", Chain), ("graph", Fork)):
        for count, k in ((1, 2), (2, 1), (2, 5), (3, 2)):
            parts = [(part, 2, (i,)) for i, part in enumerate(("a", "b", "c", ""))]
            results[f"{name} M={count} k={k}"] = compare(
                model(), parts, [batch_of(2 * count)], 2 * count, loss_fn=mean_square, k=k
            )
    return results


def other_batch_sizes() -> dict[str, Any]:
    """Batches that are smaller, as the last one of an epoch may be."""
    parts = [("image", 2, (0,)), ("text", 4, (1,)), ("", 8, (1,))]
    return compare(Towers(True), parts, [batch_of(n, 8, seed=n) for n in (8, 5, 2, 8)], 8)


def idle_device() -> dict[str, Any]:
    """A third process has nothing to do, and hears the loss."""
    return compare(Chain(), [("a b", 2, (0,)), ("", 2, (2,))], [batch_of(4)], 4, loss_fn=mean_square)


def on_two() -> dict[str, Any]:
    """Run the cases of two ranks in one job."""
    return {case.__name__: case() for case in (contrastive_loss_of_one_hot, other_batch_sizes)}


def on_three() -> dict[str, Any]:
    """Run the cases of three ranks in one job."""
    cases = (
        unequal_micro_batches,
        contrastive_loss_trained,
        values_without_gradient,
        edges_without_gradient,
        late_inputs,
        idle_device,
        batch_statistics,
    )
    return {case.__name__: case() for case in cases}
