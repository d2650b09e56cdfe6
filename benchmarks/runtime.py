"""The runtime on real processes over gloo: emulated compute, real compute, overhead, and bytes sent.

With emulated compute a pass sleeps, so that many processes share few cores and the ideal is what the simulator says.
With no compute what is left is the overhead of a micro-batch. Other work on the machine spoils all but the bytes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import paper_models, towers
from benchmarks.common import Figure, Report, at_least, at_most
from benchmarks.problems import SAMPLES_PER_DEVICE, summit_problem
from graphpipe.graph import ComputationGraph
from graphpipe.planner.graphpipe import GraphPipePlanner
from graphpipe.program import lower
from graphpipe.stage import StageGraph

CLAIM = (
    "A step takes what the simulator says, a stage graph of two balanced towers runs 1.5 times as fast as their chain "
    "with 2 micro-batches and 1.25 times with 4, and the runtime adds less to a micro-batch than torch's own pipeline."
)
REMARKS = (
    "emulated: a stage alone takes 10 ms forward and 20 ms backward, nearly all of it asleep",
    "emulated: a sample a micro-batch; all processes share the cores of one machine",
    "simulated is what a plan would say, with the package's figure of a message on one machine",
    "graph is two branches that meet in a last stage; chain and torch_1f1b are as many stages one after the other",
    "overhead: two processes, 32 micro-batches, no compute but a product and a mean; cpu is the time of a processor",
    "all figures are medians over turns, in each of which graph, chain and torch_1f1b make some steps in sequence",
    "timeline: what the records of a step cost over that step without compute",
    "real compute is measured by the towers benchmark, beside torch's Schedule1F1B",
    "bytes: the least is every sample of a value once to each device that reads it, and its gradient once back",
)
FORWARD_S = 0.010
# Processes and micro-batches: two a process, where filling and draining are long, and four, as is usual.
EMULATED = ((4, 8), (4, 16), (8, 16), (16, 32))
# Goals hold up to this many processes on two cores; with more the wake-ups of all of them count too.
MOST_WITH_GOAL = 6
OVERHEAD_MICRO_BATCHES = 32
# A job that takes longer has failed.
LIMIT_S = 300.0
REAL_GOALS = {2: 1.4, 4: 1.2}
# The models whose plans for 8 devices send the bytes.
PLANNED: tuple[tuple[str, Callable[[], ComputationGraph]], ...] = (
    ("mmt", paper_models.mmt),
    ("candle_uno", paper_models.candle_uno),
)


def run() -> Report:
    """Return all figures."""
    figures = [figure for counts in EMULATED for figure in _emulated(*counts)]
    figures += _real_compute()
    figures += _overhead()
    figures += [_bytes(name, make()) for name, make in PLANNED]
    return Report(claim=CLAIM, figures=tuple(figures), remarks=REMARKS)


def _emulated(num_processes: int, num_micro_batches: int) -> list[Figure]:
    found = measure(num_processes, FORWARD_S, num_micro_batches, 5, 2)
    prefix = f"runtime/emulated/{num_processes}-processes/{num_micro_batches}-micro-batches"
    goal = 1.05 if num_processes <= MOST_WITH_GOAL else None
    figures = []
    for name in ("graph", "chain", "torch"):
        ratio = found["wall"][name] / found["simulated"][name]
        label = f"{prefix}/{'torch_1f1b' if name == 'torch' else name}_over_simulated"
        if goal is None or name == "torch":
            figures.append(Figure(name=label, value=ratio, unit="ratio", paper=1.0))
        else:
            figures.append(at_most(label, ratio, "ratio", goal, 1.0))
    gain = found["wall"]["torch"] / found["wall"]["graph"]
    expected = found["simulated"]["chain"] / found["simulated"]["graph"]
    label = f"{prefix}/graph_over_torch_1f1b"
    figures.append(Figure(name=label, value=gain, unit="ratio", paper=expected))
    return figures


def _real_compute() -> list[Figure]:
    measured = {figure.name: figure for figure in towers.run().figures}
    return [
        at_least(
            f"runtime/real/{count}-micro-batches/graph_over_torch_1f1b",
            measured[f"towers/{count}-micro-batches/graph_over_torch_1f1b"].value,
            "ratio",
            goal,
            (count + 1) / count,
        )
        for count, goal in REAL_GOALS.items()
    ]


def _overhead() -> list[Figure]:
    found = measure(2, 0.0, OVERHEAD_MICRO_BATCHES, 9, 20)
    figures = []
    for kind, label in (("wall", "wall"), ("busy", "cpu")):
        for name in ("chain", "torch"):
            seconds = found[kind][name] / OVERHEAD_MICRO_BATCHES
            whose = "torch_1f1b" if name == "torch" else "own"
            figures.append(Figure(name=f"runtime/overhead/{whose}_{label}_s", value=seconds, unit="s"))
        ratio = found[kind]["chain"] / found[kind]["torch"]
        figures.append(at_most(f"runtime/overhead/{label}_over_torch_1f1b", ratio, "ratio", 1.0))
    figures.append(
        at_most("runtime/timeline/share_of_a_step", found["timeline_s"] / found["wall"]["chain"], "ratio", 0.02)
    )
    return figures


def measure(
    num_processes: int, forward_s: float, num_micro_batches: int, num_turns: int, num_steps: int
) -> dict[str, Any]:
    """Run `benchmarks.emulated` and return what it wrote."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "seconds.json"
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes)]
        numbers = (forward_s, num_micro_batches, num_turns, num_steps)
        arguments = ["-m", "benchmarks.emulated", *map(str, numbers), str(path)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, *launcher, *arguments], check=True, env=environment, timeout=LIMIT_S)
        found: dict[str, Any] = json.loads(path.read_text())
        return found


def _bytes(name: str, graph: ComputationGraph) -> Figure:
    strategy = GraphPipePlanner().plan(summit_problem(graph, 8, SAMPLES_PER_DEVICE[name] * 8))
    program = lower(strategy.stages, strategy.schedule)
    sent = sum(message.num_bytes for message in program.messages if not message.is_local)
    return at_most(f"runtime/bytes/{name}_over_least", sent / least_bytes(strategy.stages), "ratio", 1.0, 1.0)


def least_bytes(stages: StageGraph) -> int:
    """Return the bytes that must pass between devices, whatever messages there are.

    A device needs each sample of a value that one of its stages reads there and none makes there, once. The sum of its
    gradients over these stages goes back once.
    """
    held = [_samples_by_device(stages, x) for x in range(len(stages.stages))]
    total = 0
    for value in stages.graph.values:
        made = held[stages.stage_of[value.producer]]
        edges = [edge for edge in stages.edges if value in edge.values]
        for read in (edges, [edge for edge in edges if value in edge.returned]):
            needed: dict[int, set[int]] = {}
            for edge in read:
                for device, samples in held[edge.target].items():
                    needed.setdefault(device, set()).update(samples)
            for device, samples in needed.items():
                missing = samples - made.get(device, set())
                if missing:
                    total += value.num_bytes(len(missing) if value.bytes_per_sample else 1)
    return total


def _samples_by_device(stages: StageGraph, x: int) -> dict[int, set[int]]:
    """Return the samples that each device of a stage works on."""
    found: dict[int, set[int]] = {}
    for m in range(stages.num_micro_batches(x)):
        for replica, device in enumerate(stages.stages[x].devices):
            samples = stages.replica_samples(x, m, replica)
            found.setdefault(device, set()).update(range(samples.start, samples.stop))
    return found
