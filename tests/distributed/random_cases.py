"""Random models and strategies on real processes: one job runs many of them."""

from __future__ import annotations

import math
import os
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from graphpipe.capture.specs import LossReduction
from graphpipe.runtime.pipeline import Pipeline
from graphpipe.runtime.process_transports import NcclTransport, TransportKind
from graphpipe.schedule import UniformCosts, kfkb
from graphpipe.stage import Stage, StageGraph, StageOrder
from tests.distributed.parity import relative
from tests.graph_models import GraphModel, OperatorShape, make_batch, reference
from tests.stage_graphs import make_strategy

# There is no NCCL here. What its transport does, posts in order and without tags, is tried over gloo.
NcclTransport.backend = "gloo"

# Names the file with the cases, for the ranks.
CASES_PATH = "GRAPHPIPE_TEST_CASES"


@dataclass(frozen=True)
class RandomCase:
    """A model and a strategy, as plain data; its text is all that is needed to run it again.

    Attributes:
        shapes: The operators.
        seed: Of the parameters.
        reduction: Of the loss.
        stages: Of the strategy.
        mini_batch_size: Samples a step.
        order: What a stage waits for.
        k: Of the schedule.
        kind: The transport.
    """

    shapes: tuple[OperatorShape, ...]
    seed: int
    reduction: LossReduction
    stages: tuple[Stage, ...]
    mini_batch_size: int
    order: StageOrder
    k: int
    kind: TransportKind


def random_programs() -> list[dict[str, Any]]:
    """Run every case and return how far its loss and gradients are from one process's."""
    cases: list[RandomCase] = pickle.loads(Path(os.environ[CASES_PATH]).read_bytes())
    return [_run(case) for case in cases]


class Captured:
    """A model that need not be captured, and does not look like a module that has to be."""

    def __init__(self, model: GraphModel) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _run(case: RandomCase) -> dict[str, Any]:
    alone, model = (GraphModel(case.shapes, case.seed, case.reduction) for _ in range(2))
    batch = make_batch(case.mini_batch_size)
    loss, expected = reference(alone, batch)
    stages = StageGraph(model.graph, case.stages, case.mini_batch_size, case.order)
    schedule = kfkb(stages, UniformCosts(1.0, 2.0, 0.25, 0.5), k=case.k)
    strategy = make_strategy(stages, schedule=schedule, num_devices=int(os.environ["WORLD_SIZE"]))
    pipeline = Pipeline(Captured(model), strategy, transport=case.kind)
    # The second mini-batch finds out what the first one left behind.
    for _ in range(2):
        result = pipeline.forward_backward(batch)
    found = pipeline.gather_gradients()
    worst = 0.0
    for name, gradient in expected.items():
        if gradient is None:
            worst = math.inf if name in found and bool(found[name].any()) else worst
        elif gradient.abs().max() < 1e-12:
            worst = max(worst, float((found[name] - gradient).abs().max()) * 1e3)
        else:
            worst = max(worst, relative(found[name], gradient))
    mine = {n: p.grad for n, p in pipeline.parameters.items() if p.grad is not None}
    return {
        "loss": abs(result.loss - loss) / max(abs(loss), 1e-12),
        "gradient": worst,
        "copies_equal": all(torch.equal(found[name], gradient) for name, gradient in mine.items()),
    }
