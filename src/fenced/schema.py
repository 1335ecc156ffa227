"""Which clients may work with a stored schema: one rule and one sentence for all stores.

A schema has two numbers: its version, and the oldest version that a client must know to work with it. A change that
only adds leaves the second number as it is, so that old and new clients work side by side during a rolling upgrade.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from fenced import __version__
from fenced.errors import Misconfigured

RELEASE: Final = __version__


@dataclass(frozen=True, slots=True)
class Schema:
    """The schema of a store, as it is stored there."""

    version: int
    readable_by: int
    """The oldest schema version that a client must know."""
    release: str = ""
    """The fenced that stored it."""


def check_readable(where: str, stored: Schema, known: int) -> None:
    """Misconfigured if a client that knows schema `known` is too old for this one."""
    if stored.readable_by > known:
        needed = f"fenced {stored.release} or later" if stored.release else "a later fenced"
        raise Misconfigured(
            f"{where} has schema {stored.version}, which a client can use if it knows schema {stored.readable_by} or "
            f"later; this fenced {RELEASE} knows {known}: install {needed}"
        )


def is_older(release: str, other: str) -> bool:
    """Whether a release comes before another one."""

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(".") if part.isdigit()]

    return numbers(release) < numbers(other)
