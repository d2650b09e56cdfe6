"""Numbers as people read them: seconds, shares, axis ticks. Bytes are formatted by `graphpipe.estimate`."""

from __future__ import annotations

import math

_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def format_seconds(seconds: float) -> str:
    """Return a duration with three digits and the unit that suits it: 1.25 s, 3.4 ms, 120 µs."""
    if not seconds:
        return "0 s"
    for size, unit in _UNITS:
        # From 999.5 of a unit on, three digits of it would read 1e+03.
        if abs(seconds) >= 0.9995 * size:
            return f"{_digits(seconds / size)} {unit}"
    return f"{_digits(seconds * 1e6)} µs"


def format_share(share: float) -> str:
    """Return a share in percent: 38 %, 0.4 %."""
    percent = 100 * share
    return f"{percent:.0f} %" if abs(percent) >= 9.95 or abs(percent) < 0.05 else f"{percent:.1f} %"


def format_number(number: float) -> str:
    """Return a number with three digits, or all digits before the point: 12400, 3.14, 0.00012."""
    return _digits(number)


def _digits(number: float) -> str:
    return f"{number:.0f}" if abs(number) >= 999.5 else f"{number:.3g}"


def round_ticks(end: float, at_most: int) -> tuple[float, ...]:
    """Return multiples of a round step from 0 up to `end`, as many steps as `at_most`, at least 3, allows.

    A round step is 1, 2 or 5 times a power of ten. The result is ``(0.0,)`` where `end` is not positive.
    """
    if end <= 0 or not math.isfinite(end):
        return (0.0,)
    power = 10.0 ** math.floor(math.log10(end / at_most))
    step = next(factor * power for factor in (1, 2, 5, 10, 20) if end / (factor * power) <= at_most)
    return tuple(i * step for i in range(int(end / step + 1e-9) + 1))


def format_ticks(ticks: tuple[float, ...]) -> tuple[str, ...]:
    """Return the labels of `round_ticks` in seconds, all in the unit that suits the last one."""
    size, unit = next((u for u in _UNITS if ticks[-1] >= u[0] * 0.9995), _UNITS[-1])
    return tuple(f"{tick / size:.6g} {unit}" if tick else "0" for tick in ticks)
