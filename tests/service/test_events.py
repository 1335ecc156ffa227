"""What an instance remembers for its page."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
import pytest

from fenced.errors import StaleToken
from fenced.service.events import EVENTS_MAX, Events
from fenced.service.feed import Story
from fenced.values.decision import Mark, Ruling, Verdict
from fenced.values.model import (
    Ask,
    Ended,
    Granted,
    HeldBy,
    Holder,
    Kept,
    NameView,
    Release,
    Released,
    Renewal,
    Stamp,
    Waiting,
    grant_id,
)
from fenced.values.rollout import Decision

SECRET = "5ec2e7" + "0" * 26
ASK = Ask(SECRET, ("orders",), 30.0, Holder("id", "worker", "web-3", 4711))
STAMP = Stamp("0" * 16, ("orders",), 33, None, grant_id(SECRET))


def test_grants_ends_and_refusals_are_events() -> None:
    events, numbers = Events(), []
    events.listener = lambda: numbers.append(events.number)
    events.answered("default", [ASK], [Waiting(1.0)])
    events.answered("default", [ASK], [Granted(33, 30.0, 30.0)])
    events.answered("default", [Renewal(SECRET)], [Kept(30.0)])
    events.answered("default", [Renewal(SECRET)], [Ended("expired")])
    events.answered("default", [Renewal(SECRET)], [Released()])
    events.refused("memory:", StaleToken("late", name="orders", stamp=STAMP, mark=34))
    for ruling in Ruling:
        mark = Mark(34, "f" * 32, 0, "0")
        events.decided(
            Decision.about(
                datetime.now(UTC), "orders", "orders", STAMP, mark, Verdict.STALE, ruling, "enforce"
            ),
            "sqlite:///shop.db",
        )
    found = events.since(0)
    assert [(each.kind, each.why) for each in found] == [
        ("granted", ""), ("ended", "expired"), ("ended", "released"), ("refused", "stale"), ("refused", "stale"),
    ]  # fmt: skip
    assert {each.grant for each in found} == {grant_id(SECRET)}
    assert [(each.token, each.mark) for each in found[3:]] == [(33, 34)] * 2
    assert [each.guard for each in found[3:]] == ["memory:", "orders in sqlite:///shop.db"]
    assert numbers == [1, 2, 3, 4, 5] and events.granted == {"default": 1}
    assert events.expired == {"default": 1}
    events.answered("default", [Renewal("1" * 32)], [Ended("expired")])
    events.answered("default", [Release(SECRET)], [Ended("expired")])
    assert events.expired == {"default": 1}, "one was a place in a queue, the other is the same lease again"
    assert SECRET.encode() not in msgspec.json.encode(found), "an attempt is a secret"


def test_only_the_newest_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fenced.service.events.GRANTS_MAX", 10)
    events = Events()
    for number in range(12):
        events.answered("default", [ASK._replace(secret=f"{number:032x}")], [Granted(1, 30.0, 30.0)])
    for number in range(12):
        events.answered("default", [Release(f"{number:032x}")], [Ended("expired")])
    assert events.expired == {"default": 10}
    events.refused("memory:", StaleToken("late", name="orders", stamp=STAMP, mark=34))
    for token in range(1, EVENTS_MAX + 11):
        events.answered("default", [ASK], [Granted(token, 30.0, 30.0)])
    assert [each.token for each in events.since(events.number - 2)] == [EVENTS_MAX + 9, EVENTS_MAX + 10]
    remembered = events.since(0)
    assert len(remembered) == EVENTS_MAX + 1 and remembered[0].kind == "refused", "no grant drives it out"
    assert events.since(events.number) == []


def held(name: str, token: int, remaining: float) -> NameView:
    by = HeldBy(Holder("id", f"worker-{token}", "web-3", token), token, f"{token:032x}", remaining)
    return NameView(name, by, (name,), 30.0, 0.0, ())


def reported(story: Story, views: list[NameView], at: float) -> list[tuple[str, int | None, str]]:
    return [(event.kind, event.token, event.why) for event in story.look(views, at, at)]


def test_ends_that_nobody_reported() -> None:
    """A lease that is gone at its deadline has expired. Of one that is gone before it, nobody here knows how."""
    story = Story("default")
    assert reported(story, [held("a", 1, 10.0), held("b", 2, 10.0)], 100.0) == [], "they were there before"
    assert reported(story, [held("a", 1, 30.0), held("b", 2, 9.0), held("c", 3, 30.0)], 101.0) == [
        ("granted", 3, "seen in the store")
    ]
    assert reported(story, [held("a", 4, 30.0), held("c", 3, 20.0)], 110.0) == [
        ("ended", 1, ""),
        ("granted", 4, "seen in the store"),
        ("lost", 2, "expired"),
    ]
    assert story.look([], 111.0, 111.0, whole=False) == [], (
        "they may be among the names that were not looked at"
    )
    story.pause()
    assert reported(story, [], 200.0) == [("ended", 3, ""), ("ended", 4, "")], "when, was not seen"
    assert {event.at for event in story.feed[-2:]} == {130.0, 140.0}


def test_a_renewed_lease_ends_when_its_last_renewal_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if nobody looked while it was renewed: the history must not say that it ended at its first ttl."""
    now = 100.0
    monkeypatch.setattr("fenced.service.events._now", lambda: now)
    events = Events()
    events.answered("default", [ASK], [Granted(33, 30.0, 30.0)])
    while now < 160.0:
        now += 10.0
        events.answered("default", [Renewal(SECRET)], [Kept(30.0)])
    story = Story("default", events.until)
    story.take(events.since(0))
    story.look([], 500.0, 500.0)
    assert [(event.kind, event.at) for event in story.feed] == [("granted", 100.0), ("ended", 190.0)]


def test_a_lease_that_was_taken_away_is_lost() -> None:
    """And a refusal names both holders."""
    events, story = Events(), Story("default")
    story.realm = STAMP.realm
    events.answered("default", [ASK], [Granted(33, 30.0, 30.0)])
    events.answered("default", [ASK], [Granted(33, 30.0, 30.0)])
    events.taken("default", "orders", 33, "by ops: stuck")
    newer = Ask("0" * 32, ("orders",), 30.0, Holder("other", "newer", "web-1", 1))
    events.answered("default", [newer], [Granted(35, 30.0, 30.0)])
    events.answered("billing", [ASK], [Granted(99, 30.0, 30.0)])
    events.refused("memory:", StaleToken("late", name="orders", stamp=STAMP, mark=35))
    events.refused("memory:", StaleToken("late", name="orders", stamp=STAMP._replace(realm="1" * 16), mark=9))
    found = story.take(events.since(0))
    assert [(event.kind, event.token) for event in found] == [
        ("granted", 33), ("taken", 33), ("lost", 33), ("granted", 35), ("refused", 33),
    ]  # fmt: skip
    events.answered("default", [Release(newer.secret)], [Released()])
    assert [event.kind for event in story.take(events.since(7))] == ["released"]
    grant = HeldBy(newer.holder, 35, grant_id(newer.secret), 30.0)
    before_the_release = NameView("orders", grant, ("orders",), 30.0, 0.0, ())
    assert reported(story, [before_the_release], 100.0) == reported(story, [], 101.0) == []
    for token in range(100, 2100):
        again = newer._replace(secret=f"{token:032x}")
        events.answered("default", [again], [Granted(token, 30.0, 30.0)])
    story.take(events.since(8))
    assert [event.kind for event in story.feed][:3] == ["taken", "lost", "refused"], (
        "grants do not displace them"
    )
    late, mark = found[-1].holder, found[-1].mark_holder
    assert late is not None and mark is not None
    assert (late.label, mark.label) == ("worker", "newer")
