from __future__ import annotations

import pytest

from graphpipe.cluster import LOOPBACK, Cluster, Device
from graphpipe.report.labels import devices_label, ranges, stage_label
from tests.report.samples import strategy_of


@pytest.mark.parametrize(
    ("modules", "label"),
    [
        (["vision.layers.0.attention", "vision.layers.0.mlp", "vision.layers.1", "norm"], "vision.layers.0-1 (+1)"),
        (["layers.0", "layers.2", "layers.1", "layers.9"], "layers.0-2,9"),
        (["features.conv1", "features.conv2"], "features.conv1-2"),
        (["h.3.ln", "h.3.attn", "h.3.mlp"], "h.3.*"),
        (["stages.1.blocks.4", "stages.1.blocks.5"], "stages.1.blocks.4-5"),
        (["head"], "head"),
        (["head", "head"], "head"),
        (["head.act", "head.norm", "head.out"], "head.*"),
        (["tower", "tower.proj", "tower.proj"], "tower.proj (+1)"),
        (["left", "right", "right"], "right (+1)"),
        (["left", "right"], "left (+1)"),
    ],
)
def test_a_stage_is_called_by_what_most_of_its_operators_share(modules: list[str], label: str) -> None:
    strategy = strategy_of([modules], [], mini_batch_size=4, micro_batch_sizes=[2], devices=[(0,)])
    assert stage_label(strategy.stages, 0) == label


def test_devices_are_listed_as_ranges_where_their_names_are_numbered() -> None:
    cluster = Cluster.uniform(12, memory_bytes=1)
    assert devices_label(cluster, (0, 1, 2, 3)) == "cpu0-3"
    assert devices_label(cluster, (7, 2, 3)) == "cpu2-3,7"
    assert devices_label(cluster, (11,)) == "cpu11"
    assert ranges([]) == ""


def test_devices_without_numbers_or_with_one_name_can_be_told_apart() -> None:
    def named(*names: str) -> Cluster:
        devices = tuple(Device(name=name, memory_bytes=1) for name in names)
        return Cluster(devices=devices, inside_node=LOOPBACK, between_nodes=LOOPBACK)

    assert devices_label(named("left", "right"), (0, 1)) == "left, right"
    assert devices_label(named("a", "b", "c", "d"), (0, 1, 2, 3)) == "a, b (+2)"
    assert devices_label(named("gpu0", "gpu0"), (1,)) == "gpu0 (#1)"
