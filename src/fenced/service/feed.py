"""Joins what an instance has answered with what the store shows, so that every event names its holders."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import NamedTuple

from fenced.service.events import ServiceEvent
from fenced.service.minutes import Minutes
from fenced.service.views import EventKind, LiveEvent, shown_holder
from fenced.values.model import Holder, NameView

FEED_MAX = 1000
"""How many events a page gets when it opens."""
NOTABLE_MAX = 500
"""How many refusals, losses and force-releases it gets, however many grants came after them."""
GRANTS_MAX = 20_000
"""How many grants are remembered, for the names of their holders."""
SLACK_SECONDS = 0.5
"""How far a deadline, counted from one look, may be off at the next one."""


class KnownGrant(NamedTuple):
    """A grant that was seen."""

    grant: str
    names: tuple[str, ...]
    token: int
    holder: Holder
    since: float


class Story:
    """The events of one namespace. Pure: its times are those that it is given."""

    def __init__(self, namespace: str, until: Callable[[str], float] = lambda _: 0.0) -> None:
        """`until`: when a grant expires as far as its renewals are known, also those while nobody looked."""
        self.namespace = namespace
        self._until = until
        self.realm = ""
        self._notable: deque[LiveEvent] = deque(maxlen=NOTABLE_MAX)
        self._others: deque[LiveEvent] = deque(maxlen=FEED_MAX - NOTABLE_MAX)
        self.counts: Counter[str] = Counter()
        self.minutes: Minutes[EventKind] = Minutes()
        """Of refusals: when guards made them, by their clocks."""
        self.last_token = 0
        self._number = 0
        self._grants: dict[str, KnownGrant] = {}
        self._by_token: dict[tuple[str, int], KnownGrant] = {}
        self._held: dict[str, float] = {}
        """The grants that are held as far as is known, with the instant when each expires unless it is renewed."""
        self._holding: dict[str, str] = {}
        """The grant that holds a name."""
        self._looked = False

    @property
    def feed(self) -> list[LiveEvent]:
        """The newest events, in their order."""
        return sorted([*self._notable, *self._others], key=lambda event: event.number)

    def since(self, grant: str) -> float | None:
        known = self._grants.get(grant)
        return known.since if known else None

    def take(self, events: Iterable[ServiceEvent]) -> list[LiveEvent]:
        """What these events add to the feed."""
        before = self._number
        for event in events:
            if event.kind == "refused":
                self._refused(event)
            elif event.namespace == self.namespace:
                self._leases(event)
        return self._added(before)

    def look(
        self, views: Iterable[NameView], began: float, ended: float, *, whole: bool = True
    ) -> list[LiveEvent]:
        """What a survey adds: leases that began or ended without a request to this instance. `whole`: of all names."""
        before, seen = self._number, set()
        for view in views:
            held = view.held_by
            if held is None or held.grant in seen:
                continue
            seen.add(held.grant)
            if held.grant not in self._grants:
                known = KnownGrant(held.grant, view.names, held.token, held.holder, ended)
                self._begin(known, ended, "seen in the store", quiet=not self._looked)
            if held.grant in self._held:  # and not released while the survey ran
                self._held[held.grant] = ended + held.remaining
        for grant in list(self._held) if whole else ():
            known = self._grants[grant]
            # One that is newer than the beginning of the survey may have been granted after it.
            if grant not in seen and known.since < began:
                self._end_unseen(known, ended)
        self._looked = True
        return self._added(before)

    def pause(self) -> None:
        """Nobody looks from now on: what ends meanwhile ends at a time that is not known."""
        self._looked = False

    def _leases(self, event: ServiceEvent) -> None:
        if event.kind == "granted":
            if event.grant not in self._grants and event.token is not None and event.holder is not None:
                known = KnownGrant(event.grant, event.names, event.token, event.holder, event.at)
                self._begin(known, event.at, "")
                self._held[event.grant] = event.at + event.ttl
            return
        if event.kind == "taken":
            self._add(event.at, "taken", names=event.names, token=event.token, why=event.why)
            taken = self._by_token.get((event.names[0], event.token or 0))
            if taken is not None and taken.grant in self._held:
                self._end(taken, event.at, "lost", "revoked")
            return
        known_end = self._grants.get(event.grant)
        if known_end is not None and event.grant in self._held:
            released = event.why in ("released", "withdrawn")
            self._end(known_end, event.at, "released" if released else "lost", "" if released else event.why)

    def _begin(self, known: KnownGrant, at: float, why: str, *, quiet: bool = False) -> None:
        for name in known.names:
            earlier = self._holding.get(name)
            if earlier is not None and earlier in self._held:
                self._end_unseen(self._grants[earlier], at)
            self._holding[name] = known.grant
        self._remember(known)
        self._held[known.grant] = at
        if not quiet:
            self._add(at, "granted", known, why=why)

    def _end_unseen(self, known: KnownGrant, at: float) -> None:
        """It is over by now. It has expired if looks have followed its renewals; else nobody here knows how."""
        deadline = max(self._held[known.grant], self._until(known.grant))
        if self._looked and at >= deadline - SLACK_SECONDS:
            self._end(known, at, "lost", "expired")
        else:
            self._end(known, min(at, max(deadline, known.since)), "ended", "")

    def _end(self, known: KnownGrant, at: float, kind: EventKind, why: str) -> None:
        self._held.pop(known.grant, None)
        for name in known.names:
            if self._holding.get(name) == known.grant:
                del self._holding[name]
        self._add(at, kind, known, why=why)

    def _refused(self, event: ServiceEvent) -> None:
        if event.realm and self.realm and event.realm != self.realm:
            return  # by a token of another namespace
        name = event.names[0] if event.names else ""
        late = self._grants.get(event.grant)
        newer = self._grants.get(event.mark_grant) or self._by_token.get((name, event.mark or 0))
        self._add(
            event.at,
            "refused",
            names=event.names,
            token=event.token,
            grant=event.grant,
            holder=shown_holder(late.holder if late else None),
            why=event.why,
            mark=event.mark,
            mark_holder=shown_holder(newer.holder if newer else None),
            guard=event.guard,
            mode=event.mode,
        )

    def _remember(self, known: KnownGrant) -> None:
        self.last_token = max(self.last_token, known.token)
        self._grants[known.grant] = known
        self._by_token |= {(name, known.token): known for name in known.names}
        if len(self._grants) > GRANTS_MAX:
            for grant in list(islice(self._grants, GRANTS_MAX // 10)):  # the oldest ones
                if grant not in self._held:
                    old = self._grants.pop(grant)
                    for name in old.names:
                        self._by_token.pop((name, old.token), None)

    def _add(self, at: float, kind: EventKind, known: KnownGrant | None = None, **fields: object) -> None:
        if known is not None:
            fields |= {
                "names": known.names,
                "token": known.token,
                "grant": known.grant,
                "holder": shown_holder(known.holder),
            }
        self._number += 1
        self.counts[kind] += 1
        if kind == "refused":
            self.minutes.add(kind, at)
        kept = self._notable if kind in ("refused", "lost", "taken") else self._others
        kept.append(LiveEvent(self._number, at, kind, **fields))  # type: ignore[arg-type]

    def _added(self, before: int) -> list[LiveEvent]:
        if self._number == before:
            return []
        return [event for event in self.feed if event.number > before]
