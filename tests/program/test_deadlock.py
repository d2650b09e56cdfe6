"""The proof that a program ends, under the rules of both kinds of transport."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpipe.errors import DeadlockError
from graphpipe.program import Matching, PostReceive, Program, Send, StartReduction, check_deadlock, lower
from graphpipe.schedule import DeviceOrder, Schedule, Task, UniformCosts, kfkb
from tests.stage_graphs import CHAIN_3, DIAMOND, make_stages
from tests.strategies import stage_graphs


def order(devices: tuple[int, ...], text: str) -> DeviceOrder:
    return DeviceOrder(devices, tuple(map(Task.parse, text.split())))


def test_an_order_that_waits_in_a_circle_is_refused_with_both_ends() -> None:
    # Device 0 wants the gradient of micro-batch 0 before it lets micro-batch 1 go, for which device 1 waits first.
    stages = make_stages([(0, 1), (1, 2)], mini_batch_size=2, devices=[(0,), (1,), (0,)])
    lower(stages, kfkb(stages))
    circle = Schedule((order((0,), "0F0 2F0 2B0 0B0 0F1 2F1 2B1 0B1"), order((1,), "1F0 1F1 1B0 1B1")))
    expected = (
        "the devices wait for each other in a circle: device 0 waits for the receive of gradient of v0-1 [0:1] from "
        "stage 1, micro-batch 0 on device 1 to stage 0, micro-batch 0 on device 0 (task 1B0 to 0B0); device 1 waits for"
    )
    with pytest.raises(DeadlockError, match=re.escape(expected)):
        lower(stages, circle)


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


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_one_order_over_all_devices_never_waits_in_a_circle(data: st.DataObject) -> None:
    stages = data.draw(stage_graphs())
    costs = data.draw(st.sampled_from([UniformCosts(1.0, 2.0, 0.5, 0.25), UniformCosts(0.0, 0.0)]))
    schedule = kfkb(stages, k=data.draw(st.integers(1, 3)))
    program = lower(stages, schedule, matching=Matching.ORDER, costs=costs)  # checks itself
    assert program.matching is Matching.ORDER
    # Both ends of a pair of devices begin their messages to each other in the same order.
    begun: dict[tuple[int, int], list[int]] = {}
    for device, instructions in enumerate(program.instructions):
        for instruction in instructions:
            if isinstance(instruction, Send | PostReceive) and not instruction.message.is_local:
                message = instruction.message
                other = message.source_device + message.target_device - device
                begun.setdefault((device, other), []).append(message.tag)
    assert all(tags == begun[other, device] for (device, other), tags in begun.items())
    # What the transport by tag is given has no circle without the rules of order either.
    check_deadlock(replace(program, matching=Matching.TAG))


def test_posts_that_run_free_wait_in_a_circle_where_order_counts() -> None:
    # Device 0 posts the receives of gradients first, device 1 those of values: as first things they never meet.
    stages = make_stages(CHAIN_3, mini_batch_size=4)
    free = lower(stages, kfkb(stages))
    with pytest.raises(DeadlockError, match="device 0 waits for"):
        check_deadlock(replace(free, matching=Matching.ORDER))


def test_any_two_things_that_change_places_are_found() -> None:
    stages = make_stages(DIAMOND, mini_batch_size=4, sizes=(1, 2, 1, 4), devices=[(0,), (1,), (2,), (3,)])
    program = lower(stages, kfkb(stages), matching=Matching.ORDER)
    for device, instructions in enumerate(program.instructions):
        places = [i for i, found in enumerate(instructions) if isinstance(found, Send | PostReceive)]
        for a, b in pairwise(places):
            ends = [{instructions[i].message.source_device, instructions[i].message.target_device} for i in (a, b)]
            if ends[0] != ends[1]:
                continue
            swapped = list(instructions)
            swapped[a], swapped[b] = swapped[b], swapped[a]
            with pytest.raises(DeadlockError):
                check_deadlock(_with(program, device, tuple(swapped)))


def test_a_sum_that_a_device_leaves_out_is_found() -> None:
    stages = make_stages(CHAIN_3, mini_batch_size=4, sizes=2, devices=[(0, 1), (2,), (3,)])
    program = lower(stages, kfkb(stages))
    without = tuple(i for i in program.instructions[1] if not isinstance(i, StartReduction))
    with pytest.raises(DeadlockError, match=r"device 0 waits for the sum of gradients .* devices \[1\] do not begin"):
        check_deadlock(_with(program, 1, without))


def _with(program: Program, device: int, instructions: tuple[object, ...]) -> Program:
    lists = list(program.instructions)
    lists[device] = instructions
    return replace(program, instructions=tuple(lists))
