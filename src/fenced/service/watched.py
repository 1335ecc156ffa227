"""The guards of `--guard`: their stages, and their newest refusals."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fenced.client import registry
from fenced.client.operated import OperatedGuards
from fenced.errors import Unavailable, Unsupported, redacted
from fenced.guards.spec import Spec
from fenced.runtime import clocks
from fenced.runtime.blocking import step
from fenced.runtime.logs import OutageLog
from fenced.service.events import Events
from fenced.service.views import (
    ClaimedRowView,
    GuardTableView,
    GuardView,
    OverrideView,
    StageView,
    UnstampedView,
    WorkView,
)
from fenced.sql.engines import on
from fenced.values.contracts import Operator
from fenced.values.rollout import DatabaseStatus, Decision, DecisionCount, by_writer

RECORDS_SECONDS = 0.25
"""How often records are looked for, so that a refusal is shown within a second."""
LAGGING_SECONDS = 2.0
"""The same for guards over cells: they write at most once a second, and each look costs several requests."""
STATUS_EVERY = 20
"""How many of these looks go by between two looks at the stages, which cost more."""
RETRY_SECONDS = 5.0
RECORDS_MAX = 100

log = logging.getLogger("fenced.service")
WORK_SHARE = 0.05
"""How much of the time is spent on counting rows, at most: that reads the whole table."""
CLAIMS_SHOWN = 20
WRITERS_SHOWN = 5
Work = dict[str, WorkView]
"""By the name of the guard."""
Reading = tuple[DatabaseStatus | None, list[Decision], Work]


class WatchedGuard:
    """One guard, with a thread and a connection of its own: a slow one delays nothing else."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self.view = GuardView(str(redacted(dsn)), [])
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="guard")
        self._source: SqlGuards | OneGuard | None = None
        self._known: set[Decision] = set()
        self._outages = OutageLog(log, f"the guard {self.view.url}")

    async def look(self, *, status: bool) -> list[Decision]:
        """The records that are new. The view has the stages, or why it could not be looked at."""
        loop = asyncio.get_running_loop()
        try:
            state, records, work = await loop.run_in_executor(self._thread, self._look, status)
        except Exception as error:  # noqa: BLE001 - drivers raise their own; the page shows it, and it is tried again
            why = str(redacted(str(error))).partition("\n")[0]
            self.view = GuardView(self.view.url, self.view.tables, why or type(error).__name__)
            self._outages.failed(error)
            raise Unavailable(why) from None
        self._outages.worked()
        if state is not None:
            self.view = GuardView(self.view.url, _tables(state, work), realm=state.realm)
        new = [each for each in records if each not in self._known]
        self._known = set(records)
        return new

    @property
    def lags(self) -> bool:
        return self._source is not None and self._source.lags

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._disconnect)
        self._thread.shutdown(wait=False)

    async def disconnect(self) -> None:
        """Until the next look."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._disconnect)

    def _look(self, status: bool) -> Reading:
        if self._source is None:
            self._source = (SqlGuards if registry.is_engine(self._dsn) else OneGuard)(self._dsn)
        try:
            return self._source.read(status)
        except BaseException:
            self._disconnect()
            raise

    def _disconnect(self) -> None:
        source, self._source = self._source, None
        if source is not None:
            with contextlib.suppress(Exception):
                source.close()


class SqlGuards:
    """The guarded tables of a database. Used in one thread."""

    lags = False

    def __init__(self, dsn: str) -> None:
        self._guards = OperatedGuards(dsn)
        self._work: Work = {}
        self._next_count = 0.0

    def read(self, status: bool) -> Reading:
        state, records = self._guards.run(lambda operator: _read(operator, status))
        if status and clocks.now() >= self._next_count:
            began = clocks.now()
            self._work = step(_work(self._guards.connection))
            ended = clocks.now()
            self._next_count = ended + (ended - began) / WORK_SHARE
        return state, records, self._work

    def close(self) -> None:
        self._guards.close()


async def _work(connection: Any) -> Work:
    """Who has which row, of each table with claims."""
    found = on(connection, "blocking")
    guards = await found.table(Spec("any", "any"), True).registered()
    counted = [await found.claims(spec).status(CLAIMS_SHOWN) for spec, _ in guards if spec.claims is not None]
    return {
        each.table: WorkView(
            each.ready,
            each.oldest,
            each.later,
            each.claimed,
            each.dead,
            [ClaimedRowView(row.name, row.worker, row.since.timestamp(), row.attempt) for row in each.claims],
        )
        for each in counted
    }


class OneGuard:
    """A guard that guards no tables. Used in one thread."""

    def __init__(self, dsn: str) -> None:
        self._guards = OperatedGuards(dsn)
        self.lags = self._guards.lags

    def read(self, status: bool) -> Reading:
        return *self._guards.run(lambda operator: _read(operator, status)), {}

    def close(self) -> None:
        self._guards.close()


async def _read(operator: Operator, status: bool) -> tuple[DatabaseStatus | None, list[Decision]]:
    try:
        records = await operator.records(limit=RECORDS_MAX)
    except Unsupported:  # some guards only count
        records = []
    return await operator.status() if status else None, records


def _tables(found: DatabaseStatus, work: Work) -> list[GuardTableView]:
    return [
        GuardTableView(
            each.guard,
            each.rule,
            [StageView(at.pattern, at.mode, at.next.stage, list(at.next.reasons)) for at in each.stages],
            each.marks,
            each.highest,
            sum(count.count for count in each.counts if count.refused)
            if each.refused is None
            else each.refused,
            list(each.wrong),
            work.get(each.guard),
            _unstamped(each.counts),
            [OverrideView(at.pattern, at.until.timestamp(), at.who, at.why) for at in each.overrides],
        )
        for each in found.guards
    ]


def _unstamped(counts: Iterable[DecisionCount]) -> list[UnstampedView]:
    found = by_writer(each for each in counts if each.verdict == "missing")
    return [
        UnstampedView(each.who, each.count, each.last.timestamp() if each.last else None)
        for each in found[:WRITERS_SHOWN]
    ]


class WatchedGuards:
    """All of them. Each is looked at by a task of its own while a page is open."""

    def __init__(self, dsns: Sequence[str], events: Events) -> None:
        self._guards = [WatchedGuard(dsn) for dsn in dsns]
        self._events = events
        self._tasks: dict[WatchedGuard, asyncio.Task[None]] = {}
        self.number = 0
        """Grows with every change of `views`."""

    @property
    def views(self) -> list[GuardView]:
        return [guard.view for guard in self._guards]

    def start(self, watched: Callable[[], bool]) -> None:
        """Look from now on, as long as `watched` says so."""
        for guard in self._guards:
            task = self._tasks.get(guard)
            if task is None or task.done():
                self._tasks[guard] = asyncio.create_task(self._run(guard, watched))

    async def _run(self, guard: WatchedGuard, watched: Callable[[], bool]) -> None:
        looks = 0
        while watched():
            before = guard.view
            try:
                for record in await guard.look(status=looks % STATUS_EVERY == 0):
                    self._events.decided(record, guard.view.url)
                seconds, looks = LAGGING_SECONDS if guard.lags else RECORDS_SECONDS, looks + 1
            except Unavailable:
                seconds, looks = RETRY_SECONDS, 0  # it begins with the stages when it is back
            if guard.view != before:
                self.number += 1
            await asyncio.sleep(seconds)
            if not watched():
                await guard.disconnect()

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        for guard in self._guards:
            await guard.close()  # behind the look that its thread may still be doing
