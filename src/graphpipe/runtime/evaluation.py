"""Forward passes in eval mode, on the devices that hold the parameters.

The graph in eval mode is not that of training: nothing is dropped, and a batch normalisation no longer mixes samples.
So it is captured by itself. Each of its operators goes to the training stage that holds most of its parameters, or,
without any, to the stage of the same operator in training or of what it reads. Where operators of other stages come
between those of one stage, it becomes several here: without backward passes that costs nothing. An operator may need
parameters of two stages, such as a layer with the normalisation after it; the smaller ones are sent before the pass.
One that mixes the samples of a batch takes the whole of it on the first of its stage's devices, and what else runs on
these devices does so there too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from graphpipe.capture import CapturedModel
from graphpipe.capture.classes import Kind, SampleClass
from graphpipe.errors import GraphPipeError
from graphpipe.program import Program
from graphpipe.runtime.executor import Executor
from graphpipe.stage import SampleRange, Stage, StageGraph

Lower = Callable[[StageGraph], Program]


class _Home(NamedTuple):
    """The stage of the training on whose devices an operator runs, and whether it mixes samples."""

    stage: int
    mixes: bool


def evaluation_stages(
    trained: CapturedModel, stages: StageGraph, captured: CapturedModel, num_samples: int
) -> StageGraph:
    """Return where the operators of a model in eval mode run.

    Args:
        trained: The model as it was captured for training.
        stages: Those of the training.
        captured: The model in eval mode.
        num_samples: Of the batch.
    """
    found_homes = zip(_homes(trained, stages, captured), captured.graph.operators, strict=True)
    homes = [_Home(x, operator.is_batch_wise) for x, operator in found_homes]
    # Stages share all of their devices or none, so what else would run on these runs on the first as well.
    reduced = {stages.stages[home.stage].devices for home in homes if home.mixes}
    parts: list[tuple[_Home, list[str]]] = []
    for i in _by_home(captured, homes):
        if not parts or parts[-1][0] != homes[i]:
            parts.append((homes[i], []))
        parts[-1][1].append(captured.graph.operators[i].name)
    found = []
    for home, names in parts:
        stage = stages.stages[home.stage]
        devices = stage.devices[:1] if stage.devices in reduced else stage.devices
        size = num_samples if home.mixes else min(max(stage.micro_batch_size, len(devices)), num_samples)
        names.sort(key=captured.graph.index.__getitem__)
        # Replicas that a small batch has no sample for are left out.
        found.append(Stage(operators=tuple(names), micro_batch_size=size, devices=devices[:size]))
    return StageGraph(captured.graph, tuple(found), num_samples)


def holders(trained: CapturedModel, stages: StageGraph) -> dict[str, tuple[int, ...]]:
    """Return the stages that have each parameter, and each buffer that training writes, as it is now."""
    found: dict[str, tuple[int, ...]] = {}
    for x, stage in enumerate(stages.stages):
        module = trained.stage_module(stage.operators)
        for name in (*(n for n, _ in module.named_parameters()), *module.written_buffers()):
            found[name] = (*found.get(name, ()), x)
    return found


def _homes(trained: CapturedModel, stages: StageGraph, captured: CapturedModel) -> list[int]:
    """Return the training stage whose devices run each operator of a model in eval mode."""
    held_by = holders(trained, stages)
    loss_home = stages.stage_of[trained.loss_operator]
    homes: list[int] = []
    for i, operator in enumerate(captured.graph.operators):
        sizes: Counter[int] = Counter()
        for name, tensor in _tensors(captured, [operator.name]).items():
            sizes.update(dict.fromkeys(held_by.get(name, ()), tensor.numel() * tensor.element_size()))
        before = [homes[p] for p in captured.graph.predecessors[i]]
        if sizes:
            homes.append(min(sizes, key=lambda x: (-sizes[x], x)))
        elif operator.name in stages.stage_of:
            homes.append(stages.stage_of[operator.name])
        elif operator.is_batch_wise or not before:
            homes.append(loss_home)
        else:
            homes.append(max(before))
    return homes


def _tensors(captured: CapturedModel, operators: Sequence[str]) -> dict[str, Tensor]:
    module = captured.stage_module(operators)
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _by_home(captured: CapturedModel, homes: Sequence[_Home]) -> list[int]:
    """Return a topological order that stays with a home as long as it can."""
    graph = captured.graph
    missing = [len(found) for found in graph.predecessors]
    ready = {i for i, count in enumerate(missing) if not count}
    order: list[int] = []
    while ready:
        current = homes[order[-1]] if order else None
        chosen = min(ready, key=lambda i: (homes[i] != current, homes[i], i))
        ready.remove(chosen)
        order.append(chosen)
        for reader in graph.successors[chosen]:
            missing[reader] -= 1
            if not missing[reader]:
                ready.add(reader)
    return order


@dataclass(frozen=True, eq=False)
class Evaluation:
    """A model in eval mode on one rank.

    Attributes:
        captured: The model.
        executor: Runs the rank's part.
        program: What each rank does, for one number of samples.
        sent: The tensors that some rank needs and does not train, each with the rank that sends it to all.
    """

    captured: CapturedModel
    executor: Executor
    program: Program
    sent: Mapping[str, int]

    @classmethod
    def of(
        cls,
        trained: CapturedModel,
        stages: StageGraph,
        captured: CapturedModel,
        base: Executor,
        num_samples: int,
        lower: Lower,
    ) -> Evaluation:
        """Return a rank's part of an evaluation.

        Args:
            trained: The model as it was captured for training.
            stages: Those of the training.
            captured: The model in eval mode.
            base: The rank's executor in training.
            num_samples: Of the batch.
            lower: Makes the program of stages.
        """
        program = lower(evaluation_stages(trained, stages, captured, num_samples))
        modules = {
            x: captured.stage_module(stage.operators)
            for x, stage in enumerate(program.stages.stages)
            if base.device in stage.devices
        }
        executor = Executor(base.device, captured, modules, base.transport, base.clock, base.torch_device)
        executor.kept_names = frozenset(name for name, _ in captured.outputs)
        held_by = holders(trained, stages)
        sent: dict[str, int] = {}
        for stage in program.stages.stages:
            for name in _tensors(captured, stage.operators):
                have = {device for x in held_by.get(name, ()) for device in stages.stages[x].devices}
                if have and not have.issuperset(stage.devices):
                    sent[name] = min(have)
        return cls(captured, executor, program, dict(sorted(sent.items())))

    def run(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return this rank's part of the loss, and of the outputs by ``name start stop``."""
        self.executor.source = self.captured.sized(inputs)
        tensors = dict((*self.captured.model.named_parameters(), *self.captured.model.named_buffers()))
        with torch.no_grad():
            for name, source in self.sent.items():
                own = tensors[name].detach()
                copied = torch.empty_like(own, device="cpu") if own.is_meta else own.to("cpu", copy=True).contiguous()
                dist.broadcast(copied, src=source)
                if dist.get_rank() != source and not own.is_meta:
                    own.copy_(copied)
                elif own.is_meta and any(name in self._names(x) for x in self.executor.modules):
                    raise GraphPipeError(
                        f"{name!r} is on another rank and on the meta device here, and evaluation needs it on both; "
                        "make the model with its values, or let one stage hold the layer and its normalisation"
                    )
            loss = self.executor.run(self.program, inputs)
        kept = {f"{name} {s.start} {s.stop}": tensor for name, s, tensor in self.executor.kept}
        self.executor.kept.clear()
        return loss, kept

    def _names(self, stage: int) -> frozenset[str]:
        return frozenset(_tensors(self.captured, self.program.stages.stages[stage].operators))

    def joined(self, pieces: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the whole outputs from the pieces of all ranks."""
        found: dict[str, list[tuple[SampleRange, Tensor]]] = {}
        for key, tensor in pieces.items():
            name, start, stop = key.rsplit(" ", 2)
            found.setdefault(name, []).append((SampleRange(int(start), int(stop)), tensor))
        return [
            join(sorted(found[name], key=lambda piece: piece[0].start), place) for name, place in self.captured.outputs
        ]


def join(pieces: Sequence[tuple[SampleRange, Tensor]], place: SampleClass) -> Tensor:
    """Return the tensor of a batch from those of its micro-batches, in order.

    Args:
        pieces: The samples and the tensor of each.
        place: How the tensor depends on the samples.
    """
    if len(pieces) == 1 or place.kind in (Kind.INDEPENDENT, Kind.WHOLE):
        return pieces[0][1]
    if place.kind is Kind.PER_SAMPLE:
        axis = place.axis
        split = [t.reshape(*t.shape[:axis], place.outer, len(s) * place.inner, *t.shape[axis + 1 :]) for s, t in pieces]
        return torch.cat(split, axis + 1).flatten(axis, axis + 1)
    if place.kind is Kind.COUNT:
        raise GraphPipeError(
            "an output depends on the number of samples alone, and micro-batches made their own; return a tensor that "
            "has a row for each sample"
        )
    total = sum(len(s) for s, _ in pieces)
    weights = [len(s) / total if place.kind is Kind.MEAN else 1.0 for s, _ in pieces]
    stacked = torch.stack([t * w for (_, t), w in zip(pieces, weights, strict=True)])
    return stacked.sum(0)
