"""The failures that a user can act on.

Three kinds of failure are kept apart: ``ValueError`` for one wrong argument of a call, a `GraphPipeError` for an input
that is wrong as a whole (a model, a strategy, a cluster, a batch), and ``assert`` for our own bugs. The message of a
`GraphPipeError` names the thing, the numbers that don't fit, and a way out; the command line prints it without a
traceback.
"""

from __future__ import annotations


class GraphPipeError(Exception):
    """An input as a whole cannot be used. The message says why and what to do about it."""


class FieldError(GraphPipeError):
    """A file is no JSON, or a value in it is not what it should be. The message begins with the value's path."""


class CaptureError(GraphPipeError):
    """The model cannot be turned into a computation graph, or only into one that would compute something else."""


class PlanningError(GraphPipeError):
    """No strategy exists for this model on this cluster."""


class StrategyError(GraphPipeError):
    """A strategy is damaged, contradicts itself, or belongs to another model or cluster."""


class DeadlockError(StrategyError):
    """The instructions of a strategy's devices wait for each other in a circle."""


class RankFailure(GraphPipeError):  # noqa: N818
    """A process of a job failed while the others went on; started again, the job may succeed."""


class BatchError(GraphPipeError):
    """A batch does not have the inputs that the model was captured with."""


class CheckpointError(GraphPipeError):
    """A checkpoint cannot be written, is damaged, or belongs to another model."""
