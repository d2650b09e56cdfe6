"""The devices to plan for, and the links between them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from graphpipe.errors import FieldError, GraphPipeError
from graphpipe.fields import Field, read_json

GIGABYTE = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A processor with its own memory that runs stages.

    Attributes:
        name: Shown to people, such as ``gpu3`` or ``cpu0``.
        memory_bytes: What a process may use of its memory.
        node: The machine that it is in; devices of one node talk over the faster link.
        kind: A name in `graphpipe.cost.roofline.DEVICE_KINDS`.
    """

    name: str
    memory_bytes: int
    node: int = 0
    kind: str = "cpu-core"


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What a message between two devices costs.

    Attributes:
        latency_s: Seconds until the first byte arrives.
        bandwidth_bytes_per_s: Bytes per second in one direction.
    """

    latency_s: float
    bandwidth_bytes_per_s: float

    def __post_init__(self) -> None:
        if self.latency_s < 0 or self.bandwidth_bytes_per_s <= 0:
            raise GraphPipeError(
                f"a link needs a latency of at least 0 s and a positive bandwidth, got {self.latency_s} s and "
                f"{self.bandwidth_bytes_per_s} bytes/s"
            )

    def transfer_s(self, num_bytes: float) -> float:
        """Return the seconds that a message of `num_bytes` takes on a free link."""
        return self.latency_s + num_bytes / self.bandwidth_bytes_per_s


# Processes on one machine, over gloo and the loopback device. Measured on two cores: a 16 MB tensor takes 12.7 ms.
LOOPBACK = Link(latency_s=150e-6, bandwidth_bytes_per_s=1.3e9)
# NVLink 2.0 of a V100: 25 GB/s a direction and link, two links between neighbours of a Summit node (Oak Ridge's guide
# to Summit; nodes that hold four V100s instead of six have three). InfiniBand EDR: 100 Gb/s, as the GraphPipe paper
# says, although a Summit node has two such ports. Both latencies are round figures that we assume.
NVLINK2_X2 = Link(latency_s=5e-6, bandwidth_bytes_per_s=50e9)
INFINIBAND_EDR = Link(latency_s=5e-6, bandwidth_bytes_per_s=12.5e9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Devices, numbered from 0, and the two kinds of links between them.

    Attributes:
        devices: Device `i` runs the process of rank `i`. Devices of a node follow each other.
        inside_node: The link between two devices of one node.
        between_nodes: The link between devices of two nodes.

    Raises:
        GraphPipeError: There is no device, or a device has no memory, or a node's devices are scattered.
    """

    devices: tuple[Device, ...]
    inside_node: Link
    between_nodes: Link

    def __post_init__(self) -> None:
        if not self.devices:
            raise GraphPipeError("a cluster needs at least one device")
        for device in self.devices:
            if device.memory_bytes <= 0:
                raise GraphPipeError(f"device {device.name} has {device.memory_bytes} bytes of memory; give it some")
        nodes = [device.node for device in self.devices]
        if nodes != sorted(nodes):
            raise GraphPipeError(f"list the devices node by node; their nodes are {nodes}")

    def __len__(self) -> int:
        return len(self.devices)

    def link(self, source: int, target: int) -> Link:
        """Return the link between two devices."""
        same = self.devices[source].node == self.devices[target].node
        return self.inside_node if same else self.between_nodes

    def slowest_link(self, devices: Sequence[int]) -> Link:
        """Return the slowest link among a group of devices."""
        # Nodes ascend with the devices.
        is_inside = not devices or self.devices[min(devices)].node == self.devices[max(devices)].node
        return self.inside_node if is_inside else self.between_nodes

    @property
    def devices_per_node(self) -> int:
        """The number of devices of the largest node."""
        nodes = [device.node for device in self.devices]
        return max(nodes.count(node) for node in set(nodes))

    @classmethod
    def uniform(
        cls,
        num_devices: int,
        *,
        memory_bytes: int,
        kind: str = "cpu-core",
        devices_per_node: int | None = None,
        inside_node: Link = LOOPBACK,
        between_nodes: Link | None = None,
    ) -> Cluster:
        """Return a cluster of equal devices, filled node by node.

        Raises:
            GraphPipeError: `num_devices` is less than 1.
        """
        per_node = devices_per_node or max(num_devices, 1)
        prefix = "cpu" if kind == "cpu-core" else "gpu"
        devices = tuple(
            Device(name=f"{prefix}{i}", memory_bytes=memory_bytes, node=i // per_node, kind=kind)
            for i in range(num_devices)
        )
        return cls(devices=devices, inside_node=inside_node, between_nodes=between_nodes or inside_node)

    @classmethod
    def summit(cls, num_devices: int) -> Cluster:
        """Return the cluster of the GraphPipe paper: nodes of four V100 with 16 GB, NVLink and InfiniBand EDR."""
        return cls.uniform(
            num_devices,
            memory_bytes=16 * GIGABYTE,
            kind="V100-16GB",
            devices_per_node=4,
            inside_node=NVLINK2_X2,
            between_nodes=INFINIBAND_EDR,
        )

    @classmethod
    def detect(cls, num_devices: int | None = None) -> Cluster:
        """Return this machine: its GPUs where ``nvidia-smi`` finds some, else one device a CPU core.

        Args:
            num_devices: Use this many; by default all GPUs, or all cores.

        Raises:
            GraphPipeError: There are fewer GPUs than asked for. (Cores may be oversubscribed.)
        """
        gpus = _detect_gpus()
        if gpus:
            wanted = num_devices or len(gpus)
            if wanted > len(gpus):
                raise GraphPipeError(f"{wanted} devices are asked for, this machine has {len(gpus)} GPUs")
            devices = tuple(
                Device(name=f"gpu{i}", memory_bytes=memory, kind=kind) for i, (kind, memory) in enumerate(gpus[:wanted])
            )
            return cls(devices=devices, inside_node=NVLINK2_X2, between_nodes=INFINIBAND_EDR)
        wanted = num_devices or len(os.sched_getaffinity(0))
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return cls.uniform(wanted, memory_bytes=memory // max(wanted, 1))

    def with_memory(self, memory_bytes: int) -> Cluster:
        """Return the same cluster with another amount of memory on every device."""
        return replace(self, devices=tuple(replace(d, memory_bytes=memory_bytes) for d in self.devices))

    def to_json(self) -> dict[str, Any]:
        """Return the cluster as plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: object) -> Cluster:
        """Return the cluster that `to_json` wrote.

        Raises:
            GraphPipeError: A field is missing, or the cluster is not valid.
        """
        cluster = Field(data, "<the cluster>")
        return cls(
            devices=tuple(_device(field) for field in cluster["devices"].elements()),
            inside_node=_link(cluster["inside_node"]),
            between_nodes=_link(cluster["between_nodes"]),
        )

    @classmethod
    def load(cls, path: str | Path) -> Cluster:
        """Return the cluster in a JSON file.

        Raises:
            GraphPipeError: The file is missing or is not a cluster.
        """
        try:
            data = read_json(Path(path))
        except FileNotFoundError:
            raise GraphPipeError(f"there is no cluster file {str(path)!r}") from None
        except FieldError as error:
            raise GraphPipeError(f"cluster file {str(path)!r} cannot be read: {error}") from error
        try:
            return cls.from_json(data)
        except GraphPipeError as error:
            raise GraphPipeError(f"cluster file {str(path)!r}: {error}") from error


def _device(field: Field) -> Device:
    field.members(_DEVICE)
    return Device(
        name=field["name"].text(),
        memory_bytes=field["memory_bytes"].integer(1),
        node=field.get("node", 0).integer(),
        kind=field.get("kind", "cpu-core").text(),
    )


def _link(field: Field) -> Link:
    field.members(_LINK)
    return Link(
        latency_s=field["latency_s"].number(), bandwidth_bytes_per_s=field["bandwidth_bytes_per_s"].number(minimum=1.0)
    )


_DEVICE, _LINK = (frozenset(f.name for f in fields(kind)) for kind in (Device, Link))


def _detect_gpus() -> list[tuple[str, int]]:
    """Return kind and memory of each GPU that ``nvidia-smi`` lists."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    found = []
    for line in done.stdout.splitlines():
        name, _, mebibytes = line.rpartition(",")
        found.append((name.strip(), int(mebibytes) * 2**20))
    return found
