"""The order of one name: which tokens may have requests in flight, and how long a permit counts. Pure.

Before a proxy forwards a request, its permit for the token is in the store, together with the mark. A request with a
newer token raises the mark at once, so nothing older enters any more, and goes on when no permit of another token is
left.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import NamedTuple

from fenced.errors import InvalidStamp, Misconfigured
from fenced.values.model import Stamp

BEAT_SECONDS = 1.0
"""How often a proxy renews the permit of a request that takes long."""
SEND_SECONDS = 2.0
"""For how long after it began to write its permit a proxy sends anything under it."""
SILENT_SECONDS = 3.0
"""After so long without a change of its permit a proxy is dead, or has stopped sending."""


class Permit(NamedTuple):
    """A proxy may have requests with this token in flight. `unknown`: one of them may still run at the upstream."""

    proxy: str
    token: int
    beat: int = 0
    """Rises with every renewal, so that others notice that the proxy lives."""
    unknown: bool = False


@dataclass(frozen=True, slots=True)
class InFlight:
    """What all proxies know of one name: the newest stamp that was admitted, and the permits."""

    newest: Stamp | None = None
    permits: tuple[Permit, ...] = ()

    def packed(self) -> bytes:
        return json.dumps([self.newest and str(self.newest), self.permits], separators=(",", ":")).encode()

    @classmethod
    def unpacked(cls, name: str, value: bytes | None) -> InFlight:
        if value is None:
            return cls()
        try:
            newest, permits = json.loads(value)
            return cls(newest and Stamp.parse(newest), tuple(Permit(*permit) for permit in permits))
        except (ValueError, TypeError, InvalidStamp) as error:
            raise Misconfigured(
                f"{name}: the store has a value that no proxy wrote; use another one"
            ) from error

    def permit(self, proxy: str, token: int) -> Permit | None:
        for permit in self.permits:
            if permit.proxy == proxy and permit.token == token and not permit.unknown:
                return permit
        return None

    def others(self, token: int) -> tuple[Permit, ...]:
        """The permits that a request with the newest token waits for."""
        return tuple(permit for permit in self.permits if permit.token != token)

    def admitted(self, stamp: Stamp, proxy: str) -> InFlight:
        """With the mark at `stamp`, and a permit for it that has just been renewed."""
        before = self.permit(proxy, stamp.token)
        renewed = before._replace(beat=before.beat + 1) if before else Permit(proxy, stamp.token)
        rest = tuple(permit for permit in self.permits if permit != before)
        return InFlight(stamp, (*rest, renewed))

    def doubted(self, proxy: str, token: int) -> InFlight:
        """With a note that the outcome of a request is unknown, from now on."""
        before = [p for p in self.permits if p.proxy == proxy and p.token == token and p.unknown]
        beat = max((permit.beat for permit in before), default=0) + 1
        return self.without(before).plus(Permit(proxy, token, beat, unknown=True))

    def plus(self, permit: Permit) -> InFlight:
        return replace(self, permits=(*self.permits, permit))

    def without(self, permits: Collection[Permit]) -> InFlight:
        return replace(self, permits=tuple(permit for permit in self.permits if permit not in permits))


class Watch:
    """How long the permits of others have been seen without a change, by the clock of this proxy."""

    def __init__(self, settle: float) -> None:
        self._settle = settle
        self._first_seen: dict[Permit, float] = {}

    def look(self, permits: Collection[Permit], now: float) -> None:
        """Note what is there. A permit with a new beat is a new one; a permit that has gone is forgotten."""
        self._first_seen = {permit: self._first_seen.get(permit, now) for permit in permits}

    def silent(self, permit: Permit, now: float) -> bool:
        """Whether its proxy has not renewed it for so long that it is dead, or has stopped sending."""
        return now - self._first_seen[permit] >= SILENT_SECONDS

    def over_at(self, permit: Permit) -> float:
        """When nothing of this permit can be running any more.

        The outcome of an unknown request settles in `settle` seconds. A proxy that has died may have sent something
        until it would have been silent, and that settles in as many seconds.
        """
        silent = 0.0 if permit.unknown else SILENT_SECONDS
        return self._first_seen[permit] + silent + self._settle
