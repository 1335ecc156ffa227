"""Times on a command line: 30 (seconds), 30s, 5m, 2h or 1h30m."""

from __future__ import annotations

import re
from collections.abc import Callable

import click

_N = "([0-9]+(?:[.][0-9]+)?)"
_SPAN = re.compile(f"(-?)(?:{_N}|(?:{_N}d)?(?:{_N}h)?(?:{_N}m)?(?:{_N}s)?)")
_UNITS = (1.0, 86_400.0, 3_600.0, 60.0, 1.0)


def duration(low: float, high: float) -> Callable[[str | float], float]:
    """The type of an option that takes a time: seconds, or numbers with units. Out of bounds is a usage error."""

    def time(value: str | float) -> float:
        seconds = value if isinstance(value, float) else _in_seconds(value)
        if not low <= seconds <= high:
            raise click.BadParameter(f"{value} is not from {_text(low)} to {_text(high)}")
        return seconds

    return time


def _in_seconds(text: str) -> float:
    found = _SPAN.fullmatch(text)
    if found is None or not any(found.groups()[1:]):
        raise click.BadParameter(f"a time is 30 (seconds), 30s, 5m, 2h or 1h30m, not {text!r}")
    sign, *numbers = found.groups()
    seconds = sum(float(number) * unit for number, unit in zip(numbers, _UNITS, strict=True) if number)
    return -seconds if sign else seconds


def _text(seconds: float) -> str:
    for unit, size in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds > size and seconds % size == 0:
            return f"{seconds / size:g}{unit}"
    return f"{seconds:g}s"
