"""Looks of the exporter at guards and authorities: one thread for each store, and what Prometheus gets of them."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime

from fenced import __version__
from fenced.client import registry
from fenced.client.operated import OperatedGuards
from fenced.errors import REFUSALS, Unsupported, redacted
from fenced.metrics.numbers import Numbers, Point
from fenced.metrics.table import STAGES, Source
from fenced.runtime import clocks
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.runtime.logs import OutageLog
from fenced.values.contracts import Authority, Operator
from fenced.values.decision import Mode, Ruling
from fenced.values.model import NameView
from fenced.values.rollout import DatabaseStatus, GuardStatus, KeyView

OLD_AFTER = 3
"""A look that has not come back after so many intervals is a failed one: old numbers would hold alerts up or down."""
EXTENT_SECONDS = 60.0
"""How often the highest mark is looked for, which takes longer the more there are."""
NAMES_MAX = 5000
PAGE = 1000
log = logging.getLogger("fenced.exporter")


class Looker(ABC):
    """Looks at one store, in a thread of its own. `points` may be read in any thread, and never waits for the store."""

    role: Source

    def __init__(self, target: str, url: str, every: float) -> None:
        self.target = target
        self.every = every
        self._url = url
        # Replaced as one by the thread that looks, so whoever reads it finds one whole look.
        self._found: tuple[float, float, list[Point]] | None = None
        self._began = clocks.now()
        self._outages = OutageLog(log, f"{self.role} {target}")
        self._stopped = threading.Event()

    def start(self) -> None:
        # A daemon: a look that hangs must not hold up the end of the process.
        threading.Thread(target=self._run, name=f"looks at {self.target}", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def points(self) -> list[Point]:
        """The last look; if it failed or is old, only that it did."""
        now, found = clocks.now(), self._found
        at, took, points = found or (self._began, 0.0, [])
        fresh = found is not None and now - at < OLD_AFTER * self.every
        numbers = Numbers(self.role)
        numbers.set("fenced_up", int(fresh), self.role)
        numbers.set("fenced_look_seconds", took, self.role)
        numbers.set("fenced_look_age_seconds", now - at, self.role)
        return [*numbers.samples(("target", self.target)), *(points if fresh else [])]

    def _run(self) -> None:
        while not self._stopped.is_set():
            began = clocks.now()
            try:
                points = self.look()
            except Exception as error:  # noqa: BLE001 - drivers raise their own; the log says it, and it is tried again
                self._found = None
                self._began = clocks.now()
                self._outages.failed(error)
                with suppress(Exception):
                    self.disconnect()
            else:
                self._found = clocks.now(), clocks.now() - began, points
                self._outages.worked()
            self._stopped.wait(max(0.0, began + self.every - clocks.now()))
        with suppress(Exception):
            self.disconnect()

    @abstractmethod
    def look(self) -> list[Point]: ...

    @abstractmethod
    def disconnect(self) -> None:
        """Until the next look."""


class GuardLooker(Looker):
    """The guards at one address."""

    role = "guard"

    def __init__(self, target: str, url: str, every: float) -> None:
        super().__init__(target, url, every)
        self._guards: OperatedGuards | None = None
        self._extent = 0, 0
        self._extent_at = float("-inf")
        self._overridden: dict[tuple[str, str], float] = {}
        """Since when each pattern has been overridden without a break."""
        self._unrecorded: dict[str, tuple[int, int]] = {}
        """By guard: what the last look found, and what is shown."""
        self.highest = 0
        self.realm: str | None = None

    def disconnect(self) -> None:
        guards, self._guards = self._guards, None
        self._extent_at = float("-inf")
        if guards is not None:
            guards.close()

    def look(self) -> list[Point]:
        if self._guards is None:
            self._guards = OperatedGuards(self._url)
        status, keys, extent = self._guards.run(self._read)
        if extent is not None:
            self._extent, self._extent_at = extent, clocks.now()
        numbers = Numbers("guard")
        overridden: dict[tuple[str, str], float] = {}
        for guard in status.guards:
            self._count(numbers, guard)
            for each in guard.overrides:
                key = guard.guard, each.pattern
                overridden[key] = self._overridden.get(key, clocks.now())
                numbers.set("fenced_guard_override_age_seconds", clocks.now() - overridden[key], *key)
        for view in keys:
            if view.revoked is None:
                numbers.set("fenced_key_age_seconds", _seconds(status.now, view.added), view.id)
        marks, self.highest = self._extent
        if self.highest:
            numbers.set("fenced_guard_marks", marks, "")
            numbers.set("fenced_guard_highest_token", self.highest, "")
        numbers.set("fenced_guard_unrecorded_total", status.unrecorded)
        self._overridden, self.realm = overridden, status.realm
        return numbers.samples(("target", self.target))

    async def _read(
        self, operator: Operator
    ) -> tuple[DatabaseStatus, Sequence[KeyView], tuple[int, int] | None]:
        status = await operator.figures()
        try:
            keys = await operator.keys()
        except Unsupported:
            keys = []
        due = clocks.now() - self._extent_at >= EXTENT_SECONDS
        return status, keys, await operator.extent() if due else None

    def _count(self, numbers: Numbers, guard: GuardStatus) -> None:
        """By verdict and ruling, never by pattern or writer: their counts move when modes change, and would fall."""
        where = guard.guard
        refused = Counter(dict.fromkeys((*REFUSALS, "unrecorded"), 0))
        let, bare = Counter(dict.fromkeys(REFUSALS, 0)), Counter(dict.fromkeys(map(str, Ruling), 0))
        for count in guard.counts:
            if count.verdict == "missing":
                bare[count.ruling] += count.count
            if count.refused:
                refused[count.verdict] += count.count
            elif count.would_refuse:
                let[count.verdict] += count.count
        refused["unrecorded"] = self._lasting(where, guard.not_recorded)
        for metric, found in (("refusals", refused), ("let_through", let), ("unstamped", bare)):
            for kind, number in found.items():
                numbers.set(f"fenced_{metric}_total", number, where, kind)
        for stage in guard.stages:
            numbers.set("fenced_guard_stage", STAGES[Mode.parse(stage.mode).name], where, stage.pattern)
        numbers.set("fenced_guard_wrong", len(guard.wrong), where)
        numbers.set("fenced_guard_bypass_roles", len(guard.bypass), where)
        numbers.set("fenced_guard_pending", len(guard.pending), where)

    def _lasting(self, guard: str, found: int) -> int:
        """What two looks in a row have seen: the record of a refusal follows it, so one look may see it missing."""
        before, shown = self._unrecorded.get(guard, (found, found))
        shown = max(shown, min(before, found))
        self._unrecorded[guard] = found, shown
        return shown


class AuthorityLooker(Looker):
    """One namespace of an authority."""

    role = "authority"

    def __init__(self, target: str, url: str, every: float, guards: Sequence[GuardLooker]) -> None:
        super().__init__(target, url, every)
        self._guards = guards
        self._authority: Authority | None = None
        self._stuck: dict[str, tuple[str | None, float]] = {}
        """By name that is waited for: the grant that holds it, and since when that has not changed."""

    def disconnect(self) -> None:
        authority, self._authority = self._authority, None
        if authority is not None:
            step(authority.close())

    def look(self) -> list[Point]:
        if self._authority is None:
            self._authority = registry.authority(self._url, BlockingRuntime())
        # The marks were read before the counter is: one that is read later could be above it, by a grant in between.
        marks = [(each.target, each.realm, each.highest) for each in self._guards]
        standing = step(self._authority.open(create=False))
        views = self._survey(self._authority)
        numbers = Numbers("authority")
        numbers.set("fenced_authority_last_token", standing.last_token)
        numbers.set("fenced_authority_strict", int(not standing.doubts))
        numbers.set("fenced_held", sum(view.held_by is not None for view in views))
        numbers.set("fenced_waiting", sum(len(view.waiters) for view in views))
        numbers.set("fenced_queue_longest", max((len(view.waiters) for view in views), default=0))
        numbers.set("fenced_queue_stuck_seconds", self._stuck_seconds(views))
        points = numbers.samples(("target", self.target))
        for target, realm, highest in marks:
            if realm == standing.realm and highest:
                above = Numbers("guard")
                above.set("fenced_mark_above_last_token", highest - standing.last_token, "")
                points += above.samples(("target", target))
        return points

    def _survey(self, authority: Authority) -> list[NameView]:
        views: list[NameView] = []
        while len(views) < NAMES_MAX:
            page = step(authority.survey(after=views[-1].name if views else "", limit=PAGE))
            views += page
            if len(page) < PAGE:
                break
        return views

    def _stuck_seconds(self, views: Sequence[NameView]) -> float:
        now, stuck = clocks.now(), {}
        for view in views:
            if view.waiters:
                grant = view.held_by.grant if view.held_by else None
                before = self._stuck.get(view.name)
                stuck[view.name] = grant, before[1] if before is not None and before[0] == grant else now
        self._stuck = stuck
        return max((now - since for _, since in stuck.values()), default=0.0)


def lookers(guards: Sequence[str], authorities: Sequence[str], every: float) -> list[Looker]:
    """For each `[TARGET=]URL`. Without a target, the address without user and password is the label."""
    looking = [GuardLooker(*_target(each), every) for each in guards]
    return [*looking, *(AuthorityLooker(*_target(each), every, looking) for each in authorities)]


def _target(text: str) -> tuple[str, str]:
    name, found, url = text.partition("=")
    return (name, url) if found and name.isidentifier() else (str(redacted(text)), text)


def build_info() -> list[Point]:
    numbers = Numbers("guard")
    numbers.set("fenced_build_info", 1, __version__)
    return numbers.samples()


def _seconds(now: datetime, since: datetime) -> float:
    return (now - since).total_seconds()
