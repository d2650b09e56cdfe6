"""A file that was edited, cut or corrupted gives a clear error, or a valid object that says what the file says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graphpipe.cluster import Cluster
from graphpipe.cost import Profile
from graphpipe.errors import FieldError, GraphPipeError, StrategyError
from graphpipe.estimate import estimate
from graphpipe.strategy import Strategy
from tests.stage_graphs import DIAMOND, make_stages, make_strategy

STRATEGY = make_strategy(make_stages(DIAMOND, mini_batch_size=8, sizes=2, devices=[(0, 1), (2,), (3,), (2,)])).to_json()
CLUSTER = Cluster.summit(6).to_json()
PROFILE = Profile(("a", "b"), (1, 4), np.ones((2, 2)), np.ones((2, 2)), np.zeros((2, 2))).to_json()
READERS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "strategy": (STRATEGY, Strategy.from_json),
    "cluster": (CLUSTER, Cluster.from_json),
    "profile": (PROFILE, Profile.from_json),
}

JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([-1, 0, 1, 2, 10**9, 2**63, 10**400])
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["0F9", "chain", "measured", "o0", "\ud800", "\0"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


def paths(tree: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all values of a document."""
    found = [here] if here else []
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list | tuple) else ()
    for key, value in items:
        found += paths(value, (*here, key))
    return found


@st.composite
def damaged(draw: st.DrawFn, document: Any) -> Any:
    """Return a document with some values replaced, removed, repeated or exchanged."""
    data = json.loads(json.dumps(document))
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(paths(data)))
        node = data
        for key in path[:-1]:
            node = node[key]
        match draw(st.sampled_from(["replace", "replace", "remove", "repeat", "exchange"])):
            case "replace":
                node[path[-1]] = draw(JUNK)
            case "remove":
                del node[path[-1]]
            case "repeat" if isinstance(node, list):
                node.insert(path[-1], node[path[-1]])
            case _:
                other = draw(st.sampled_from(list(node) if isinstance(node, dict) else range(len(node))))
                node[path[-1]], node[other] = node[other], node[path[-1]]
        if not paths(data):
            break
    return data


def holds(written: Any, found: Any) -> bool:
    """Return whether all that a file has was read: what it lacks has a default, and a strategy may have more to say."""
    if isinstance(found, dict):
        return all(holds(written[key], value) for key, value in found.items() if key in written)
    if isinstance(found, list):
        return len(found) == len(written) and all(map(holds, written, found))
    return bool(written == found)


@pytest.mark.parametrize("name", READERS)
@given(data=st.data())
@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_damaged_document_is_refused_or_read_as_it_is(name: str, data: st.DataObject) -> None:
    document, read = READERS[name]
    given_document = data.draw(damaged(document))
    try:
        loaded = read(given_document)
    except GraphPipeError:
        return  # And no other kind of exception.
    written = json.loads(json.dumps(loaded.to_json()))
    assert read(written).to_json() == loaded.to_json()
    assert holds(written, json.loads(json.dumps(given_document)))
    if name == "strategy":
        estimate(loaded)


@given(at=st.integers(0, 10_000), length=st.integers(0, 20), new=st.binary(max_size=8))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_file_with_other_bytes_is_refused_or_read_as_it_is(
    at: int, length: int, new: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = json.dumps(STRATEGY).encode()
    at %= len(content)
    path = tmp_path_factory.getbasetemp() / "fuzzed.json"
    path.write_bytes(content[:at] + new + content[at + length :])
    try:
        loaded = Strategy.load(path)
    except StrategyError:
        return
    assert Strategy.from_json(loaded.to_json()).to_json() == loaded.to_json()


def changed(*path: Any, value: Any) -> Any:
    data = json.loads(json.dumps(STRATEGY))
    node = data
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    return data


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (changed("stages", 2, "devices", 0, value="3"), r"stages\[2\]\.devices\[0\] must be a whole number, not '3'"),
        (changed("stages", 1, "micro_batch_size", value=0), r"stages\[1\]\.micro_batch_size must be a whole number fr"),
        (changed("stages", 0, "recompute", value="some"), r"stages\[0\]\.recompute must be one of 'none', 'all'"),
        (changed("schedule", 0, "tasks", value="0F0 0X1"), r"schedule\[0\]\.tasks: '0X1' is not a task"),
        (changed("cluster", "devices", 1, "memory_bytes", value=-5), r"cluster\.devices\[1\]\.memory_bytes must be"),
        (changed("cluster", "devices", 0, "knid", value="x"), r"cluster\.devices\[0\]\.knid is unknown; .* 'kind'\?"),
        (changed("cluster", "inside_node", "latency_s", value=None), r"cluster\.inside_node\.latency_s must be a num"),
        (changed("profile", "forward_s", 0, 1, value=float("nan")), r"profile\.forward_s\[0\]\[1\] must be a number"),
        (changed("graph", "operators", 3, "inputs", value="x"), r"graph\.operators\[3\]\.inputs must be a list"),
        (changed("graph", "values", 0, "producer", value="o3"), r"operators of 'test' are not in a topological order"),
        (changed("cluster", "devices", value=[]), r"a cluster needs at least one device"),
        (changed("stages", 1, "devices", value=[9]), r"stage 1 is on device 9; the cluster has devices 0 to 3"),
        (changed("stages", 1, "devices", value=[3]), r"task 1F0 is ordered on devices \[2\], which lack its stage"),
    ],
)
def test_the_path_of_the_bad_field_is_named(data: Any, message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        Strategy.from_json(data)


def test_a_cluster_file_says_where_it_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps({**CLUSTER, "between_nodes": {"latency_s": 1e-6}}))
    with pytest.raises(GraphPipeError, match=r"cluster.json': between_nodes.bandwidth_bytes_per_s is missing"):
        Cluster.load(path)
    path.write_text("[]")
    with pytest.raises(GraphPipeError, match=r"cluster.json': <the cluster> must be an object, not \[\]"):
        Cluster.load(path)
    path.write_text("NaN")
    with pytest.raises(GraphPipeError, match=r"cluster.json' cannot be read: NaN is not a number of JSON"):
        Cluster.load(path)


def test_a_profile_says_where_it_is_wrong() -> None:
    with pytest.raises(FieldError, match=r"backward_s\[1\]\[0\] must be a number from 0 to 1e\+30, not -1"):
        Profile.from_json({**PROFILE, "backward_s": [[1, 1], [-1, 1]]})
    with pytest.raises(FieldError, match=r"saved_bytes has rows of different lengths"):
        Profile.from_json({**PROFILE, "saved_bytes": [[1, 1], [1]]})


def test_old_files_without_later_fields_are_read() -> None:
    data = json.loads(json.dumps(STRATEGY))
    cluster = {
        **data["cluster"],
        "devices": [{"name": d["name"], "memory_bytes": 5} for d in data["cluster"]["devices"]],
    }
    assert Strategy.from_json({**data, "cluster": cluster}).cluster.devices[0].kind == "cpu-core"
