"""Times every operator of a captured model, at each local micro-batch size, on this machine.

The operators run one after another on what the ones before them gave, forward and then backward, as stages of one
operator each. So a sum over the operators of a stage counts each operation once, and the small cost of starting an
operator on its own once an operator.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from graphpipe.capture import CapturedModel, StageModule
from graphpipe.cost import Profile, ProfileSource
from graphpipe.profiler.cache import cache_path, default_cache_dir, read_profile, write_profile

# Counts up when the way of measuring changes, so that older cached profiles are not taken for current ones.
METHOD = 1


def measure_profile(
    captured: CapturedModel,
    sizes: Sequence[int],
    example_batch: Any,
    *,
    repeats: int = 3,
    cache_dir: str | Path | None = None,
) -> Profile:
    """Return the measured costs of a captured model's operators.

    Seconds are measured with as many threads as the process has (`torch.get_num_threads`) and are the median of the
    repeats, after a warm-up. Saved bytes are those of `Operator.saved_bytes`, which capture has counted exactly.

    The parameters and their gradients are left as they were.

    Args:
        captured: The model.
        sizes: Local micro-batch sizes, in samples.
        example_batch: Its samples are repeated or cut to each size.
        repeats: Timed passes at each size.
        cache_dir: Where measured profiles are kept; by default ``~/.cache/graphpipe``.

    Raises:
        ValueError: There is no size, one is less than 1, or nothing is to be repeated.
    """
    wanted = tuple(sorted(set(sizes)))
    if not wanted or wanted[0] < 1 or repeats < 1:
        raise ValueError(f"a profile needs sizes and repeats of at least 1, got {list(sizes)} and {repeats}")
    names = tuple(operator.name for operator in captured.graph.operators)
    device = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} thread(s)"
    key = {
        "method": METHOD,
        "graph": captured.graph.fingerprint,
        "sizes": wanted,
        "repeats": repeats,
        "device": device,
        "node": platform.node(),
        "torch": torch.__version__,
    }
    path = cache_path(Path(cache_dir) if cache_dir is not None else default_cache_dir(), key)
    cached = read_profile(path, names, wanted)
    if cached is not None:
        return cached
    seconds = np.array([_measure_size(captured, example_batch, size, repeats) for size in wanted])
    saved = np.array([[operator.saved_bytes * size for operator in captured.graph.operators] for size in wanted])
    profile = Profile(names, wanted, seconds[:, 0], seconds[:, 1], saved, ProfileSource.MEASURED, device)
    write_profile(path, profile)
    return profile


def _measure_size(captured: CapturedModel, example_batch: Any, size: int, repeats: int) -> list[list[float]]:
    """Return the seconds of the forward and of the backward pass of every operator."""
    inputs = captured.resize_batch(captured.flatten_batch(example_batch), size)
    modules = [captured.stage_module([operator.name]) for operator in captured.graph.operators]
    runs = [_run_once(captured, modules, inputs, size) for _ in range(repeats + 1)][1:]
    return [
        [statistics.median(run[phase][i] for run in runs) for i in range(len(modules))]
        for phase in range(2)
    ]


def _run_once(
    captured: CapturedModel, modules: Sequence[StageModule], inputs: Mapping[str, Tensor], size: int
) -> tuple[list[float], list[float]]:
    forward_s, backward_s = [], []
    known = dict(inputs)
    for module, operator in zip(modules, captured.graph.operators, strict=True):
        parameters = list(module.parameters())
        kept = [p.grad for p in parameters]
        for parameter in parameters:
            parameter.grad = None
        read: dict[str, Tensor] = {}
        for name in module.input_names:
            read[name] = known[name].detach()
            if name in captured.values and captured.values[name].carries_gradient:
                read[name].requires_grad_()
        start = time.perf_counter()
        with torch.set_grad_enabled(operator.has_backward):
            outputs = module(read, size)
        forward_s.append(time.perf_counter() - start)
        known.update({name: output.detach() for name, output in outputs.items()})
        backward_s.append(_backward_s([o for o in outputs.values() if o.requires_grad]))
        for parameter, gradient in zip(parameters, kept, strict=True):
            parameter.grad = gradient
    return forward_s, backward_s


def _backward_s(outputs: Sequence[Tensor]) -> float:
    if not outputs:
        return 0.0
    gradients = [torch.ones_like(output) for output in outputs]
    start = time.perf_counter()
    torch.autograd.backward(outputs, gradients)
    return time.perf_counter() - start
