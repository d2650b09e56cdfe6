"""Replicas that share the work and the memory of the optimizer: the first stage of ZeRO, by whole parameters.

Each parameter that several devices hold is owned by one of them, whose optimizer alone has a state for it. After a step
the owner sends the new values to the others. Whole parameters, since an optimizer may look at a parameter's norm or
shape; so a stage with fewer parameters than replicas shares less evenly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum

import torch
from torch import nn

from graphpipe.graph import ComputationGraph
from graphpipe.program import Reduction
from graphpipe.runtime.buckets import BUCKET_BYTES, grouped
from graphpipe.runtime.process_transports import ProcessTransport


class OptimizerStates(StrEnum):
    """Which of the devices that hold a parameter keep the optimizer's state for it."""

    COPIED = "copied"
    """All of them; each updates its own copy."""
    SHARDED = "sharded"
    """One of them, which sends the new values to the others."""


def parameter_owners(graph: ComputationGraph, reductions: Sequence[Reduction]) -> dict[str, int]:
    """Return the owner of every parameter that several devices hold.

    The largest parameters go first, each to the device that owns the fewest bytes so far, the lowest among equals.
    """
    sizes = {parameter.name: parameter.num_bytes for operator in graph.operators for parameter in operator.parameters}
    owned_bytes: dict[int, int] = {}
    owners: dict[str, int] = {}
    shared = [(name, reduction.devices) for reduction in reductions for name in reduction.parameters]
    for name, devices in sorted(shared, key=lambda entry: (-sizes[entry[0]], entry[0])):
        owner = min(devices, key=lambda device: (owned_bytes.get(device, 0), device))
        owners[name] = owner
        owned_bytes[owner] = owned_bytes.get(owner, 0) + sizes[name]
    return owners


class ParameterSharing:
    """Sends the parameters that a rank owns to the others that hold them.

    Args:
        rank: This rank.
        parameters: Those that it holds, by name.
        reductions: All of the program's.
        owners: From `parameter_owners`.
        transport: Sends them.
        bucket_bytes: How much is sent at once.
    """

    def __init__(
        self,
        rank: int,
        parameters: Mapping[str, nn.Parameter],
        reductions: Sequence[Reduction],
        owners: Mapping[str, int],
        transport: ProcessTransport,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._transport = transport
        # What is sent at once, in the same order on all devices: who holds it, who sends it, and what.
        self._buckets: list[tuple[tuple[int, ...], int, list[nn.Parameter]]] = []
        for reduction in reductions:
            if rank not in reduction.devices:
                continue
            for owner in reduction.devices:
                owned = [parameters[name] for name in reduction.parameters if owners[name] == owner]
                self._buckets += [(reduction.devices, owner, group) for group in grouped(owned, bucket_bytes)]
        self._rank = rank

    @torch.no_grad()
    def share(self) -> None:
        """Give every copy of a parameter its owner's values. All ranks call this after their optimizers' step."""
        for devices, owner, parameters in self._buckets:
            flat = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
            self._transport.broadcast(devices, owner, flat)
            if owner != self._rank:
                parts = torch.split(flat, [parameter.numel() for parameter in parameters])
                for parameter, part in zip(parameters, parts, strict=True):
                    parameter.copy_(part.view_as(parameter))
