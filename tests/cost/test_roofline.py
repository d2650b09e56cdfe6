"""The roofline: laws of its kernels, and a profile made of them."""

from __future__ import annotations

import itertools

import pytest

from graphpipe.cluster import Cluster
from graphpipe.cost import DEVICE_KINDS, CostModel, DeviceKind, ProfileSource, roofline_profile
from graphpipe.cost.roofline import TILE_FLOPS
from graphpipe.errors import GraphPipeError
from graphpipe.graph import ComputationGraph, Operator, Parameter, Value

# Easy numbers: 1 s a kernel at least, 10 operations and 4 bytes a second, half of the peak at 20 operations.
DEVICE = DeviceKind(
    name="abacus", peak_flops_per_s=10, knee_flops=20, bandwidth_bytes_per_s=4, memory_bytes=1, launch_s=1
)


def graph_of(**fields: object) -> ComputationGraph:
    return ComputationGraph("one", (Operator(name="o", **fields),))  # type: ignore[arg-type]


def seconds(size: int, **fields: object) -> tuple[float, float]:
    profile = roofline_profile(graph_of(**fields), DEVICE, [size])
    return float(profile.forward_s[0, 0]), float(profile.backward_s[0, 0])


def test_a_kernel_is_launched_and_then_limited_by_operations_or_by_bytes() -> None:
    assert DEVICE.kernel_s(flops=80, num_bytes=4) == 1 + (80 + 20) / 10
    assert DEVICE.kernel_s(flops=80, num_bytes=400) == 1 + 400 / 4
    assert DEVICE.kernel_s(flops=0, num_bytes=4) == 1 + 4 / 4


def test_a_kernel_of_the_knees_size_reaches_half_of_the_peak() -> None:
    for kind in DEVICE_KINDS.values():
        flops = kind.knee_flops
        assert flops / (kind.kernel_s(flops, 0) - kind.launch_s) == pytest.approx(kind.peak_flops_per_s / 2)


def test_peaks_follow_from_multiprocessors_cores_and_boost_clocks() -> None:
    # Multiprocessors, fp32 cores in each, boost clock in Hz; a core does a multiply-add a cycle.
    chips = {
        "V100": (80, 64, 1.53e9),
        "A100": (108, 64, 1.41e9),
        "H100": (132, 128, 1.98e9),
        "H200": (132, 128, 1.98e9),
    }
    for name, kind in DEVICE_KINDS.items():
        if name != "cpu-core":
            multiprocessors, cores, clock_hz = chips[name.partition("-")[0]]
            assert kind.peak_flops_per_s == pytest.approx(multiprocessors * cores * 2 * clock_hz, rel=0.005)
            assert kind.knee_flops == multiprocessors * TILE_FLOPS


def test_each_kind_does_some_operations_in_the_time_of_a_byte() -> None:
    # A wrong power of ten in a rate leaves this range, in which fp32 has been for two decades.
    for kind in DEVICE_KINDS.values():
        assert 4 < kind.peak_flops_per_s / kind.bandwidth_bytes_per_s < 32


def test_forward_reads_the_parameters_once_whatever_the_number_of_samples() -> None:
    parameters = (Parameter("w", 40), Parameter("frozen", 60, is_trainable=False))
    # 2 operations and 8 bytes a sample: bytes decide.
    fields = {"parameters": parameters, "forward_flops": 2.0, "backward_flops": 2.0, "moved_bytes": 8.0}
    for size in (1, 7):
        forward_s, backward_s = seconds(size, **fields)
        assert forward_s == 1 + (8 * size + 100) / 4
        # Twice the activations, all parameters, and the trainable one's gradient read and written.
        assert backward_s == 1 + (2 * 8 * size + 100 + 2 * 40) / 4


def test_backward_is_two_kernels_where_it_has_two_gradients() -> None:
    _, one = seconds(3, forward_flops=10.0, backward_flops=10.0)
    _, two = seconds(3, forward_flops=10.0, backward_flops=20.0)
    assert one == 1 + (30 + 20) / 10
    assert two == 2 * one


def test_without_gradient_backward_takes_no_time() -> None:
    assert seconds(3, forward_flops=10.0, backward_flops=20.0, has_backward=False)[1] == 0


def test_a_look_up_reads_rows_forward_and_writes_the_table_backward() -> None:
    forward_s, backward_s = seconds(2, parameters=(Parameter("table", 4000),), moved_bytes=16.0)
    assert forward_s == 1 + (2 * 16 + 2 * 16) / 4
    assert backward_s == 1 + (2 * 2 * 16 + 2 * 4000) / 4


def test_larger_micro_batches_cost_more_in_all_and_less_a_sample() -> None:
    sizes = [64, 1, 2, 4, 8, 16, 32, 4]
    operator = {
        "parameters": (Parameter("w", 4_000_000),),
        "forward_flops": 2e6,
        "backward_flops": 4e6,
        "moved_bytes": 8e3,
        "saved_bytes": 4e3,
    }
    for name in DEVICE_KINDS:
        profile = roofline_profile(graph_of(**operator), name, sizes)
        assert profile.sizes == (1, 2, 4, 8, 16, 32, 64)
        assert (profile.source, profile.device) == (ProfileSource.ROOFLINE, name)
        for table in (profile.forward_s[:, 0], profile.backward_s[:, 0]):
            assert all(b >= a for a, b in itertools.pairwise(table))
            a_sample = table / profile.sizes
            assert all(b < a for a, b in itertools.pairwise(a_sample))
        assert profile.saved_bytes[:, 0].tolist() == [4e3 * size for size in profile.sizes]


def test_a_faster_device_is_never_slower() -> None:
    graph = graph_of(parameters=(Parameter("w", 10**7),), forward_flops=1e9, backward_flops=2e9, moved_bytes=1e6)
    order = ["cpu-core", "V100-16GB", "A100-40GB", "A100-80GB", "H100-80GB", "H200"]
    times = [roofline_profile(graph, name, [1, 8]).forward_s.sum() for name in order]
    assert times == sorted(times, reverse=True)


def test_the_profile_fits_its_graph_and_the_paper_s_cluster() -> None:
    first, second = (Operator(name=name, forward_flops=1e6, backward_flops=2e6) for name in "ab")
    graph = ComputationGraph("pair", (first, second), (Value(name="v", producer="a", consumers=("b",)),))
    cluster = Cluster.summit(4)
    kind = DEVICE_KINDS[cluster.devices[0].kind]
    assert cluster.devices[0].memory_bytes == kind.memory_bytes
    model = CostModel(graph, roofline_profile(graph, kind.name, [1, 4]), cluster)
    assert model.forward_s([0, 1], 4) == pytest.approx(2 * kind.kernel_s(4e6, 0))


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'V200' is not known; known are V100-16GB, A100-40GB"):
        roofline_profile(graph_of(), "V200", [1])
    for sizes in ([], [0, 1], [-1]):
        with pytest.raises(GraphPipeError, match="sizes"):
            roofline_profile(graph_of(), "H200", sizes)
    with pytest.raises(ValueError, match="'x' needs a positive peak"):
        DeviceKind(name="x", peak_flops_per_s=0, knee_flops=0, bandwidth_bytes_per_s=1, memory_bytes=1, launch_s=0)
    with pytest.raises(ValueError, match="'x' has a negative"):
        DeviceKind(name="x", peak_flops_per_s=1, knee_flops=-1, bandwidth_bytes_per_s=1, memory_bytes=1, launch_s=0)
