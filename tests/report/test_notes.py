from __future__ import annotations

from graphpipe.report.notes import note_lines


def test_notes_are_read_by_the_units_in_their_names() -> None:
    notes = {
        "lower_bound_s": 0.125,
        "distance": 0.034,
        "idle_share": [0.5, 0.25],
        "peak_bytes": 2_000_000,
        "samples_per_s": 12.5,
        "is_optimal": True,
        "sizes": [1, 2],
        "none": None,
        "idle_devices": [],
        "iteration_s_by_micro_batch_size": {"8": 0.25, "16": 0.5},
        "search": {"wall_s": 2, "states": {"kept": 10}},
        "choices": [{"stage": 1, "forward_s": 0.002}],
        "s": 1,
    }
    assert note_lines(notes) == (
        ("lower bound", "125 ms"),
        ("distance", "3.4 %"),
        ("idle share", "50 %, 25 %"),
        ("peak", "2 MB"),
        ("samples/s", "12.5"),
        ("is optimal", "yes"),
        ("sizes", "1, 2"),
        ("none", "unknown"),
        ("idle devices", "none"),
        ("iteration by micro batch size", "8: 250 ms, 16: 500 ms"),
        ("search › wall", "2 s"),
        ("search › states › kept", "10"),
        ("choices", "(stage: 1, forward: 2 ms)"),
        ("s", "1"),
    )


def test_what_planners_are_known_to_say_comes_first() -> None:
    notes = {
        "search_s": 0.5,
        "certificate": {"ratio": 1.034, "lower_bound_s": 0.1, "work_s": 0.1, "other": 1},
        "why": "one device works all the time",
    }
    assert note_lines(notes) == (
        ("what limits it", "one device works all the time"),
        ("lower bound", "100 ms"),
        ("lower bound by work", "100 ms"),
        ("iteration / lower bound", "1.034"),
        ("search", "500 ms"),
        ("certificate › other", "1"),
    )


def test_long_lists_are_cut() -> None:
    assert note_lines({"knots": [["a", "b"]] * 10}) == (
        ("parts put in line", ", ".join(["(a, b)"] * 8) + " and 2 more"),
    )
    assert note_lines({}) == ()
