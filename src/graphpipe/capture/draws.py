"""Random numbers that do not depend on the plan: which entries dropout drops.

A mask follows from a seed, the step, the operation and the sample, whichever stage, replica and micro-batch has the
sample. So a model with dropout trains alike under every strategy, and a repeated forward pass drops the same entries.
Entry `i` of a sample is dropped by a hash of `i` and of the sample's key, which is as good as independent draws, the
same on every type of device, and needs no generator whose state somebody would have to keep.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from graphpipe.capture.classes import Kind, SampleClass
from graphpipe.capture.nodes import argument_of, dropout_probability, is_random, operator_name

# The axis that holds samples, what varies slower than the sample along it, and what varies faster: plain numbers, which
# can stand in the code of a program. None for a tensor that holds no samples.
Place = tuple[int, int, int] | None

_MASK_64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Draws:
    """What the random numbers of one micro-batch follow from.

    Attributes:
        seed: Of the whole training.
        step: The updates of the parameters before.
        turn: The mini-batches since the last update.
        first_sample: The position in the mini-batch of the micro-batch's first sample.
    """

    seed: int = 0
    step: int = 0
    turn: int = 0
    first_sample: int = 0

    def key(self, operation: str) -> int:
        """Return the key of an operation in this step, of 64 bits."""
        text = f"{self.seed} {self.step} {self.turn} {operation}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")

    def keeps(
        self, operation: str, shape: tuple[int, ...], probability: float, place: Place, device: torch.device
    ) -> Tensor:
        """Return a bool tensor of a shape, each entry True with one minus a probability.

        Args:
            operation: Its name in the graph.
            shape: Of the tensor.
            probability: To drop an entry.
            place: Where its samples are; None for a tensor without samples, which has one mask for all of them.
            device: Where the tensor is.
        """
        key = self.key(operation)
        if place is None:
            return _keeps(_sample_keys(key, 0, 1, device), math.prod(shape), probability).reshape(shape)
        axis, outer, inner = place
        rows = outer * inner
        before, after = shape[:axis], shape[axis + 1 :]
        count = shape[axis] // rows if rows else 0
        kept = _keeps(
            _sample_keys(key, self.first_sample, count, device),
            math.prod(before) * rows * math.prod(after),
            probability,
        )
        # From [sample, before, outer, inner, after] to [before, outer, sample, inner, after].
        split = kept.reshape(count, math.prod(before), outer, inner, math.prod(after))
        return split.permute(1, 2, 0, 3, 4).reshape(shape)


def _sample_keys(key: int, first: int, count: int, device: torch.device) -> Tensor:
    """Return ``[count]`` int32 keys of samples: the finalizer of splitmix64 on the operation's key and the sample."""
    z = torch.arange(first + 1, first + count + 1, device=device) * _signed(0x9E3779B97F4A7C15) + _signed(key)
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    return (z ^ _shifted(z, 31)).to(torch.int32)


def _keeps(keys: Tensor, count: int, probability: float) -> Tensor:
    """Return ``[keys, count]`` bool: whether the hash of an entry and a key is at least the probability.

    The hash is the finalizer of murmur3, of 32 bits.
    """
    entries = torch.arange(count, dtype=torch.int32, device=keys.device) * _signed(0x9E3779B1, 32)
    z = entries ^ keys[:, None]
    z ^= (z >> 16) & 0xFFFF
    z *= _signed(0x85EBCA6B, 32)
    z ^= (z >> 13) & 0x7FFFF
    z *= _signed(0xC2B2AE35, 32)
    z ^= (z >> 16) & 0xFFFF
    # An int32 is compared with one: at most 2^31 - 1, which none exceeds.
    below = round(probability * (1 << 32))
    return z > below - 1 - (1 << 31) if below else torch.ones_like(z, dtype=torch.bool)


def _signed(number: int, bits: int = 64) -> int:
    """Return the signed number of the same bits."""
    number &= (1 << bits) - 1
    return number - (1 << bits) if number >> (bits - 1) else number


def _shifted(z: Tensor, places: int) -> Tensor:
    """Shift right and fill with zeros."""
    return (z >> places) & (_MASK_64 >> places)


def drop(x: Tensor, probability: float, draws: Draws, operation: str, place: Place) -> Tensor:
    """Return a tensor with entries dropped and the others scaled, as ``torch.nn.functional.dropout``."""
    return x * _factor(x, tuple(x.shape), probability, draws, operation, place)


def drop_in_place(x: Tensor, probability: float, draws: Draws, operation: str, place: Place) -> Tensor:
    """Drop entries of a tensor in place."""
    return x.mul_(_factor(x, tuple(x.shape), probability, draws, operation, place))


def drop_features(x: Tensor, probability: float, draws: Draws, operation: str, place: Place) -> Tensor:
    """Return a tensor with whole channels dropped, as ``torch.nn.functional.dropout2d``."""
    shape = (*x.shape[:2], *[1] * (x.dim() - 2))
    return x * _factor(x, shape, probability, draws, operation, place)


def _factor(
    x: Tensor, shape: tuple[int, ...], probability: float, draws: Draws, operation: str, place: Place
) -> Tensor:
    kept = draws.keeps(operation, shape, probability, place, x.device).to(x.dtype)
    return kept.mul_(1.0 / (1.0 - probability)) if probability < 1.0 else kept


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    probability: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    draws: Draws,
    operation: str,
    place: Place,
) -> Tensor:
    """Return attention with weights dropped: ``scaled_dot_product_attention``, whose own draws nobody can repeat."""
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype is torch.bool else scores + mask
    return drop(torch.softmax(scores, -1), probability, draws, operation, place) @ value


def seeded(target: Callable[..., Any], draws: Draws, operation: str, *args: Any, **kwargs: Any) -> Any:
    """Call an operator with torch's generator seeded, and put the generator back.

    Its numbers are the same whenever a strategy is run again, and under another strategy if it has the same
    micro-batches.
    """
    with _seeded(draws.key(f"{operation} {draws.first_sample}"), args):
        return target(*args, **kwargs)


@contextmanager
def _seeded(seed: int, args: tuple[Any, ...]) -> Iterator[None]:
    devices = {a.device for a in pytree.tree_leaves(args) if isinstance(a, Tensor) and a.device.type == "cuda"}
    with torch.random.fork_rng(devices=sorted(devices, key=str)):
        torch.manual_seed(_signed(seed))
        yield


Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def repeatable(
    node: fx.Node, sample_class: object, args: tuple[Any, ...], kwargs: dict[str, Any], draws: fx.Node
) -> Call:
    """Return the call to put in the place of an operation, so that its random numbers follow from `draws`.

    Args:
        node: The operation.
        sample_class: Its class, or a tuple of them.
        args: Its arguments.
        kwargs: Its keyword arguments.
        draws: The `Draws` in the stage's program.
    """
    target: Callable[..., Any] = node.target  # type: ignore[assignment]
    if not is_random(node):
        return target, args, kwargs
    name = operator_name(node)
    probability = dropout_probability(node)
    if isinstance(sample_class, SampleClass) and probability is not None:
        holds_samples = sample_class.kind is Kind.PER_SAMPLE
        place = (sample_class.axis, sample_class.outer, sample_class.inner) if holds_samples else None
        known = {"dropout": drop, "dropout_": drop_in_place, "feature_dropout": drop_features}
        if name in known and (name != "feature_dropout" or not holds_samples or sample_class.axis < 2):
            return known[name], (args[0], probability, draws, node.name, place), {}
        if name == "scaled_dot_product_attention" and _weights_hold_samples(node, place):
            given = dict(zip((a.name for a in node.target._schema.arguments), args, strict=False)) | kwargs  # type: ignore[union-attr]
            options = [given.get(n, argument_of(node, n)) for n in ("is_causal", "scale", "enable_gqa")]
            tensors = [given.get(n) for n in ("query", "key", "value", "attn_mask")]
            return attend, (*tensors, probability, *options, draws, node.name, place), {}
    return seeded, (target, draws, node.name, *args), kwargs


def _weights_hold_samples(node: fx.Node, place: Place) -> bool:
    """Whether the weights of an attention have their samples where its result has them."""
    result = node.meta["val"]
    return place is None or place[0] < result.dim() - 2
