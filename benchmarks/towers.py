"""Two equal towers and a light joint loss on two real processes: as a graph of stages, and as a chain.

Measured on this machine with one thread a process, over gloo. The stages, devices and micro-batches are the same in
both: a tower on each device, and the loss with the second tower. As a chain each stage waits for the one before it, so
with M micro-batches a balanced chain takes (M + 1) / M of the graph's time. Both run in one job and take turns; a
figure is the ratio of the medians. Other work on the machine spoils the figures: the graph needs both cores.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import Figure, Report, at_least

CLAIM = "A chain of two balanced stages takes 1.5 times as long as the graph with 2 micro-batches, 1.25 times with 4."
REMARKS = (
    "messages over gloo and the joint loss are on the path of the graph too",
    "other work on the machine slows the graph more than the chain, as it needs both processes at the same time",
    "torch's Schedule1F1B runs the same chain, and passes the second tower's input through the first stage",
)
MICRO_BATCHES = (2, 4)
GOALS = {2: 1.4, 4: 1.2}
WIDTH, DEPTH, MINI_BATCH_SIZE = 512, 6, 512
ROUNDS, STEPS = 12, 3


def run() -> Report:
    """Start two processes and return the ratios for each number of micro-batches."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "seconds.json"
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "benchmarks.towers"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, *launcher, str(path)], check=True, env=environment)
        seconds = json.loads(path.read_text())
    figures = []
    for count in MICRO_BATCHES:
        graph_s, chain_s, torch_s = (seconds[f"{name} {count}"] for name in ("graph", "chain", "torch"))
        prefix = f"towers/{count}-micro-batches"
        ideal = (count + 1) / count
        figures += [
            Figure(name=f"{prefix}/graph_s", value=graph_s, unit="s"),
            Figure(name=f"{prefix}/chain_s", value=chain_s, unit="s"),
            Figure(name=f"{prefix}/torch_1f1b_s", value=torch_s, unit="s"),
            at_least(f"{prefix}/graph_over_chain", chain_s / graph_s, "ratio", GOALS[count], ideal),
            at_least(f"{prefix}/graph_over_torch_1f1b", torch_s / graph_s, "ratio", 1.0, ideal),
            at_least(f"{prefix}/torch_1f1b_over_chain", torch_s / chain_s, "ratio", 0.9, 1.0),
            Figure(
                name=f"{prefix}/measured_over_predicted", value=graph_s / seconds[f"predicted {count}"], unit="ratio"
            ),
        ]
    return Report(claim=CLAIM, figures=tuple(figures), remarks=REMARKS)


def worker(path: Path) -> None:
    """Measure; every rank runs this."""
    import torch
    import torch.distributed as dist

    from graphpipe.capture import capture
    from graphpipe.cluster import Cluster
    from graphpipe.cost import ADAM
    from graphpipe.estimate import estimate
    from graphpipe.profiler import measure_profile
    from graphpipe.runtime.pipeline import Pipeline
    from graphpipe.schedule import ModelCosts, kfkb
    from graphpipe.stage import Stage, StageGraph, StageOrder
    from graphpipe.strategy import Strategy

    torch.set_num_threads(1)
    model, batch = make_model()
    captured = capture(model, batch)
    sizes = [MINI_BATCH_SIZE // count for count in MICRO_BATCHES]
    names = [o.name for o in captured.graph.operators]
    left = tuple(n for n in names if n.startswith("left"))
    right = tuple(n for n in names if n.startswith("right"))
    head = tuple(n for n in names if n not in left + right)
    cluster = Cluster.detect(2)
    dist.init_process_group("gloo")
    # Rank 0 measures alone, so that both ranks have the same profile.
    if dist.get_rank() == 0:
        measure_profile(captured, sizes, batch)
    dist.barrier()
    profile = measure_profile(captured, sizes, batch)
    steps: dict[str, Callable[[], object]] = {}
    seconds: dict[str, Any] = {}
    for count in MICRO_BATCHES:
        for order in StageOrder:
            stages = StageGraph(
                captured.graph,
                tuple(
                    Stage(operators=part, micro_batch_size=MINI_BATCH_SIZE // count, devices=(device,))
                    for part, device in ((left, 0), (right, 1), (head, 1))
                ),
                MINI_BATCH_SIZE,
                order,
            )
            draft = Strategy(stages, kfkb(stages), profile, cluster, ADAM)
            strategy = Strategy(stages, kfkb(stages, ModelCosts(draft.cost_model, stages)), profile, cluster, ADAM)
            pipeline = Pipeline(captured, strategy)
            steps[f"{order.value} {count}"] = partial(pipeline.forward_backward, batch)
            if order is StageOrder.GRAPH:
                seconds[f"predicted {count}"] = estimate(strategy).iteration_s
        steps[f"torch {count}"] = torch_chain(model, batch, count)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(ROUNDS + 1):
        for name, step in steps.items():
            for _ in range(STEPS):
                dist.barrier()
                start = time.perf_counter()
                step()
                if turn:  # The first turn warms up.
                    times[name].append(time.perf_counter() - start)
    seconds |= {name: statistics.median(found) for name, found in times.items()}
    if dist.get_rank() == 0:
        path.write_text(json.dumps(seconds))
    dist.barrier()
    dist.destroy_process_group()


def torch_chain(model: Any, batch: dict[str, Any], num_micro_batches: int) -> Callable[[], object]:
    """Return a step of the same chain by torch.distributed.pipelining."""
    import torch
    import torch.distributed as dist
    from torch import Tensor, nn
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left = model.left

        def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
            return self.left(a), b

    class Second(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.right, self.head = model.right, model.head

        def forward(self, left: Tensor, b: Tensor) -> Tensor:
            found: Tensor = self.head(left * self.right(b))
            return found

    rank = dist.get_rank()
    stage = PipelineStage(First() if rank == 0 else Second(), rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, num_micro_batches, loss_fn=lambda output, _: output.square().mean())
    return partial(schedule.step, batch["a"], batch["b"]) if rank == 0 else partial(schedule.step, target=batch["a"])


def make_model() -> tuple[Any, dict[str, Any]]:
    """Return two equal towers with a light joint loss, and a batch."""
    import torch
    from torch import nn

    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.left, self.right = (
                nn.Sequential(*(m for _ in range(DEPTH) for m in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))
                for _ in range(2)
            )
            self.head = nn.Linear(WIDTH, 1)

        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.head(self.left(a) * self.right(b))
            return found.square().mean()

    torch.manual_seed(1)
    return Towers(), {name: torch.randn(MINI_BATCH_SIZE, WIDTH) for name in ("a", "b")}


if __name__ == "__main__":
    worker(Path(sys.argv[1]))
