"""What a device can be told to do.

A message is a range of samples of one value, or of its gradient, that passes from one replica's task to another's.
Between two stages on one device a message is handed over in place. Sends, receives and reductions are asynchronous: an
instruction begins one, another waits for its end.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from graphpipe.schedule import Phase, Task
from graphpipe.stage import SampleRange, StageGraph


class Matching(StrEnum):
    """How a transport finds the receive that belongs to a send."""

    TAG = "tag"
    """By a number that both carry, in any order: gloo."""
    ORDER = "order"
    """The first of a device's sends and receives with another device goes with that device's first, and each waits for
    those before it: NCCL. So both ends of every message are posted in one order over all devices."""


@dataclass(frozen=True, slots=True)
class Message:
    """Samples of a value, or of its gradient, on their way from one task to another.

    Attributes:
        tag: Its number in the program.
        value: The name of the value.
        phase: FORWARD for the value itself, BACKWARD for its gradient.
        source: The task that produces it.
        target: The task that needs it.
        source_device: Where it comes from.
        target_device: Where it goes. The same device when the two stages share it.
        samples: Which samples of the mini-batch.
        num_bytes: Its size.
        answers: For a gradient, the tag of the message that brought its value: once the gradient is here, that one has
            long arrived. None for a value.
    """

    tag: int
    value: str
    phase: Phase
    source: Task
    target: Task
    source_device: int
    target_device: int
    samples: SampleRange
    num_bytes: int
    answers: int | None = None

    @property
    def is_local(self) -> bool:
        """Whether it stays on its device."""
        return self.source_device == self.target_device

    def __str__(self) -> str:
        what = self.value if self.phase is Phase.FORWARD else f"gradient of {self.value}"
        source, target = self.source, self.target
        return (
            f"{what} [{self.samples.start}:{self.samples.stop}] from stage {source.stage}, micro-batch "
            f"{source.micro_batch} on device {self.source_device} to stage {target.stage}, micro-batch "
            f"{target.micro_batch} on device {self.target_device} (task {source} to {target})"
        )


@dataclass(frozen=True, slots=True)
class Reduction:
    """The sum of the gradients of some parameters over all devices that hold them.

    Attributes:
        devices: The devices, ascending.
        parameters: The names, sorted.
        num_bytes: Their size.
    """

    devices: tuple[int, ...]
    parameters: tuple[str, ...]
    num_bytes: int

    def __str__(self) -> str:
        return f"sum of gradients over devices {list(self.devices)}, first of {self.parameters[0]!r}"


@dataclass(frozen=True, slots=True)
class PostReceive:
    """Make a buffer for a message and let it come."""

    message: Message


@dataclass(frozen=True, slots=True)
class AwaitReceive:
    """Wait until a message is here."""

    message: Message


@dataclass(frozen=True, slots=True)
class Compute:
    """Run a task on this device's share of its micro-batch."""

    task: Task
    replica: int
    samples: SampleRange


@dataclass(frozen=True, slots=True)
class Send:
    """Let a message go."""

    message: Message


@dataclass(frozen=True, slots=True)
class AwaitSend:
    """Wait until a message has gone, so that its memory is free again."""

    message: Message


@dataclass(frozen=True, slots=True)
class StartReduction:
    """Let this device's gradients go into a sum; its own backward passes on them are complete."""

    reduction: Reduction


@dataclass(frozen=True, slots=True)
class AwaitReduction:
    """Wait until the sum is here."""

    reduction: Reduction


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """Update the parameters of this device."""


Instruction = PostReceive | AwaitReceive | Compute | Send | AwaitSend | StartReduction | AwaitReduction | OptimizerStep


@dataclass(frozen=True, eq=False)
class Program:
    """The instructions of every device for one mini-batch.

    Attributes:
        stages: The stage graph.
        instructions: ``[devices]`` the list of each device; empty for one without a stage.
        matching: The transport that it is written for.
    """

    stages: StageGraph
    instructions: tuple[tuple[Instruction, ...], ...]
    matching: Matching = Matching.TAG

    @cached_property
    def messages(self) -> tuple[Message, ...]:
        """All messages, by tag."""
        found = [i.message for program in self.instructions for i in program if isinstance(i, Send)]
        return tuple(sorted(found, key=lambda message: message.tag))

    @cached_property
    def reductions(self) -> tuple[Reduction, ...]:
        """All sums of gradients, each once."""
        found = [i.reduction for program in self.instructions for i in program if isinstance(i, StartReduction)]
        return tuple(dict.fromkeys(found))
