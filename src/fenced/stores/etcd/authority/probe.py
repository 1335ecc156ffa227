"""Known bugs of etcd versions, by the upstream change logs. Pure."""

from __future__ import annotations

import re
from typing import NamedTuple


class KnownBug(NamedTuple):
    """What can happen under which condition, and the first patch of each minor version without it.

    A minor version that is not listed never had the bug, unless it is older than all that are.
    """

    what: str
    issue: int
    fixed: dict[tuple[int, int], int]
    oldest: tuple[int, int] = (0, 0)


REPEATS_TOKENS = (
    KnownBug("a crash during a compaction can take revisions back", 17780, {(3, 4): 32, (3, 5): 14}),
    KnownBug("a single member that crashes can lose acknowledged writes", 14370, {(3, 4): 21, (3, 5): 5}),
    KnownBug("enabling auth can leave members with different data", 14571, {(3, 4): 22, (3, 5): 6}),
    KnownBug("a crash under load can leave members with different data", 13766, {(3, 5): 3}, (3, 5)),
    KnownBug(
        "a crash during a defragmentation can leave members with different data", 14685, {(3, 5): 6}, (3, 5)
    ),
)
"""Tokens are revisions: with these bugs they can repeat or fall, so the guarantee is best-effort."""
HARMS_LEASES = (
    KnownBug("a former leader can end leases that are alive", 17425, {(3, 4): 31, (3, 5): 13}),
    KnownBug("a renewal can succeed on a lease that is revoked", 20616, {(3, 4): 38, (3, 5): 23, (3, 6): 5}),
)
"""A holder can believe in a lease that has ended, as after a pause. Guards refuse it; tokens still rise."""


def version_of(text: str) -> tuple[int, int, int] | None:
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2]), int(found[3])) if found else None


def known_bugs(text: str, bugs: tuple[KnownBug, ...]) -> tuple[str, ...]:
    """The bugs of this version: one sentence each, with its condition and the fixed versions."""
    version = version_of(text)
    if version is None:
        return ()
    minor, patch = version[:2], version[2]
    return tuple(
        f"in etcd {text} {bug.what} (etcd {bug.issue}; fixed in {_fixed(bug)})"
        for bug in bugs
        if bug.oldest <= minor and (minor < min(bug.fixed) or patch < bug.fixed.get(minor, 0))
    )


def _fixed(bug: KnownBug) -> str:
    """Later minor versions have the fix from their beginning, and are not listed."""
    return ", ".join(f"{major}.{minor}.{patch}" for (major, minor), patch in bug.fixed.items()) + " or later"


def warnings(text: str) -> tuple[str, ...]:
    """The bugs that harm leases, in one line."""
    bugs = known_bugs(text, HARMS_LEASES)
    return (
        (f"{'; '.join(bugs)}. Tokens still rise, and guards refuse a holder that was overtaken",)
        if bugs
        else ()
    )
