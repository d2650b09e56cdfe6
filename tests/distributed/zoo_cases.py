"""What each rank does with models of the zoo, by the planner's own strategies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from graphpipe import plan
from graphpipe.cluster import Cluster, Link
from graphpipe.cost import DeviceKind, roofline_profile
from graphpipe.runtime.pipeline import Pipeline
from graphpipe.strategy import Strategy
from tests.capture.conftest import train_eagerly
from tests.capture.zoo import ZOO, captured_zoo, loss_of

MINI_BATCH_SIZE = 8
NUM_DEVICES = 3

# A device on which the small models of the zoo take long enough to be worth a pipeline.
SLOW = DeviceKind(
    name="slow",
    peak_flops_per_s=1e9,
    knee_flops=1.0,
    bandwidth_bytes_per_s=1e9,
    memory_bytes=2**30,
    launch_s=0.0,
)


def strategy_of(name: str) -> Strategy:
    """Return the planner's strategy for a model of the zoo."""
    _, captured = captured_zoo(name)
    return plan(
        captured,
        None,
        mini_batch_size=MINI_BATCH_SIZE,
        micro_batch_sizes=(2, 4),
        cluster=Cluster.uniform(
            NUM_DEVICES,
            memory_bytes=SLOW.memory_bytes,
            inside_node=Link(bandwidth_bytes_per_s=1e10, latency_s=1e-7),
        ),
        profile=roofline_profile(captured.graph, SLOW, (1, 2, 4, 8)),
    )


def train_by(folder: str) -> dict[str, Any]:
    """Compare the loss and gradients of a mini-batch with eager's, by each strategy of a folder."""
    return {path.stem: _train_by(path.stem, Strategy.load(path)) for path in sorted(Path(folder).iterdir())}


def _train_by(name: str, strategy: Strategy) -> dict[str, Any]:
    model, captured = captured_zoo(name)
    with ZOO[name].in_its_dtype():
        torch.manual_seed(1)
        batch = ZOO[name].batch(MINI_BATCH_SIZE)
        expected = train_eagerly(model, lambda m: loss_of(m, batch))
        pipeline = Pipeline(captured, strategy)
        result = pipeline.forward_backward(batch)
        gradients = pipeline.gather_gradients()
        state = pipeline.gather_state_dict()
    largest = max(float(g.abs().max()) for g in expected.gradients.values())
    errors = {n: float((gradients[n] - g).abs().max()) / largest for n, g in expected.gradients.items()}
    statistics = {n: b for n, b in expected.buffers.items() if n in state and b.is_floating_point()}
    apart = {n: float((state[n] - b).abs().max() / b.abs().max()) for n, b in statistics.items()}
    return {
        "statistics": sorted(statistics),
        "statistic": max(apart.values(), default=0.0),
        "loss": abs(result.loss - float(expected.loss)) / abs(float(expected.loss)),
        "gradient": max(errors.values()),
        "worst": max(errors, key=errors.__getitem__),
        "missing": sorted(gradients.keys() ^ expected.gradients.keys()),
    }
