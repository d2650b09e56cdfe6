"""The stages of a rank before the first step: their modules, their values, and what ranks compare of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

from torch import nn

from graphpipe.errors import GraphPipeError
from graphpipe.runtime.initialise import Init, fill_own
from graphpipe.runtime.meeting import check_shared, tensor_digest
from graphpipe.runtime.process_group import check_agreement, rank
from graphpipe.runtime.stages import StageModule, StageSource, named_tensors
from graphpipe.stage import StageGraph


def own_stages(source: StageSource, stages: StageGraph) -> dict[int, StageModule]:
    """Return the modules of the stages that this rank has."""
    return {x: source.stage_module(s.operators) for x, s in enumerate(stages.stages) if rank() in s.devices}


def prepared_stages(source: StageSource, stages: StageGraph, init: Init | None) -> dict[int, StageModule]:
    """Return this rank's stages with their values, which agree with those of other ranks. All ranks must call this.

    Args:
        source: The model.
        stages: All stages.
        init: Where the values of a model on the meta device come from.

    Raises:
        GraphPipeError: The values are not those of other ranks, there are none, or there were some before.
    """
    modules = own_stages(source, stages)
    on_meta = sorted(name for name, p in all_parameters(source).items() if p.is_meta)
    if not on_meta and init is None:
        check_agreement("parameters", _parameters_digest(source), "build the model with the same seed, or load it,")
        return modules
    _initialise(source, stages, modules, on_meta, init)
    return own_stages(source, stages)


def _initialise(
    source: StageSource,
    stages: StageGraph,
    modules: Mapping[int, StageModule],
    on_meta: Sequence[str],
    init: Init | None,
) -> None:
    """Give memory and values to what this rank's stages hold of a model on the meta device."""
    if init is None:
        raise GraphPipeError(
            f"{len(on_meta)} parameters of {source.graph.name!r} are on the meta device, the first is "
            f"{on_meta[0]!r}; say where their values come from, such as init=graphpipe.FromSeed(0)"
        )
    if not on_meta:
        raise GraphPipeError(
            f"init is for a model on the meta device, and {source.graph.name!r} has its values already; build it "
            "under `with torch.device('meta'):`, or leave init out"
        )
    own = named_tensors(modules)
    source.adopt(fill_own(source.model, own, init))
    held = {name: tensor_digest(t) for name, t in named_tensors(own_stages(source, stages)).items()}
    check_shared(held, "values for", "the init must give the same on all of them")


def specs_digest(source: StageSource) -> str:
    """Return a hash of what every value looks like, so that no message meets a buffer of another size or type."""
    specs = sorted((s.name, str(s.dtype), s.shape, str(s.layout)) for s in source.values.values())
    return hashlib.sha256(json.dumps(specs).encode()).hexdigest()


def all_parameters(source: StageSource) -> dict[str, nn.Parameter]:
    """Return the parameters of all stages, which every rank has."""
    return dict(source.stage_module([operator.name for operator in source.graph.operators]).named_parameters())


def _parameters_digest(source: StageSource) -> str:
    """Return a hash of all parameters: replicas and tied copies must start equal to stay so."""
    digests = sorted((name, tensor_digest(parameter)) for name, parameter in all_parameters(source).items())
    return hashlib.sha256(json.dumps(digests).encode()).hexdigest()
