"""Train unmodified PyTorch models over many devices by graph pipeline parallelism.

A typical script::

    import graphpipe as gp

    strategy = gp.plan(model, example_batch, loss_fn=loss_fn, cluster=gp.Cluster.detect(), mini_batch_size=256)
    strategy.save("strategy.json")

and, started on every device by torchrun::

    pipeline = gp.Pipeline(model, gp.Strategy.load("strategy.json"), loss_fn=loss_fn, optimizer=make_optimizer)
    for batch in loader:
        print(pipeline.step(batch).loss)

Names are loaded when they are first used, so that importing the package is quick and planning does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphpipe.api import Job, plan, verify
    from graphpipe.capture import CapturedModel, capture
    from graphpipe.cluster import Cluster, Device, Link
    from graphpipe.disk_cache import DiskCache
    from graphpipe.errors import (
        BatchError,
        CaptureError,
        CheckpointError,
        DeadlockError,
        GraphPipeError,
        PlanningError,
        StrategyError,
    )
    from graphpipe.runtime.checkpoint import Checkpointer, Saving
    from graphpipe.runtime.compilation import Compilation
    from graphpipe.runtime.initialise import FromSafetensors, FromSeed
    from graphpipe.runtime.loss_scale import LossScaling
    from graphpipe.runtime.model_file import load_model
    from graphpipe.runtime.pipeline import EvaluationResult, Pipeline, StepResult
    from graphpipe.runtime.process_transports import TransportKind
    from graphpipe.runtime.sharding import OptimizerStates
    from graphpipe.strategy import Strategy

__version__ = "0.1.0"

_HOME = {
    "BatchError": "graphpipe.errors",
    "CaptureError": "graphpipe.errors",
    "CapturedModel": "graphpipe.capture",
    "CheckpointError": "graphpipe.errors",
    "Checkpointer": "graphpipe.runtime.checkpoint",
    "Cluster": "graphpipe.cluster",
    "Compilation": "graphpipe.runtime.compilation",
    "DeadlockError": "graphpipe.errors",
    "Device": "graphpipe.cluster",
    "DiskCache": "graphpipe.disk_cache",
    "EvaluationResult": "graphpipe.runtime.pipeline",
    "FromSafetensors": "graphpipe.runtime.initialise",
    "FromSeed": "graphpipe.runtime.initialise",
    "GraphPipeError": "graphpipe.errors",
    "Job": "graphpipe.api",
    "Link": "graphpipe.cluster",
    "LossScaling": "graphpipe.runtime.loss_scale",
    "OptimizerStates": "graphpipe.runtime.sharding",
    "Pipeline": "graphpipe.runtime.pipeline",
    "PlanningError": "graphpipe.errors",
    "Saving": "graphpipe.runtime.checkpoint",
    "StepResult": "graphpipe.runtime.pipeline",
    "Strategy": "graphpipe.strategy",
    "StrategyError": "graphpipe.errors",
    "TransportKind": "graphpipe.runtime.process_transports",
    "load_model": "graphpipe.runtime.model_file",
    "plan": "graphpipe.api",
    "verify": "graphpipe.api",
}

__all__ = [
    "BatchError",
    "CaptureError",
    "CapturedModel",
    "CheckpointError",
    "Checkpointer",
    "Cluster",
    "Compilation",
    "DeadlockError",
    "Device",
    "DiskCache",
    "EvaluationResult",
    "FromSafetensors",
    "FromSeed",
    "GraphPipeError",
    "Job",
    "Link",
    "LossScaling",
    "OptimizerStates",
    "Pipeline",
    "PlanningError",
    "Saving",
    "StepResult",
    "Strategy",
    "StrategyError",
    "TransportKind",
    "capture",
    "load_model",
    "plan",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name == "capture":
        return importlib.import_module("graphpipe.capture")  # The package can be called like the function.
    if name not in _HOME:
        raise AttributeError(f"module 'graphpipe' has no attribute {name!r}")
    found = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
