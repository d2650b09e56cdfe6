"""What a rank's memory is while it trains, by the operating system, beside what was predicted."""

from __future__ import annotations

import gc
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from graphpipe.capture import CapturedModel, capture
from graphpipe.cluster import Cluster
from graphpipe.cost import ADAM, roofline_profile
from graphpipe.estimate import estimate
from graphpipe.runtime.pipeline import Pipeline
from graphpipe.schedule import kfkb
from graphpipe.stage import Stage, StageGraph
from graphpipe.strategy import Strategy

WIDTH, MICRO_BATCH_SIZE = 512, 512
# Layers of the long branch on each of two devices; the short one, with the end, is on a third.
LONG, SHORT = (4, 8), 4

# Micro-batches in a step.
COUNTS = (4, 32)


class Uneven(nn.Module):
    """A branch of twelve layers beside one of four, and a light end."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.long, self.short = (
            nn.Sequential(*(m for _ in range(length) for m in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))
            for length in (sum(LONG), SHORT)
        )
        self.end = nn.Linear(WIDTH, 1)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        found: Tensor = self.end(self.long(a) + self.short(b)).square().mean()
        return found


def uneven_branches() -> dict[str, Any]:
    """Train the two branches with Adam by plans of 4 to 32 micro-batches of one size."""
    torch.set_default_dtype(torch.float32)
    measured, predicted = [], []
    for count in (COUNTS[0], *COUNTS):
        captured = capture(Uneven(), batch_of(MICRO_BATCH_SIZE))
        strategy = plan(captured, count * MICRO_BATCH_SIZE)
        pipeline = Pipeline(captured, strategy, optimizer=partial(torch.optim.Adam, foreach=False))
        batch = batch_of(strategy.mini_batch_size)
        own_bytes = sum(p.numel() * p.element_size() for p in pipeline.parameters.values())
        gc.collect()
        start_bytes = resident_bytes("VmRSS")
        # Resets the largest resident size to the present one.
        Path("/proc/self/clear_refs").write_text("5")
        # Adam's state is made by the first step, and held through the second.
        pipeline.step({name: tensor[: COUNTS[0] * MICRO_BATCH_SIZE] for name, tensor in batch.items()})
        pipeline.step(batch)
        measured.append(resident_bytes("VmHWM") - start_bytes + own_bytes)
        predicted.append(estimate(strategy).memory[torch.distributed.get_rank()].total)
        del pipeline, batch, captured
    # In the first run libraries and threads take memory of their own, once.
    return {"measured": measured[1:], "predicted": predicted[1:]}


def plan(captured: CapturedModel, mini_batch_size: int) -> Strategy:
    """Return three stages on three devices: the beginning and the end of the long branch, and the short one."""
    names = [o.name for o in captured.graph.operators]
    long = [name for name in names if name.startswith("long.")]
    assert len(long) == sum(LONG)
    parts = (long[: LONG[0]], long[LONG[0] :], [name for name in names if name not in long])
    stages = (
        Stage(operators=tuple(part), micro_batch_size=MICRO_BATCH_SIZE, devices=(d,)) for d, part in enumerate(parts)
    )
    graph = StageGraph(captured.graph, tuple(stages), mini_batch_size)
    profile = roofline_profile(captured.graph, "cpu-core", [MICRO_BATCH_SIZE])
    return Strategy(graph, kfkb(graph), profile, Cluster.uniform(len(parts), memory_bytes=10**9), ADAM)


def batch_of(num_samples: int) -> dict[str, Tensor]:
    """Return inputs of both branches."""
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(num_samples, WIDTH, generator=generator) for name in ("a", "b")}


def resident_bytes(field: str) -> int:
    """Return a figure of this process from ``/proc/self/status``."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024
