"""The stream of the live page, in one process: a namespace with many names holds up no request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest

from fenced.service import live
from fenced.service.access import EVERYBODY, Principal
from fenced.service.api import Api
from fenced.service.minutes import KEPT_MAX, Minutes
from fenced.stores.memory.authority import MemoryAuthority, MemoryStore
from fenced.values.model import Ask, Ended, Granted, Holder, Renewal
from fenced_testkit.stepped import Stepped
from tests.service.inside import Written

PATIENCE = 100.0
LOOKS_MAX = 200
"""A change of a second is sent. Looks are a tenth of a second apart at least: these take twenty seconds."""
NAMES = [f"jobs/{number:04}" for number in range(1000)]
Event = tuple[str, Any, int]
"""Its kind, its data, and in which turn of the loop it was sent."""


class Surveyed(MemoryAuthority):
    """Notes in which turn of the loop each survey was made."""

    turns: list[int]
    turn: Callable[[], int]

    async def survey(self, **options: Any) -> Any:
        self.turns.append(self.turn())
        return await super().survey(**options)


class Watched:
    """A store, an instance before it, and what a page of it is sent."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.store = MemoryStore(clock)
        self.surveyed: list[int] = []
        self.api = Api(lambda runtime, _: self._authority(runtime))
        self._sent: asyncio.Queue[Event] = asyncio.Queue()
        self._turn = 0

    def _authority(self, runtime: Any) -> MemoryAuthority:
        made = Surveyed(self.store, runtime)
        made.turns, made.turn = self.surveyed, self.turn
        return made

    def turn(self) -> int:
        """A number that differs from the last one only if the loop had a turn in between."""
        asyncio.get_running_loop().call_soon(self._next)
        return self._turn

    def _next(self) -> None:
        self._turn += 1

    def hold(self, names: list[str]) -> None:
        for number, name in enumerate(names):
            Stepped.over(self.store).ask(
                Ask(f"{number:032x}", (name,), 600.0, Holder("id", "worker", "web-1", number))
            )

    def _write(self, message: bytes) -> None:
        kind, data, *_ = message.decode().split("\n")
        event = kind.removeprefix("event: "), json.loads(data.removeprefix("data: ")), self.turn()
        self._sent.put_nowait(event)

    async def events(self) -> AsyncGenerator[Event, None]:
        await self.api.namespaces.opened("default", create=True)
        stream = await self.api.live.open(await self.api.namespaces.get("default"), EVERYBODY)
        exchange: Any = Written(self._write)
        reading = asyncio.create_task(stream.send(exchange))
        try:
            while True:
                yield await asyncio.wait_for(self._sent.get(), PATIENCE)
        finally:
            reading.cancel()
            await asyncio.wait([reading])
            await self.api.close()


async def test_many_names_come_in_pieces() -> None:
    """Others have their turn between two surveys, and between two pieces of what is sent."""
    times = [0.0]
    watched = Watched(lambda: times[0])
    watched.hold(NAMES)
    events = watched.events()
    names, turns, kind = [], [], ""
    while kind != "state":
        kind, data, turn = await anext(events)
        piece = data["names"] if kind == "state" else data
        assert len(piece) <= live.NAMES_AT_ONCE
        names += [view["name"] for view in piece]
        turns.append(turn)
    assert names == NAMES, "the state is complete when it arrives"
    assert len(set(turns)) == len(turns)
    times[0] = 60.0
    Stepped.over(watched.store).renew([f"{number:032x}" for number in range(len(NAMES))])
    watched.surveyed.clear()
    turns.clear()
    seen: list[str] = []
    while len(seen) < len(NAMES):
        _, change, turn = await anext(events)
        seen += (piece := [view["name"] for view in change.get("names", [])])
        turns += [turn] if piece else []
    assert sorted(seen) == NAMES and len(set(turns)) == len(turns) >= 4
    assert len(set(watched.surveyed)) == len(watched.surveyed) >= 4
    await events.aclose()


async def test_small_renewals_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page counts down from what it was sent, so the looks are compared with that."""
    monkeypatch.setattr(live, "LOOK_SECONDS", 0.1)
    watched = Watched(lambda: 0.0)  # as if the lease were renewed all the time
    watched.hold(["a"])
    events = watched.events()
    changes = 0
    async for kind, data, _ in events:
        changes += kind == "change" and bool(data.get("names"))
        if changes == 2:
            break
        assert len(watched.surveyed) < LOOKS_MAX, "each look was compared with the one before it"
    await events.aclose()


async def test_the_numbers_are_right_after_nobody_has_looked() -> None:
    """Losses count while no page is open, too, as in `/metrics`; and a pause is no second with many grants."""
    watched = Watched(lambda: 0.0)
    await watched.api.namespaces.opened("default", create=True)
    namespace = await watched.api.namespaces.get("default")
    seen, hours = [], []
    for _ in range(2):
        stream = await watched.api.live.open(namespace, EVERYBODY)
        seen.append(stream._state.samples)
        stream._watch.pages.clear()
        stream._watch.wake()
        while stream._watch._task is not None:
            await asyncio.sleep(0.001)
        for number in range(1, 38):  # while nobody looks
            ask = Ask(f"{number:032x}", ("a",), 30.0, Holder("id", "worker", "web-1", 1))
            watched.api.events.answered("default", [ask], [Granted(number, 30.0, 30.0)])
            watched.api.events.answered("default", [Renewal(ask.secret)], [Ended("expired")])
        hours.append(stream._state.hour)
    assert [(sum(each.granted), sum(each.lost)) for each in hours] == [(0, 0), (37, 37)], "of the last hour"
    assert [(each.granted, each.lost) for each in seen[0]] == [(0, 0)]
    assert [(each.granted, each.lost) for each in seen[1]] == [(37, 37)], "and not the difference"
    text = watched.api.numbers.text(0, watched.api.events.expired.total(), 0, None)
    assert 'lease_expired_while_executing_total{reason="expired"} 74' in text
    await watched.api.close()


async def test_a_page_says_what_needs_attention() -> None:
    """A certificate near its end, and values that nobody stamped: to those who see the whole instance."""
    watched = Watched(lambda: 0.0)
    left = [86400 * 15.0]
    watched.api.certificate = lambda: ("server.crt", left[0])
    await watched.api.namespaces.opened("default", create=True)
    namespace = await watched.api.namespaces.get("default")
    some = Principal("some", "0" * 64, ("observe",), names=("jobs",))

    async def alerts(by: Principal) -> list[str]:
        stream = await watched.api.live.open(namespace, by)
        stream._watch.pages.clear()
        stream._watch.wake()
        while stream._watch._task is not None:
            await asyncio.sleep(0.001)
        return stream._state.alerts

    assert await alerts(EVERYBODY) == []
    left[0] = 86400 * 3.0
    watched.api.numbers.unstamped("pass")
    certificate, values = await alerts(EVERYBODY)
    assert certificate == "The certificate server.crt ends in 3 days: replace it, then send SIGHUP"
    assert values == "Values: 1 admitted without a stamp since this instance started"
    assert await alerts(some) == []
    await watched.api.close()


def test_counts_by_the_minute() -> None:
    """Sixty of them, in bounded memory, whatever the clocks of guards say."""
    minutes: Minutes[str] = Minutes()
    for minute in range(1000):
        minutes.add("refused", minute * 60.0)
    minutes.add("refused", 999 * 60.0 + 59, 4)
    assert minutes.hour("refused", 999 * 60.0 + 30) == [1] * 59 + [5]
    assert minutes.hour("refused", 1001 * 60.0) == [1] * 57 + [5, 0, 0]
    assert minutes.hour("lost", 999 * 60.0) == [0] * 60
    assert len(minutes._counts) == KEPT_MAX


def test_every_counter_begins_at_zero() -> None:
    """`increase()` sees no first event of a counter that begins with it."""
    api = Api(lambda runtime, _: MemoryAuthority(MemoryStore(lambda: 0.0), runtime))
    text = api.numbers.text(0, 0, 0, None)
    for sample in (
        'fencing_reject_total{guard="values",kind="stale",source="service"}',
        'fencing_reject_total{guard="values",kind="reused",source="service"}',
        'fenced_errors_total{type="unavailable"}',
        'fenced_errors_total{type="blank"}',
        'fenced_answers_total{answer="granted"}',
        'fenced_requests_total{route="/v1/leases",status="200"}',
        'critical_write_without_token_total{guard="values",ruling="refuse",source="service"}',
        'lease_expired_while_executing_total{reason="expired"}',
    ):
        assert f"\n{sample} 0\n" in text, sample
