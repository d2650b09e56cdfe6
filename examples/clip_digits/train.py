"""Trains the digits by a strategy, on every process that torchrun starts.

::

    torchrun --nproc-per-node 2 train.py --strategy strategy.json --out .

`demo.py` runs it too, with a chain of stages to compare with.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from data import Digits
from job import LEARNING_RATE, MINI_BATCH_SIZE, NUM_STEPS, build_model, zero_shot_accuracy

import graphpipe as gp
from graphpipe.capture import capture
from graphpipe.estimate import estimate
from graphpipe.report.chrome_trace import chrome_trace
from graphpipe.report.html import html_report


def main() -> None:
    """Check a step, train, report, and compare with the chain."""
    options = parse_options()
    torch.set_num_threads(1)
    strategy = gp.Strategy.load(options.strategy)
    digits = Digits()
    model = build_model(digits.tokenizer)
    stream = digits.batches(MINI_BATCH_SIZE)
    first = next(stream)

    proof = gp.verify(model, strategy, first)
    worst, error = proof.worst
    if not proof.holds:
        raise gp.GraphPipeError(f"the gradient of {worst} differs from a single process's by {error:.1e}")
    say(
        f"one step equals a single process: loss {proof.loss:.6f} and {proof.reference_loss:.6f}, largest relative "
        f"difference of {len(proof.errors)} gradients {error:.0e} (float32)"
    )

    untrained = copy.deepcopy(model)
    pipeline = gp.Pipeline(
        model,
        strategy,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=LEARNING_RATE),
        example_batch=first,
    )
    train(pipeline, stream, options.steps)
    trace = pipeline.trace()
    model.load_state_dict(pipeline.gather_state_dict())
    accuracy = zero_shot_accuracy(model, digits)
    say(f"zero-shot accuracy on {len(digits.held_out_targets)} held-out digits: {accuracy:.1%}")

    facts = {"Zero-shot accuracy": f"{accuracy:.1%} of {len(digits.held_out_targets)} held-out digits"}
    result = {"accuracy": accuracy, "gradient_error": error, "measured_iteration_s": trace.makespan_s}
    if options.chain is not None:
        chain = gp.Pipeline(capture(untrained, first), gp.Strategy.load(options.chain))
        ours_s, chain_s = compare(pipeline, chain, stream)
        result |= {"graph_step_s": ours_s, "chain_step_s": chain_s, "ratio": chain_s / ours_s}
        facts["Throughput beside a chain of stages"] = f"{chain_s / ours_s:.2f} times"
        say(
            f"a step takes {1e3 * ours_s:.0f} ms as a graph of stages, {1e3 * chain_s:.0f} ms as a chain of stages: "
            f"{chain_s / ours_s:.2f} times the throughput"
        )
    if dist.get_rank() == 0:
        found = estimate(strategy)
        page = html_report(strategy, found, trace, title="CLIP on handwritten digits", facts=facts)
        (options.out / "report.html").write_text(page)
        (options.out / "trace.json").write_text(json.dumps(chrome_trace(trace, strategy)))
        (options.out / "result.json").write_text(json.dumps(result, indent=1))
    dist.barrier()


def train(pipeline: gp.Pipeline, stream, steps: int) -> None:
    """Train with a progress line."""
    start = time.perf_counter()
    for step in range(1, steps + 1):
        result = pipeline.step(next(stream))
        if step % 50 == 0 or step == steps:
            speed = step * result.num_samples / (time.perf_counter() - start)
            say(f"step {step:3d}/{steps}  loss {result.loss:.3f}  {speed:.0f} samples/s")


def compare(graph: gp.Pipeline, chain: gp.Pipeline, stream, rounds: int = 6, steps: int = 4) -> tuple[float, float]:
    """Return the median seconds of a step of each, without the optimizer; they take turns, so both see one machine."""
    seconds: dict[str, list[float]] = {"graph": [], "chain": []}
    for turn in range(rounds + 1):
        for name, pipeline in (("graph", graph), ("chain", chain)):
            for _ in range(steps):
                batch = next(stream)
                dist.barrier()
                start = time.perf_counter()
                pipeline.forward_backward(batch)
                if turn:  # The first turn warms up.
                    seconds[name].append(time.perf_counter() - start)
    return statistics.median(seconds["graph"]), statistics.median(seconds["chain"])


def say(line: str) -> None:
    """Print a line once."""
    if dist.get_rank() == 0:
        print(line, flush=True)


def parse_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description="Train CLIP on handwritten digits by a strategy.")
    parser.add_argument("--strategy", type=Path, required=True)
    parser.add_argument("--chain", type=Path, help="A strategy whose stages form a chain, to compare with.")
    parser.add_argument("--steps", type=int, default=NUM_STEPS)
    parser.add_argument("--out", type=Path, default=Path())
    return parser.parse_args()


if __name__ == "__main__":
    main()
