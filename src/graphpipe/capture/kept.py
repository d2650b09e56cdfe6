"""Captures kept on disk, so that a model which does the same is not captured again.

An entry is found by everything that a capture depends on: what the model does (see `behaviour`), its modules and
tensors by name and type, the values of its buffers and of the example batch, the options, and the versions. Whatever
cannot be told, or has no form as plain data, is captured anew every time.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from graphpipe.capture.autocast import Autocast
from graphpipe.capture.batch import BatchLayout
from graphpipe.capture.behaviour import Digest, IndescribableError, behaviour, content, settings
from graphpipe.capture.division import Division, division_from_plain, division_to_plain
from graphpipe.capture.export import LossFunction, Mode, ModelWithLoss
from graphpipe.disk_cache import DiskCache
from graphpipe.fields import read_json

_log = logging.getLogger(__name__)

# Captures that stay; the ones that were used last.
_KEEP = 64
# A size that hardly is one of anything else in a model.
_NUM_SAMPLES = 61
_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)


@dataclass(frozen=True)
class Question:
    """What is captured, and how.

    Attributes:
        model: The model.
        wrapper: The model with its loss.
        layout: Of the batch.
        tensors: The example batch, flat.
        loss_fn: The loss.
        mode: What the model is captured for.
        options: Whatever else the answer depends on, as text.
    """

    model: nn.Module
    wrapper: ModelWithLoss
    layout: BatchLayout
    tensors: Mapping[str, Tensor]
    loss_fn: LossFunction | None
    mode: Mode
    options: tuple[str, ...]


class KeptCapture:
    """The entry of one question, which may not exist.

    Args:
        cache: Where it is.
        question: The question.
    """

    def __init__(self, cache: DiskCache, question: Question) -> None:
        self._cache = cache
        self._question = question
        self._name: str | None = None
        if cache.folder is None:
            return
        try:
            self._name = f"capture-{_key(question)}.json"
        except Exception as error:  # Whatever the model's code raises is for the capture itself to explain.
            self._say("is not kept", error)

    def read(self) -> Division | None:
        """Return the answer, or None where there is none, a damaged one, or one to another question."""
        path = None if self._name is None else self._cache.path(self._name)
        if path is None or self._name is None or not path.is_file():
            return None
        try:
            entry = read_json(path)
            body = entry["division"]
            if _digest(body) != entry["digest"]:
                self._say("is damaged on disk", ValueError(path.name))
                return None
            found = division_from_plain(body, self._question.model, self._question.layout.num_samples)
        except Exception as error:  # A damaged file can show in any way.
            self._say("cannot be read from disk", error)
            return None
        self._cache.used(self._name)
        return found

    def write(self, division: Division) -> None:
        """Keep an answer, if it has a form as plain data."""
        if self._name is None:
            return
        try:
            body = division_to_plain(division, self._question.model)
        except Exception as error:
            self._say("is not kept", error)
            return
        body = json.loads(json.dumps(body, allow_nan=False))
        self._cache.write(self._name, json.dumps({"digest": _digest(body), "division": body}))
        self._cache.prune("capture-*.json", _KEEP)

    def _say(self, what: str, error: Exception) -> None:
        name = type(self._question.model).__name__
        _log.debug("the capture of %s %s: %s: %s", name, what, type(error).__name__, error)


def _digest(body: object) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=20).hexdigest()


def _key(question: Question) -> str:
    digest = Digest()
    digest.add(*_versions(), *question.options)
    digest.add(torch.get_default_dtype(), torch.get_default_device(), Autocast.ambient(), question.mode)
    digest.add(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.are_deterministic_algorithms_enabled())
    _add_batch(digest, question)
    _add_tensors(digest, question.model)
    digest.add(settings(question.model))
    shapes = _other_shapes(question)
    inputs = {name: (shapes[name], tensor) for name, tensor in question.tensors.items()}
    digest.add(behaviour(question.model, question.wrapper, inputs, question.loss_fn, question.mode))
    return digest.text()[:24]


def _other_shapes(question: Question) -> dict[str, torch.Size]:
    """The shapes of a batch that differs from the example's in every size that may differ.

    Then a number in the model's code that was the size by chance is not taken for it.
    """
    found = {}
    for name, tensor in question.tensors.items():
        shape = list(tensor.shape)
        samples = question.layout.inputs[name].layout
        if samples is not None:
            shape[samples.axis] = _NUM_SAMPLES
        for axis in question.layout.free_axes.get(name, {}):
            shape[axis] += -1 if shape[axis] > 3 else 1
        found[name] = torch.Size(shape)
    return found


@cache
def _versions() -> tuple[str, ...]:
    """What torch, Python and this package are; the package by its files, which a version does not tell apart."""
    package = Path(__file__).parents[1]
    files = sorted(path for folder in ("capture", "graph") for path in (package / folder).glob("*.py"))
    own = hashlib.blake2b(b"\0".join(path.read_bytes() for path in files), digest_size=20).hexdigest()
    return sys.version, torch.__version__, str(torch.version.git_version), own


def _add_batch(digest: Digest, question: Question) -> None:
    layout = question.layout
    for name, constant in layout.constants.items():
        if not isinstance(constant, _PLAIN):
            raise IndescribableError(f"{name!r} of the example batch is a {type(constant).__name__}")
        digest.add(name, repr(constant))
    _, tree = pytree.tree_flatten(layout.unflatten(list(question.tensors.values())))
    digest.add(tree, layout.entries, layout.is_positional, layout.num_samples)
    for name, tensor in question.tensors.items():
        axes = sorted(layout.free_axes.get(name, {}).items())
        digest.add(name, layout.inputs[name].layout, axes, _type_of(tensor), _telling(tensor))


def _telling(tensor: Tensor) -> str:
    """What of the values of an input a capture may follow: all of them, unless they are numbers like any others.

    Floats are if most of them differ, and there is none that stands for something, as zeros do.
    """
    if tensor.is_floating_point() and tensor.numel() > 1:
        sample = tensor.detach().reshape(-1)
        some = sample[: 1 << 16]
        is_fractional = bool((torch.isfinite(sample) & (sample != sample.round())).all())
        if is_fractional and 2 * len(torch.unique(some)) > len(some):
            return f"numbers, below zero: {bool((sample < 0).any())}, above one: {bool((sample > 1).any())}"
    return content(tensor)


def _add_tensors(digest: Digest, model: nn.Module) -> None:
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        digest.add(name, first.setdefault(id(parameter), name), _type_of(parameter), parameter.requires_grad)
    for name, tensor in model.named_buffers(remove_duplicate=False):
        digest.add(name, first.setdefault(id(tensor), name), _type_of(tensor), content(tensor))


def _type_of(tensor: Tensor) -> str:
    return f"{type(tensor).__name__} {tuple(tensor.shape)} {tensor.stride()} {tensor.dtype} {tensor.device}"
