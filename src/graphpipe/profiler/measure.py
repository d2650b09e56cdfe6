"""Measure each operator of a captured model at several micro-batch sizes."""

from __future__ import annotations

import copy
import json
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from graphpipe.capture import CapturedModel, StageModule
from graphpipe.cost.profile import Profile, ProfileSource
from graphpipe.disk_cache import DiskCache
from graphpipe.errors import GraphPipeError
from graphpipe.profiler.cache import entry_name, read_profile
from graphpipe.profiler.saved import SavedBytes

# Counts up when the way of measuring changes, so that older cached profiles are not taken for current ones.
METHOD = 3


def measure_profile(
    captured: CapturedModel,
    sizes: Sequence[int],
    example_batch: Any,
    *,
    device: str | torch.device = "cpu",
    repeats: int = 5,
    cache: DiskCache | None = None,
) -> Profile:
    """Return the measured costs of every operator.

    The operators run one after another on the values that the ones before them gave, each from a copy of its own
    parameters, so the model is left alone and a device needs memory for one operator at a time. Times are the
    least after one warm-up, with as many threads as the caller has set: other work on the machine only ever adds to
    them. The result is kept on disk.

    Args:
        captured: The model.
        sizes: Samples at a time, each at least 1. Operators that mix samples are measured at all of them too.
        example_batch: A batch; its samples are repeated or cut for each size.
        device: Where to measure.
        repeats: Measurements that the least is taken of.
        cache: Where profiles are kept; by default the user's own.

    Raises:
        ValueError: `sizes` is empty or has a size below 1, or `repeats` is below 1.
        BatchError: The batch does not fit the model.
        GraphPipeError: The model's parameters are on the meta device.
    """
    if not sizes or min(sizes) < 1:
        raise ValueError(f"sizes must be one or more numbers of samples, got {list(sizes)}")
    if repeats < 1:
        raise ValueError(f"an operator must be measured at least once, got repeats={repeats}")
    flat = captured.flatten_batch(example_batch)
    place = torch.device(device)
    ascending = tuple(sorted(set(sizes)))
    operators = tuple(o.name for o in captured.graph.operators)
    name = device_name(place)
    modules = {operator: captured.stage_module([operator]) for operator in operators}
    key = {
        "method": METHOD,
        "graph": captured.graph.fingerprint,
        "sizes": ascending,
        "dtypes": sorted({str(p.dtype) for module in modules.values() for p in module.parameters()}),
        "autocast": str(captured.autocast),
        "device": name,
        "node": platform.node(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "repeats": repeats,
    }
    cache, entry = cache or DiskCache.default(), entry_name(key)
    stored = read_profile(cache.path(entry), operators, ascending)
    if stored is not None:
        return stored
    _refuse_meta(captured, modules)
    tables = np.zeros((3, len(ascending), len(operators)))
    for row, size in enumerate(ascending):
        tensors = {n: t.to(place) for n, t in captured.resize_batch(flat, size).items()}
        tables[:, row, :] = _measure_size(captured, modules, tensors, size, place, repeats)
    forward_s, backward_s, saved_bytes = tables
    profile = Profile(
        operators, ascending, forward_s, backward_s, saved_bytes, source=ProfileSource.MEASURED, device=name
    )
    cache.write(entry, json.dumps(profile.to_json()))
    return profile


def device_name(device: torch.device) -> str:
    """Return the name of a device's kind, such as that of the graphics card or of the processor."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    if device.type != "cpu":
        return device.type
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def _refuse_meta(captured: CapturedModel, modules: Mapping[str, StageModule]) -> None:
    for module in modules.values():
        for name, parameter in module.named_parameters():
            if parameter.is_meta:
                raise GraphPipeError(
                    f"parameter {name!r} of {captured.graph.name!r} is on the meta device and has no values to measure "
                    "with; materialise the model, or use a profile computed from the device's peak rates"
                )


@dataclass(frozen=True, slots=True)
class _Times:
    forward_s: float
    backward_s: float


def _measure_size(
    captured: CapturedModel,
    modules: Mapping[str, StageModule],
    inputs: Mapping[str, Tensor],
    num_samples: int,
    device: torch.device,
    repeats: int,
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """``[forward_s, backward_s, saved_bytes; operators]`` for one number of samples."""
    saved = SavedBytes()
    values: dict[str, Tensor] = dict(inputs)
    last_reader = {value.name: value.consumers[-1] for value in captured.graph.values}
    times = []
    for operator in captured.graph.operators:
        module = copy.deepcopy(modules[operator.name]).to(device)
        given = {name: values[name] for name in module.input_names}
        times.append(_time(captured, module, given, num_samples, device, repeats))
        received = {name: tensor for name, tensor in given.items() if name in captured.values}
        free = [*inputs.values(), *module.parameters(), *module.buffers()]
        with saved.recording(operator.name, received, free) as made:
            made.update(module(_leaves(captured, given), num_samples))
        values.update({name: tensor.detach() for name, tensor in made.items()})
        for name in received:
            if last_reader[name] == operator.name:
                del values[name]
    names = [operator.name for operator in captured.graph.operators]
    return np.array(
        [[t.forward_s for t in times], [t.backward_s for t in times], [float(saved.of(name)) for name in names]]
    )


def _time(
    captured: CapturedModel,
    module: StageModule,
    given: Mapping[str, Tensor],
    num_samples: int,
    device: torch.device,
    repeats: int,
) -> _Times:
    """The least seconds of a forward and of a backward pass."""
    forward, backward = [], []
    for repeat in range(repeats + 1):
        leaves = _leaves(captured, given)
        started = _now(device)
        made = module(leaves, num_samples)
        middle = _now(device)
        roots = [t for name, t in made.items() if t.requires_grad and _carries_gradient(captured, name)]
        seeds = [torch.ones_like(t) for t in roots]
        before = _now(device)
        if roots:
            torch.autograd.backward(roots, seeds)
        stopped = _now(device)
        module.zero_grad(set_to_none=True)
        if repeat:  # the first is the warm-up
            forward.append(middle - started)
            backward.append(stopped - before if roots else 0.0)
    return _Times(min(forward), min(backward))


def _leaves(captured: CapturedModel, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The given tensors as a stage receives them: cut off from what made them, with gradients of their own."""
    return {name: t.detach().requires_grad_(_carries_gradient(captured, name)) for name, t in given.items()}


def _carries_gradient(captured: CapturedModel, name: str) -> bool:
    return name == captured.loss or (name in captured.values and captured.values[name].carries_gradient)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
