"""From an unmodified model to trained steps: `make demo` runs this.

Plans Hugging Face's CLIP for this machine, shows the plan, trains it on handwritten digits over torchrun and gloo, and
compares with the same model planned as a chain of stages.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
from data import Digits
from job import MICRO_BATCH_SIZES, MINI_BATCH_SIZE, NUM_STEPS, build_model

import graphpipe as gp
from graphpipe.api import profile_sizes
from graphpipe.capture import capture
from graphpipe.estimate import estimate
from graphpipe.planner.pipedream import PipeDreamPlanner
from graphpipe.profiler import measure_profile
from graphpipe.report import plan_text, stage_graph_svg, stage_graph_text

FOLDER = Path(__file__).parent


def main() -> None:
    """Run the demo."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--out", type=Path, default=Path("demo-out"))
    options.add_argument("--steps", type=int, default=NUM_STEPS)
    given = options.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    torch.set_num_threads(1)

    num_processes = min(4, max(2, len(os.sched_getaffinity(0))))
    print(f"1. Planning CLIP for {num_processes} processes, one a core (two at least, four at most)", flush=True)
    graph, chain = make_strategies(num_processes)
    graph.save(given.out / "strategy.json")
    chain.save(given.out / "chain.json")
    found = estimate(graph)
    (given.out / "stage-graph.svg").write_text(stage_graph_svg(graph, found))
    print(plan_text(graph, found, width=min(shutil.get_terminal_size((110, 24)).columns, 140)))
    print(stage_graph_text(graph))
    ratio = estimate(chain).iteration_s / found.iteration_s
    print(f"As a chain of stages a step is predicted to take {ratio:.2f} times as long.\n", flush=True)

    print(
        f"2. Training {given.steps} steps of {MINI_BATCH_SIZE} samples with torchrun and gloo",
        flush=True,
    )
    train(num_processes, given.out, given.steps)

    result = json.loads((given.out / "result.json").read_text())
    print(
        f"\nDone in {time.perf_counter() - start:.0f} s: accuracy {result['accuracy']:.1%}, "
        f"{result['ratio']:.2f} times the throughput of the chain. Look at"
    )
    for name in ("report.html", "stage-graph.svg", "trace.json", "strategy.json"):
        print(f"  {given.out / name}")
    if result["accuracy"] < 0.9:
        sys.exit(f"error: the accuracy is {result['accuracy']:.1%}; at least 90 % were expected")


def make_strategies(num_processes: int) -> tuple[gp.Strategy, gp.Strategy]:
    """Return the plan as a graph of stages, and as a chain of stages, from the same measurements."""
    digits = Digits()
    model = build_model(digits.tokenizer)
    batch = next(digits.batches(MINI_BATCH_SIZE))
    captured = capture(model, batch)
    profile = measure_profile(captured, profile_sizes(MINI_BATCH_SIZE, MICRO_BATCH_SIZES), batch)
    cluster = gp.Cluster.detect(num_processes)
    strategies = [
        gp.plan(
            captured,
            batch,
            cluster=cluster,
            mini_batch_size=MINI_BATCH_SIZE,
            micro_batch_sizes=MICRO_BATCH_SIZES,
            profile=profile,
            planner=planner,
        )
        for planner in (None, PipeDreamPlanner())
    ]
    return strategies[0], strategies[1]


def train(num_processes: int, out: Path, steps: int) -> None:
    """Run `train.py` under torchrun."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes)),
        str(FOLDER / "train.py"),
        *("--strategy", str(out / "strategy.json"), "--chain", str(out / "chain.json")),
        *("--steps", str(steps), "--out", str(out)),
    ]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
    if done.returncode:
        sys.exit(f"error: training ended with exit code {done.returncode}; its messages are above")


if __name__ == "__main__":
    main()
