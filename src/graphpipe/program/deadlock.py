"""The proof that a program ends: its lists of instructions are played through under the rules of its transport."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from graphpipe.errors import DeadlockError
from graphpipe.program.instructions import (
    AwaitReceive,
    AwaitReduction,
    AwaitSend,
    Instruction,
    Matching,
    Message,
    PostReceive,
    Program,
    Reduction,
    Send,
    StartReduction,
)


def check_deadlock(program: Program) -> None:
    """Prove that no device can wait for ever.

    A transfer is over only once it was sent and its receive posted, a reduction once all of its devices have begun it.
    A transport that matches by order does more: whatever a device has begun waits for all that it has begun before.
    How many streams NCCL runs side by side depends on how its groups were made; the proof holds for a single one and so
    for any number. The play gives the same end whichever device moves first, since nothing that is over is undone.

    Raises:
        DeadlockError: The play does not reach the end of every list; the message names what each device waits for.
    """
    _check_ends(program)
    play = _Play(program)
    play.run()
    stuck = [d for d, instructions in enumerate(program.instructions) if play.position[d] < len(instructions)]
    if stuck:
        where = "; ".join(
            f"device {d} waits for {_describe(program.instructions[d][play.position[d]])}" for d in stuck[:4]
        )
        raise DeadlockError(f"the devices wait for each other in a circle: {where}")


def _check_ends(program: Program) -> None:
    """Check that every wait is for something that both ends begin."""
    sent: set[int] = set()
    posted: set[int] = set()
    started: dict[Reduction, set[int]] = {}
    for device, instructions in enumerate(program.instructions):
        for instruction in instructions:
            match instruction:
                case Send(message):
                    sent.add(message.tag)
                case PostReceive(message):
                    posted.add(message.tag)
                case StartReduction(reduction):
                    started.setdefault(reduction, set()).add(device)
                case _:
                    pass
    for device, instructions in enumerate(program.instructions):
        for instruction in instructions:
            match instruction:
                case AwaitReceive(message):
                    if message.tag not in sent or (not message.is_local and message.tag not in posted):
                        raise DeadlockError(
                            f"device {device} waits for a message that is never sent or posted: {message}"
                        )
                case AwaitSend(message):
                    if message.tag not in posted:
                        raise DeadlockError(f"device {device} sends a message that nobody takes: {message}")
                case AwaitReduction(reduction):
                    missing = sorted(set(reduction.devices) - started.get(reduction, set()))
                    if missing:
                        raise DeadlockError(
                            f"device {device} waits for the {reduction}, which devices {missing} do not begin"
                        )
                case _:
                    pass


@dataclass
class _Operation:
    """A transfer or a reduction in the play."""

    devices: tuple[int, ...]
    begun: int = 0
    is_over: bool = False
    waiting: list[int] = field(default_factory=list)


class _Play:
    """Moves every device on until it waits for something that is not over."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.is_ordered = program.matching is Matching.ORDER
        self.position = [0] * len(program.instructions)
        self.operations: dict[int | Reduction, _Operation] = {}
        # What each device has begun and is not over, first begun first.
        self.queues: list[deque[_Operation]] = [deque() for _ in program.instructions]
        self.ready = [d for d, instructions in enumerate(program.instructions) if instructions]

    def run(self) -> None:
        while self.ready:
            device = self.ready.pop()
            instructions = self.program.instructions[device]
            at = self.position[device]
            while at < len(instructions) and self._passes(device, instructions[at]):
                at = self.position[device] = at + 1

    def _passes(self, device: int, instruction: Instruction) -> bool:
        """Do an instruction; return False where it has to wait."""
        match instruction:
            case Send(message) | PostReceive(message):
                self._begin(device, message.tag, _devices(message))
            case StartReduction(reduction):
                self._begin(device, reduction, reduction.devices)
            case AwaitReceive(message) | AwaitSend(message):
                return self._is_over(device, message.tag, _devices(message))
            case AwaitReduction(reduction):
                return self._is_over(device, reduction, reduction.devices)
            case _:
                pass
        return True

    def _operation(self, key: int | Reduction, devices: tuple[int, ...]) -> _Operation:
        found = self.operations.get(key)
        if found is None:
            found = self.operations[key] = _Operation(devices)
        return found

    def _begin(self, device: int, key: int | Reduction, devices: tuple[int, ...]) -> None:
        operation = self._operation(key, devices)
        operation.begun += 1
        if self.is_ordered and len(devices) > 1:
            self.queues[device].append(operation)
        self._advance(operation)

    def _advance(self, operation: _Operation) -> None:
        """End an operation if its time has come, and those that waited for it alone."""
        candidates = [operation]
        while candidates:
            found = candidates.pop()
            if found.is_over or found.begun < len(found.devices):
                continue
            queues = [self.queues[d] for d in found.devices] if self.is_ordered and len(found.devices) > 1 else []
            if any(queue[0] is not found for queue in queues):
                continue
            found.is_over = True
            self.ready.extend(found.waiting)
            for queue in queues:
                queue.popleft()
                candidates.extend(list(queue)[:1])

    def _is_over(self, device: int, key: int | Reduction, devices: tuple[int, ...]) -> bool:
        operation = self._operation(key, devices)
        if not operation.is_over:
            operation.waiting.append(device)
        return operation.is_over


def _devices(message: Message) -> tuple[int, ...]:
    """Return the devices that begin a transfer: one where it stays, for it is sent only."""
    return (message.source_device,) if message.is_local else (message.source_device, message.target_device)


def _describe(instruction: Instruction) -> str:
    match instruction:
        case AwaitReceive(message):
            return f"the receive of {message}"
        case AwaitSend(message):
            return f"the send of {message}"
        case AwaitReduction(reduction):
            return f"the {reduction}"
        case _:
            return type(instruction).__name__
