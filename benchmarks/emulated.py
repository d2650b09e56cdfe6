"""Stage graphs whose compute is emulated by sleeping: the processes of the runtime benchmark.

``python -m benchmarks.emulated SECONDS MICRO_BATCHES TURNS STEPS FILE`` under torchrun: a forward pass takes
SECONDS, and a backward pass twice that, most of it asleep. Rank 0 writes what it measured: this runtime on two branches
that meet in a last stage, this runtime on a chain, and torch.distributed.pipelining's Schedule1F1B on the same chain.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from graphpipe.capture.autocast import Autocast
from graphpipe.capture.draws import Draws
from graphpipe.capture.specs import LossReduction, SampleLayout, ValueSpec
from graphpipe.cluster import Cluster
from graphpipe.cost import SGD, Profile
from graphpipe.graph import ComputationGraph, Operator, Parameter, Value
from graphpipe.program import Program
from graphpipe.runtime.clock import Mark, WallClock
from graphpipe.runtime.pipeline import Pipeline
from graphpipe.schedule import ModelCosts, UniformCosts, kfkb
from graphpipe.simulator import simulate
from graphpipe.stage import Stage, StageGraph
from graphpipe.strategy import Strategy
from graphpipe.trace import SpanKind

WIDTH = 256
BYTES = 4 * WIDTH
Reads = tuple[tuple[int, ...], ...]


def chain_of(count: int) -> Reads:
    """Return what each stage of a chain reads."""
    return tuple((x - 1,) if x else () for x in range(count))


def branches_of(count: int) -> Reads:
    """Return what each stage reads: two branches of about the same length, and a last stage that reads both."""
    longer = count // 2
    first = [(x - 1,) if x else () for x in range(longer)]
    second = [(x - 1,) if x > longer else () for x in range(longer, count - 1)]
    return (*first, *second, (longer - 1, count - 2) if count - 1 > longer else (longer - 1,))


class Emulated(nn.Module):
    """Scales what it reads by a parameter and sleeps in both passes.

    Args:
        sleeps_s: The seconds to sleep in a forward and in a backward pass.
    """

    def __init__(self, sleeps_s: tuple[float, float]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self._sleeps_s = sleeps_s

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = _Sleep.apply(x * self.weight, *self._sleeps_s)
        return found


class _Sleep(torch.autograd.Function):
    """Returns its input; sleeps in both passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        _sleep(forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        _sleep(ctx.backward_s)
        return gradient, None, None


def _sleep(seconds: float) -> None:
    if seconds > 0:
        time.sleep(seconds)


def calibrated(forward_s: float) -> tuple[float, float]:
    """Return the sleeps with which passes of a stage alone take this long forward, and twice as long backward.

    A clock oversleeps, and a core that has slept takes some tenths of a millisecond for lines that take hundredths
    when it is warm. A profile, which measures passes, would have that in it.
    """
    wanted_s = (forward_s, 2 * forward_s)
    sleeps_s = wanted_s
    for _ in range(2 if forward_s else 0):
        module, x = Emulated(sleeps_s), torch.ones(1, WIDTH)
        taken_s: tuple[list[float], list[float]] = ([], [])
        for _ in range(9):
            start_s = time.perf_counter()
            y = module(x.detach().requires_grad_())
            turned_s = time.perf_counter()
            torch.autograd.backward([y], [torch.ones_like(y)])
            taken_s[0].append(turned_s - start_s)
            taken_s[1].append(time.perf_counter() - turned_s)
        late_s = [statistics.median(taken) - wanted for taken, wanted in zip(taken_s, wanted_s, strict=True)]
        sleeps_s = (sleeps_s[0] - late_s[0], sleeps_s[1] - late_s[1])
    return sleeps_s


class EmulatedModel:
    """A captured model of one operator a stage, the last of which returns the loss.

    Args:
        reads: What each operator reads; the input where it reads nothing.
        modules: Of each operator.
    """

    loss = "loss"
    loss_reduction = LossReduction.MEAN
    sparse_parameters: frozenset[str] = frozenset()
    autocast = Autocast()

    def __init__(self, reads: Reads, modules: Sequence[Emulated]) -> None:
        self.reads = reads
        self.modules = modules
        self.loss_operator = f"op{len(reads) - 1}"
        layout = SampleLayout(0, 1)
        self.inputs = {"x": ValueSpec("x", torch.float32, (1, WIDTH), layout, False)}
        names = [f"v{x}" for x in range(len(reads) - 1)]
        self.values = {name: ValueSpec(name, torch.float32, (1, WIDTH), layout, True) for name in names}
        readers = {x: tuple(f"op{y}" for y, read in enumerate(reads) if x in read) for x in range(len(reads))}
        self.graph = ComputationGraph(
            "emulated",
            tuple(Operator(name=f"op{x}", parameters=(Parameter(f"op{x}.weight", 4),)) for x in range(len(reads))),
            tuple(
                Value(name=f"v{x}", producer=f"op{x}", consumers=readers[x], bytes_per_sample=BYTES)
                for x in range(len(reads) - 1)
            ),
        )

    def flatten_batch(self, batch: Mapping[str, Tensor], needed: object = None) -> dict[str, Tensor]:
        """Return the batch."""
        return dict(batch)

    def sized(self, flat: Mapping[str, Tensor]) -> EmulatedModel:
        """Return this model: all sizes are fixed."""
        return self

    def num_samples(self, flat: Mapping[str, Tensor]) -> int:
        """Return the number of samples."""
        return len(flat["x"])

    def stage_module(self, operators: Sequence[str]) -> EmulatedStage:
        """Return the module of some operators."""
        return EmulatedStage(self, [int(name.removeprefix("op")) for name in operators])


class EmulatedStage:
    """Some operators of an emulated model, one after the other."""

    def __init__(self, model: EmulatedModel, operators: Sequence[int]) -> None:
        self._model = model
        self._operators = operators
        read = [f"v{y}" for x in operators for y in model.reads[x] if y not in operators]
        self.input_names = tuple(read) or ("x",)
        last = len(model.reads) - 1
        self.output_names = tuple("loss" if x == last else f"v{x}" for x in operators)

    def written_buffers(self) -> dict[str, Tensor]:
        """Return the buffers that a call writes: there are none."""
        return {}

    def forward_again(
        self, tensors: Mapping[str, Tensor], num_samples: int, draws: Draws, buffers: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return the outputs by name."""
        assert not buffers
        return self(tensors, num_samples, draws)

    def __call__(self, tensors: Mapping[str, Tensor], num_samples: int, draws: Draws, /) -> dict[str, Tensor]:
        """Return the outputs by name."""
        known = dict(tensors)
        for x in self._operators:
            read = [known[f"v{y}"] for y in self._model.reads[x]] or [known["x"]]
            known[f"v{x}"] = self._model.modules[x](read[0] if len(read) == 1 else sum(read))
        last = f"v{len(self._model.reads) - 1}"
        if last in known:
            known["loss"] = known[last].mean()
        return {name: known[name] for name in self.output_names}

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters."""
        for x in self._operators:
            yield f"op{x}.weight", self._model.modules[x].weight


def make_pipeline(
    reads: Reads, forward_s: float, sleeps_s: tuple[float, float], num_micro_batches: int
) -> tuple[Pipeline, float]:
    """Return a pipeline with a device a stage and one sample a micro-batch, and its simulated seconds a mini-batch.

    These are what a plan would say, with the package's figures of messages on one machine.
    """
    model = EmulatedModel(reads, [Emulated(sleeps_s) for _ in reads])
    stages = StageGraph(
        model.graph,
        tuple(Stage(operators=(f"op{x}",), micro_batch_size=1, devices=(x,)) for x in range(len(reads))),
        num_micro_batches,
    )
    costs = UniformCosts(forward_s, 2 * forward_s) if forward_s else UniformCosts(1.0, 2.0)
    names, ones = tuple(o.name for o in model.graph.operators), np.ones((1, len(reads)))
    profile = Profile(names, (1,), costs.forward_s * ones, costs.backward_s * ones, BYTES * ones)
    schedule = kfkb(stages, costs)
    strategy = Strategy(stages, schedule, profile, Cluster.uniform(len(reads), memory_bytes=10**9), SGD)
    pipeline = Pipeline(model, strategy, verify="never")
    predicted = ModelCosts(strategy.cost_model, stages)
    return pipeline, simulate(program_of(pipeline, num_micro_batches), predicted).makespan_s


def program_of(pipeline: Pipeline, mini_batch_size: int) -> Program:
    """Return the program that a pipeline runs."""
    return pipeline._program(mini_batch_size)


def torch_chain(sleeps_s: tuple[float, float], num_micro_batches: int, batch: Tensor) -> Callable[[], object]:
    """Return a step of torch's 1F1B on a chain with a stage a process."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, count = dist.get_rank(), dist.get_world_size()
    stage = PipelineStage(Emulated(sleeps_s), rank, count, torch.device("cpu"))
    schedule = Schedule1F1B(stage, num_micro_batches, loss_fn=lambda output, _: output.mean())
    if rank == 0:
        return partial(schedule.step, batch)
    return partial(schedule.step, target=batch) if rank == count - 1 else schedule.step


def timeline_s(num_tasks: int) -> float:
    """Return the seconds that a device takes to record its tasks."""
    clock = WallClock()
    start = time.perf_counter()
    for _ in range(100):
        record: list[tuple[SpanKind, Mark, Mark, int, int]] = []
        for m in range(num_tasks):
            begin = clock.mark()
            record.append((SpanKind.FORWARD, begin, clock.mark(), 0, m))
    return (time.perf_counter() - start) / 100


def main() -> None:
    """Measure on every rank; rank 0 writes."""
    forward_s, num_micro_batches, num_turns, num_steps = float(sys.argv[1]), *map(int, sys.argv[2:5])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, count = dist.get_rank(), dist.get_world_size()
    batch = torch.ones(num_micro_batches, WIDTH)
    # One after the other: calibrated together they would wait for each other's cores.
    for turn in range(count):
        if turn == rank:
            sleeps_s = calibrated(forward_s)
        dist.barrier()
    graph, graph_s = make_pipeline(branches_of(count), forward_s, sleeps_s, num_micro_batches)
    chain, chain_s = make_pipeline(chain_of(count), forward_s, sleeps_s, num_micro_batches)
    steps: dict[str, Callable[[], object]] = {
        "graph": partial(graph.forward_backward, {"x": batch}),
        "chain": partial(chain.forward_backward, {"x": batch}),
        "torch": torch_chain(sleeps_s, num_micro_batches, batch),
    }
    wall_s: dict[str, list[float]] = {name: [] for name in steps}
    busy_s: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():  # warms up
        step()
    for _ in range(num_turns):
        for name, step in steps.items():
            dist.barrier()
            start_s, busy_before_s = time.perf_counter(), time.process_time()
            for _ in range(num_steps):
                step()
            busy = torch.tensor(time.process_time() - busy_before_s, dtype=torch.float64)
            dist.barrier()
            wall_s[name].append((time.perf_counter() - start_s) / num_steps)
            dist.all_reduce(busy)
            busy_s[name].append(float(busy) / count / num_steps)
    if rank == 0:
        found = {
            "simulated": {"graph": graph_s, "chain": chain_s, "torch": chain_s},
            "wall": {name: statistics.median(times) for name, times in wall_s.items()},
            "busy": {name: statistics.median(times) for name, times in busy_s.items()},
            "timeline_s": timeline_s(2 * num_micro_batches),
        }
        Path(sys.argv[5]).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
