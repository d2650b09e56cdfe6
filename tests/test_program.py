from __future__ import annotations

from dataclasses import replace

import pytest

from graphpipe.errors import DeadlockError
from graphpipe.program import (
    AllReduce,
    AwaitReceive,
    AwaitSend,
    Compute,
    PostReceive,
    Program,
    Send,
    check_deadlock,
    lower,
)
from graphpipe.schedule import DeviceOrder, Schedule, Task, kfkb
from graphpipe.stage import StageGraph
from tests.stage_graphs import CHAIN_3, DIAMOND, TWO_TOWERS, make_stages


def order(devices: tuple[int, ...], text: str) -> DeviceOrder:
    return DeviceOrder(devices, tuple(map(Task.parse, text.split())))


def test_an_order_that_waits_in_a_circle_is_refused_with_both_ends() -> None:
    # Device 0 wants the gradient of micro-batch 0 before it lets micro-batch 1 go, for which device 1 waits first.
    stages = make_stages([(0, 1), (1, 2)], mini_batch_size=2, devices=[(0,), (1,), (0,)])
    lower(stages, kfkb(stages))
    circle = Schedule((order((0,), "0F0 2F0 2B0 0B0 0F1 2F1 2B1 0B1"), order((1,), "1F0 1F1 1B0 1B1")))
    with pytest.raises(
        DeadlockError, match=r"circle: device 0 waits in the receive of gradient of v0-1 .*; device 1 waits"
    ):
        lower(stages, circle)


def test_every_message_is_sent_and_received_once_and_posted_before() -> None:
    stages = make_stages(DIAMOND, mini_batch_size=12, sizes=(4, 6, 3, 12), devices=[(0, 1), (2,), (3, 4, 5), (6,)])
    program = lower(stages, kfkb(stages))
    for message in program.messages:
        source, target = program.instructions[message.source_device], program.instructions[message.target_device]
        assert source.count(Send(message)) == source.count(AwaitSend(message)) == 1
        assert source.index(Send(message)) < source.index(AwaitSend(message))
        assert target.count(PostReceive(message)) == target.count(AwaitReceive(message)) == 1
        assert target.index(PostReceive(message)) < target.index(AwaitReceive(message))
    # As many samples return as gradients as went forward as values.
    moved = {phase: sum(len(m.samples) for m in program.messages if m.phase == phase) for phase in "FB"}
    assert moved["F"] == moved["B"] == 4 * 12


def test_a_planted_bug_is_found() -> None:
    stages = make_stages(CHAIN_3, mini_batch_size=2)
    program = lower(stages, kfkb(stages))
    first = program.instructions[0]
    without_send = tuple(i for i in first if i != next(i for i in first if isinstance(i, Send)))
    with pytest.raises(DeadlockError, match="never sent or posted"):
        check_deadlock(replace(program, instructions=(without_send, *program.instructions[1:])))
    second = program.instructions[1]
    late = next(i for i in second if isinstance(i, PostReceive))
    with pytest.raises(DeadlockError, match="circle"):
        check_deadlock(
            replace(program, instructions=(first, (*(i for i in second if i != late), late), *program.instructions[2:]))
        )


def test_stages_on_one_device_hand_over_in_place() -> None:
    stages = make_stages(TWO_TOWERS, mini_batch_size=4, sizes=(2, 2, 4), devices=[(0,), (1,), (0,)])
    program = lower(stages, kfkb(stages))
    posted = [i.message for i in program.instructions[0] if isinstance(i, PostReceive)]
    assert {m.source_device for m in posted} == {1}
    assert any(m.is_local for m in program.messages)


def test_replicas_and_shared_parameters_are_summed_once_a_step() -> None:
    stages = make_stages(CHAIN_3, mini_batch_size=8, sizes=2, devices=[(0, 1), (2,), (3,)])
    tied = replace(stages.graph.operators[2], parameters=stages.graph.operators[1].parameters)
    graph = replace(stages.graph, operators=(*stages.graph.operators[:2], tied))
    program = lower(StageGraph(graph, stages.stages, 8), kfkb(stages))
    found = [[i for i in instructions if isinstance(i, AllReduce)] for instructions in program.instructions]
    assert found == [
        [AllReduce((0, 1), ("w0",), 100)],
        [AllReduce((0, 1), ("w0",), 100)],
        [AllReduce((2, 3), ("w1",), 100)],
        [AllReduce((2, 3), ("w1",), 100)],
    ]


def test_a_replica_without_samples_has_no_task() -> None:
    stages = make_stages([], mini_batch_size=3, sizes=2, devices=[(0, 1)])
    program: Program = lower(stages, kfkb(stages))
    counts = [sum(isinstance(i, Compute) for i in instructions) for instructions in program.instructions]
    assert sorted(counts) == [2, 4]


def test_a_sound_order_is_not_refused_for_gradients_that_are_taken_late() -> None:
    # Device 0 holds the end of both paths; awaiting its gradients early would let device 1 wait for itself.
    stages = make_stages([(0, 1), (1, 2), (0, 2)], mini_batch_size=8, sizes=(1, 8, 1), devices=[(1,), (0,), (0,)])
    lower(stages, kfkb(stages))
