"""What a stage holds and where it is, in few words."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby

from graphpipe.cluster import Cluster
from graphpipe.graph import Operator
from graphpipe.stage import StageGraph

_NUMBERED = re.compile(r"(.*?)(\d+)")


def stage_label(stages: StageGraph, x: int) -> str:
    """Return what stage `x` holds: the module path that most of its operators share, and how many others there are.

    ``vision_model.encoder.layers.0-1 (+3)`` holds layers 0 and 1 and three operators from elsewhere; ``head.*`` holds
    several modules of ``head``, none of which stands out.
    """
    return operators_label([stages.graph.operators[i] for i in stages.operator_positions[x]])


def operators_label(operators: Sequence[Operator]) -> str:
    """Return what some operators are, at least one, as `stage_label` does for those of a stage."""
    text, covered = _summary([tuple((o.module or o.name).split(".")) for o in operators])
    others = len(operators) - covered
    return f"{text} (+{others})" if others else text


def _summary(paths: Sequence[tuple[str, ...]]) -> tuple[str, int]:
    """Return a text for the paths that share the most, and how many those are."""
    shared = 0
    while all(len(path) > shared for path in paths) and len({path[shared] for path in paths}) == 1:
        shared += 1
    prefix = ".".join(paths[0][:shared])
    families: dict[str, list[tuple[str, ...]]] = {}
    for path in paths:
        families.setdefault(_family(path, shared), []).append(path)
    name, largest = max(families.items(), key=lambda item: len(item[1]))  # The first of equals.
    if len(families) > 1:
        if prefix and 2 * len(largest) < len(paths):
            return f"{prefix}.*", len(paths)
        return _summary(largest)
    if not name:
        return prefix, len(paths)
    numbers = sorted({int(path[shared][len(name) - 1 :]) for path in largest})
    return f"{prefix}{'.' if prefix else ''}{name[1:]}{ranges(numbers)}", len(paths)


def _family(path: tuple[str, ...], at: int) -> str:
    """Return what the members of a numbered family share: ``#layer`` for ``layer3``; else the component itself."""
    if len(path) <= at:
        return ""
    match = _NUMBERED.fullmatch(path[at])
    return f"#{match[1]}" if match else path[at]


def ranges(numbers: Iterable[int], dash: str = "-") -> str:
    """Return ascending numbers as ranges: ``0-3,5``."""
    found = []
    for _, group in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        found.append(str(run[0]) if len(run) == 1 else f"{run[0]}{dash}{run[-1]}")
    return ",".join(found)


def device_name(cluster: Cluster, device: int) -> str:
    """Return what the cluster calls a device; a trace may know more devices than the cluster."""
    return cluster.devices[device].name if 0 <= device < len(cluster) else f"device {device}"


def devices_label(cluster: Cluster, devices: Sequence[int]) -> str:
    """Return the names of some devices: ``gpu0-3``, ``gpu0,2``, ``left, right``, ``a, b (+6)``.

    Names that two devices of the cluster share are followed by the position: ``gpu0 (#4)``.
    """
    counts = Counter(device.name for device in cluster.devices)
    names = []
    for device in devices:
        name = device_name(cluster, device)
        names.append(name if counts[name] < 2 else f"{name} (#{device})")
    matches = [_NUMBERED.fullmatch(name) for name in names]
    bases = {match[1] if match else None for match in matches}
    if None not in bases and len(bases) == 1:
        return f"{bases.pop()}{ranges(sorted(int(match[2]) for match in matches if match))}"
    return ", ".join(names) if len(names) <= 3 else f"{', '.join(names[:2])} (+{len(names) - 2})"
