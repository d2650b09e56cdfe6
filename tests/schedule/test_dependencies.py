from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from graphpipe.schedule import Phase, Task, dependencies, pieces
from graphpipe.stage import StageGraph
from tests.stage_graphs import TWO_TOWERS, make_stages


def test_a_task_needs_what_overlaps_its_samples() -> None:
    towers = make_stages(TWO_TOWERS, mini_batch_size=12, sizes=(4, 3, 6))
    assert list(map(str, dependencies(Task(2, Phase.FORWARD, 1), towers))) == ["0F1", "0F2", "1F2", "1F3"]
    assert list(map(str, dependencies(Task(0, Phase.BACKWARD, 1), towers))) == ["0F1", "2B0", "2B1"]
    assert dependencies(Task(0, Phase.FORWARD, 2), towers) == ()


@given(
    mini_batch_size=st.integers(4, 40),
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    replicas=st.tuples(st.integers(1, 3), st.integers(1, 3)),
)
def test_pieces_bring_every_sample_to_every_consumer_once(
    mini_batch_size: int, sizes: tuple[int, int], replicas: tuple[int, int]
) -> None:
    sizes = tuple(min(mini_batch_size, max(s, r)) for s, r in zip(sizes, replicas, strict=True))
    devices = [tuple(range(replicas[0])), tuple(range(3, 3 + replicas[1]))]
    stages = make_stages([(0, 1)], mini_batch_size=mini_batch_size, sizes=sizes, devices=devices)
    (edge,) = stages.edges
    (value,) = edge.values
    arrived: list[int] = []
    for piece in pieces(stages, edge, value):
        samples = set(range(piece.samples.start, piece.samples.stop))
        source = stages.replica_samples(0, piece.source_micro_batch, piece.source_replica)
        target = stages.replica_samples(1, piece.target_micro_batch, piece.target_replica)
        assert samples <= set(range(source.start, source.stop)) & set(range(target.start, target.stop))
        arrived.extend(samples)
    assert sorted(arrived) == list(range(mini_batch_size))


def test_a_value_without_samples_comes_once_a_task_from_the_holder_of_its_first_sample() -> None:
    stages = make_stages([(0, 1)], mini_batch_size=12, sizes=(4, 6))
    value = replace(stages.graph.values[0], bytes_per_sample=0, fixed_bytes=8)
    fixed = StageGraph(replace(stages.graph, values=(value,)), stages.stages, 12)
    found = list(pieces(fixed, fixed.edges[0], value))
    assert [(p.source_micro_batch, p.target_micro_batch) for p in found] == [(0, 0), (1, 1)]
