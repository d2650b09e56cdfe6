"""Costs of operators on a named device, from operations and bytes, for planning without the hardware.

The model of one kernel, fixed before anything was planned with it::

    seconds = launch + max((flops + knee) / peak, bytes / bandwidth)

The first term is the rule of Hockney and Jesshope, Parallel Computers 2 (1988), for pipelined processors: the rate that
a kernel reaches is ``peak * flops / (flops + knee)``, half of the peak where it has `knee` operations. So a kernel over
few samples is slow, and its cost is not linear in the micro-batch size. The second term is the roofline of Williams,
Waterman and Patterson, CACM 52(4), 2009. Peaks and bandwidths are those of data sheets, which no kernel quite reaches;
seconds are therefore optimistic, alike for all planners.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from graphpipe.cost.profile import Profile, ProfileSource
from graphpipe.graph import ComputationGraph, Operator

# A matrix product is cut into tiles of the result, one after the other on each multiprocessor. Below one tile for each
# of them the device is partly idle. Taken here: tiles of 64 × 64, the smaller ones of fp32 libraries, and an inner
# dimension of 1024. For a V100 that makes a product of 1024 × 1024 matrices reach 76 % of the peak, one of 2048 96 %.
TILE_FLOPS = 2 * 64 * 64 * 1024

# What eager PyTorch takes on the host to issue one operation to a GPU; the device waits for it where kernels are short.
# A round figure that we assume, not a measurement.
GPU_LAUNCH_S = 5e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKind:
    """What a kind of device can do, in fp32 without tensor cores: PyTorch's default for models in fp32.

    Attributes:
        name: As in `graphpipe.cluster.Device.kind`.
        peak_flops_per_s: Operations per second; a multiply-add is two.
        knee_flops: A kernel of so many operations reaches half of the peak.
        bandwidth_bytes_per_s: Of the device's memory.
        memory_bytes: Its size as sold; a process may use less.
        launch_s: Seconds that every kernel takes at least.

    Raises:
        ValueError: A rate or the memory is not positive, or a cost is negative.
    """

    name: str
    peak_flops_per_s: float
    knee_flops: float
    bandwidth_bytes_per_s: float
    memory_bytes: int
    launch_s: float

    def __post_init__(self) -> None:
        if min(self.peak_flops_per_s, self.bandwidth_bytes_per_s, self.memory_bytes) <= 0:
            raise ValueError(f"device kind {self.name!r} needs a positive peak, bandwidth and memory")
        if min(self.knee_flops, self.launch_s) < 0:
            raise ValueError(f"device kind {self.name!r} has a negative knee or launch overhead")

    def kernel_s(self, flops: float, num_bytes: float) -> float:
        """Return the seconds of one kernel.

        Args:
            flops: Its floating-point operations; 0 for one that only moves data.
            num_bytes: What it reads from and writes to memory.
        """
        compute_s = (flops + self.knee_flops) / self.peak_flops_per_s if flops else 0.0
        return self.launch_s + max(compute_s, num_bytes / self.bandwidth_bytes_per_s)


def _gpu(
    name: str, tera_flops: float, num_multiprocessors: int, giga_bytes_per_s: float, giga_bytes: int
) -> DeviceKind:
    return DeviceKind(
        name=name,
        peak_flops_per_s=tera_flops * 1e12,
        knee_flops=float(num_multiprocessors * TILE_FLOPS),
        bandwidth_bytes_per_s=giga_bytes_per_s * 1e9,
        memory_bytes=giga_bytes * 10**9,
        launch_s=GPU_LAUNCH_S,
    )


# Peak fp32 TFLOP/s, streaming multiprocessors, GB/s, GB, of the modules for SXM sockets, not of PCIe cards. The peaks
# are multiprocessors × fp32 cores × 2 × boost clock: 80 × 64 × 2 × 1.53 GHz, 108 × 64 × 2 × 1.41 GHz and
# 132 × 128 × 2 × 1.98 GHz. Each figure was compared with publications of computing centres and hardware reviews that
# quote the vendor's documents named here; the documents themselves were not at hand.
_KINDS = (
    # NVIDIA Tesla V100 data sheet (SXM2) and white paper WP-08608-001, quoted by Oak Ridge's "Summit architecture
    # overview" (2019: 80 multiprocessors, 16 GB, 900 GB/s) and Pittsburgh's page on Bridges-2 (15.7 TFLOP/s). The
    # device of the GraphPipe paper.
    _gpu("V100-16GB", 15.7, 80, 900, 16),
    # NVIDIA A100 data sheet (SXM4) and Ampere white paper, quoted by Paderborn's documentation of its A100 (40 GB: 108
    # multiprocessors, 19.5 TFLOP/s, 1,555 GB/s) and G. Lockwood's notes on processors (80 GB: the same at 2,039 GB/s).
    _gpu("A100-40GB", 19.5, 108, 1555, 40),
    _gpu("A100-80GB", 19.5, 108, 2039, 80),
    # NVIDIA H100 data sheet (SXM5) and Hopper white paper, quoted by G. Lockwood's notes (132 multiprocessors, 66.9
    # TFLOP/s, 3.35 TB/s). Figures of 2022 for the same module, 60 TFLOP/s and 3 TB/s, are those of its announcement.
    _gpu("H100-80GB", 67, 132, 3350, 80),
    # NVIDIA H200 data sheet (SXM5): the H100's processor with more and faster memory, quoted by its announcement's
    # reviews of November 2023 (141 GB, 4.8 TB/s).
    _gpu("H200", 67, 132, 4800, 141),
    # One core of an AMD EPYC with AVX-512, measured with torch 2.13, one thread: 103 GFLOP/s in products of 256 × 256
    # matrices; products of 4 × 4 take 1.3 µs; 24 GB/s in copies. The knee is what products of 32 and 64 leave
    # unexplained. The memory is a share that leaves room for others.
    DeviceKind(
        name="cpu-core",
        peak_flops_per_s=103e9,
        knee_flops=5e4,
        bandwidth_bytes_per_s=24e9,
        memory_bytes=4 * 10**9,
        launch_s=1.3e-6,
    ),
)

DEVICE_KINDS: Mapping[str, DeviceKind] = MappingProxyType({kind.name: kind for kind in _KINDS})
"""The kinds of devices that are known, by name."""


def device_kind(name: str) -> DeviceKind:
    """Return the kind of this name.

    Raises:
        ValueError: It is not known; the message lists those that are.
    """
    if name not in DEVICE_KINDS:
        raise ValueError(f"device kind {name!r} is not known; known are {', '.join(DEVICE_KINDS)}")
    return DEVICE_KINDS[name]


def roofline_profile(graph: ComputationGraph, kind: str | DeviceKind, sizes: Sequence[int]) -> Profile:
    """Return what the operators of a graph cost on a kind of device.

    An operator is one kernel in the forward pass, and in the backward pass one or, where that has over 1.5 times the
    operations, two of equal size: the gradients of its input and of its parameters. Light operations that capture
    folded into an operator add bytes, not kernels. The bytes of a kernel are

    - forward: the activations that it reads and writes, and its parameters once;
    - backward, over all kernels: twice those activations (it reads what was saved and the gradient of the result, and
      writes the gradient of the input), its parameters once more, and the sums of their gradients read and written.

    An operator with parameters but no operations looks rows up. Its forward pass reads no more of its parameters than
    it moves activations; a bag of rows is so counted as the one row that it becomes. Its backward pass is PyTorch's for
    dense gradients, over the whole table.

    Args:
        graph: The operators, with operations and bytes per sample.
        kind: The device, by name or with numbers of one's own.
        sizes: The samples that one replica takes at a time, in any order.

    Raises:
        ValueError: The kind is not known.
        GraphPipeError: There is no size, or one is less than 1.
    """
    device = device_kind(kind) if isinstance(kind, str) else kind
    ordered = tuple(sorted(set(sizes)))
    return Profile(
        operators=tuple(operator.name for operator in graph.operators),
        sizes=ordered,
        forward_s=_table(graph, ordered, lambda operator, size: _forward_s(device, operator, size)),
        backward_s=_table(graph, ordered, lambda operator, size: _backward_s(device, operator, size)),
        saved_bytes=_table(graph, ordered, lambda operator, size: operator.saved_bytes * size),
        source=ProfileSource.ROOFLINE,
        device=device.name,
    )


def _table(
    graph: ComputationGraph, sizes: Sequence[int], cost: Callable[[Operator, int], float]
) -> NDArray[np.float64]:
    found = [[cost(operator, size) for operator in graph.operators] for size in sizes]
    return np.array(found, dtype=np.float64).reshape(len(sizes), len(graph.operators))


def _forward_s(device: DeviceKind, operator: Operator, num_samples: int) -> float:
    moved = operator.moved_bytes * num_samples
    read = operator.parameter_bytes if operator.forward_flops else min(operator.parameter_bytes, moved)
    return device.kernel_s(operator.forward_flops * num_samples, moved + read)


def _backward_s(device: DeviceKind, operator: Operator, num_samples: int) -> float:
    if not operator.has_backward:
        return 0.0
    num_bytes = 2 * operator.moved_bytes * num_samples + 2 * operator.trainable_bytes
    # The gradient of a look-up needs no rows, only their positions.
    num_bytes += operator.parameter_bytes if operator.forward_flops else 0
    num_kernels = 2 if operator.backward_flops > 1.5 * operator.forward_flops else 1
    flops = operator.backward_flops * num_samples
    return num_kernels * device.kernel_s(flops / num_kernels, num_bytes / num_kernels)
