"""The judge of the storms on authorities, in both directions: it passes what is right and catches what is planted."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from evidence.authority_storms.judge import CLIENT, OUTAGE, RELEASE, SILENT, Bounds, Event, judge, read, spans

TTL = 2.0
BOUNDS = Bounds.of("redis", TTL)
_numbers = itertools.count(1)


def call(
    who: str,
    asked: float,
    granted: float | None = None,
    ended: float | None = None,
    *,
    names: str = "a",
    token: int = 0,
    how: str = "released",
    wait: float | None = None,
    still: float | None = None,
) -> list[Event]:
    """The events of one call; its holder looks at its lease just before the end, unless `still` says otherwise."""
    number = next(_numbers)
    told: list[dict[str, Any]] = [{"do": "asking", "at": asked, "names": list(names), "wait": wait}]
    if granted is not None:
        told.append({"do": "granted", "at": granted, "token": token or round(granted * 1000), "ttl": TTL})
        seen = still if still is not None else ended
        if seen is not None:
            told.append({"do": "still", "at": seen})
    if ended is not None:
        told.append({"do": "ended", "at": ended, "how": how})
    return [{**event, "who": who, "call": number} for event in told]


def storm(do: str, at: float, **details: Any) -> list[Event]:
    return [{"who": "storm", "do": do, "at": at, **details}]


def broken(*told: list[Event], authority: str = "redis") -> list[str]:
    found: list[str] = judge([*itertools.chain(*told), *storm("end", 100.0)], authority)["broken"]
    return found


ORDERLY = [call("A", 1, 1.1, 2), call("B", 1.5, 2.01, 3), call("C", 1.6, 3.01, 4)]


def test_an_orderly_story_is_not_broken() -> None:
    assert broken(*ORDERLY) == []


@pytest.mark.parametrize(
    "why, told",
    [
        ("granted twice", [call("A", 1, 1.1, 2, token=7), call("B", 3, 3.1, 4, token=7)]),
        ("after 9", [call("A", 1, 1.1, 2, token=9), call("B", 2.5, 2.6, 3, token=8, names="b")]),
        # One asked before the other was granted, so that only the order of the holders shows it.
        ("after 9", [call("A", 1, 1.1, 2, token=9), call("B", 0.5, 2.1, 3, token=8)]),
        ("two holders", [call("A", 1, 1.1, 2), call("B", 1.5, 1.9, 3)]),
        ("two holders", [call("A", 1, 1.1, 5), call("B", 1.5, 2, 2.1, still=1.9), call("C", 2, 4, 6)]),
        (
            "Misuse",
            [*ORDERLY, [{**event, "why": "Misuse"} for event in call("D", 1, None, 1.1, how="failed")]],
        ),
    ],
)
def test_unsafe_histories_are_found(why: str, told: list[list[Event]]) -> None:
    (found,) = broken(*told)
    assert why in found


def test_a_holder_that_looked_no_more_does_not_overlap() -> None:
    """It was stopped: what it believed meanwhile nobody knows."""
    assert (
        broken(
            call("A", 1, 1.1, 9, still=1.2, how="lost"),
            storm("paused", 8.9, whom="A", begin=1.3, standing=1.3),
            call("B", 1.5, 3.5, 4),
        )
        == []
    )


WAITER = call("B", 1.5, 8, 9)


@pytest.mark.parametrize(
    "seconds, kind, told",
    [
        (6.0, RELEASE, [call("A", 1, 1.1, 2), WAITER]),
        (5.0, CLIENT, [call("A", 1, 1.1), storm("killed", 3, whom="A", begin=2.9), WAITER]),
        (
            5.0,
            CLIENT,
            [call("A", 1, 1.1, 9, still=2), storm("paused", 9, whom="A", begin=2.9, standing=3), WAITER],
        ),
        (5.0, CLIENT, [call("A", 1, 1.1, 3, how="failed"), WAITER]),
        # A waiter that died ahead of the one that lives, and none of both holds anything.
        (5.0, CLIENT, [call("A", 1), storm("killed", 3, whom="A", begin=2.9), WAITER]),
        (4.0, OUTAGE, [call("A", 1, 1.1, 2), storm("outage", 4, begin=2.5, silent=False), WAITER]),
        # The dead one waited for two names, the live one for the second of them.
        (
            5.0,
            CLIENT,
            [
                call("A", 2.5, names="ab"),
                storm("killed", 3, whom="A", begin=2.9),
                call("B", 2.6, 8, 9, names="b"),
            ],
        ),
        # Waiters come and go, but one of them is always there.
        (
            6.0,
            RELEASE,
            [call("A", 1, 1.1, 2), call("B", 1.5, None, 5, wait=3.5, how="gave up"), call("C", 4, 8, 9)],
        ),
    ],
)
def test_a_free_name_that_is_not_granted_is_found(seconds: float, kind: str, told: list[list[Event]]) -> None:
    (found,) = broken(*told)
    assert f"was free for {seconds:.3f} s (after {kind}" in found


@pytest.mark.parametrize(
    "told",
    [
        # Nobody waits; or only one that is stopped, is dead, or does not want to wait.
        [call("A", 1, 1.1, 2), call("B", 7.9, 8, 9)],
        [call("A", 1, 1.1, 2), WAITER, storm("paused", 7.9, whom="B", begin=1.9, standing=1.95)],
        [call("A", 1, 1.1, 2), call("B", 1.5), storm("killed", 2.1, whom="B", begin=2.05)],
        [call("A", 1, 1.1, 2), call("B", 1.5, None, 8, wait=0.0, how="gave up")],
        # The server is away all the time.
        [call("A", 1, 1.1, 2), WAITER, storm("outage", 7, begin=2.1, silent=False)],
        # The waiter wants another name too, which is held.
        [call("A", 1, 1.1, 2), call("C", 1, 1.2, 7.9, names="b"), call("B", 1.5, 8, 9, names="ab")],
        # And so may one be who wants this name alone, behind a waiter for both.
        [
            call("A", 1, 1.1, 2),
            call("C", 1, 1.2, 7.9, names="b"),
            call("B", 1.5, 8, 8.5, names="ab"),
            call("D", 1.6, 8.6, 9),
        ],
    ],
)
def test_a_wait_with_a_reason_is_not_blamed(told: list[list[Event]]) -> None:
    assert broken(*told) == []


def test_a_fault_long_ago_excuses_nothing() -> None:
    told = [
        call("X", 1, 1.1),
        storm("killed", 1.2, whom="X", begin=1.15),
        call("A", 1.3, 3, 8),
        call("B", 4, 9.5, 10),
    ]
    (found,) = broken(*told)
    assert "free for 1.500 s (after release, bound 1.000 s)" in found


def test_bounds_of_each_authority() -> None:
    assert Bounds.of("redis", TTL) == Bounds(1.0, 3.0, 3.0, 6.5)
    assert Bounds.of("etcd", TTL).outage == 5.0
    assert Bounds.of("zookeeper", 3.0, 0.1).client_fault == pytest.approx(5.1)


def test_silent_connections_take_the_time_of_a_request() -> None:
    told = [call("A", 1, 1.1, 2), WAITER, storm("outage", 3, begin=2.1, silent=True)]
    found = spans(read(itertools.chain(*told, storm("end", 100.0))), BOUNDS)
    assert [(span.kind, round(span.seconds, 3), span.over) for span in found if span.kind == SILENT] == [
        (SILENT, 5.0, False)
    ]


def test_calls_beyond_their_deadline_are_measured() -> None:
    told = [
        call("A", 1, None, 2.5, wait=1.0, how="gave up"),
        call("B", 1, None, 3.5, wait=1.0, how="failed"),
        storm("paused", 3, whom="B", begin=2, standing=2),
        call("C", 10, None, 10.7, wait=0.5, how="failed"),
        storm("outage", 10.5, begin=10.1, silent=False),
    ]
    late = judge(itertools.chain(*told, storm("end", 100.0)), "redis")["beyond_the_deadline"]
    assert (late["calm"]["count"], late["calm"]["max"], late["calm"]["above_aim"]) == (1, 0.5, 1)
    assert (late["outage"]["count"], late["outage"]["max"], late["outage"]["above_aim"]) == (1, 0.2, 0)
