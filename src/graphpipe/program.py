"""The instructions of every device: what the simulator and the executor both interpret.

`lower` turns a schedule into one list of instructions a device. Communication is added here and nowhere else: a message
is a range of samples of one value, or of its gradient, that passes from one replica's task to another's. Between two
stages on one device a message is handed over in place.

Sends and receives are asynchronous. A receive is posted some tasks before it is needed, so that the data moves in the
background; a send is awaited late, when it is surely done. `check_deadlock` proves on the very lists that will be
executed that no device can wait for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from graphpipe.errors import DeadlockError
from graphpipe.schedule import Phase, Schedule, Task, pieces
from graphpipe.stage import SampleRange, StageGraph


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

    @property
    def is_local(self) -> bool:
        """Whether it stays on its device."""
        return self.source_device == self.target_device

    def __str__(self) -> str:
        what = self.value if self.phase is Phase.FORWARD else f"gradient of {self.value}"
        return (
            f"{what} [{self.samples.start}:{self.samples.stop}] from task {self.source} on device "
            f"{self.source_device} to task {self.target} on device {self.target_device}"
        )


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
class AllReduce:
    """Sum the gradients of some parameters over all devices that hold them.

    Attributes:
        devices: The devices, ascending.
        parameters: The names, sorted.
        num_bytes: Their size.
    """

    devices: tuple[int, ...]
    parameters: tuple[str, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """Update the parameters of this device."""


Instruction = PostReceive | AwaitReceive | Compute | Send | AwaitSend | AllReduce | OptimizerStep


@dataclass(frozen=True, eq=False)
class Program:
    """The instructions of every device for one mini-batch.

    Attributes:
        stages: The stage graph.
        instructions: ``[devices]`` the list of each device; empty for one without a stage.
    """

    stages: StageGraph
    instructions: tuple[tuple[Instruction, ...], ...]

    @cached_property
    def messages(self) -> tuple[Message, ...]:
        """All messages, by tag."""
        found = [i.message for program in self.instructions for i in program if isinstance(i, Send)]
        return tuple(sorted(found, key=lambda message: message.tag))


def lower(
    stages: StageGraph,
    schedule: Schedule,
    *,
    num_devices: int | None = None,
    receive_window: int = 2,
    send_window: int = 4,
) -> Program:
    """Return the program of a schedule, proven free of deadlock.

    Args:
        stages: The stage graph.
        schedule: The order of tasks on every device.
        num_devices: How many devices there are; by default as many as the stages need.
        receive_window: The passes of a stage ahead of which its receives are posted; each holds its buffer meanwhile.
        send_window: The backward passes of a stage for which it keeps gradients that are on their way.

    Raises:
        DeadlockError: The order of tasks lets devices wait for each other in a circle.
        ValueError: A window is less than 1.
    """
    if receive_window < 1 or send_window < 1:
        raise ValueError(f"windows need at least 1 pass, got {receive_window} and {send_window}")
    program = _lower(stages, schedule, num_devices, receive_window, send_window)
    try:
        check_deadlock(program)
    except DeadlockError:
        # The order may be sound and only the wait for gradients that are on their way be in the circle: a device that
        # takes them late lets others wait that it needs itself. Then they are awaited when the mini-batch ends.
        program = _lower(stages, schedule, num_devices, receive_window, stages.mini_batch_size)
        check_deadlock(program)
    return program


def _lower(
    stages: StageGraph, schedule: Schedule, num_devices: int | None, receive_window: int, send_window: int
) -> Program:
    count = max(num_devices or 0, max(stages.devices) + 1)
    incoming, outgoing = _messages(stages)
    reductions = _reductions(stages)
    programs: list[tuple[Instruction, ...]] = [()] * count
    for order in schedule.orders:
        for replica, device in enumerate(order.devices):
            lowering = _DeviceLowering(stages, replica, incoming, outgoing, receive_window, send_window)
            ending: list[Instruction] = [r for r in reductions if device in r.devices]
            programs[device] = (*lowering.lower(order.tasks), *ending, OptimizerStep())
    return Program(stages, tuple(programs))


_ByTask = dict[tuple[Task, int], list[Message]]


def _messages(stages: StageGraph) -> tuple[_ByTask, _ByTask]:
    """Return the messages that each replica's task (task, replica) needs, and those that it sends."""
    incoming: _ByTask = {}
    outgoing: _ByTask = {}
    tag = 0
    for edge in stages.edges:
        source, target = stages.stages[edge.source], stages.stages[edge.target]
        for value in edge.values:
            returns = value.carries_gradient and stages.has_backward[edge.target] and stages.has_backward[edge.source]
            for piece in pieces(stages, edge, value):
                giver = (edge.source, piece.source_micro_batch, piece.source_replica, source.devices)
                taker = (edge.target, piece.target_micro_batch, piece.target_replica, target.devices)
                for phase in (Phase.FORWARD, Phase.BACKWARD) if returns else (Phase.FORWARD,):
                    (x, m, i, a), (y, n, j, b) = (giver, taker) if phase is Phase.FORWARD else (taker, giver)
                    message = Message(
                        tag=tag,
                        value=value.name,
                        phase=phase,
                        source=Task(x, phase, m),
                        target=Task(y, phase, n),
                        source_device=a[i],
                        target_device=b[j],
                        samples=piece.samples,
                        num_bytes=value.num_bytes(len(piece.samples)),
                    )
                    tag += 1
                    outgoing.setdefault((message.source, i), []).append(message)
                    incoming.setdefault((message.target, j), []).append(message)
    return incoming, outgoing


def _reductions(stages: StageGraph) -> tuple[AllReduce, ...]:
    """Return the sums of gradients: replicas of a stage, and stages that share a parameter, are one case.

    All parameters that the same devices hold are summed at once. Every device runs its reductions in this order.
    """
    holders: dict[str, set[int]] = {}
    sizes: dict[str, int] = {}
    for x, stage in enumerate(stages.stages):
        for i in stages.operator_positions[x]:
            for parameter in stages.graph.operators[i].parameters:
                if parameter.is_trainable:
                    holders.setdefault(parameter.name, set()).update(stage.devices)
                    sizes[parameter.name] = parameter.num_bytes
    groups: dict[tuple[int, ...], list[str]] = {}
    for name, devices in holders.items():
        if len(devices) > 1:
            groups.setdefault(tuple(sorted(devices)), []).append(name)
    return tuple(
        AllReduce(devices, tuple(sorted(names)), sum(sizes[n] for n in names))
        for devices, names in sorted(groups.items())
    )


class _DeviceLowering:
    """Writes the instructions of one device."""

    def __init__(
        self,
        stages: StageGraph,
        replica: int,
        incoming: _ByTask,
        outgoing: _ByTask,
        receive_window: int,
        send_window: int,
    ) -> None:
        self.stages = stages
        self.replica = replica
        self.incoming = incoming
        self.outgoing = outgoing
        self.receive_window = receive_window
        self.send_window = send_window
        self.out: list[Instruction] = []
        # Sends that nothing acknowledges wait here, by stage and pass.
        self.unacknowledged: dict[tuple[int, Phase], list[list[Message]]] = {}

    def lower(self, tasks: Sequence[Task]) -> list[Instruction]:
        passes: dict[tuple[int, Phase], list[Task]] = {}
        for task in tasks:
            passes.setdefault((task.stage, task.phase), []).append(task)
        for run in passes.values():
            for task in run[: self.receive_window]:
                self._post(task)
        for task in tasks:
            run = passes[task.stage, task.phase]
            self._run(task)
            ahead = task.micro_batch + self.receive_window
            if ahead < len(run):
                self._post(run[ahead])
        for batches in self.unacknowledged.values():
            for batch in batches:
                self.out.extend(map(AwaitSend, batch))
        return self.out

    def _post(self, task: Task) -> None:
        for message in self.incoming.get((task, self.replica), ()):
            if not message.is_local:
                self.out.append(PostReceive(message))

    def _run(self, task: Task) -> None:
        samples = self.stages.replica_samples(task.stage, task.micro_batch, self.replica)
        if not len(samples):
            return
        received = self.incoming.get((task, self.replica), [])
        self.out.extend(map(AwaitReceive, received))
        if task.phase is Phase.BACKWARD:
            self._await_acknowledged(task)
        self.out.append(Compute(task, self.replica, samples))
        sent = self.outgoing.get((task, self.replica), [])
        self.out.extend(map(Send, sent))
        self._keep(task, [message for message in sent if not message.is_local])

    def _await_acknowledged(self, task: Task) -> None:
        """Await the forward sends whose gradient has come back: they are done, so this never blocks."""
        forward = Task(task.stage, Phase.FORWARD, task.micro_batch)
        returned = {(m.source, m.value, m.samples) for m in self.incoming.get((task, self.replica), ())}
        for message in self.outgoing.get((forward, self.replica), ()):
            answer = (Task(message.target.stage, Phase.BACKWARD, message.target.micro_batch), message.value)
            if not message.is_local and (*answer, message.samples) in returned:
                self.out.append(AwaitSend(message))

    def _keep(self, task: Task, sent: list[Message]) -> None:
        """Hold sends that no gradient will acknowledge, and await the oldest once too many passes are on their way."""
        acknowledged = task.phase is Phase.FORWARD and self.stages.has_backward[task.stage]
        if acknowledged:
            backward = Task(task.stage, Phase.BACKWARD, task.micro_batch)
            returning = {(m.source.stage, m.value) for m in self.incoming.get((backward, self.replica), ())}
            sent = [m for m in sent if (m.target.stage, m.value) not in returning]
        held = self.unacknowledged.setdefault((task.stage, task.phase), [])
        held.append(sent)
        if task.phase is Phase.BACKWARD and len(held) > self.send_window:
            self.out.extend(map(AwaitSend, held.pop(0)))


def check_deadlock(program: Program) -> None:
    """Prove that no device can wait for ever.

    The instructions are events. An event follows the one before it on its device; a message is here only after it was
    sent and its receive posted; a send is done only once its receive is posted; a reduction starts on no device before
    all of its devices have come to it. If these relations have no cycle, the program ends.

    Raises:
        DeadlockError: There is a cycle; the message names each device's instruction in it.
    """
    waits: dict[tuple[int, int], list[tuple[int, int]]] = {}
    sent: dict[int, tuple[int, int]] = {}
    posted: dict[int, tuple[int, int]] = {}
    reduced: dict[AllReduce, list[tuple[int, int]]] = {}
    for device, instructions in enumerate(program.instructions):
        for at, instruction in enumerate(instructions):
            match instruction:
                case Send(message):
                    sent[message.tag] = (device, at)
                case PostReceive(message):
                    posted[message.tag] = (device, at)
                case AllReduce():
                    reduced.setdefault(instruction, []).append((device, at))
                case _:
                    pass
    for device, instructions in enumerate(program.instructions):
        for at, instruction in enumerate(instructions):
            match instruction:
                case AwaitReceive(message):
                    events = [sent.get(message.tag), None if message.is_local else posted.get(message.tag)]
                    if sent.get(message.tag) is None or (not message.is_local and posted.get(message.tag) is None):
                        raise DeadlockError(
                            f"device {device} waits for a message that is never sent or posted: {message}"
                        )
                    waits[device, at] = [event for event in events if event is not None]
                case AwaitSend(message):
                    if message.tag not in posted:
                        raise DeadlockError(f"device {device} sends a message that nobody takes: {message}")
                    waits[device, at] = [posted[message.tag]]
                case AllReduce():
                    # Each device has to have reached the instruction before its own.
                    waits[device, at] = [(d, i - 1) for d, i in reduced[instruction] if d != device and i > 0]
                case _:
                    pass
    _run_events(program, waits)


def _run_events(program: Program, waits: dict[tuple[int, int], list[tuple[int, int]]]) -> None:
    """Pass over every event whose causes are past; raise if some are never reached."""
    position = [0] * len(program.instructions)
    blocked: dict[tuple[int, int], list[int]] = {}
    ready = [d for d, instructions in enumerate(program.instructions) if instructions]
    while ready:
        device = ready.pop()
        while position[device] < len(program.instructions[device]):
            at = position[device]
            cause = next((c for c in waits.get((device, at), ()) if position[c[0]] <= c[1]), None)
            if cause is not None:
                blocked.setdefault(cause, []).append(device)
                break
            position[device] += 1
            ready.extend(blocked.pop((device, at), ()))
    stuck = [d for d, instructions in enumerate(program.instructions) if position[d] < len(instructions)]
    if stuck:
        where = "; ".join(f"device {d} waits in {_describe(program.instructions[d][position[d]])}" for d in stuck[:4])
        raise DeadlockError(f"the devices wait for each other in a circle: {where}")


def _describe(instruction: Instruction) -> str:
    match instruction:
        case AwaitReceive(message):
            return f"the receive of {message}"
        case AwaitSend(message):
            return f"the send of {message}"
        case AllReduce(devices, parameters, _):
            return f"the sum of gradients over devices {list(devices)}, first of {parameters[0]!r}"
        case _:
            return type(instruction).__name__
