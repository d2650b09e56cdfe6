"""Each value of a file says where it is and what is wrong with it."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphpipe.errors import FieldError
from graphpipe.fields import Field, read_json


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


DOCUMENT = Field(
    {"stages": [{"size": 3, "devices": [0, "x"]}, {"size": True}], "colour": "green", "s": 1e400, "n": 10**5000},
    "<the document>",
)


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda d: d["stages"].elements()[0]["devices"].elements()[1].integer(), r"stages\[0\]\.devices\[1\] must be"),
        (lambda d: d["stages"].elements()[1]["size"].integer(), r"stages\[1\]\.size must be a whole number, not True"),
        (lambda d: d["stages"].elements()[0]["size"].integer(4), r"size must be a whole number from 4 to .*, not 3"),
        (lambda d: d["stages"].elements()[0]["width"], r"stages\[0\]\.width is missing"),
        (lambda d: d["stages"].elements()[0].members(frozenset({"sizes", "devices"})), r"did you mean 'sizes'\?"),
        (lambda d: d["stages"].elements()[0]["size"].members(), r"stages\[0\]\.size must be an object, not 3"),
        (lambda d: d["colour"].choice(Colour), r"colour must be one of 'red', 'blue', not 'green'"),
        (lambda d: d["colour"].elements(), r"colour must be a list, not 'green'"),
        (lambda d: d["s"].number(), r"s must be a number from 0 to 1e\+30, not inf"),
        (lambda d: d["n"].number(), r"n must be a number from 0 to 1e\+30, not one int of great length"),
        (lambda d: d["n"].integer(), r"n must be a whole number from 0 to 9223372036854775807"),
        (lambda d: d.elements(), r"<the document> must be a list"),
    ],
)
def test_an_error_begins_with_the_path(read: Any, message: str) -> None:
    with pytest.raises(FieldError, match=message):
        read(DOCUMENT)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_reading_anything_as_anything_gives_it_or_a_field_error(value: Any) -> None:
    field = Field(value, "value")
    for read in (field.integer, field.number, field.boolean, field.text, field.texts, field.elements, field.members):
        try:
            found = read()
        except FieldError:
            continue
        if read not in (field.elements, field.members, field.texts):
            assert found == value
            assert type(found) is type(value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "Expecting property name"),
        (b'{"a": \xff}', "byte 6 is not UTF-8"),
        (b'{"a": NaN}', "NaN is not a number of JSON"),
        (b"[-Infinity]", "-Infinity is not a number of JSON"),
        (b'{"a": 1, "b": 2, "a": 3}', "an object has 'a' twice"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[" + b"9" * 5000 + b"]", "Exceeds the limit"),
        (b'"\\ud80', "Invalid"),
        (b"", "Expecting value"),
    ],
)
def test_a_file_that_is_no_json_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(FieldError, match=message):
        read_json(path)
