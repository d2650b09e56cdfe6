from __future__ import annotations

from dataclasses import replace

import pytest

from graphpipe.program import (
    AwaitReceive,
    AwaitReduction,
    AwaitSend,
    Compute,
    Matching,
    OptimizerStep,
    PostReceive,
    Program,
    Reduction,
    Send,
    StartReduction,
    lower,
)
from graphpipe.schedule import Phase, Task, kfkb
from graphpipe.stage import StageGraph
from tests.stage_graphs import CHAIN_3, DIAMOND, TWO_TOWERS, frozen_first, make_stages


@pytest.mark.parametrize("matching", Matching)
def test_every_message_is_sent_and_received_once_and_posted_before(matching: Matching) -> None:
    stages = make_stages(DIAMOND, mini_batch_size=12, sizes=(4, 6, 3, 12), devices=[(0, 1), (2,), (3, 4, 5), (6,)])
    program = lower(stages, kfkb(stages), matching=matching)
    assert program.matching is matching
    for message in program.messages:
        source, target = program.instructions[message.source_device], program.instructions[message.target_device]
        assert source.count(Send(message)) == source.count(AwaitSend(message)) == 1
        assert source.index(Send(message)) < source.index(AwaitSend(message))
        assert target.count(PostReceive(message)) == target.count(AwaitReceive(message)) == 1
        assert target.index(PostReceive(message)) < target.index(AwaitReceive(message))
    # As many samples return as gradients as went forward as values.
    moved = {phase: sum(len(m.samples) for m in program.messages if m.phase == phase) for phase in "FB"}
    assert moved["F"] == moved["B"] == 4 * 12


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
    found = [[i.reduction for i in own if isinstance(i, StartReduction)] for own in program.instructions]
    assert found == [
        [Reduction((0, 1), ("w0",), 100)],
        [Reduction((0, 1), ("w0",), 100)],
        [Reduction((2, 3), ("w1",), 100)],
        [Reduction((2, 3), ("w1",), 100)],
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


@pytest.mark.parametrize("matching", Matching)
def test_a_sum_begins_with_the_last_backward_pass_that_goes_into_it(matching: Matching) -> None:
    # Devices 0 and 1 hold the first and the last stage; the last one ends while the first still has work.
    stages = make_stages(CHAIN_3, mini_batch_size=8, sizes=2, devices=[(0, 1), (2,), (0, 1)])
    program = lower(stages, kfkb(stages), matching=matching)
    for device in (0, 1):
        instructions = program.instructions[device]
        for stage, parameter in ((2, "w2"), (0, "w0")):
            start = instructions.index(StartReduction(Reduction((0, 1), (parameter,), 100)))
            assert Task(stage, Phase.BACKWARD, 3) in {i.task for i in instructions[:start] if isinstance(i, Compute)}
            assert not any(isinstance(i, Compute) and i.task.stage == stage for i in instructions[start:])
        first, second = (i for i, found in enumerate(instructions) if isinstance(found, StartReduction))
        assert any(isinstance(i, Compute) for i in instructions[first:second])
        assert isinstance(instructions[-1], OptimizerStep)
        assert [type(i) for i in instructions[-3:-1]] == [AwaitReduction, AwaitReduction]


def test_a_value_is_let_go_once_its_gradient_is_here() -> None:
    stages = make_stages(CHAIN_3, mini_batch_size=4)
    first = lower(stages, kfkb(stages)).instructions[0]
    for i, instruction in enumerate(first):
        if isinstance(instruction, AwaitReceive):
            assert isinstance(first[i + 1], AwaitSend)
            assert first[i + 1].message.tag == instruction.message.answers


def test_receives_are_posted_once_nothing_is_left_to_give() -> None:
    stages = make_stages(CHAIN_3, mini_batch_size=8, sizes=2)
    own = lower(stages, kfkb(stages)).instructions[2]
    posts = [i for i, instruction in enumerate(own) if isinstance(instruction, PostReceive)]
    # Two before the first wait, the others between a gradient that leaves and the next wait, never ahead of a task.
    assert posts[:2] == [0, 1]
    assert len(posts) == 4
    for i in posts[2:]:
        assert isinstance(own[i - 1], Send)
        assert isinstance(own[i + 1], AwaitReceive)


def test_a_stage_without_backward_pass_runs_ahead_of_its_last_reader_and_little_more() -> None:
    # 0 is frozen, and also read three stages later: it is let three passes ahead of that one, and four on their way.
    stages = frozen_first(((0, 1), (1, 2), (2, 3), (0, 3)), mini_batch_size=32)
    on_the_way = most = 0
    for instruction in lower(stages, kfkb(stages)).instructions[0]:
        on_the_way += isinstance(instruction, Send) - isinstance(instruction, AwaitSend)
        most = max(most, on_the_way)
    assert most == 2 * (3 + 4 + 1)
