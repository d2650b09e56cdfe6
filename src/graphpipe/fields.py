"""Values of a JSON document, each with its path, so that what is wrong with a file can be found in it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from graphpipe.errors import FieldError

_Choice = TypeVar("_Choice", bound=StrEnum)

# No byte, second, operation or sample that we count comes near; far below, sums and products stay finite.
LARGEST_NUMBER = 1e30
LARGEST_INTEGER = 2**63 - 1


class Field:
    """A value, and where it is: ``stages[2].devices[0]``.

    Args:
        value: Plain data, as `json.loads` returns it, or a `Field`, which is taken as it is.
        path: Where it is; for a whole document, what it is, in angle brackets.
    """

    def __init__(self, value: object, path: str) -> None:
        self.value: Any = value.value if isinstance(value, Field) else value
        self.path: str = value.path if isinstance(value, Field) else path

    def error(self, expected: str) -> FieldError:
        """Return the error that this value is not what was expected."""
        try:
            text = repr(self.value)
        except (ValueError, RecursionError):
            text = f"one {type(self.value).__name__} of great length or depth"
        return FieldError(f"{self.path} must be {expected}, not {text if len(text) <= 60 else f'{text[:57]}...'}")

    def __getitem__(self, name: str) -> Field:
        """Return a member of an object.

        Raises:
            FieldError: This is no object, or has no such member.
        """
        members = self.members()
        if name not in members:
            raise FieldError(f"{self._path_of(name)} is missing")
        return members[name]

    def get(self, name: str, default: object) -> Field:
        """Return a member of an object, or a field with a default value where it has none."""
        return self.members().get(name, Field(default, self._path_of(name)))

    def members(self, known: frozenset[str] | None = None) -> dict[str, Field]:
        """Return the members of an object.

        Args:
            known: All names that it may have; None where it may have any.

        Raises:
            FieldError: This is no object, or it has an unknown member.
        """
        if not isinstance(self.value, Mapping) or not all(isinstance(name, str) for name in self.value):
            raise self.error("an object")
        for name in self.value:
            if known is not None and name not in known:
                near = get_close_matches(name, sorted(known), n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(sorted(known))}"
                raise FieldError(f"{self._path_of(name)} is unknown; {hint}")
        return {name: Field(value, self._path_of(name)) for name, value in self.value.items()}

    def _path_of(self, name: str) -> str:
        return name if self.path.startswith("<") else f"{self.path}.{name}"

    def elements(self) -> list[Field]:
        """Return the elements of a list.

        Raises:
            FieldError: This is no list.
        """
        if not isinstance(self.value, list | tuple):
            raise self.error("a list")
        path = "" if self.path.startswith("<") else self.path
        return [Field(value, f"{path}[{i}]") for i, value in enumerate(self.value)]

    def integer(self, minimum: int = 0) -> int:
        """Return a whole number of at least `minimum`.

        Raises:
            FieldError: It is something else, too small, or above 2⁶³ − 1.
        """
        if isinstance(self.value, bool) or not isinstance(self.value, int):
            raise self.error("a whole number")
        if not minimum <= self.value <= LARGEST_INTEGER:
            raise self.error(f"a whole number from {minimum} to {LARGEST_INTEGER}")
        return self.value

    def number(self, minimum: float = 0.0) -> float:
        """Return a finite number of at least `minimum`.

        Raises:
            FieldError: It is something else, too small, or above `LARGEST_NUMBER`.
        """
        if isinstance(self.value, bool) or not isinstance(self.value, int | float):
            raise self.error("a number")
        if not minimum <= self.value <= LARGEST_NUMBER:  # also where it is not a number
            raise self.error(f"a number from {minimum:g} to {LARGEST_NUMBER:g}")
        found: float = self.value  # A whole number stays one: the fingerprint of a graph is made of its text.
        return found

    def boolean(self) -> bool:
        """Return true or false.

        Raises:
            FieldError: It is something else.
        """
        if not isinstance(self.value, bool):
            raise self.error("true or false")
        return self.value

    def text(self) -> str:
        """Return a text that can be printed and written.

        Raises:
            FieldError: It is something else, or holds half of a surrogate pair.
        """
        if not isinstance(self.value, str) or any("\ud800" <= c <= "\udfff" for c in self.value):
            raise self.error("a text")
        return self.value

    def texts(self) -> tuple[str, ...]:
        """Return a list of texts."""
        return tuple(element.text() for element in self.elements())

    def choice(self, choices: type[_Choice]) -> _Choice:
        """Return one of the values of an enumeration.

        Raises:
            FieldError: It is none of them.
        """
        for choice in choices:
            if self.value == choice.value and isinstance(self.value, str):
                return choice
        raise self.error(f"one of {', '.join(repr(choice.value) for choice in choices)}")


def read_json(path: Path) -> Any:
    """Return the content of a JSON file as plain data.

    Unlike `json.loads` this refuses ``NaN`` and ``Infinity``, which are no JSON, and a name that an object has twice.

    Raises:
        FileNotFoundError: There is no such file.
        FieldError: It cannot be read, or is no JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse, object_pairs_hook=_unique)
    except FileNotFoundError:
        raise
    except UnicodeDecodeError as error:
        raise FieldError(f"byte {error.start} is not UTF-8") from error
    except RecursionError as error:
        raise FieldError("it is nested too deeply") from error
    except OSError as error:
        raise FieldError(error.strerror or str(error)) from error
    except ValueError as error:
        raise FieldError(str(error)) from error


def _refuse(constant: str) -> None:
    raise FieldError(f"{constant} is not a number of JSON")


def _unique(members: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(members)
    if len(found) < len(members):
        names = [name for name, _ in members]
        raise FieldError(f"an object has {next(n for n in names if names.count(n) > 1)!r} twice")
    return found
