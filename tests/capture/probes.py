"""Small models, each with one thing that an exported graph may get wrong in silence."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Net(nn.Module):
    """Two layers, what a probe adds, and the probe's forward pass."""

    def __init__(self, body: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


@dataclass(frozen=True)
class Probe:
    """A model, its batches, and what a capture makes of it.

    Attributes:
        body: The forward pass.
        setup: Adds modules, buffers and hooks.
        batch: Makes a batch.
        refusal: What the error says; empty if the model is captured.
        draws: Whether it draws random numbers.
        tolerance: How far gradients may be from eager's.
    """

    body: Callable[[Any, Tensor], Tensor]
    setup: Callable[[Any], None]
    batch: Callable[[int], Tensor]
    refusal: str
    draws: bool
    tolerance: float

    def build(self) -> nn.Module:
        """Return the model in train mode."""
        net = Net(self.body)
        self.setup(net)
        return net.train()


PROBES: dict[str, Probe] = {}


def rows(num_samples: int) -> Tensor:
    return torch.randn(num_samples, 4)


def sequences(num_samples: int) -> Tensor:
    return torch.randn(num_samples, 5, 4)


def indices(num_samples: int) -> Tensor:
    return torch.randint(0, 9, (num_samples, 3))


def probe(
    *,
    setup: Callable[[Any], None] = lambda net: None,
    batch: Callable[[int], Tensor] = rows,
    refusal: str = "",
    draws: bool = False,
    tolerance: float = 1e-9,
) -> Callable[[Callable[[Any, Tensor], Tensor]], Callable[[Any, Tensor], Tensor]]:
    """Register a forward pass under its name."""

    def register(body: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
        PROBES[body.__name__] = Probe(body, setup, batch, refusal, draws, tolerance)
        return body

    return register


def adds(name: str, make: Callable[[], Any]) -> Callable[[Any], None]:
    """Return a setup that sets an attribute."""
    return lambda net: setattr(net, name, make())


def adds_buffer(*, persistent: bool = True) -> Callable[[Any], None]:
    """Return a setup that registers a buffer ``n``."""
    return lambda net: net.register_buffer("n", torch.zeros(4), persistent=persistent)


# ---- regions


@probe()
def no_grad(net: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = net.a(x)
    return (net.b(y) * net.a(x)).sum()


@probe()
def no_grad_decorator(net: Any, x: Tensor) -> Tensor:
    first = torch.no_grad()(net.a)
    return (net.b(first(x)) * net.a(x)).sum()


@probe()
def enable_grad_inside_of_no_grad(net: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = net.a(x)
        with torch.enable_grad():
            z = net.b(x)
    return (z * y).sum()


@probe()
def detach(net: Any, x: Tensor) -> Tensor:
    return (net.b(net.a(x).detach()) * net.a(x)).sum()


@probe(setup=lambda net: net.a.float(), tolerance=2.0**-6)  # gradients of bfloat16 are rounded for each micro-batch
def autocast(net: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = net.a(x.float())
    return net.b(y.to(x.dtype)).sum()


@probe()
def autocast_off(net: Any, x: Tensor) -> Tensor:
    y = net.a(x)
    with torch.autocast("cpu", enabled=False):
        z = net.b(y)
    return z.sum()


# ---- code that runs in backward


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return -3 * gradient


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.sign(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() < 1)


@probe()
def function_that_reverses(net: Any, x: Tensor) -> Tensor:
    return net.b(Reversed.apply(net.a(x))).square().sum()


@probe()
def function_that_saves(net: Any, x: Tensor) -> Tensor:
    return net.b(StraightThrough.apply(net.a(x))).square().sum()


@probe()
def checkpointed(net: Any, x: Tensor) -> Tensor:
    hidden = checkpoint(lambda t: torch.tanh(net.a(t)), x, use_reentrant=False)
    return net.b(hidden).square().sum()


@probe(refusal="CheckpointFunction")
def checkpointed_reentrant(net: Any, x: Tensor) -> Tensor:
    hidden = checkpoint(lambda t: torch.tanh(net.a(t)), net.a(x), use_reentrant=True)
    return net.b(hidden).square().sum()


@probe(setup=lambda net: net.a.register_forward_hook(lambda m, args, out: out * 2))
def forward_hook(net: Any, x: Tensor) -> Tensor:
    return net.a(x).square().sum()


def _double_gradient(_: Any, gradients: tuple[Any, ...], __: Any) -> tuple[Any, ...]:
    return tuple(g if g is None else 2 * g for g in gradients)


@probe(setup=lambda net: net.a.register_full_backward_hook(_double_gradient))
def backward_hook(net: Any, x: Tensor) -> Tensor:
    return net.a(net.b(x)).square().sum()


@probe(refusal="gradient hook")
def tensor_hook(net: Any, x: Tensor) -> Tensor:
    y = net.a(x)
    y.register_hook(lambda g: g * 2)
    return net.b(y).square().sum()


@probe(refusal="cannot be exported|needs? a gradient|requires_grad")
def gradient_of_an_input(net: Any, x: Tensor) -> Tensor:
    x = x.requires_grad_(True)
    energy = net.a(x).square().sum()
    (force,) = torch.autograd.grad(energy, x, create_graph=True)
    return force.square().sum()


@probe(refusal="cannot be exported")
def functional_gradient(net: Any, x: Tensor) -> Tensor:
    force = torch.func.grad(lambda t: net.a(t).square().sum())(x)
    return force.square().sum()


@probe(refusal="uses torch.func")
def vmap(net: Any, x: Tensor) -> Tensor:
    return torch.vmap(lambda t: net.a(t) ** 2)(x).sum()


# ---- state


@probe(setup=adds_buffer())
def buffer_in_place(net: Any, x: Tensor) -> Tensor:
    y = net.a(x)
    with torch.no_grad():
        net.n.mul_(0.9).add_(y.mean(0))
    return (y * net.n).sum()


@probe(setup=adds_buffer())
def buffer_assigned(net: Any, x: Tensor) -> Tensor:
    y = net.a(x)
    net.n = net.n * 0.9 + y.detach().mean(0)
    return (y * net.n).sum()


@probe(setup=adds_buffer(persistent=False))
def buffer_not_persistent(net: Any, x: Tensor) -> Tensor:
    y = net.a(x)
    net.n.add_(y.detach().mean(0))
    return (y * net.n).sum()


@probe(setup=adds("c", int), refusal="changes its attribute 'c'")
def counter(net: Any, x: Tensor) -> Tensor:
    net.c += 1
    return (net.a(x) * net.c).sum()


@probe(setup=adds("c", lambda: torch.full((4,), 2.0)))
def tensor_attribute(net: Any, x: Tensor) -> Tensor:
    return (net.a(x) * net.c).sum()


@probe()
def tensor_stored(net: Any, x: Tensor) -> Tensor:
    y = net.a(x)
    net.last = y
    return y.sum()


@probe(draws=True)
def random_numbers(net: Any, x: Tensor) -> Tensor:
    # Dropout draws by sample and operation instead, see the tests of draws.
    return (net.a(x) * torch.rand_like(x) + torch.rand(x.shape[0], 4)).sum()


@probe(refusal="random generator")
def python_random(net: Any, x: Tensor) -> Tensor:
    return (net.a(x) * random.random()).sum()


@probe()
def own_train_flag(net: Any, x: Tensor) -> Tensor:
    return (net.a(x) * (2.0 if net.training else 1.0)).sum()


# ---- modules


@probe(setup=lambda net: setattr(net, "w", nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))))
def weight_norm(net: Any, x: Tensor) -> Tensor:
    return net.w(net.a(x)).square().sum()


@probe(setup=lambda net: setattr(net, "w", nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))))
def spectral_norm(net: Any, x: Tensor) -> Tensor:
    return net.w(net.a(x)).square().sum()


@probe(setup=lambda net: setattr(net, "w", nn.utils.weight_norm(nn.Linear(4, 4))))  # type: ignore[no-untyped-call]
def weight_norm_by_hook(net: Any, x: Tensor) -> Tensor:
    return net.w(net.a(x)).square().sum()


@probe(setup=adds("r", lambda: nn.LSTM(4, 4, 2, batch_first=True)), batch=sequences)
def lstm(net: Any, x: Tensor) -> Tensor:
    return net.r(net.a(x))[0].square().sum()


@probe(setup=adds("r", lambda: nn.GRUCell(4, 4)), batch=sequences)
def gru_cell_in_a_loop(net: Any, x: Tensor) -> Tensor:
    hidden = x.new_zeros(x.shape[0], 4)
    for t in range(x.shape[1]):
        hidden = net.r(x[:, t], hidden)
    return hidden.square().sum()


@probe(setup=adds("r", lambda: nn.MultiheadAttention(4, 2, batch_first=True)), batch=sequences)
def attention(net: Any, x: Tensor) -> Tensor:
    return net.r(x, x, x)[0].square().sum()


@probe(setup=adds("r", lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True)), batch=sequences)
def encoder_layer(net: Any, x: Tensor) -> Tensor:
    mask = torch.zeros(x.shape[:2], dtype=torch.bool)
    return net.r(x, src_key_padding_mask=mask).square().sum()


@probe(setup=adds("e", lambda: nn.EmbeddingBag(9, 4, mode="sum", sparse=True)), batch=indices)
def sparse_embedding(net: Any, x: Tensor) -> Tensor:
    return net.a(net.e(x)).square().sum()


@probe(setup=adds("e", lambda: nn.Embedding(9, 4, max_norm=1.0)), batch=indices)
def embedding_with_a_norm(net: Any, x: Tensor) -> Tensor:
    return net.a(net.e(x)).square().sum()


@probe(setup=adds("r", lambda: nn.LSTM(4, 4, batch_first=True)), batch=sequences, refusal="cannot be exported|values")
def packed_sequence(net: Any, x: Tensor) -> Tensor:
    lengths = torch.full((x.shape[0],), 3)
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    found, _ = nn.utils.rnn.pad_packed_sequence(net.r(packed)[0], batch_first=True)
    return found.square().sum()


@probe(setup=lambda net: setattr(net, "c", torch.compile(nn.Linear(4, 4), backend="eager")))
def compiled(net: Any, x: Tensor) -> Tensor:
    return net.c(net.a(x)).square().sum()


# ---- inputs, values and shapes


@probe(refusal="modifies its input 'x' in place")
def input_in_place(net: Any, x: Tensor) -> Tensor:
    x.mul_(2)
    return net.a(x).sum()


@probe(refusal="branches on the values of a tensor by cond")
def cond(net: Any, x: Tensor) -> Tensor:
    found = torch.cond(x.sum() > 0, net.a, net.b, (x,))
    return found.sum()  # type: ignore[no-any-return]


def _scaled(net: Any, x: Tensor, m: Tensor | None = None, k: int = 1, s: str = "b") -> Tensor:
    assert s == "a"
    return (net.a(x) * k).sum() if m is None else (net.a(x) * m).sum()


@probe(setup=adds("scaled", lambda: functools.partial(_scaled, m=None, k=3, s="a")))
def constants_among_arguments(net: Any, x: Tensor) -> Tensor:
    return net.scaled(net, x)  # type: ignore[no-any-return]


@probe()
def view_in_place(net: Any, x: Tensor) -> Tensor:
    y = net.a(x)
    z = y.view(-1, 2, 2)
    z.add_(1.0)
    z[:, 0].mul_(2.0)
    return net.b(y).square().sum()


@probe()
def slices_assigned(net: Any, x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[:, :2] = net.a(x)[:, :2]
    out[:, 2:] = net.b(x)[:, 2:]
    return out.square().sum()


@probe()
def numpy_constant(net: Any, x: Tensor) -> Tensor:
    return (net.a(x) * torch.from_numpy(np.full(4, 2.0))).sum()


@probe(refusal="value")
def number_of_a_tensor(net: Any, x: Tensor) -> Tensor:
    y = net.a(x)
    return y.sum() * (1 + float(y.mean()))


@probe()
def shape_as_a_tensor(net: Any, x: Tensor) -> Tensor:
    count = torch.tensor(x.shape[0], dtype=x.dtype)
    return net.a(x).sum() / count + torch.tensor(float(x.shape[1]))


@probe(refusal="batch size of Net was fixed to 4")
def shape_as_a_number(net: Any, x: Tensor) -> Tensor:
    return net.a(x).sum() / int(x.shape[0])


@probe(refusal="batch size of Net was fixed to 4")
def chunks_of_samples(net: Any, x: Tensor) -> Tensor:
    parts = [(c * (i + 1)).sum() for i, c in enumerate(net.a(x).chunk(2, dim=0))]
    return torch.stack(parts).sum()


@probe(refusal="batch size of Net was fixed to 4")
def samples_in_a_loop(net: Any, x: Tensor) -> Tensor:
    return torch.stack([net.a(row) for row in x]).sum()


@probe(refusal="values of a tensor")
def assertion(net: Any, x: Tensor) -> Tensor:
    assert x.shape[0] > 0
    assert torch.isfinite(x).all()
    return net.a(x).sum()


@probe()
def complex_numbers(net: Any, x: Tensor) -> Tensor:
    return torch.fft.rfft(net.a(x)).abs().sum()
