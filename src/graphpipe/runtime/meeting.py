"""What ranks tell each other before they do something together, so that a difference is an error and not a hang."""

from __future__ import annotations

import datetime
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from graphpipe.capture.specs import ValueSpec
from graphpipe.errors import BatchError, GraphPipeError
from graphpipe.runtime.process_group import rank
from graphpipe.runtime.rows import Round, Rows
from graphpipe.runtime.stages import StageSource

_SAME_BATCH = (
    "every rank needs the same batch: make it with the same seed, and shuffle it in the same way, on all of them"
)
# Of each input so many entries are compared in every step: enough to see another order, too few to take time.
_NUM_COMPARED = 64
Position = tuple[int, int]
"""The epoch and the number of a batch in it, both from 0."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a training has come, which is the same on every rank.

    Attributes:
        num_steps: The updates so far.
        turn: The mini-batches since the last one.
        updates: Whether an update follows.
        keeps: Whether gradients of earlier mini-batches go into it.
    """

    num_steps: int
    turn: int
    updates: bool = False
    keeps: bool = False

    @property
    def number(self) -> int:
        """A number above zero that no other progress has."""
        return 1 + (((self.num_steps << 16) + self.turn % (1 << 16)) << 2) + 2 * self.updates + self.keeps

    @classmethod
    def of(cls, number: int) -> Progress:
        """Return the progress that has a number."""
        counts, flags = divmod(number - 1, 4)
        return cls(counts >> 16, counts % (1 << 16), flags >= 2, flags % 2 == 1)

    def __str__(self) -> str:
        what = "an update" if self.updates else "no update"
        kept = ", with the gradients before," if self.keeps else ""
        return f"mini-batch {self.turn} since {self.num_steps} updates{kept} and {what} after it"


# The columns of the table that ranks exchange: what they do, with which batch of how many samples, how far they are,
# then the shapes of its inputs and what is seen of their entries.
_NUM_COLUMNS_BEFORE_INPUTS = 4


class Meeting(IntEnum):
    """What all ranks do together."""

    MINI_BATCH = 1
    EVALUATION = 2
    PREDICTION = 3
    GATHERING = 4
    TRACE = 5
    CHECKPOINT = 6
    UPDATE = 7
    GRADIENTS = 8
    LOSS = 9
    NORM = 10
    WRITING = 11

    def __str__(self) -> str:
        """Return what it is called in messages."""
        return {
            Meeting.MINI_BATCH: "a mini-batch",
            Meeting.EVALUATION: "an evaluation",
            Meeting.UPDATE: "an update",
            Meeting.GRADIENTS: "a gathering of gradients",
            Meeting.LOSS: "the sum of the loss",
            Meeting.NORM: "the norm of the gradients",
            Meeting.WRITING: "the writing of the model",
        }.get(self, f"a {self.name.lower()}")


class Meetings:
    """Compares what ranks are about to do, by a row of each.

    Args:
        num_inputs: Of the model in training. The table has two columns for each; where an evaluation has more inputs,
            some share them.
        timeout: After this long a wait raises.
    """

    def __init__(self, num_inputs: int, timeout: datetime.timedelta) -> None:
        self._num_inputs = max(1, num_inputs)
        # One size for all meetings, so that any two meet.
        self._rows = Rows(_NUM_COLUMNS_BEFORE_INPUTS + 2 * self._num_inputs, timeout)

    def meet(self, meeting: Meeting, progress: Progress | None = None) -> None:
        """Return once all ranks do the same.

        Args:
            meeting: What they do.
            progress: How far the training is, where that matters.

        Raises:
            GraphPipeError: One does something else, or has done.
        """
        self._compared(self._rows.begin().finish([meeting, 0, 0, 0 if progress is None else progress.number]))

    def begin(self) -> Round:
        """Let the numbers of a sum come; `total` ends it. All ranks begin and end the same ones in the same order."""
        return self._rows.begin()

    def total(self, begun: Round, meeting: Meeting, number: float) -> float:
        """Return the sum of a number of every rank, added in the order of ranks: the same one on all.

        Raises:
            GraphPipeError: A rank does something else.
        """
        bits = torch.tensor([number], dtype=torch.float64).view(torch.int64).tolist()
        table = self._compared(begun.finish([meeting, *bits]))
        return float(table[:, 1].contiguous().view(torch.float64).sum())

    def num_samples(
        self,
        meeting: Meeting,
        source: StageSource,
        inputs: Mapping[str, Tensor],
        progress: Progress,
        position: Position | None,
    ) -> int:
        """Return the samples of a batch that all ranks are about to use, before any message of another size comes.

        Args:
            meeting: What they do with it.
            source: The model.
            inputs: What this rank was given of the batch.
            progress: How far the training is.
            position: Which batch it is, if that is known.

        Raises:
            GraphPipeError: A rank does something else, or has done.
            BatchError: Two ranks were given another batch, number of samples, or shape of an input, or other entries of
                one among those that are looked at.
        """
        count = source.num_samples(inputs)
        names = list(source.inputs)
        columns = [names[i :: self._num_inputs] for i in range(self._num_inputs)]
        shapes = [
            _number([(source.inputs[n], inputs[n]) for n in column]) if column and inputs.keys() >= {*column} else 0
            for column in columns
        ]
        epoch, number = (0, 0) if position is None else position
        # One more than the batch's place, since 0 stands for a rank that says nothing.
        place = 0 if position is None else (epoch << 32) + number + 1
        # From here on nothing can fail on one rank alone.
        begun = self._rows.begin()
        samples = [
            digest_of_some([inputs[n] for n in column], progress.number) if shape else 0
            for column, shape in zip(columns, shapes, strict=True)
        ]
        table = self._compared(begun.finish([meeting, place, count, progress.number, *shapes, *samples]))
        for first, other, (one, another) in _differences(table[:, 1].tolist()):
            raise BatchError(
                f"rank {first} is at {_place(one)} and rank {other} at {_place(another)}: their loaders have different "
                "numbers of batches; give every rank as many"
            )
        for first, other, (one, another) in _differences(table[:, 2].tolist()):
            raise BatchError(
                f"rank {first} was given a batch of {one} samples and rank {other} one of {another}; every rank needs "
                "the same batch"
            )
        of_inputs = table[:, _NUM_COLUMNS_BEFORE_INPUTS:].T.tolist()
        for column, found in zip(columns, of_inputs[: self._num_inputs], strict=True):
            for first, other, _ in _differences(found):
                told = " or ".join(map(repr, column))
                raise BatchError(
                    f"rank {first} was given a batch of another shape of {told} than rank {other}; every rank needs "
                    "the same batch"
                )
        for column, found in zip(columns, of_inputs[self._num_inputs :], strict=True):
            for first, other, _ in _differences(found):
                told = " or ".join(map(repr, column))
                raise BatchError(
                    f"ranks {first} and {other} were given different tensors for input {told}; {_SAME_BATCH}"
                )
        most = int(table[:, 2].max())
        if not most:
            raise BatchError("no rank was given an input that holds samples")
        return most

    def _compared(self, table: Tensor) -> Tensor:
        """Return the rows of all ranks, which do the same."""
        for first, other, (one, another) in _differences(table[:, 0].tolist()):
            raise GraphPipeError(
                f"rank {first} begins {Meeting(one)} and rank {other} {Meeting(another)}; all ranks do the same in the "
                "same order: do their loaders have different numbers of batches?"
            )
        if table[0, 0] in (Meeting.LOSS, Meeting.NORM):
            return table
        for first, other, (one, another) in _differences(table[:, 3].tolist()):
            raise GraphPipeError(
                f"rank {first} is at {Progress.of(one)}, and rank {other} at {Progress.of(another)}; call step, "
                "accumulate, forward_backward and update alike on all ranks"
            )
        return table


def _differences(column: list[int]) -> list[tuple[int, int, tuple[int, int]]]:
    """Return the ranks whose number, if it is not 0, differs from the first such number, with both."""
    given = [(number, found) for number, found in enumerate(column) if found]
    return [(given[0][0], other, (given[0][1], found)) for other, found in given[1:] if found != given[0][1]]


def _place(number: int) -> str:
    epoch, batch = divmod(number - 1, 1 << 32)
    return f"batch {batch + 1} of epoch {epoch + 1}"


def _number(inputs: list[tuple[ValueSpec, Tensor]]) -> int:
    """Return a number above zero that differs for other shapes, apart from the number of samples."""
    shapes = [
        [size for i, size in enumerate(tensor.shape) if spec.layout is None or i != spec.layout.axis]
        for spec, tensor in inputs
    ]
    return 1 + int(hashlib.sha256(str(shapes).encode()).hexdigest()[:15], 16)


def digest_of_some(tensors: list[Tensor], shift: int) -> int:
    """Return a number above zero that follows from some entries of tensors.

    Args:
        tensors: Of any shape and type.
        shift: By how much the places of the entries are moved, so that every step looks at other ones.
    """
    found = hashlib.sha256()
    for tensor in tensors:
        count = tensor.numel()
        places = (_spread(count, tensor.device) + shift % max(1, count)) % max(1, count)
        if tensor.is_contiguous():
            entries = tensor.detach().view(-1)[places]
        else:
            entries = tensor.detach()[torch.unravel_index(places, tensor.shape)]
        found.update(entries.cpu().contiguous().view(torch.uint8).numpy().data)
    return 1 + int(found.hexdigest()[:15], 16)


@lru_cache(maxsize=256)
def _spread(count: int, device: torch.device) -> Tensor:
    """Return places among a number of entries, spread so that no column of a table is met again and again.

    Even steps would be: with 64 of them the first token or pixel of each sample may be all that is looked at.
    """
    golden = (math.sqrt(5) - 1) / 2
    if count > _NUM_COMPARED:
        places = [int(count * (i * golden % 1)) for i in range(_NUM_COMPARED)]
    else:
        places = list(range(count))
    return torch.tensor(places, dtype=torch.int64, device=device)


def check_shared(
    digests: Mapping[str, str], what: str, way_out: str, kind: type[GraphPipeError] = GraphPipeError
) -> None:
    """Check that all ranks that know a name know the same digest of it.

    Raises:
        GraphPipeError: Two ranks have different ones; an error of `kind`.
    """
    seen: dict[str, tuple[int, str]] = {}
    for source in range(dist.get_world_size()):
        for name, digest in json.loads(broadcast_text(json.dumps(digests), source)).items():
            other, expected = seen.setdefault(name, (source, digest))
            if digest != expected:
                raise kind(f"ranks {other} and {source} were given different {what} {name!r}; {way_out}")


def check_batches(inputs: Mapping[str, Tensor]) -> None:
    """Check that all ranks were given the same batch.

    A loader that every rank shuffles in its own way would train without an error, and wrongly.

    Raises:
        BatchError: Two ranks have different tensors for an input.
    """
    check_shared(
        {name: tensor_digest(inputs[name]) for name in inputs},
        "tensors for input",
        _SAME_BATCH,
        BatchError,
    )


def tensor_digest(tensor: Tensor) -> str:
    """Return a hash of a tensor's shape, type and bytes."""
    found = hashlib.sha256(f"{tuple(tensor.shape)} {tensor.dtype} ".encode())
    if tensor.numel():
        # Hashed in place: a batch may be large.
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def broadcast_text(text: str, source: int) -> str:
    """Return the text that one rank gives. All ranks must call this."""
    data = torch.tensor(list(text.encode()), dtype=torch.uint8)
    size = torch.tensor([len(data)])
    dist.broadcast(size, src=source)
    if source != rank():
        data = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(data, src=source)
    return bytes(data.tolist()).decode()
