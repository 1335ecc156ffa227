"""Known bugs of etcd versions. Pure."""

from __future__ import annotations

import re

OLDEST = (3, 4, 0)
_BUGS: tuple[tuple[dict[tuple[int, int], int], str], ...] = (
    ({(3, 4): 22, (3, 5): 6}, "a crash under load can leave members with different data (etcd 13766)"),
    ({(3, 4): 31, (3, 5): 13}, "a former leader can end leases that are alive"),
    ({(3, 4): 32, (3, 5): 14}, "the revision can go back after a crash during a compaction (etcd 17780)"),
    ({(3, 4): 38, (3, 5): 23}, "a keep-alive can succeed on a lease that is revoked"),
)
"""The first patch of each minor version that fixes a bug; later minor versions never had it."""


def version_of(text: str) -> tuple[int, int, int] | None:
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2]), int(found[3])) if found else None


def known_bugs(text: str) -> list[str]:
    """What this version can do to a lease or a token, in a sentence each."""
    version = version_of(text)
    if version is None:
        return []
    minor, patch = version[:2], version[2]
    return [bug for fixed, bug in _BUGS if minor < min(fixed) or patch < fixed.get(minor, 0)]


def warning(url: str, text: str) -> str | None:
    bugs = known_bugs(text)
    if not bugs:
        return None
    return f"{url} runs etcd {text}, in which {'; '.join(bugs)}. Take 3.4.38, 3.5.23, 3.6 or later."
