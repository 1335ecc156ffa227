"""Asking the authority about others' leases: who holds a name, and whether a stamp is of the lease that does."""

from __future__ import annotations

import threading
from typing import NamedTuple

from fenced.client.guarding import Fence, stamp_of
from fenced.core.acquiring import LeaseEngine
from fenced.errors import LeaseLost
from fenced.guards.answers import error_for
from fenced.values.decision import Mark, Verdict
from fenced.values.model import HeldBy, Stamp, check_name

REMEMBERED_MAX = 10_000
"""Of how many names a client remembers who held them."""


class Seen(NamedTuple):
    """Who held a name when the authority was last asked."""

    token: int
    grant: str
    asked: float


class SeenHolders:
    """What a client has learned from earlier questions. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: dict[str, Seen] = {}

    def of(self, name: str) -> Seen | None:
        return self._seen.get(name)

    def saw(self, name: str, held_by: HeldBy, asked: float) -> None:
        new = Seen(held_by.token, held_by.grant, asked)
        with self._lock:
            # Compared and replaced in one step: the answer to an earlier question may arrive later.
            old = self._seen.get(name)
            if old is not None and (old.token, old.asked) > (new.token, new.asked):
                return
            self._seen.pop(name, None)  # it becomes the newest
            self._seen[name] = new
            if len(self._seen) > REMEMBERED_MAX:
                del self._seen[next(iter(self._seen))]


def fence_in(fence: Fence | str) -> Fence:
    """A stamp may come as its text, as requests carry it."""
    return Stamp.parse(fence) if isinstance(fence, str) else fence


async def holder(engine: LeaseEngine, name: str) -> HeldBy | None:
    check_name(name)
    await engine.standing()  # opens the authority
    return (await engine.authority.observe(name)).held_by


async def current(
    engine: LeaseEngine, seen: SeenHolders, fence: Fence | str, names: tuple[str, ...], max_age: float
) -> None:
    """Raise unless the lease of this stamp holds all these names, or all of its own."""
    stamp = stamp_of(fence_in(fence), "verify", announcing=True)
    realm = (await engine.standing()).realm
    if stamp.realm != realm:
        raise error_for(Verdict.FOREIGN, name=None, stamp=stamp, realm=realm, tells=False)
    for name in map(check_name, names or stamp.names):
        if name not in stamp.names:
            raise error_for(Verdict.UNCOVERED, name=name, stamp=stamp, tells=False)
        known, now = seen.of(name), engine.runtime.now()
        # Tokens only rise, so a higher one that was seen at any time is an answer. Otherwise only the stamp's own lease
        # is, and only for `max_age`.
        if known is None or not (known.token > stamp.token or _is_of(known, stamp, now - max_age)):
            held_by = (await engine.authority.observe(name)).held_by
            if held_by is None or held_by.token < stamp.token:
                who = "nobody" if held_by is None else f"token {held_by.token}"
                ended = f"{name}: the lease of token {stamp.token} has ended: {who} holds it"
                raise LeaseLost(ended, reason="gone")
            seen.saw(name, held_by, now)  # as old as the question: the lease may have ended since
            known = Seen(held_by.token, held_by.grant, now)
        if (known.token, known.grant) != (stamp.token, stamp.grant):
            verdict = Verdict.STALE if known.token > stamp.token else Verdict.REUSED
            mark = Mark(known.token, known.grant, 0)
            raise error_for(verdict, name=name, stamp=stamp, mark=mark, tells=False)


def _is_of(known: Seen, stamp: Stamp, since: float) -> bool:
    return (known.token, known.grant) == (stamp.token, stamp.grant) and known.asked > since
