"""A strategy made by hand for a captured model, and its comparison with one process."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from graphpipe.capture import CapturedModel, capture, eager_loss
from graphpipe.runtime.pipeline import LossFunction, Pipeline
from graphpipe.runtime.process_transports import TransportKind
from graphpipe.runtime.update import OptimizerFactory
from graphpipe.schedule import kfkb
from graphpipe.stage import Recompute, Stage, StageGraph
from graphpipe.strategy import Strategy
from graphpipe.trace import SpanKind
from tests.stage_graphs import make_strategy

Part = tuple[str, int, tuple[int, ...]]

# What carries the messages of the case that is running; the worker sets it.
kind = TransportKind.GLOO


def hand_made(
    captured: CapturedModel,
    parts: Sequence[Part],
    mini_batch_size: int,
    *,
    k: int = 1,
    num_devices: int = 0,
    recompute: Recompute = Recompute.NONE,
) -> Strategy:
    """Return a strategy with one stage a part: (prefixes of its operators' names, micro-batch size, devices).

    Prefixes are module paths, separated by blanks; without one the part takes what is left.
    """
    left = [o.name for o in captured.graph.operators]
    stages = []
    for prefixes, size, devices in parts:
        mine = [n for n in left if not prefixes or any(n == p or n.startswith(f"{p}.") for p in prefixes.split())]
        assert mine, f"no operator left for {prefixes!r} among {left}"
        left = [n for n in left if n not in mine]
        stages.append(Stage(operators=tuple(mine), micro_batch_size=size, devices=devices, recompute=recompute))
    assert not left, left
    graph = StageGraph(captured.graph, tuple(stages), mini_batch_size)
    return make_strategy(graph, schedule=kfkb(graph, k=k), num_devices=num_devices)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Return plain SGD, which hides no constant factor."""
    return torch.optim.SGD(parameters, lr=0.05)


def compare(
    model: nn.Module,
    parts: Sequence[Part],
    batches: Sequence[Any],
    mini_batch_size: int,
    *,
    loss_fn: LossFunction | None = None,
    k: int = 1,
    num_devices: int = 0,
    recompute: Recompute = Recompute.NONE,
    make_optimizer: OptimizerFactory = sgd,
    **options: Any,
) -> dict[str, Any]:
    """Train some steps by a strategy and in one process; return the largest differences, and facts about the run.

    The pipeline is given `options` besides.
    """
    alone = copy.deepcopy(model)
    captured = capture(model, batches[0], loss_fn=loss_fn)
    strategy = hand_made(captured, parts, mini_batch_size, k=k, num_devices=num_devices, recompute=recompute)
    pipeline = Pipeline(captured, strategy, optimizer=make_optimizer, transport=kind, **options)
    optimizer = make_optimizer(alone.named_parameters())
    losses, errors, copies_equal = [], {"loss": 0.0, "gradient": 0.0, "parameter": 0.0}, True
    missing: list[str] = []
    for batch in batches:
        optimizer.zero_grad(set_to_none=True)
        expected = eager_loss(alone, batch, loss_fn)
        expected.backward()
        optimizer.step()
        result = pipeline.step(batch)
        losses.append(result.loss)
        errors["loss"] = max(errors["loss"], relative(torch.tensor(result.loss), expected.detach()))
        gradients, parameters = pipeline.gather_gradients(), pipeline.gather_parameters()
        for name, parameter in alone.named_parameters():
            if parameter.grad is None:
                missing += [name] if name in gradients else []
            else:
                errors["gradient"] = max(errors["gradient"], relative(gradients[name], parameter.grad))
            errors["parameter"] = max(errors["parameter"], relative(parameters[name], parameter.detach()))
        copies_equal &= all(torch.equal(parameters[n], p.detach()) for n, p in pipeline.parameters.items())
    trace = pipeline.trace()
    updated = pipeline.optimizer
    return {
        "losses": losses,
        **errors,
        "unexpected_gradients": missing,
        "copies_equal": copies_equal,
        "reductions": [
            sum(span.kind is SpanKind.REDUCE for span in trace.spans if span.device == device)
            for device in range(trace.num_devices)
        ],
        "order": str(strategy.schedule),
        "updated": sorted(n for n, p in pipeline.parameters.items() if updated and p in updated.state),
        "spans": [[s.device, s.kind.value, s.start_s, s.stop_s, s.stage, s.micro_batch] for s in trace.spans],
        "gradients": {n: g.tolist() for n, g in gradients.items() if g.numel() == 1},
    }


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference over the largest expected entry."""
    error = float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-30))
    return error if math.isfinite(error) else math.inf
