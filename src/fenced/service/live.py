"""The streams of the live page: one look a second for all open pages together, and none while nobody looks."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal

import msgspec

from fenced import __version__
from fenced.errors import FencedError, Unavailable
from fenced.http1.exchanges import ServerExchange
from fenced.service.access import EVERYBODY, Principal
from fenced.service.bodies import HOT_SHOWN, HotView
from fenced.service.events import Events, ServiceEvent
from fenced.service.feed import Story
from fenced.service.namespaces import ServedNamespace, ServedNamespaces
from fenced.service.replies import NotAdmitted, plain
from fenced.service.views import (
    WAITERS_SHOWN,
    GuardView,
    HourView,
    LiveChange,
    LiveEvent,
    LiveName,
    LiveState,
    Sample,
    live_name,
)
from fenced.service.watched import WatchedGuards
from fenced.values.model import NameView, Standing

LOOK_SECONDS = 1.0
GATHER_SECONDS = 0.05
"""Events that come this close together are sent together."""
EVENTS_AT_ONCE_MAX = 500
NAMES_MAX = 5000
"""How many names of a namespace an instance looks at."""
NAMES_AT_ONCE = 250
"""How many names are compared, shown or sent in one turn of the loop: requests of clients come in between."""
BREAK_SECONDS = 0.002
"""Between two pieces. A request takes several turns of the loop, and would wait for a piece in each of them."""
SURVEY_PAGE = 250
PAGES_MAX = 100
UNREAD_MAX = 100
"""How many changes may be waiting for a slow reader before its stream is ended. It comes back, and gets the state."""
SAMPLES_MAX = 120
ALERTS_SECONDS = 60.0
"""To see when a certificate ends takes a handshake in memory: milliseconds of the loop's thread."""
STREAM_HEADERS = (
    ("cache-control", "no-store"),
    ("x-accel-buffering", "no"),  # a proxy must pass each event on at once
    ("content-type", "text/event-stream; charset=utf-8"),
)


class OpenPage:
    """One reader. What it may see depends on its credential."""

    def __init__(self, by: Principal) -> None:
        self.by = by
        self.unread: asyncio.Queue[LiveChange | None] = asyncio.Queue(UNREAD_MAX)

    @property
    def sees_all(self) -> bool:
        return self.by.names is None and self.by.namespaces is None

    def put(self, change: LiveChange | None) -> None:
        """None ends the stream."""
        if self.unread.full():
            while not self.unread.empty():
                self.unread.get_nowait()
            change = None
        self.unread.put_nowait(change)

    def events(self, found: Iterable[LiveEvent]) -> list[LiveEvent]:
        return [event for event in found if self._may_see(event)]

    def _may_see(self, event: LiveEvent) -> bool:
        """A write without a stamp may have been meant for any namespace."""
        if self.by.namespaces is not None and event.token is None:
            return False
        return self.by.names is None or (bool(event.names) and self.by.may_use(event.names))

    def guards(self, views: list[GuardView]) -> list[GuardView]:
        """They guard the names of all."""
        return views if self.sees_all else []

    def _seen(self, name: LiveName) -> LiveName:
        return msgspec.structs.replace(name, names=list(filter(self.by.owns, name.names)))

    def namespaces(self, names: list[str]) -> list[str]:
        return [name for name in names if self.by.may("observe", name)]

    def hot(self, found: list[HotView]) -> list[HotView]:
        """Names that it may not see are left out before the hottest ones are taken."""
        return [each for each in found if self.by.owns(each.name)][:HOT_SHOWN]

    def change(self, whole: LiveChange) -> LiveChange:
        """What this reader may see of it."""
        if whole.hot is not None:
            whole = msgspec.structs.replace(whole, hot=self.hot(whole.hot))
        if self.sees_all:
            return whole
        return msgspec.structs.replace(
            whole,
            names=[self._seen(each) for each in whole.names if self.by.owns(each.name)],
            gone=[name for name in whole.gone if self.by.may_use([name])],
            events=self.events(whole.events),
            namespaces=None if whole.namespaces is None else self.namespaces(whole.namespaces),
            guards=None,
            alerts=None,
        )


@dataclass(slots=True)
class LookFound:
    """One poll of the store, as a difference to the previous one."""

    differ: list[NameView] = field(default_factory=list)
    """The names that differ by more than the time that has passed."""
    names: set[str] = field(default_factory=set)
    held: int = 0
    waiting: int = 0


class WatchedNamespace:
    """One namespace, while somebody looks at it. The task of `_run` is the only one that changes what it knows."""

    def __init__(
        self,
        namespace: ServedNamespace,
        all_served: ServedNamespaces,
        events: Events,
        guards: WatchedGuards,
        alerts: Callable[[], list[str]],
    ) -> None:
        self._namespace = namespace
        self._all_served = all_served
        self._namespaces: list[str] = []
        """Those that the last change had."""
        self._events = events
        self._guards = guards
        self._find_alerts = alerts
        self._story = Story(namespace.name, events.until)
        self._number = 0
        self._views: dict[str, tuple[NameView, float]] = {}
        """What was last sent about each name, and when."""
        self._took = 0.0
        """How long the last look took: each end of a lease may be off by so much."""
        self._more = False
        self._samples: deque[Sample] = deque(maxlen=SAMPLES_MAX)
        self._guards_number = 0
        self._hot: list[HotView] = []
        self._hour = HourView()
        self._alerts: list[str] = []
        self._alerts_due = 0.0
        self._woken = asyncio.Event()
        self._looked = asyncio.Event()
        self._problem = ""
        self._task: asyncio.Task[None] | None = None
        """Ends by itself: a survey is never cancelled."""
        self.pages: set[OpenPage] = set()

    def wake(self) -> None:
        self._woken.set()

    async def open(self, by: Principal) -> tuple[OpenPage, LiveState, Iterator[list[LiveName]]]:
        """A page, its state without the names, and the names in pieces, which are made one by one."""
        standing = await (await self._namespace.looker()).open(create=False)
        page = OpenPage(by)
        # Added before the task is looked at: one that has not seen the last page close goes on for this one.
        self.pages.add(page)
        if self._task is None:
            self._looked.clear()
            self._task = asyncio.create_task(self._run(), name=f"looks at {self._namespace.name}")
        try:
            await self._looked.wait()
            if self._problem:
                raise Unavailable(self._problem)
        except BaseException:
            self.pages.discard(page)
            raise
        # From here to the return nothing is awaited, so the first change continues exactly this state.
        while not page.unread.empty():
            page.unread.get_nowait()
        return page, self._state(standing, page), self._pieces(list(self._views.values()), by)

    async def close(self) -> None:
        self.pages.clear()
        self.wake()
        if self._task is not None:
            await asyncio.wait([self._task])

    def _state(self, standing: Standing, page: OpenPage) -> LiveState:
        by, namespace = page.by, self._namespace
        return LiveState(
            namespace=namespace.name,
            namespaces=page.namespaces(self._all_served.names),
            realm=standing.realm,
            store=namespace.looking.url,
            guarantee="best-effort" if standing.doubts else "strict",
            doubts=list(standing.doubts),
            version=__version__,
            last_token=max(standing.last_token, self._story.last_token),
            now=_now(),
            may_operate=by.may("operate", namespace.name),
            names=[],
            more=self._more,
            guards=page.guards(self._guards.views),
            events=page.events(self._story.feed),
            samples=list(self._samples),
            hot=page.hot(self._hot),
            hour=self._hour,
            alerts=self._alerts if page.sees_all else [],
        )

    async def _run(self) -> None:
        """Looks until the last page is closed. A page that opens until then finds the last look."""
        loop = asyncio.get_running_loop()
        self._alerts_due = 0.0
        self._samples.clear()  # there is one for each second, so none before a pause
        try:
            while self.pages:
                due = loop.time() + LOOK_SECONDS
                await self._look()
                self._looked.set()
                while self.pages and (left := due - loop.time()) > 0:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._woken.wait(), left)
                        await asyncio.sleep(GATHER_SECONDS)
                        self._send(LiveChange(events=self._take()))
        except BaseException:
            self._problem = "the looks at the store were ended by a bug"
            raise
        finally:
            # Nothing is awaited since the loop saw no page: a page that opens later finds no task, and starts one.
            self._task = None
            self._looked.set()  # whoever waits for a look gets the problem instead
            self._story.pause()

    def _send(self, change: LiveChange) -> None:
        if self._guards.number != self._guards_number:
            self._guards_number = self._guards.number
            change.guards = self._guards.views
        if (names := self._all_served.names) != self._namespaces:
            change.namespaces = self._namespaces = names
        change.last_token = self._story.last_token
        if change == LiveChange(last_token=change.last_token):
            return
        for page in self.pages:
            page.put(page.change(change))

    def _take(self) -> list[LiveEvent]:
        self._woken.clear()
        found = self._events.since(self._number)
        self._number = self._events.number
        return self._story.take(_limited(found))[-EVENTS_AT_ONCE_MAX:]

    async def _look(self) -> None:
        began = _now()
        try:
            views, more = await self._survey()
        except FencedError as error:
            self._problem = str(error)
            self._send(LiveChange(events=self._take(), problem=self._problem))
            return
        ended = _now()
        found = await self._compared(views, began, ended)
        # Up to the first `_send` nothing is awaited: a page that opens gets the state before this look or the one
        # after it. One that opens later gets some names twice, which changes nothing.
        self._problem, self._more, self._took = "", more, ended - began
        self._story.realm = self._namespace.realm
        events = [*self._take(), *self._story.look(views, began, ended, whole=not more)]
        gone = [name for name in self._views if name not in found.names]
        for name in gone:
            del self._views[name]
        self._views |= {view.name: (view, ended) for view in found.differ}
        granted, lost = (each[self._namespace.name] for each in (self._events.granted, self._events.expired))
        sample = Sample(found.held, found.waiting, granted, self._story.counts["refused"], lost)
        self._samples.append(sample)
        change = LiveChange(gone=gone, more=more, events=events, sample=sample)
        self._renew_counts(change, ended)
        self._send(change)
        for piece in self._pieces([(view, ended) for view in found.differ]):
            self._send(LiveChange(names=piece))
            await asyncio.sleep(BREAK_SECONDS)

    def _renew_counts(self, change: LiveChange, now: float) -> None:
        """Puts into the change what has changed of the hot names, the last hour and the alerts."""
        name, minutes = self._namespace.name, self._events.minutes
        hot = [HotView(each.name, each.count, each.error) for each in self._events.hot_in(name)]
        if hot != self._hot:
            change.hot = self._hot = hot
        hour = HourView(
            minutes.hour((name, "granted"), now),
            self._story.minutes.hour("refused", now),
            minutes.hour((name, "expired"), now),
        )
        if hour != self._hour:
            change.hour = self._hour = hour
        if now >= self._alerts_due:
            self._alerts_due = now + ALERTS_SECONDS
            if (alerts := self._find_alerts()) != self._alerts:
                change.alerts = self._alerts = alerts

    async def _compared(self, views: Sequence[NameView], began: float, ended: float) -> LookFound:
        found = LookFound()
        slack = max(self._took, ended - began)
        for number, view in enumerate(views):
            if number % NAMES_AT_ONCE == NAMES_AT_ONCE - 1:
                await asyncio.sleep(BREAK_SECONDS)
            found.names.add(view.name)
            found.held += view.held_by is not None
            found.waiting += len(view.waiters)
            old, at = self._views.get(view.name, (None, 0.0))
            if old is None or _standing(old) != _standing(view):
                found.differ.append(view)
            elif abs(at + _left(old) - ended - _left(view)) > slack + min(1.0, (view.ttl or 4.0) / 4):
                found.differ.append(view)  # renewed
        return found

    def _pieces(
        self, views: Sequence[tuple[NameView, float]], by: Principal | None = None
    ) -> Iterator[list[LiveName]]:
        """Names as they are when each piece is made; of one reader, those that it may see."""
        for number in range(0, len(views), NAMES_AT_ONCE):
            now, piece = _now(), views[number : number + NAMES_AT_ONCE]
            if by is not None:
                piece = [(by.seen(view), at) for view, at in piece if by.owns(view.name)]
            yield [self._shown(view, now - at) for view, at in piece]

    def _shown(self, view: NameView, age: float) -> LiveName:
        """As it is now, `age` seconds after the look."""
        since = self._story.since(view.held_by.grant) if view.held_by else None
        waits = (
            self._events.waits_since(self._namespace.name, view.name, each.holder)
            for each in view.waiters[:WAITERS_SHOWN]
        )
        shown = live_name(view, since, min((each for each in waits if each is not None), default=None))
        shown.free_in = max(0.0, shown.free_in - age)
        if shown.held_by is not None:
            shown.held_by.remaining = max(0.0, shown.held_by.remaining - age)
        return shown

    async def _survey(self) -> tuple[list[NameView], bool]:
        """Through the authority object for surveys: where the store is elsewhere, a grant does not wait behind it.

        The ledger answers in this thread, so grants wait for each of its pages: they come in between.
        """
        looker, after = await self._namespace.looker(), ""
        found: list[NameView] = []
        while len(found) < NAMES_MAX:
            page = await looker.survey(after=after, limit=SURVEY_PAGE)
            found += page
            if len(page) < SURVEY_PAGE:
                return found, False
            after = page[-1].name
            await asyncio.sleep(BREAK_SECONDS)
        return found, True


def _left(view: NameView) -> float:
    """Seconds until the lease ends, or the name becomes free."""
    return view.held_by.remaining if view.held_by else view.free_in


def _standing(view: NameView) -> tuple[object, ...]:
    """What does not change by time alone."""
    grant = view.held_by.grant if view.held_by else view.free_in > 0
    return grant, view.ttl, [waiter.holder.id for waiter in view.waiters]


def _limited(found: list[ServiceEvent]) -> list[ServiceEvent]:
    """A page need not see thousands of grants a second, but every refusal."""
    old, new = found[:-EVENTS_AT_ONCE_MAX], found[-EVENTS_AT_ONCE_MAX:]
    return [event for event in old if event.kind in ("refused", "taken")] + new


def _now() -> float:
    return datetime.now(UTC).timestamp()


class LiveStream:
    """A stream of server-sent events, until its reader goes away or this instance stops."""

    def __init__(
        self, watch: WatchedNamespace, page: OpenPage, state: LiveState, names: Iterator[list[LiveName]]
    ) -> None:
        self._watch = watch
        self._page = page
        self._state = state
        self._names = names
        self._flows = asyncio.Event()
        self._flows.set()

    async def send(self, exchange: ServerExchange) -> None:
        """Answer the request by this stream."""
        exchange.on_gone = self._stop
        exchange.on_pressure = self._press
        if exchange.done:
            self._stop()
        try:
            exchange.begin(200, STREAM_HEADERS)
            if exchange.head.method != b"HEAD":
                await self._begin(exchange)
                while (change := await self._page.unread.get()) is not None:
                    await self._write(exchange, "change", change)
            exchange.end()
        finally:
            self._watch.pages.discard(self._page)

    def _stop(self) -> None:
        """The reader has gone."""
        self._page.put(None)
        self._flows.set()

    def _press(self, stuck: bool) -> None:
        if stuck:
            self._flows.clear()
        else:
            self._flows.set()

    async def _begin(self, exchange: ServerExchange) -> None:
        """The state has the last piece of the names, those before it come first. So it is complete when it arrives."""
        self._state.names = next(self._names, [])
        for piece in self._names:
            await self._write(exchange, "names", self._state.names)
            await asyncio.sleep(BREAK_SECONDS)  # requests of clients come in between
            self._state.names = piece
        await self._write(exchange, "state", self._state)

    async def _write(
        self,
        exchange: ServerExchange,
        event: Literal["names", "state", "change"],
        data: list[LiveName] | LiveState | LiveChange,
    ) -> None:
        """Send an event, as soon as the reader takes it. Meanwhile changes collect, up to UNREAD_MAX."""
        await self._flows.wait()
        exchange.write(b"event: %s\ndata: %s\n\n" % (event.encode(), msgspec.json.encode(data)))


class Live:
    """All open pages of an instance."""

    def __init__(
        self,
        namespaces: ServedNamespaces,
        events: Events,
        guards: Sequence[str] = (),
        each_max: int = PAGES_MAX,
        alerts: Callable[[], list[str]] = list,
    ) -> None:
        """`each_max`: how many pages one bearer token may have open."""
        self._each_max = each_max
        self._opening: Counter[str] = Counter()
        self._namespaces = namespaces
        self._events = events
        self._guards = WatchedGuards(guards, events)
        self._alerts = alerts
        self._watches: dict[str, WatchedNamespace] = {}
        self._stopping = False

    @property
    def pages(self) -> int:
        return sum(len(watch.pages) for watch in self._watches.values())

    async def open(self, namespace: ServedNamespace, by: Principal) -> LiveStream:
        self._check_room(by)
        self._opening[by.id] += 1
        try:
            return await self._opened(namespace, by)
        finally:
            self._opening[by.id] -= 1

    def _check_room(self, by: Principal) -> None:
        if self._stopping or self.pages + self._opening.total() >= PAGES_MAX:
            raise Unavailable("this instance shows no more pages; close one, or use another instance")
        own = sum(page.by.id == by.id for watch in self._watches.values() for page in watch.pages)
        if by is not EVERYBODY and own + self._opening[by.id] >= self._each_max:
            more = f"it has {self._each_max} open; close one"
            raise NotAdmitted(plain(429, "This token has too many pages", more), ("retry-after", "1"))

    async def _opened(self, namespace: ServedNamespace, by: Principal) -> LiveStream:
        watch = self._watches.get(namespace.name)
        if watch is None:
            watch = WatchedNamespace(namespace, self._namespaces, self._events, self._guards, self._alerts)
            self._watches[namespace.name] = watch
        page, state, names = await watch.open(by)
        self._events.listener = self._wake
        self._guards.start(self._watched)
        return LiveStream(watch, page, state, names)

    def end_all_but(self, is_current: Callable[[Principal], bool]) -> None:
        """End the streams of tokens that are not current. Pages connect again, and are judged again."""
        for watch in self._watches.values():
            for page in watch.pages:
                if not is_current(page.by):
                    page.put(None)

    def send_on(self) -> None:
        """This instance stops: end the streams. Their pages connect again, to another one."""
        self._stopping = True
        for watch in self._watches.values():
            for page in watch.pages:
                page.put(None)

    async def close(self) -> None:
        self.send_on()
        for watch in self._watches.values():
            await watch.close()
        await self._guards.close()

    def _watched(self) -> bool:
        return self.pages > 0

    def _wake(self) -> None:
        if not self.pages:
            self._events.listener = None
            return
        for watch in self._watches.values():
            watch.wake()
