from __future__ import annotations

import math
import os
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpipe.errors import CheckpointError
from graphpipe.runtime.plain_data import decode, encode

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
KEYS = st.text() | st.integers() | st.tuples(st.integers(), st.text())
PLAIN = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.tuples(inner, inner) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=6,
)


@settings(max_examples=60)
@given(PLAIN)
def test_plain_data_comes_back_with_its_types(value: Any) -> None:
    found = decode(encode(value, {}, "x"), {})
    assert repr(found) == repr(value)  # 1, 1.0 and True are equal, and not the same


def test_what_json_lacks_comes_back() -> None:
    value = {
        "counter": Counter({30: 1, 80: 2}),
        "ordered": OrderedDict(b=1, a=2),
        "dollar": {"$tensor": "not one"},
        "set": {3, 1},
        "infinite": [math.inf, -math.inf],
        "dtype": torch.bfloat16,
        "numpy": (np.arange(3, dtype=np.uint32), np.float64(0.1)),
    }
    found = decode(encode(value, {}, "x"), {})
    np.testing.assert_array_equal(found["numpy"][0], value["numpy"][0])
    assert found["numpy"][0].dtype == np.uint32
    assert found["numpy"][1] == 0.1
    del found["numpy"], value["numpy"]
    assert found == value
    assert type(found["counter"]) is Counter
    assert math.isnan(decode(encode(math.nan, {}, "x"), {}))


def test_tensors_are_put_aside() -> None:
    tensors: dict[str, torch.Tensor] = {}
    data = encode({"generator": [torch.get_rng_state()]}, tensors, "loader")
    assert list(tensors) == ["loader.generator.0"]
    assert torch.equal(decode(data, tensors)["generator"][0], torch.get_rng_state())


def test_arrays_of_anything_but_numbers_are_refused() -> None:
    with pytest.raises(CheckpointError, match="not one of numbers"):
        decode({"$array": ["S99999999999", []]}, {})
    with pytest.raises(CheckpointError, match=r"table is a torch.sparse_coo tensor"):
        encode(torch.eye(2).to_sparse(), {}, "table")
    with pytest.raises(CheckpointError, match="only those of numbers"):
        encode({"names": np.array(["a"])}, {}, "x")


TENSORS = st.recursive(
    st.builds(torch.full, st.sampled_from([(), (1,), (2, 2)]), st.integers(0, 9)),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(KEYS | st.sampled_from(["a.b", "0", "a"]), inner, max_size=4)
    ),
    max_leaves=8,
)


@settings(max_examples=100)
@given(TENSORS)
def test_no_two_tensors_are_mixed_up(value: Any) -> None:
    tensors: dict[str, torch.Tensor] = {}
    assert repr(decode(encode(value, tensors, "x"), tensors)) == repr(value)


@pytest.mark.parametrize(
    "value",
    [
        {"a.b": torch.ones(2), "a": {"b": torch.zeros(2)}},
        {1: torch.ones(2), "1": torch.zeros(2)},
        {"q": [torch.ones(2)], "q.0": torch.zeros(2)},
    ],
)
def test_names_that_are_spelt_alike_are_told_apart(value: Any) -> None:
    tensors: dict[str, torch.Tensor] = {}
    assert repr(decode(encode(value, tensors, "x"), tensors)) == repr(value)


@pytest.mark.parametrize(
    "number", [torch.tensor(0.1), torch.tensor(math.inf), torch.tensor(True), torch.tensor(3, dtype=torch.uint8)]
)
def test_a_number_that_is_a_tensor_stays_one(number: torch.Tensor) -> None:
    tensors: dict[str, torch.Tensor] = {}
    found = decode(encode({"lr": number}, tensors, "x"), tensors)["lr"]
    assert not tensors
    assert found.dtype == number.dtype
    assert torch.equal(found, number)


def test_an_object_is_refused_by_its_name() -> None:
    with pytest.raises(CheckpointError, match=r"scaler\.hook is .*Linear"):
        encode({"hook": torch.nn.Linear(1, 1)}, {}, "scaler")


@pytest.mark.parametrize(
    "hostile",
    [
        {"$tensor": "absent"},
        {"$dtype": "os"},
        {"$dtype": "load"},
        {"$call": "os.system"},
        {"$float": "1e9"},
        {"$scalar": ["load", 1]},
        {"$tuple": 1},
    ],
)
def test_data_that_nobody_wrote_is_refused(hostile: Any) -> None:
    with pytest.raises(CheckpointError, match="not a value"):
        decode([hostile], {})
    assert os.system  # only its name was in the data
