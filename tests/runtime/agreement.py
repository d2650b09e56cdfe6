"""A program in one process beside its model in one."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from graphpipe.program import Program
from graphpipe.runtime.in_process import run_in_process
from graphpipe.schedule import TaskCosts
from graphpipe.simulator import simulate
from tests.graph_models import GraphModel, reference

RELATIVE = 1e-9


def assert_as_one_process(model: GraphModel, program: Program, batch: Mapping[str, Tensor], costs: TaskCosts) -> None:
    """Run a program and compare loss, gradients, and the makespan under a virtual clock."""
    loss, gradients = reference(model, batch)

    result = run_in_process(model, program, batch, costs)

    assert result.loss == pytest.approx(loss, rel=RELATIVE, abs=1e-12)
    seen = set()
    for device in result.gradients:
        for name, found in device.items():
            seen.add(name)
            expected = gradients[name]
            if expected is None:
                assert found is None or not found.any(), name
            else:
                assert found is not None, name
                torch.testing.assert_close(
                    found, expected, rtol=RELATIVE, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}"
                )
    assert seen == set(gradients)
    # Copies of a parameter, on replicas or on stages that share it, have the same gradient to the last bit.
    for name in seen:
        copies = [d[name] for d in result.gradients if d.get(name) is not None]
        assert all(torch.equal(copies[0], c) for c in copies if c is not None), name
    # Under a virtual clock the executor's makespan is the simulator's.
    assert result.trace.makespan_s == pytest.approx(simulate(program, costs).makespan_s, rel=1e-12)
