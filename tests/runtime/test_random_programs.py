"""The gradients of one process, over random stage graphs, strategies and kinds of values."""

from __future__ import annotations

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from graphpipe.capture.specs import LossReduction
from graphpipe.program import Matching, lower
from graphpipe.schedule import UniformCosts, in_flight_limits, kfkb
from graphpipe.stage import Recompute, Stage, StageGraph, StageOrder
from tests.graph_models import GraphModel, OperatorShape, make_batch
from tests.runtime.agreement import assert_as_one_process


@st.composite
def graph_models(draw: st.DrawFn) -> GraphModel:
    """Draw a model of two to seven operators, with every kind of value."""
    count = draw(st.integers(2, 7))
    reads: list[tuple[int, ...]] = []
    for i in range(count - 1):
        reads.append(tuple(sorted(draw(st.sets(st.integers(0, i - 1), max_size=2)))) if i else ())
    read_by_others = {j for r in reads for j in r}
    reads.append(tuple(i for i in range(count - 1) if i not in read_by_others))
    coin = st.booleans()
    rare = st.sampled_from([False, False, False, True])
    shapes = [
        OperatorShape(
            reads=r,
            gives_mask=draw(coin) and i < count - 1,
            gives_scale=draw(coin) and i < count - 1,
            is_batch_wise=draw(rare) and i > 0,
            sample_axis=draw(st.integers(0, 1)),
            is_frozen=draw(rare) and i < count - 1,
            matrix="shared" if draw(rare) and i > 0 else "",
        )
        for i, r in enumerate(reads)
    ]
    # A shared matrix is frozen for all of its readers or for none.
    frozen = any(s.is_frozen for s in shapes if s.matrix)
    shapes = [OperatorShape(**{**vars_of(s), "is_frozen": frozen}) if s.matrix else s for s in shapes]
    model = GraphModel(shapes, seed=draw(st.integers(0, 3)), reduction=draw(st.sampled_from(list(LossReduction))))
    assume(model.needs_gradient[-1])  # With all matrices frozen there is nothing to compare.
    return model


def vars_of(shape: OperatorShape) -> dict[str, object]:
    """Return the fields of a shape."""
    return {name: getattr(shape, name) for name in OperatorShape.__dataclass_fields__}


@st.composite
def stage_graphs(draw: st.DrawFn, model: GraphModel) -> StageGraph:
    """Draw a partition of a random topological order, with sizes, replicas, shared devices and recomputation."""
    graph = model.graph
    order: list[int] = []
    left = set(range(len(graph.operators)))
    while left:
        ready = sorted(i for i in left if not set(graph.predecessors[i]) & left)
        order.append(draw(st.sampled_from(ready)))
        left.remove(order[-1])
    cuts = sorted(draw(st.sets(st.integers(1, len(order) - 1), max_size=4)))
    parts = [sorted(order[a:b]) for a, b in zip([0, *cuts], [*cuts, len(order)], strict=True)]
    mini_batch_size = draw(st.integers(1, 9))
    stages: list[Stage] = []
    free = 0
    for part in parts:
        coupled = any(graph.operators[i].is_batch_wise for i in part)
        size = mini_batch_size if coupled else draw(st.integers(1, mini_batch_size))
        most = 1 if coupled else min(3, size)
        shared = sorted({s.devices for s in stages if len(s.devices) <= most})
        if shared and draw(st.booleans()):
            devices = draw(st.sampled_from(shared))
        else:
            devices = tuple(range(free, free + draw(st.integers(1, most))))
            free += len(devices)
        stages.append(
            Stage(
                operators=tuple(graph.operators[i].name for i in part),
                micro_batch_size=size,
                devices=devices,
                recompute=draw(st.sampled_from(list(Recompute))),
            )
        )
    return StageGraph(graph, tuple(stages), mini_batch_size, draw(st.sampled_from(list(StageOrder))))


@settings(max_examples=270, deadline=None)
@given(data=st.data())
def test_loss_and_gradients_are_those_of_one_process(data: st.DataObject) -> None:
    model = data.draw(graph_models())
    stages = data.draw(stage_graphs(model))
    k = data.draw(st.integers(1, 3))
    costs = UniformCosts(1.0, 2.0, 0.25, 0.5)
    schedule = kfkb(stages, costs, k=k)
    program = lower(stages, schedule, matching=data.draw(st.sampled_from(list(Matching))), costs=costs)
    batch = make_batch(stages.mini_batch_size)
    assert_as_one_process(model, program, batch, costs)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_samples_in_flight_stay_within_the_limits(data: st.DataObject) -> None:
    stages = data.draw(stage_graphs(data.draw(graph_models())))
    k = data.draw(st.integers(1, 4))
    limits = in_flight_limits(stages, k)
    for order in kfkb(stages, k=k).orders:
        held = dict.fromkeys(range(len(stages.stages)), 0)
        for task in order.tasks:
            samples = len(stages.micro_batch(task.stage, task.micro_batch))
            held[task.stage] += samples if task.phase.value == "F" else -samples
            if stages.has_backward[task.stage]:
                assert held[task.stage] <= limits[task.stage]
