"""What this instance has answered, for its live page: the newest grants, ends of leases and refusals of guards.

Attempts are secrets, and values belong to programs: neither is ever in an event. Everything here may be lost.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice, takewhile
from operator import itemgetter
from typing import Any, Literal

from msgspec import Struct

from fenced.errors import InvalidStamp, Refused
from fenced.metrics.hot import NAMES_MAX, HotName, HotNames
from fenced.service.minutes import Minutes
from fenced.values.decision import Ruling
from fenced.values.model import (
    Ask,
    BatchAnswer,
    BatchOperation,
    Ended,
    Granted,
    Holder,
    Kept,
    Released,
    Stamp,
    Waiting,
    grant_id,
)
from fenced.values.rollout import Decision

ENDS = (Released, Ended)
EVENTS_MAX = 1000
"""How many grants and ends an instance remembers, and how many other events: those must not be lost among the first."""
GRANTS_MAX = 100_000
"""How many grants whose end was not reported an instance remembers."""


class ServiceEvent(Struct, frozen=True, omit_defaults=True):
    """One event, in the order of this instance. The page adds what it knows about grants from other events."""

    number: int
    at: float
    """Seconds since 1970, for people."""
    kind: Literal["granted", "ended", "refused", "taken"]
    namespace: str = ""
    names: tuple[str, ...] = ()
    token: int | None = None
    grant: str = ""
    holder: Holder | None = None
    ttl: float = 0.0
    why: str = ""
    """Of an end: released, expired, revoked ...; of a refusal: stale, missing ...; of a force-release: its reason."""
    mark: int | None = None
    """Of a refusal: the highest token that the guard had seen."""
    mark_grant: str = ""
    guard: str = ""
    mode: str = ""
    realm: str = ""


class Events:
    """The newest events of one instance. Used in the loop's thread only."""

    def __init__(self) -> None:
        self._leases: deque[tuple[Any, ...]] = deque(maxlen=EVENTS_MAX)
        """Grants and ends of leases, as the fields of an event. Most are never looked at, so `since` makes them."""
        self._others: deque[tuple[Any, ...]] = deque(maxlen=EVENTS_MAX)
        self.number = 0
        """Of the last event."""
        self.granted: Counter[str] = Counter()
        """How many leases were granted in each namespace."""
        self._unended: dict[str, float] = {}
        """The newest grants whose end nobody has reported, and when each expires unless it is renewed again."""
        self.expired: Counter[str] = Counter()
        """How many leases of each namespace had expired when their holder came to renew or release them."""
        self.minutes: Minutes[tuple[str, str]] = Minutes()
        """Of `granted` and `expired`, by the namespace and the name of the counter."""
        self.waited: list[float] = []
        """Of the last `answered`: how long the granted asks that had queued had waited since their first answer."""
        self.contended = 0
        """How many asks had to queue."""
        self._queued: dict[str, tuple[float, str, Ask]] = {}
        """The asks that are queued, as far as is known: when each was answered first, and in which namespace."""
        self._places: dict[tuple[str, str, str], float] = {}
        """Since when a holder waits for a name, by namespace, name and the holder's id."""
        self._hot: dict[str, HotNames] = {}
        """By namespace."""
        self.listener: Callable[[], None] | None = None
        """Called after each event while somebody looks; it must return at once."""

    def answered(
        self, namespace: str, operations: Sequence[BatchOperation], results: Sequence[BatchAnswer]
    ) -> int:
        """What the store has answered. Renewals that were kept, and waiters, are no events.

        Returns how many leases were granted.
        """
        at, number, leases, unended, granted = _now(), self.number, self._leases, self._unended, 0
        self.waited = []
        for operation, answer in zip(operations, results, strict=True):
            if isinstance(answer, Granted) and isinstance(operation, Ask):
                granted += 1
                number += 1
                names, holder, grant = operation.names, operation.holder, grant_id(operation.secret)
                token, _, ttl = answer
                unended[grant] = at + ttl
                if self._queued and (since := self._left_queue(grant)) is not None:
                    self.waited.append(at - since)
                leases.append((number, at, "granted", namespace, names, token, grant, holder, ttl))
            elif isinstance(answer, ENDS):
                number += 1
                grant = grant_id(operation.secret)
                self._left_queue(grant)
                why = answer.reason if isinstance(answer, Ended) else "released"
                if grant in unended:  # otherwise it may have waited only, or it was counted
                    del unended[grant]
                    if why == "expired":
                        self.expired[namespace] += 1
                        self.minutes.add((namespace, "expired"), at)
                leases.append((number, at, "ended", namespace, (), None, grant, None, 0.0, why))
            elif isinstance(answer, Kept) and (grant := grant_id(operation.secret)) in unended:
                unended[grant] = at + answer.remaining
            elif isinstance(answer, Waiting) and isinstance(operation, Ask):
                self._note_waiting(namespace, operation, at)
        if granted:
            self.granted[namespace] += granted
            self.minutes.add((namespace, "granted"), at, granted)
            if len(unended) > GRANTS_MAX:
                for grant in list(islice(unended, GRANTS_MAX // 10)):
                    del unended[grant]
        if number > self.number:
            self._notify(number)
        return granted

    def _note_waiting(self, namespace: str, ask: Ask, at: float) -> None:
        """The first answer to an ask that has to queue; the others of the same ask add nothing."""
        grant = grant_id(ask.secret)
        if grant in self._queued:
            return
        self._queued[grant] = at, namespace, ask
        self._places |= {(namespace, name, ask.holder.id): at for name in ask.names}
        self.contended += 1
        hot = self._hot.get(namespace)
        if hot is None:
            hot = self._hot[namespace] = HotNames()
        for name in ask.names:
            hot.add(name, at)
        if len(self._queued) > GRANTS_MAX:
            for old in list(islice(self._queued, GRANTS_MAX // 10)):
                self._left_queue(old)

    def _left_queue(self, grant: str) -> float | None:
        """Since when it had waited; None if it is not known that it did."""
        found = self._queued.pop(grant, None)
        if found is None:
            return None
        since, namespace, ask = found
        for name in ask.names:
            place = (namespace, name, ask.holder.id)
            if self._places.get(place) == since:  # else a newer ask of the same holder waits
                del self._places[place]
        return since

    def waits_since(self, namespace: str, name: str, holder: Holder) -> float | None:
        """Since when a holder waits for a name; None if it has asked another instance."""
        return self._places.get((namespace, name, holder.id))

    def hot_in(self, namespace: str) -> list[HotName]:
        """The names of a namespace that asks had to queue for in the last minutes, the hottest one first."""
        hot = self._hot.get(namespace)
        return [] if hot is None else hot.top(_now(), NAMES_MAX)

    def until(self, grant: str) -> float:
        """When a grant expires, as far as this instance has renewed it; 0.0: it is not known here."""
        return self._unended.get(grant, 0.0)

    def _notify(self, number: int) -> None:
        self.number = number
        if self.listener is not None:
            self.listener()

    def taken(self, namespace: str, name: str, token: int, why: str) -> None:
        """An operator has taken a name from the holder that had this token."""
        self._add(_now(), "taken", namespace, (name,), token, "", None, 0.0, why)

    def refused(self, guard: str, error: Refused, mode: str = "") -> None:
        """A guard of this process has refused an operation. `guard` is its address without secrets."""
        self._refused(_now(), guard, error.name, error.stamp, error.mark, error.holder, error.kind, mode)

    def decided(self, record: Decision, where: str) -> None:
        """A guard elsewhere has written this record; `where` is its address. Only refusals are events."""
        if record.ruling is not Ruling.REFUSE:
            return
        try:
            stamp = Stamp.parse(record.stamp) if record.stamp else None
        except InvalidStamp:
            stamp = None
        at, mark, grant = record.at.timestamp(), record.mark, record.mark_grant
        guard = where if "://" in record.guard else f"{record.guard} in {where}"
        self._refused(at, guard, record.name, stamp, mark, grant, record.verdict.value, record.mode)

    def since(self, number: int) -> list[ServiceEvent]:
        """The events after this number that are still remembered."""
        later = partial(takewhile, lambda fields: fields[0] > number)
        found = [*later(reversed(self._leases)), *later(reversed(self._others))]
        return [ServiceEvent(*fields) for fields in sorted(found, key=itemgetter(0))]

    def _add(self, *fields: Any) -> None:
        self._others.append((self.number + 1, *fields))
        self._notify(self.number + 1)

    def _refused(
        self,
        at: float,
        guard: str,
        name: str | None,
        stamp: Stamp | None,
        mark: int | None,
        mark_grant: str | None,
        why: str,
        mode: str,
    ) -> None:
        names = () if name is None else (name,)
        token, grant, realm = (stamp.token, stamp.grant, stamp.realm) if stamp else (None, "", "")
        holder, ttl = None, 0.0
        about = (names, token, grant, holder, ttl, why, mark, mark_grant or "")
        self._add(at, "refused", "", *about, guard, mode, realm)


def _now() -> float:
    return time.time()  # noqa: TID251 - for people who read the event
