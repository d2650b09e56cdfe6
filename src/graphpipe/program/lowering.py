"""From a schedule to the instructions of every device.

Receives are posted some tasks before they are needed, so that the data moves in the background; sends are awaited late,
when they are surely done; the gradients of a stage's replicas are summed while the device goes on with what is left.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from graphpipe.errors import DeadlockError
from graphpipe.program.deadlock import check_deadlock
from graphpipe.program.instructions import (
    AwaitReceive,
    AwaitReduction,
    AwaitSend,
    Compute,
    Instruction,
    Matching,
    Message,
    OptimizerStep,
    PostReceive,
    Program,
    Reduction,
    Send,
    StartReduction,
)
from graphpipe.program.order import task_order
from graphpipe.schedule import DeviceOrder, Phase, Schedule, Task, TaskCosts, UniformCosts, pieces
from graphpipe.stage import StageGraph


def lower(
    stages: StageGraph,
    schedule: Schedule,
    *,
    num_devices: int | None = None,
    receive_window: int = 2,
    send_window: int = 4,
    matching: Matching = Matching.TAG,
    costs: TaskCosts | None = None,
) -> Program:
    """Return the program of a schedule, proven free of deadlock under the rules of its transport.

    Args:
        stages: The stage graph.
        schedule: The order of tasks on every device.
        num_devices: How many devices there are; by default as many as the stages need.
        receive_window: The passes of a stage ahead of which its receives are posted; each holds its buffer meanwhile.
        send_window: The passes of a stage for which it keeps gradients that are on their way; values too, if it has no
            backward pass, besides those that its readers have not come to yet.
        matching: How the transport matches sends with receives.
        costs: Where order matters, messages are ordered by when these say that they are produced; any costs are right,
            and good ones let less wait. By default a backward pass takes twice a forward pass.

    Raises:
        DeadlockError: The order of tasks lets devices wait for each other in a circle.
        ValueError: A window is less than 1.
    """
    if receive_window < 1 or send_window < 1:
        raise ValueError(f"windows need at least 1 pass, got {receive_window} and {send_window}")
    plan = _Plan.of(stages, schedule, num_devices, matching)
    by_tag = plan.program(receive_window, send_window, None)
    try:
        check_deadlock(by_tag)
    except DeadlockError:
        # The order may be sound and only the wait for what is on its way be in the circle: a device that takes it late
        # lets others wait that it needs itself. Then it is awaited when the mini-batch ends.
        send_window = stages.mini_batch_size
        by_tag = plan.program(receive_window, send_window, None)
        check_deadlock(by_tag)
    if matching is Matching.TAG:
        return by_tag
    # What matching by tag has passed has no circle among its tasks, so these have an order.
    order = task_order(stages, schedule, costs or UniformCosts(1.0, 2.0))
    program = plan.program(receive_window, send_window, order)
    try:
        check_deadlock(program)
    except DeadlockError:
        program = plan.program(receive_window, stages.mini_batch_size, order)
        check_deadlock(program)
    return program


_ByTask = dict[tuple[Task, int], list[Message]]


@dataclass(frozen=True, eq=False)
class _Plan:
    """What the lists of all devices are written from."""

    stages: StageGraph
    schedule: Schedule
    num_devices: int
    matching: Matching
    incoming: _ByTask
    outgoing: _ByTask
    reductions: tuple[_ReadyReduction, ...]

    @cached_property
    def passes_ahead(self) -> list[int]:
        """By stage, how many passes it is ahead of the last stage that reads from it, where all stages work at once."""
        stages = self.stages
        found = [0] * len(stages.stages)
        for x in range(len(found)):
            distance = {x: 0}
            for edge in stages.edges:  # By source: whatever leads to it has been seen.
                if edge.source in distance:
                    distance[edge.target] = max(distance.get(edge.target, 0), distance[edge.source] + 1)
            for edge in stages.edges:
                if edge.source == x:
                    size, other = (stages.stages[y].micro_batch_size for y in (x, edge.target))
                    found[x] = max(found[x], distance[edge.target] * max(1, -(-other // size)))
        return found

    @classmethod
    def of(cls, stages: StageGraph, schedule: Schedule, num_devices: int | None, matching: Matching) -> _Plan:
        count = max(num_devices or 0, max(stages.devices) + 1)
        incoming, outgoing = _messages(stages)
        return cls(stages, schedule, count, matching, incoming, outgoing, _reductions(stages))

    def program(self, receive_window: int, send_window: int, order: dict[Task, int] | None) -> Program:
        """Return the program with some windows, posted in one order over all devices if there is one."""
        programs: list[tuple[Instruction, ...]] = [()] * self.num_devices
        for group in self.schedule.orders:
            for replica, device in enumerate(group.devices):
                lowering = _DeviceLowering(self, group, replica, receive_window, send_window)
                posts = _FreePosts(lowering) if order is None else _OrderedPosts(lowering, order)
                programs[device] = tuple(lowering.lower(posts))
        return Program(self.stages, tuple(programs), Matching.TAG if order is None else self.matching)


def _messages(stages: StageGraph) -> tuple[_ByTask, _ByTask]:
    """Return the messages that each replica's task (task, replica) needs, and those that it sends."""
    incoming: _ByTask = {}
    outgoing: _ByTask = {}
    tag = 0
    for edge in stages.edges:
        source, target = stages.stages[edge.source], stages.stages[edge.target]
        for value in edge.values:
            returns = value in edge.returned
            for piece in pieces(stages, edge, value):
                giver = (edge.source, piece.source_micro_batch, piece.source_replica, source.devices)
                taker = (edge.target, piece.target_micro_batch, piece.target_replica, target.devices)
                forward_tag = tag
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
                        answers=None if phase is Phase.FORWARD else forward_tag,
                    )
                    tag += 1
                    outgoing.setdefault((message.source, i), []).append(message)
                    incoming.setdefault((message.target, j), []).append(message)
    return incoming, outgoing


@dataclass(frozen=True, slots=True)
class _ReadyReduction:
    """A reduction and the stages whose backward passes go into it."""

    reduction: Reduction
    stages: tuple[int, ...]


def _reductions(stages: StageGraph) -> tuple[_ReadyReduction, ...]:
    """Return the sums of gradients: replicas of a stage, and stages that share a parameter, are one case.

    All parameters that the same stages on the same devices hold are summed at once. Every device begins its reductions
    in this order: those of later stages, which end first, come first.
    """
    holders: dict[str, set[int]] = {}
    sizes: dict[str, int] = {}
    for x in range(len(stages.stages)):
        for i in stages.operator_positions[x]:
            for parameter in stages.graph.operators[i].parameters:
                if parameter.is_trainable:
                    holders.setdefault(parameter.name, set()).add(x)
                    sizes[parameter.name] = parameter.num_bytes
    groups: dict[tuple[tuple[int, ...], tuple[int, ...]], list[str]] = {}
    for name, held in holders.items():
        devices = tuple(sorted({device for x in held for device in stages.stages[x].devices}))
        if len(devices) > 1:
            groups.setdefault((tuple(sorted(held)), devices), []).append(name)
    return tuple(
        _ReadyReduction(Reduction(devices, tuple(sorted(names)), sum(sizes[n] for n in names)), held)
        for (held, devices), names in sorted(groups.items(), key=lambda entry: (-entry[0][0][0], entry[0]))
    )


class _DeviceLowering:
    """Writes the instructions of one device."""

    def __init__(self, plan: _Plan, group: DeviceOrder, replica: int, receive_window: int, send_window: int) -> None:
        self.plan = plan
        self.tasks = group.tasks
        self.replica = replica
        self.device = group.devices[replica]
        self.receive_window = receive_window
        self.send_window = send_window
        self.out: list[Instruction] = []
        self.num_done: dict[tuple[int, Phase], int] = {}
        # Values that were sent and whose gradient will come, by tag.
        self.unanswered: dict[int, Message] = {}
        # Sends that nothing answers wait here, by stage and pass.
        self.unanswerable: dict[tuple[int, Phase], list[list[Message]]] = {}
        self.answered = {
            message.answers for task in self.tasks for message in self.received(task) if message.answers is not None
        }
        self.reductions = [r for r in plan.reductions if self.device in r.reduction.devices]

    def received(self, task: Task) -> Sequence[Message]:
        """Return the messages that this device's share of a task needs."""
        return self.plan.incoming.get((task, self.replica), ())

    def sent(self, task: Task) -> Sequence[Message]:
        """Return the messages that this device's share of a task gives."""
        return self.plan.outgoing.get((task, self.replica), ())

    def lower(self, posts: _FreePosts | _OrderedPosts) -> list[Instruction]:
        posts.begin()
        for task in self.tasks:
            posts.before(task)
            self._run(task, posts)
            self.num_done[task.stage, task.phase] = task.micro_batch + 1
            posts.after(task)
        posts.end()
        for batches in self.unanswerable.values():
            for batch in batches:
                self.out.extend(map(AwaitSend, batch))
        self.out.extend([AwaitReduction(i.reduction) for i in self.out if isinstance(i, StartReduction)])
        self.out.append(OptimizerStep())
        return self.out

    def post(self, message: Message) -> None:
        """Let a message come."""
        self.out.append(PostReceive(message))

    def start(self, ready: _ReadyReduction) -> None:
        """Let this device's gradients go into their sum."""
        self.out.append(StartReduction(ready.reduction))

    def is_within_window(self, message: Message) -> bool:
        """Whether the receive of a message may be posted by now."""
        target = message.target
        return target.micro_batch < self.num_done.get((target.stage, target.phase), 0) + self.receive_window

    def is_ready(self, ready: _ReadyReduction) -> bool:
        """Whether all backward passes of this device that go into a reduction are done."""
        stages = self.plan.stages
        return all(
            self.num_done.get((x, Phase.BACKWARD), 0) == stages.num_micro_batches(x)
            for x in ready.stages
            if stages.has_backward[x] and self.device in stages.stages[x].devices
        )

    def _run(self, task: Task, posts: _FreePosts | _OrderedPosts) -> None:
        samples = self.plan.stages.replica_samples(task.stage, task.micro_batch, self.replica)
        if not len(samples):
            return
        for message in self.received(task):
            self.out.append(AwaitReceive(message))
            # With its gradient here, a value has surely gone: this wait never blocks.
            if message.answers is not None and message.answers in self.unanswered:
                self.out.append(AwaitSend(self.unanswered.pop(message.answers)))
        self.out.append(Compute(task, self.replica, samples))
        sent = self.sent(task)
        self.out.extend(Send(message) for message in sent if message.is_local)
        away = [message for message in sent if not message.is_local]
        posts.send(away)
        self.unanswered.update((message.tag, message) for message in away if message.tag in self.answered)
        self._hold(task, [message for message in away if message.tag not in self.answered])

    def _hold(self, task: Task, sent: list[Message]) -> None:
        """Keep sends that nothing answers, and await the oldest once too many passes are on their way."""
        held = self.unanswerable.setdefault((task.stage, task.phase), [])
        held.append(sent)
        window = self.send_window
        if task.phase is Phase.FORWARD:
            if self.plan.stages.has_backward[task.stage]:
                return  # No more passes are ahead than samples may be in flight.
            window += self.plan.passes_ahead[task.stage]
        if len(held) > window:
            self.out.extend(map(AwaitSend, held.pop(0)))


@dataclass
class _FreePosts:
    """Posts receives as far ahead as the window allows, and reductions as soon as they are ready.

    A post takes time of the host, so receives that may be posted are, once the device has nothing else to do than to
    wait: what a task gives, others wait for.
    """

    lowering: _DeviceLowering
    next_reduction: int = 0
    due: list[Message] = field(default_factory=list)

    def begin(self) -> None:
        ahead: dict[tuple[int, Phase], list[Task]] = {}
        for task in self.lowering.tasks:
            ahead.setdefault((task.stage, task.phase), []).append(task)
        for passes in ahead.values():
            self._note(passes[: self.lowering.receive_window])

    def before(self, task: Task) -> None:
        if any(not message.is_local for message in self.lowering.received(task)):
            for message in self.due:
                self.lowering.post(message)
            self.due.clear()

    def send(self, messages: Sequence[Message]) -> None:
        self.lowering.out.extend(map(Send, messages))

    def after(self, task: Task) -> None:
        self._note([Task(task.stage, task.phase, task.micro_batch + self.lowering.receive_window)])
        reductions = self.lowering.reductions
        while self.next_reduction < len(reductions) and self.lowering.is_ready(reductions[self.next_reduction]):
            self.lowering.start(reductions[self.next_reduction])
            self.next_reduction += 1

    def end(self) -> None:
        """Nothing: with the last task every reduction is ready."""
        assert self.next_reduction == len(self.lowering.reductions)

    def _note(self, tasks: Iterable[Task]) -> None:
        for task in tasks:
            self.due += [message for message in self.lowering.received(task) if not message.is_local]


@dataclass
class _OrderedPosts:
    """Posts everything in one order over all devices: by the task that gives it, then by tag.

    Whatever a device waits for was posted after things of lower order only, on both of its ends, so the lowest that is
    not over can always end.
    """

    lowering: _DeviceLowering
    order: dict[Task, int]
    next_post: int = 0
    queue: list[Message | _ReadyReduction] = field(default_factory=list)
    position: dict[int, int] = field(default_factory=dict)

    def begin(self) -> None:
        lowering = self.lowering
        keyed: list[tuple[tuple[int, int, int], Message | _ReadyReduction]] = []
        for task in lowering.tasks:
            for message in (*lowering.received(task), *lowering.sent(task)):
                if not message.is_local:
                    keyed.append(((self.order[message.source], 0, message.tag), message))
        last = {(task.stage, task.phase): i for task, i in sorted(self.order.items(), key=lambda entry: entry[1])}
        for number, ready in enumerate(lowering.plan.reductions):
            if lowering.device in ready.reduction.devices:
                when = max(last.get((x, Phase.BACKWARD), 0) for x in ready.stages)
                keyed.append(((when, 1, number), ready))
        keyed.sort(key=lambda entry: entry[0])
        self.queue = [entry for _, entry in keyed]
        self.position = {entry.tag: i for i, entry in enumerate(self.queue) if isinstance(entry, Message)}
        self._advance()

    def before(self, task: Task) -> None:
        self._post_through(self.lowering.received(task))

    def send(self, messages: Sequence[Message]) -> None:
        self._post_through(messages)

    def after(self, task: Task) -> None:
        self._advance()

    def end(self) -> None:
        """Nothing: after the last task nothing is left to wait for."""
        assert self.next_post == len(self.queue)

    def _post_through(self, messages: Sequence[Message]) -> None:
        """Post everything up to the last of some messages."""
        last = max((self.position[message.tag] for message in messages if not message.is_local), default=-1)
        while self.next_post <= last:
            self._post(self.queue[self.next_post])

    def _advance(self) -> None:
        """Post what comes next and may be posted by now."""
        while self.next_post < len(self.queue):
            entry = self.queue[self.next_post]
            if isinstance(entry, _ReadyReduction):
                if not self.lowering.is_ready(entry):
                    return
            elif entry.source_device == self.lowering.device or not self.lowering.is_within_window(entry):
                return
            self._post(entry)

    def _post(self, entry: Message | _ReadyReduction) -> None:
        if isinstance(entry, _ReadyReduction):
            self.lowering.start(entry)
        elif entry.source_device == self.lowering.device:
            self.lowering.out.append(Send(entry))
        else:
            self.lowering.post(entry)
        self.next_post += 1
