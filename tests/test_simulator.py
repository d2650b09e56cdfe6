from __future__ import annotations

from itertools import pairwise

from graphpipe.cluster import Link
from graphpipe.cost.collectives import ring_all_reduce_s
from graphpipe.program import lower
from graphpipe.schedule import Phase, Task, UniformCosts, dependencies, kfkb
from graphpipe.simulator import simulate
from graphpipe.trace import SpanKind, Trace
from tests.stage_graphs import CHAIN_3, DIAMOND, make_stages


class SlowLinks(UniformCosts):
    """Passes of 1 and 2 seconds, messages with a latency of 0.5 s and 1 byte a second, and reductions."""

    LINK = Link(latency_s=0.5, bandwidth_bytes_per_s=1.0)

    def link(self, source: int, target: int) -> Link:
        return self.LINK

    def all_reduce_s(self, num_bytes: float, devices: object) -> float:
        return ring_all_reduce_s(num_bytes, len(devices), self.LINK)  # type: ignore[arg-type]


def test_a_message_takes_its_latency_and_its_bytes() -> None:
    stages = make_stages([(0, 1)], mini_batch_size=1, value_bytes=4)
    # Forward 1, message 4.5, forward 1, backward 2, gradient 4.5, backward 2.
    assert simulate(lower(stages, kfkb(stages)), SlowLinks(1.0, 2.0)).makespan_s == 15


def test_messages_queue_for_the_link_of_their_device() -> None:
    # Both consumers get the value of one producer: the second message waits 4 s for the first.
    stages = make_stages([(0, 1), (0, 2)], mini_batch_size=1, value_bytes=4)
    spans = simulate(lower(stages, kfkb(stages)), SlowLinks(1.0, 2.0)).spans
    starts = [s.start_s for s in spans if s.kind is SpanKind.FORWARD]
    assert starts == [0.0, 5.5, 9.5]


def test_a_reduction_starts_when_its_last_device_comes() -> None:
    stages = make_stages([], mini_batch_size=3, sizes=2, devices=[(0, 1)])
    # Samples 0, 1 and then 2, which falls to the second replica; 100 bytes over a ring of two.
    trace = simulate(lower(stages, kfkb(stages)), SlowLinks(1.0, 2.0))
    reductions = [s for s in trace.spans if s.kind is SpanKind.REDUCE]
    assert [(s.start_s, s.stop_s) for s in reductions] == [(6.0, 6.0 + 2 * (0.5 + 50))] * 2


def test_spans_of_a_device_do_not_overlap_and_follow_what_they_need() -> None:
    stages = make_stages(DIAMOND, mini_batch_size=6, sizes=(3, 2, 1, 6))
    trace = simulate(lower(stages, kfkb(stages)), UniformCosts(1.0, 2.0))
    spans = {
        Task(s.stage, Phase.FORWARD if s.kind is SpanKind.FORWARD else Phase.BACKWARD, s.micro_batch): s
        for s in trace.spans
    }
    for device in range(4):
        mine = [s for s in trace.spans if s.device == device]
        assert all(a.stop_s <= b.start_s for a, b in pairwise(mine))
    for task, span in spans.items():
        assert all(spans[needed].stop_s <= span.start_s for needed in dependencies(task, stages))


def test_a_trace_survives_json() -> None:
    stages = make_stages(CHAIN_3, mini_batch_size=2)
    trace = simulate(lower(stages, kfkb(stages)), UniformCosts())
    assert Trace.from_json(trace.to_json()) == trace


def test_a_reduction_goes_on_beside_other_work_and_its_span_is_the_wait_for_it() -> None:
    # Two devices hold both stages. The sum for the second one begins while the first has its backward pass; sums queue.
    stages = make_stages([(0, 1)], mini_batch_size=2, sizes=2, devices=[(0, 1), (0, 1)])
    trace = simulate(lower(stages, kfkb(stages)), SlowLinks(1.0, 2.0))
    ring_s = 2 * (0.5 + 50)
    # Forward passes end at 2, the backward pass of stage 1 at 4 and that of stage 0 at 6.
    reductions = [(s.start_s, s.stop_s) for s in trace.spans if s.kind is SpanKind.REDUCE and s.device == 0]
    assert reductions == [(6.0, 4.0 + ring_s), (4.0 + ring_s, 4.0 + 2 * ring_s)]
