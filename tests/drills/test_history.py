"""The check of a drill's history, in both directions: it passes what is right and catches what is planted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fenced.drills import pauses
from fenced.drills.history import (
    Decision,
    Grant,
    History,
    Kind,
    Operation,
    Pause,
    RenewalEvent,
    as_json,
    check,
)


def _operation(
    kind: Kind,
    token: int,
    at: float,
    version: int | None,
    *,
    decision: Decision = "admitted",
    name: str = "stock",
) -> Operation:
    update = f"u{token}" if kind == "write" else None
    return Operation(
        holder=f"H{token}",
        kind=kind,
        name=name,
        stamp=f"stamp of {token}",
        token=token,
        decision=decision,
        began=at,
        time=at + 0.1,
        why="stale" if decision == "refused" else None,
        version=version,
        update=update,
    )


def _story(*operations: Operation, there: tuple[str, ...] = ()) -> History:
    return History(operations=list(operations), finals={"stock": there})


def verdict(history: History) -> str:
    """As of a drill of which somebody must be overtaken, and which accepts no harm."""
    return pauses.SIGSTOP.verdict(history, check(history))


# Token 1 reads and is paused, token 2 takes over, token 1 comes late and is refused.
RIGHT = (
    _operation("announce", 1, 0, None),
    _operation("read", 1, 1, 0),
    _operation("announce", 2, 2, None),
    _operation("read", 2, 3, 0),
    _operation("write", 2, 4, 1),
    _operation("write", 1, 5, None, decision="refused"),
)


def test_a_right_history_is_held() -> None:
    findings = check(_story(*RIGHT, there=("u2",)))
    assert verdict(_story(*RIGHT, there=("u2",))) == "held"
    assert (findings.acknowledged, findings.refused, findings.overtaken) == (1, 1, 1)
    assert not findings.stale
    assert not findings.lost


NOBODY_OVERTAKEN: dict[str, tuple[Operation, ...]] = {
    "nothing happened": (),
    "nobody was late": (
        _operation("read", 1, 0, 0),
        _operation("write", 1, 1, 1),
        _operation("read", 2, 2, 1),
    ),
    "the late one came back under another name": (*RIGHT[:5], replace(RIGHT[5], name="other")),
    "the late one was not decided": (*RIGHT[:5], replace(RIGHT[5], decision="failed")),
    "the newer one had done nothing yet": (*RIGHT[:2], RIGHT[5]),
    "both acted at once": (*RIGHT[:2], replace(RIGHT[2], time=9), replace(RIGHT[5], began=4, time=9)),
}


@pytest.mark.parametrize("operations", NOBODY_OVERTAKEN.values(), ids=NOBODY_OVERTAKEN)
def test_where_nobody_was_overtaken_nothing_is_held(operations: tuple[Operation, ...]) -> None:
    """Without a guard nothing would be lost here either. A fault that is there counts all the same."""
    acknowledged = [each.update or "" for each in _story(*operations).writes("admitted")]
    history = _story(*operations, there=tuple(acknowledged))
    assert (verdict(history), check(history).overtaken) == ("inconclusive", 0)
    gone = _operation("write", 3, 20, 9)
    assert verdict(_story(*operations, gone, there=tuple(acknowledged))) == "broken"


@pytest.mark.parametrize("version", [2, None])
def test_without_a_guard_an_overtaken_holder_is_never_held(version: int | None) -> None:
    """Nothing refuses it: the one who is counted as overtaken is always counted as stale, too."""
    plain = [each for each in RIGHT[:5] if each.kind != "announce"]
    late = replace(RIGHT[-1], decision="admitted", version=version)
    findings = check(_story(*plain, late, there=("u1", "u2")))
    assert (findings.harm >= {"stale"}, findings.overtaken, findings.stale) == (True, 1, (late,))


def test_each_overtaken_lease_counts_once() -> None:
    again = replace(RIGHT[-1], began=6, time=6.1)
    third = (_operation("announce", 3, 7, None), _operation("write", 2, 8, None, decision="refused"))
    assert check(_story(*RIGHT, again, *third, there=("u2",))).overtaken == 2


def test_a_late_write_that_was_admitted_is_stale_and_loses_an_update() -> None:
    late = replace(RIGHT[-1], decision="admitted", version=2)
    findings = check(_story(*RIGHT[:-1], late, there=("u1",)))
    assert findings.harm == {"stale", "lost"}
    assert findings.stale == (late,)
    assert [each.update for each in findings.lost] == ["u2"]
    assert findings.lost_percent == pytest.approx(50)


def test_a_late_write_is_stale_after_a_mere_announcement() -> None:
    """Nothing was written with 2 yet: only the announcement makes the write of 1 stale."""
    late = replace(RIGHT[-1], decision="admitted", version=None)
    assert check(_story(*RIGHT[:3], late, there=("u1",))).stale == (late,)


def test_the_order_of_the_resource_counts_where_times_overlap() -> None:
    """Both writes were under way at once; by its versions the resource took 2 first, then 1."""
    newer = replace(_operation("write", 2, 4, 1), time=9)
    older = replace(_operation("write", 1, 4, 2), time=9)
    assert check(_story(newer, older, there=("u1", "u2"))).stale == (older,)
    swapped = (replace(newer, version=2), replace(older, version=1))
    assert not check(_story(*swapped, there=("u1", "u2"))).stale


def test_a_read_counts_where_it_stood_in_the_order_of_the_resource() -> None:
    read = replace(_operation("read", 2, 4, 6), time=9)
    before, after = (replace(_operation("write", 1, 4, version), time=9) for version in (6, 7))
    assert not check(_story(read, before, there=("u1",))).stale
    assert check(_story(read, after, there=("u1",))).stale == (after,)


def test_names_have_marks_of_their_own() -> None:
    other = _operation("write", 1, 6, 2, name="other")
    history = _story(*RIGHT, other, there=("u2",))
    history.finals["other"] = ("u1",)
    assert verdict(history) == "held"


def test_an_acknowledged_update_that_is_missing_is_lost() -> None:
    findings = check(_story(*RIGHT, there=()))
    assert [each.update for each in findings.lost] == ["u2"]
    assert findings.harm == {"lost"}


def test_an_unknown_write_may_be_there_or_not() -> None:
    unknown = _operation("write", 3, 7, None, decision="unknown")
    failed = _operation("write", 4, 8, None, decision="failed")
    for there in (("u2",), ("u2", "u3")):
        assert verdict(_story(*RIGHT, unknown, failed, there=there)) == "held"


def test_a_refused_update_that_is_there_is_caught() -> None:
    findings = check(_story(*RIGHT, there=("u1", "u2")))
    assert [each.update for each in findings.refused_applied] == ["u1"]
    assert findings.harm == {"refused_applied"}


def test_an_update_that_is_there_twice_is_caught() -> None:
    findings = check(_story(*RIGHT, there=("u2", "u2")))
    assert findings.doubled == ("u2",)
    assert findings.harm == {"doubled"}


def _grant(token: int, began: float, time: float) -> Grant:
    return Grant("stock", token, f"H{token}", began, time)


@pytest.mark.parametrize(
    "grants,fallen",
    [
        ([_grant(1, 0, 1), _grant(2, 2, 3)], 0),
        ([_grant(2, 0, 9), _grant(1, 0, 8)], 0),  # under way at once: either order is right
        ([_grant(2, 0, 1), _grant(1, 2, 3)], 1),
        ([_grant(1, 0, 1), _grant(1, 0, 1)], 1),
    ],
)
def test_tokens_that_do_not_rise_are_caught(grants: list[Grant], fallen: int) -> None:
    history = History(grants=grants)
    assert len(check(history).tokens_fallen) == fallen
    assert verdict(history) == ("broken" if fallen else "inconclusive")


@pytest.mark.parametrize("answer,revived", [("kept", 1), ("expired", 0)])
def test_a_renewal_that_revives_a_lease_is_caught(answer: str, revived: int) -> None:
    late = RenewalEvent("H1", "stock", 1, answer, began=12, time=12.1)
    findings = check(History(grants=[_grant(1, 0, 1), _grant(2, 10, 11)], renewals=[late]))
    assert len(findings.revived) == revived


def test_times_in_json_count_from_the_start() -> None:
    rows = as_json(History(grants=[_grant(1, 100.5, 101.0)]), start=100.0)["grants"]
    assert rows == [{"name": "stock", "token": 1, "holder": "H1", "began": 0.5, "time": 1.0}]


@pytest.mark.parametrize(
    ("ends", "name", "contested"), [(4.0, "stock", 1), (3.0, "stock", 0), (4.0, "other", 0)]
)
def test_a_write_acknowledged_near_a_pause_is_contested(ends: float, name: str, contested: int) -> None:
    """The write of 2 ends at 4.1: within a ttl after the pause, or not, or under another name."""
    story = _story(*RIGHT, there=("u2",))
    story.ttl = 0.5
    story.pauses.append(Pause("H1", name, 1, began=1.5, ended=ends))
    assert check(story).contested == contested
