"""Stamps from the numbers of other locks: ZooKeeper's transactions, etcd's revisions.

A guard needs a realm, a token, a grant and names. The realm comes from the source and the name that an operator gives
to the cluster, so one cluster under two addresses needs one name. The grant comes from whatever differs between any
two grants, also of one process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from fenced.errors import Misconfigured, Misuse, shown
from fenced.values.model import TOKEN_MAX, Stamp, check_name, check_names


@dataclass(frozen=True)
class ForeignSource:
    """Where numbers come from, and when they could repeat or fall."""

    meaning: str
    doubts: tuple[str, ...]
    strict: bool
    """Whether they rise as long as nobody restores a backup. Others are refused under the guarantee `strict`."""
    first: int = 1
    """The smallest number. A token is at least 1."""
    last: int = TOKEN_MAX


SOURCES = {
    "zookeeper-czxid": ForeignSource(
        "the transaction that created a lock's node (kazoo's Lock, Curator's InterProcessMutex)",
        ("a restored data folder goes back", "after 2**21 changes of the leader it is above 2**53"),
        strict=True,
    ),
    "etcd-revision": ForeignSource(
        "the revision that created a lock's key (v3lock, concurrency.Mutex)",
        ("a restored snapshot goes back, unless it was restored with --bump-revision",),
        strict=True,
    ),
    "zookeeper-sequence": ForeignSource(
        "the number in the name of a sequential node",
        ("it starts again at 0 when its parent is deleted, as a container is by itself", "it wraps at 2**31"),
        strict=False,
        first=0,
        last=2**31 - 1,
    ),
}


def foreign_stamp(
    source: str,
    cluster: str,
    names: str | Iterable[str],
    number: int,
    holder: str,
    *,
    seq: int | None = None,
    guarantee: str = "strict",
) -> Stamp:
    """The stamp of somebody else's lock. `holder`: what differs between any two grants, such as session and node."""
    found = SOURCES.get(source)
    if found is None:
        raise Misuse(f"a source is one of {', '.join(SOURCES)}, not {shown(source)}")
    if guarantee not in ("strict", "best-effort"):
        raise Misuse(f"guarantee is 'strict' or 'best-effort', not {shown(guarantee)}")
    if guarantee == "strict" and not found.strict:
        raise Misconfigured(
            f"{source} cannot promise that tokens never repeat: {'; '.join(found.doubts)}. "
            "Take another number, or accept it: guarantee='best-effort'"
        )
    if type(number) is not int or not found.first <= number <= found.last:
        raise Misuse(f"a number of {source} is from {found.first} to {found.last}, not {shown(number)}")
    if not isinstance(holder, str) or not holder:
        raise Misuse(f"a holder is a str that differs between any two grants, not {shown(holder)}")
    check_name(cluster)
    token = number + 1 - found.first
    grant = _digest(f"fenced foreign grant:{source}:{cluster}:{holder}")[:32]
    chosen = check_names([names] if isinstance(names, str) else names)
    return Stamp(foreign_realm(source, cluster), chosen, token, seq, grant)


def foreign_realm(source: str, cluster: str) -> str:
    """The realm of these stamps: what a guard has to adopt."""
    return _digest(f"fenced foreign realm:{source}:{cluster}")[:16]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
