"""What an instance remembers for its page."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec

from fenced.decision import Mark, Ruling, Verdict
from fenced.errors import StaleToken
from fenced.model import Ask, Ended, Granted, Holder, Kept, Released, Renewal, Stamp, Waiting, grant_id
from fenced.rollout import Decision
from fenced.service.events import EVENTS_MAX, Events

SECRET = "5ec2e7" + "0" * 26
ASK = Ask(SECRET, ("orders",), 30.0, Holder("id", "worker", "web-3", 4711))
STAMP = Stamp("0" * 16, ("orders",), 33, None, grant_id(SECRET))


def test_grants_ends_and_refusals_are_events() -> None:
    events, heard = Events(), []
    events.listener = lambda: heard.append(events.number)
    events.answered("default", ASK, Waiting(1.0))
    events.answered("default", ASK, Granted(33, 30.0, 30.0))
    events.answered("default", Renewal(SECRET), Kept(30.0))
    events.answered("default", Renewal(SECRET), Ended("expired"))
    events.answered("default", Renewal(SECRET), Released())
    events.refused("memory:", StaleToken("late", name="orders", stamp=STAMP, mark=34))
    for ruling in Ruling:
        mark = Mark(34, "f" * 32, 0, "0")
        events.decided(
            Decision.about(
                datetime.now(UTC), "orders", "orders", STAMP, mark, Verdict.STALE, ruling, "enforce"
            )
        )
    found = events.since(0)
    assert [(each.kind, each.why) for each in found] == [
        ("granted", ""), ("ended", "expired"), ("ended", "released"), ("refused", "stale"), ("refused", "stale"),
    ]  # fmt: skip
    assert {each.grant for each in found} == {grant_id(SECRET)}
    assert [(each.token, each.mark) for each in found[3:]] == [(33, 34)] * 2
    assert heard == [1, 2, 3, 4, 5] and events.counts["refused"] == 2
    assert SECRET.encode() not in msgspec.json.encode(found), "an attempt is a secret"


def test_only_the_newest_are_remembered() -> None:
    events = Events()
    for token in range(1, EVENTS_MAX + 11):
        events.answered("default", ASK, Granted(token, 30.0, 30.0))
    assert [each.token for each in events.since(events.number - 2)] == [EVENTS_MAX + 9, EVENTS_MAX + 10]
    assert len(events.since(0)) == EVENTS_MAX
    assert events.since(events.number) == []
