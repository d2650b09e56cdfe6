"""Ranks whose loaders do not have the same number of batches, and a batch that only the ranks with the loss refuse."""

from __future__ import annotations

import datetime
import os
import sys

import torch

import graphpipe as gp
from graphpipe.capture import capture
from graphpipe.cli import main
from graphpipe.runtime.checkpoint import Checkpointer
from graphpipe.runtime.pipeline import Pipeline
from graphpipe.runtime.process_transports import TransportKind
from tests.distributed.cases import Fork, batch_of, mean_square
from tests.distributed.failures import captured
from tests.distributed.feature_cases import Tokens, tokens_of
from tests.distributed.parity import Part, hand_made, sgd

PARTS: list[Part] = [("a b", 2, (0,)), ("", 4, (1,))]
LENGTHS = (4, 3)


def loop(folder: str, then: str, transport: str) -> None:
    """Train in a loop over a loader that is one batch shorter on rank 1, and do something at the end."""
    pipeline = Pipeline(
        captured(),
        hand_made(captured(), PARTS, 8),
        optimizer=sgd,
        transport=TransportKind(transport),
        timeout=datetime.timedelta(seconds=60),
    )
    with Checkpointer(pipeline, folder) as checkpoints:
        if then == "evaluate":
            pipeline.evaluate(batch_of(8))  # The capture in eval mode is not to keep the other rank waiting later.
        for batch in loader():
            pipeline.step(batch)
        match then:
            case "save":
                checkpoints.save()
            case "gather":
                pipeline.gather_state_dict()
            case "evaluate":
                pipeline.evaluate(batch_of(8))
            case "leave":
                return
            case _:
                raise AssertionError(then)


def refused() -> None:
    """Train with masked tokens after a capture in which all tokens counted."""
    captured = capture(Tokens("ignored"), tokens_of(8, 0, ragged=False))
    pipeline = Pipeline(captured, hand_made(captured, PARTS, 8), optimizer=sgd)
    pipeline.step(tokens_of(8, 1, ragged=False))
    pipeline.step(tokens_of(8, 1, ragged=True))


def loader() -> list[dict[str, torch.Tensor]]:
    """Return this rank's batches."""
    return [batch_of(8, seed=seed) for seed in range(LENGTHS[int(os.environ["RANK"])])]


def job() -> gp.Job:
    """Return a job whose loaders start again at their end."""
    return gp.Job(model=Fork(), example_batch=batch_of(8), loss_fn=mean_square, optimizer=sgd, batches=loader)


def train(folder: str) -> None:
    """Run the command on this rank."""
    strategy = f"{folder}/strategy-{os.environ['RANK']}.json"
    hand_made(captured(), PARTS, 8).save(strategy)
    sys.argv = ["graphpipe", "train", strategy, "--model", "tests.distributed.loaders:job", "--steps", "9"]
    main()
