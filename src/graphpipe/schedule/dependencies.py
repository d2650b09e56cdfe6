"""Who waits for whom: the only place that says which tasks and which samples a task needs.

The scheduler asks for whole tasks (`dependencies`), the lowering for the pieces that replicas pass to each other
(`pieces`). Both follow from one rule: a task needs the tasks whose samples overlap its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from graphpipe.graph import Value
from graphpipe.schedule.task import Phase, Task
from graphpipe.stage import SampleRange, StageEdge, StageGraph


def overlapping(stages: StageGraph, x: int, samples: SampleRange) -> range:
    """Return the micro-batches of stage `x` that hold some of `samples`. `samples` must not be empty."""
    return _overlapping(stages.stages[x].micro_batch_size, samples)


def _overlapping(size: int, samples: SampleRange) -> range:
    return range(samples.start // size, (samples.stop - 1) // size + 1)


@lru_cache(maxsize=1024)
def last_needed(size: int, other_size: int, mini_batch_size: int) -> Sequence[int]:
    """Return for each micro-batch of a stage the last one of another stage that it needs.

    A stage's passes run in sequence, so who has waited for the last one has waited for all of `dependencies`.

    Args:
        size: Samples of a micro-batch.
        other_size: Samples of a micro-batch of the other stage, on either side.
        mini_batch_size: Samples a step.
    """
    starts = range(0, mini_batch_size, size)
    if size == other_size:
        return range(len(starts))
    samples = (SampleRange(start, min(start + size, mini_batch_size)) for start in starts)
    return tuple(_overlapping(other_size, each)[-1] for each in samples)


def dependencies(task: Task, stages: StageGraph) -> tuple[Task, ...]:
    """Return the tasks that must be complete before `task` may start, in a fixed order.

    A forward pass needs the forward passes of the stages before it that cover its samples. A backward pass needs its
    own forward pass and, from each stage after it that returns a gradient, the backward passes that cover its samples.
    """
    samples = stages.micro_batch(task.stage, task.micro_batch)
    if task.phase is Phase.FORWARD:
        return tuple(
            Task(edge.source, Phase.FORWARD, m)
            for edge in stages.incoming[task.stage]
            for m in overlapping(stages, edge.source, samples)
        )
    return (
        Task(task.stage, Phase.FORWARD, task.micro_batch),
        *(
            Task(edge.target, Phase.BACKWARD, m)
            for edge in stages.outgoing[task.stage]
            if edge.returned
            for m in overlapping(stages, edge.target, samples)
        ),
    )


@dataclass(frozen=True, slots=True)
class Piece:
    """The samples of one value that one replica's forward task takes from another's.

    Attributes:
        source_micro_batch: Which micro-batch of the producing stage.
        source_replica: Which replica of the producing stage.
        target_micro_batch: Which micro-batch of the consuming stage.
        target_replica: Which replica of the consuming stage.
        samples: What passes. For a value that does not depend on the batch, the consumer's own samples: they only name
            the piece.
    """

    source_micro_batch: int
    source_replica: int
    target_micro_batch: int
    target_replica: int
    samples: SampleRange


def pieces(stages: StageGraph, edge: StageEdge, value: Value) -> Iterator[Piece]:
    """Yield what passes along an edge for one value over a mini-batch, by target, then by samples.

    A value with samples is cut at the borders of both sides. A value that does not depend on the batch is the same for
    every micro-batch, so a consumer takes it from the one task that holds its first sample; the gradient goes back
    there, and the sum over all of them is right whichever task it was.
    """
    source, target = edge.source, edge.target
    depends_on_batch = value.bytes_per_sample > 0
    for m in range(stages.num_micro_batches(target)):
        for replica in range(stages.stages[target].num_replicas):
            wanted = stages.replica_samples(target, m, replica)
            if not len(wanted):
                continue
            searched = wanted if depends_on_batch else SampleRange(wanted.start, wanted.start + 1)
            for n in overlapping(stages, source, searched):
                for origin in stages.replicas_holding(source, n, searched):
                    shared = stages.replica_samples(source, n, origin) & searched
                    if len(shared):
                        yield Piece(n, origin, m, replica, shared if depends_on_batch else wanted)
