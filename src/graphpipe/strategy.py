"""A strategy: everything that the runtime needs to know to train, and everything that a person may ask about it.

A strategy carries the computation graph, the profile and the cluster that it was planned with, so that it can be shown,
simulated and compared without the model, and refused for another model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from graphpipe.cluster import Cluster
from graphpipe.cost import CostModel, OptimizerCost, Profile
from graphpipe.errors import DeadlockError, FieldError, GraphPipeError, StrategyError
from graphpipe.fields import Field, read_json
from graphpipe.files import write_text
from graphpipe.graph import ComputationGraph
from graphpipe.schedule import DeviceOrder, ModelCosts, Schedule, Task, check_schedule
from graphpipe.stage import StageGraph, StageOrder, stages_from_json, stages_to_json

SCHEMA_VERSION = 1


@dataclass(frozen=True, eq=False)
class Strategy:
    """A stage graph with its schedule, and what they were planned for.

    Attributes:
        stages: The stage graph.
        schedule: The order of tasks on every device.
        profile: What the operators cost.
        cluster: The devices; a stage's devices are positions in it, and ranks of the processes.
        optimizer: What the optimizer keeps.
        planner: Who made it.
        notes: What the planner has to say about it, such as its distance from a lower bound.

    Raises:
        StrategyError: The schedule does not fit the stages, or a stage is on a device that the cluster lacks.
    """

    stages: StageGraph
    schedule: Schedule
    profile: Profile
    cluster: Cluster
    optimizer: OptimizerCost
    planner: str = "by hand"
    notes: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for x, stage in enumerate(self.stages.stages):
            for device in stage.devices:
                if not 0 <= device < len(self.cluster):
                    raise StrategyError(
                        f"stage {x} is on device {device}; the cluster has devices 0 to {len(self.cluster) - 1}"
                    )
        check_schedule(self.schedule, self.stages)
        # Built here so that a profile of another graph is refused at once.
        assert self.cost_model.graph is self.graph

    def __str__(self) -> str:
        """Return a line about the whole and one a stage; `graphpipe show` prints more."""
        stages = self.stages
        seconds = self.notes.get("iteration_s")
        time = f", {1e3 * seconds:.3g} ms an iteration predicted" if isinstance(seconds, float) else ""
        head = (
            f"{self.graph.name}: {len(stages.stages)} stages, at most {stages.depth} in sequence, on "
            f"{len(stages.devices)} of {len(self.cluster)} devices, "
            f"mini-batch of {self.mini_batch_size}{time} ({self.planner})"
        )
        lines = [head]
        for x, stage in enumerate(stages.stages):
            first, last = stage.operators[0], stage.operators[-1]
            names = first if first == last else f"{first} to {last}"
            devices = ", ".join(self.cluster.devices[d].name for d in stage.devices)
            size, count = stage.micro_batch_size, stages.num_micro_batches(x)
            lines.append(
                f"  stage {x} on {devices}: {len(stage.operators)} operators, {names}; {count} × {size} samples"
            )
        return "\n".join(lines)

    @property
    def graph(self) -> ComputationGraph:
        """The computation graph that the stages are made of."""
        return self.stages.graph

    @property
    def mini_batch_size(self) -> int:
        """Samples a step."""
        return self.stages.mini_batch_size

    @cached_property
    def cost_model(self) -> CostModel:
        """The costs of the graph's operators on the cluster."""
        return CostModel(self.graph, self.profile, self.cluster, self.optimizer)

    @cached_property
    def costs(self) -> ModelCosts:
        """The costs of the strategy's tasks."""
        return ModelCosts(self.cost_model, self.stages)

    def to_json(self) -> dict[str, Any]:
        """Return the strategy as plain data, with the version of its schema."""
        return {
            "schema_version": SCHEMA_VERSION,
            "kind": "graphpipe-strategy",
            "planner": self.planner,
            "mini_batch_size": self.mini_batch_size,
            "order": self.stages.order.value,
            "stages": stages_to_json(self.stages.stages),
            "schedule": [
                {"devices": list(order.devices), "tasks": " ".join(map(str, order.tasks))}
                for order in self.schedule.orders
            ],
            "cluster": self.cluster.to_json(),
            "optimizer": self.optimizer.to_json(),
            "notes": dict(self.notes),
            "graph_fingerprint": self.graph.fingerprint,
            "graph": self.graph.to_json(),
            "profile": self.profile.to_json(),
        }

    @classmethod
    def from_json(cls, data: object) -> Strategy:
        """Return the strategy that `to_json` wrote.

        Raises:
            StrategyError: It is damaged, of another version, or contradicts itself.
        """
        if not isinstance(data, Mapping) or data.get("kind") != "graphpipe-strategy":
            raise StrategyError("this is not a strategy; `graphpipe plan` writes one")
        if data.get("schema_version") != SCHEMA_VERSION:
            raise StrategyError(
                f"the strategy has schema version {data.get('schema_version')!r}, this GraphPipe reads version "
                f"{SCHEMA_VERSION}; plan again"
            )
        try:
            return cls._from_fields(Field(data, "<the strategy>"))
        except DeadlockError:
            raise
        except GraphPipeError as error:
            raise StrategyError(f"the strategy is damaged: {error}; plan again") from error

    @classmethod
    def _from_fields(cls, strategy: Field) -> Strategy:
        graph = ComputationGraph.from_json(strategy["graph"])
        if graph.fingerprint != strategy["graph_fingerprint"].value:
            raise StrategyError(
                f"its graph has fingerprint {graph.fingerprint}, the file says {strategy['graph_fingerprint'].value!r}"
            )
        return cls(
            stages=StageGraph(
                graph,
                stages_from_json(strategy["stages"]),
                strategy["mini_batch_size"].integer(1),
                strategy["order"].choice(StageOrder),
            ),
            schedule=Schedule(tuple(_device_order(field) for field in strategy["schedule"].elements())),
            profile=Profile.from_json(strategy["profile"]),
            cluster=Cluster.from_json(strategy["cluster"]),
            optimizer=OptimizerCost.from_json(strategy["optimizer"]),
            planner=strategy["planner"].text(),
            notes={name: field.value for name, field in strategy["notes"].members().items()},
        )

    def save(self, path: str | Path) -> None:
        """Write the strategy to a file, whole or not at all.

        Raises:
            GraphPipeError: It cannot be written.
        """
        write_text(Path(path), json.dumps(self.to_json(), indent=1))

    @classmethod
    def load(cls, path: str | Path) -> Strategy:
        """Return the strategy in a file.

        Raises:
            StrategyError: The file is missing, is not JSON, or is not a valid strategy.
        """
        try:
            data = read_json(Path(path))
        except FileNotFoundError:
            raise StrategyError(f"there is no strategy file {str(path)!r}; `graphpipe plan` writes one") from None
        except FieldError as error:
            raise StrategyError(f"strategy file {str(path)!r} cannot be read: {error}; plan again") from error
        return cls.from_json(data)

    def check_model(self, graph: ComputationGraph) -> None:
        """Check that the strategy was planned for this graph.

        Raises:
            StrategyError: It was not; the message says what differs first.
        """
        if graph.fingerprint == self.graph.fingerprint:
            return
        mine = {o.name: o for o in self.graph.operators}
        theirs = {o.name: o for o in graph.operators}
        for name in mine:
            if name not in theirs:
                raise StrategyError(f"the strategy is for another model: it has operator {name!r}, this model lacks it")
        for name, operator in theirs.items():
            if name not in mine:
                raise StrategyError(
                    f"the strategy is for another model: this model has {name!r}, the strategy lacks it"
                )
            before, now = asdict(mine[name]), asdict(operator)
            for what in before:
                if before[what] != now[what]:
                    raise StrategyError(
                        "the strategy is for another model, or for this one under another autocast, with other shapes "
                        f"or another loss: {what} of operator {name!r} was {_short(before[what])} and is "
                        f"{_short(now[what])}; plan again"
                    )
        raise StrategyError("the strategy is for another model: what passes between the operators differs; plan again")

    def check_world_size(self, world_size: int) -> None:
        """Check that there is a process for each device.

        Raises:
            StrategyError: There are more or fewer.
        """
        if world_size != len(self.cluster):
            raise StrategyError(
                f"the strategy is for {len(self.cluster)} devices, the job has {world_size} processes; start "
                f"{len(self.cluster)} (torchrun --nproc-per-node {len(self.cluster)}) or plan again for {world_size}"
            )


def _device_order(field: Field) -> DeviceOrder:
    tasks = []
    for text in field["tasks"].text().split():
        try:
            tasks.append(Task.parse(text))
        except GraphPipeError as error:
            raise FieldError(f"{field['tasks'].path}: {error}") from error
    return DeviceOrder(tuple(device.integer() for device in field["devices"].elements()), tuple(tasks))


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
