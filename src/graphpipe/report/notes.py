"""What a planner has to say about its strategy, made readable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from graphpipe.estimate import format_bytes
from graphpipe.report.units import format_number, format_seconds, format_share

_MOST_ITEMS = 8

# Notes that planners are known to leave, by path: what they are called, and their unit where the name does not tell.
_KNOWN = {
    "why": ("what limits it", ""),
    "certificate.lower_bound_s": ("lower bound", "s"),
    "certificate.work_s": ("lower bound by work", "s"),
    "certificate.path_s": ("lower bound by path", "s"),
    "certificate.ratio": ("iteration / lower bound", "ratio"),
    "certificate.best_of_all_plans": ("best of all plans", ""),
    "knots": ("parts put in line", ""),
}
# The last word of a name that is a share.
_SHARES = ("distance", "gap", "share", "fraction")
_SUFFIXES = {"_bytes": "bytes", "_seconds": "s", "_s": "s"}


def note_lines(notes: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return a planner's notes as pairs of name and text, those that are known first.

    Units are read off the names, as they are everywhere in GraphPipe: ``lower_bound_s`` is a duration, ``peak_bytes`` a
    size, ``distance`` and ``idle_share`` are shares, ``iteration_s_by_size`` holds a duration for each size. Notes in
    notes are named with a ``›``.
    """
    lines = list(_lines(notes, ""))
    known = list(_KNOWN)
    lines.sort(key=lambda line: known.index(line[0]) if line[0] in _KNOWN else len(known))
    return tuple((name, text) for _, name, text in lines)


def _lines(notes: Mapping[str, Any], above: str) -> list[tuple[str, str, str]]:
    """Return path, name and text of each note, those inside others included."""
    found: list[tuple[str, str, str]] = []
    for key, value in notes.items():
        path = f"{above}.{key}" if above else str(key)
        name, unit = _KNOWN.get(path, _name_and_unit(str(key)))
        if isinstance(value, Mapping) and "_by_" not in str(key):
            found += [(p, n if p in _KNOWN else f"{name} › {n}", text) for p, n, text in _lines(value, path)]
        else:
            found.append((path, name, _text(value, unit)))
    return found


def _name_and_unit(key: str) -> tuple[str, str]:
    measure, by, rest = key.partition("_by_")
    words = measure.replace("_per_s", "/s")
    unit = ""
    if words.rsplit("_", maxsplit=1)[-1] in _SHARES:
        unit = "share"
    else:
        for suffix, meant in _SUFFIXES.items():
            if words.endswith(suffix):
                words, unit = words.removesuffix(suffix), meant
                break
    return (words + by + rest).replace("_", " "), unit


def _text(value: object, unit: str) -> str:
    match value:
        case bool():
            return "yes" if value else "no"
        case None:
            return "unknown"
        case int() | float():
            return _quantity(value, unit)
        case str():
            return value
        case Mapping():
            items = []
            for key, inner in value.items():
                name, own = _name_and_unit(str(key))
                items.append(f"{name}: {_text(inner, own or unit)}")
            return _joined(items)
        case Sequence():
            return _joined([f"({_text(v, unit)})" if isinstance(v, list | dict) else _text(v, unit) for v in value])
        case _:
            return str(value)


def _joined(items: Sequence[str]) -> str:
    more = len(items) - _MOST_ITEMS
    return ", ".join(items[:_MOST_ITEMS]) + (f" and {more} more" if more > 0 else "") or "none"


def _quantity(value: float, unit: str) -> str:
    match unit:
        case "s":
            return format_seconds(value)
        case "bytes":
            return format_bytes(value)
        case "share":
            return format_share(value)
        case "ratio":
            return f"{value:.3f}"
        case _:
            return str(value) if isinstance(value, int) else format_number(value)
