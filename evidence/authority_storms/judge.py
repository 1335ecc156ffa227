"""Judge the events of a storm: pure functions from lines to figures.

Events are dicts with the time (`at`, by the clock that all processes of the machine share), the process (`who`: a new
name after each restart) and what it did (`do`). A grant counts from when its holder received it, so that the
time in which a name was free is never measured too short. A hold counts up to the last moment at which the holder
looked and still had it, so that no overlap is reported that did not happen.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fenced.core.acquiring import BACKOFF_MAX
from fenced.values import timing

Event = dict[str, Any]

HAND_OVER_SECONDS = 1.0
"""How soon a free name is granted if no dead or silent client is ahead in the queue."""
OVERRUN_SECONDS = 0.25
RELEASE, CLIENT, OUTAGE, SILENT = "release", "client_fault", "outage", "silent_connections"


@dataclass(slots=True)
class Call:
    """One call of a worker, from its ask to the end of its lease."""

    who: str
    names: tuple[str, ...]
    wait: float | None
    asked: float
    token: int = 0
    ttl: float = 0.0
    granted: float | None = None
    still: float | None = None
    """The last moment at which the holder looked at its lease and had it."""
    cancelling: float | None = None
    ended: float | None = None
    how: str = ""
    why: str = ""


@dataclass(frozen=True, slots=True)
class Pause:
    """`begin`: before the signal was sent; `standing`: the process was surely stopped; `until`: it continued."""

    begin: float
    standing: float
    until: float


@dataclass(frozen=True, slots=True)
class Outage:
    begin: float
    until: float
    silent: bool = False
    """Whether connections stay open afterwards, and the server's bytes no longer arrive on them."""


@dataclass(slots=True)
class Story:
    calls: list[Call] = field(default_factory=list)
    pauses: dict[str, list[Pause]] = field(default_factory=dict)
    deaths: dict[str, Pause] = field(default_factory=dict)
    outages: list[Outage] = field(default_factory=list)
    end: float = math.inf


def read(events: Iterable[Event]) -> Story:
    """Merge the events of all processes, without those after the end of the storm."""
    ordered = sorted(events, key=lambda event: event["at"])
    story, calls = Story(), dict[tuple[str, int], Call]()
    story.end = next((event["at"] for event in ordered if event["do"] == "end"), math.inf)
    for event in ordered:
        at, who = event["at"], event["who"]
        if at > story.end:
            break
        if "call" in event and event["do"] != "asking":
            _take(calls[who, event["call"]], event)
            continue
        match event["do"]:
            case "asking":
                call = Call(who, tuple(event["names"]), event["wait"], at)
                calls[who, event["call"]] = call
                story.calls.append(call)
            case "paused":
                pause = Pause(event["begin"], event["standing"], at)
                story.pauses.setdefault(event["whom"], []).append(pause)
            case "killed":
                story.deaths[event["whom"]] = Pause(event["begin"], at, math.inf)
            case "outage":
                story.outages.append(Outage(event["begin"], at, event["silent"]))
    return story


def _take(call: Call, event: Event) -> None:
    match event["do"]:
        case "granted":
            call.granted, call.token, call.ttl = event["at"], event["token"], event["ttl"]
        case "still":
            call.still = event["at"]
        case "cancelling":
            call.cancelling = event["at"]
        case "ended":
            call.ended, call.how, call.why = event["at"], event["how"], event.get("why", "")


# Safety.


def repeated_tokens(story: Story) -> list[int]:
    counts = Counter(call.token for call in story.calls if call.granted is not None)
    return sorted(token for token, count in counts.items() if count > 1)


def fallen_tokens(story: Story) -> list[tuple[int, int]]:
    """(token, later but lower token) of a call that began after the other grant, or of two holders of one name."""
    granted = [call for call in story.calls if call.granted is not None]
    fallen = []
    by_grant = sorted(granted, key=lambda call: call.granted or 0.0)
    highest: list[int] = []
    for call in by_grant:
        highest.append(max(call.token, highest[-1] if highest else 0))
    times = [call.granted or 0.0 for call in by_grant]
    for call in granted:
        before = bisect.bisect_left(times, call.asked)
        if before and highest[before - 1] > call.token:
            fallen.append((highest[before - 1], call.token))
    for holders in _holders(story).values():
        fallen += [
            (one.token, two.token) for one, two in itertools.pairwise(holders) if one.token > two.token
        ]
    return fallen


def overlaps(story: Story) -> list[tuple[str, int, int]]:
    """(name, token, token) of two holders that both saw their lease as held at one moment."""
    found = []
    for name, holders in _holders(story).items():
        last: Call | None = None
        for call in holders:
            assert call.granted is not None
            if last is not None and last.still is not None and call.granted < last.still:
                found.append((name, last.token, call.token))
            if last is None or (call.still or 0.0) > (last.still or 0.0):
                last = call
    return found


def _holders(story: Story) -> dict[str, list[Call]]:
    """The holders of each name, in the order of grants; only those that saw the lease as held after the grant."""
    holders: dict[str, list[Call]] = {}
    for call in sorted(story.calls, key=lambda call: call.granted or 0.0):
        if call.granted is not None and call.still is not None and call.still >= call.granted:
            for name in call.names:
                holders.setdefault(name, []).append(call)
    return holders


# Liveness.


@dataclass(frozen=True, slots=True)
class Bounds:
    """How long a free name with live waiters may stay ungranted after the last fault, by the kind of that fault."""

    release: float = HAND_OVER_SECONDS
    client_fault: float = math.inf
    outage: float = math.inf
    silent_connections: float = math.inf

    @classmethod
    def of(cls, authority: str, ttl: float, tick: float = 0.0) -> Bounds:
        """The bounds for the granted ttl, and for ZooKeeper's tick."""
        session = 4 / 3 * ttl + tick if authority == "zookeeper" else ttl
        after_restart = 2 * ttl if authority == "etcd" else session  # a new leader restarts every ttl
        retry = timing.CALL_SECONDS + BACKOFF_MAX  # a request on a silent connection fails and is retried
        return cls(
            client_fault=session + HAND_OVER_SECONDS,
            outage=after_restart + HAND_OVER_SECONDS,
            silent_connections=max(after_restart, retry) + HAND_OVER_SECONDS,
        )


@dataclass(frozen=True, slots=True)
class Span:
    """A time in which a name was free and a live client, which was not stopped, waited for it."""

    name: str
    kind: str
    begin: float
    """When the name became free and had a live waiter, or the end of the last fault since."""
    end: float
    due: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    @property
    def bound(self) -> float:
        return self.due - self.begin

    @property
    def over(self) -> bool:
        return self.end > self.due


def spans(story: Story, bounds: Bounds) -> list[Span]:
    """Every time span in which a name was free and had a live waiter.

    Names that one call waits for together form a group: a waiter for `a` may be behind a waiter for `a` and `b`, and
    `b` is held. So a name counts as free only if no name of its group is held. During an outage the clock stops; it
    restarts from zero at the end of the outage.
    """
    return list(_Sweep(story, bounds).run())


class _Sweep:
    def __init__(self, story: Story, bounds: Bounds) -> None:
        self.bounds = bounds
        self.end = story.end
        self.waiting: dict[int, tuple[str, ...]] = {}
        self.held: Counter[str] = Counter()
        self.out = 0
        self.faults: dict[str, dict[str, float]] = {}
        self.everywhere: dict[str, float] = {}
        self.open: dict[str, tuple[float, set[str]]] = {}
        self.changes: list[tuple[float, int, Any]] = []
        for number, call in enumerate(story.calls):
            self._plan(number, call, story)
        for outage in story.outages:
            self.changes.append((outage.begin, _OUT, 1))
            self.changes.append((outage.until, _OUT, -1))
            kind = SILENT if outage.silent else OUTAGE
            self.changes.append((outage.until, _FAULT, (None, kind)))
        self.changes.sort(key=lambda change: change[:2])

    def _plan(self, number: int, call: Call, story: Story) -> None:
        death = story.deaths.get(call.who)
        ended = min(self.end if call.ended is None else call.ended, death.begin if death else math.inf)
        pauses = [
            pause
            for pause in story.pauses.get(call.who, [])
            if pause.begin < ended and pause.until > call.asked
        ]
        granted = ended if call.granted is None else min(call.granted, ended)
        if call.wait is None or call.wait > 0:
            for begin, end in _without(call.asked, granted, pauses):
                self.changes.append((begin, _WAIT, (number, call.names)))
                self.changes.append((end, _LEAVE, number))
        for begin, end in _without(granted, ended, pauses):
            self.changes.append((begin, _HOLD, (call.names, 1)))
            self.changes.append((end, _HOLD, (call.names, -1)))
        faults = [pause.standing for pause in pauses]
        if death is not None and (call.ended is None or call.ended >= death.begin):
            faults.append(death.standing)
        elif call.how in ("lost", "failed", "interrupted"):
            faults.append(ended)
        self.changes += [(at, _FAULT, (call.names, CLIENT)) for at in faults]

    def run(self) -> Iterator[Span]:
        at = -math.inf
        for when, what, details in self.changes:
            if when > self.end:
                break
            if when > at:
                yield from self._look(at)
                at = when
            self._apply(when, what, details)
        yield from self._look(at)
        for name in list(self.open):
            yield self._close(name, self.end)

    def _apply(self, when: float, what: int, details: Any) -> None:
        match what:
            case 1:  # _WAIT
                self.waiting[details[0]] = details[1]
            case 2:  # _LEAVE
                self.waiting.pop(details, None)
            case 0:  # _HOLD
                for name in details[0]:
                    self.held[name] += details[1]
            case 3:  # _OUT
                self.out += details
            case _:  # _FAULT
                names, kind = details
                for name in names or ():
                    self.faults.setdefault(name, {})[kind] = when
                if names is None:
                    self.everywhere[kind] = when

    def _look(self, at: float) -> Iterator[Span]:
        """After all changes of one moment: find the names that are free and have a live waiter."""
        free: dict[str, set[str]] = {}
        if not self.out:
            for group in _groups(set(self.waiting.values())):
                if not any(self.held[name] > 0 for name in group):
                    free.update(dict.fromkeys(group, group))
        for name in [name for name in self.open if name not in free]:
            yield self._close(name, at)
        for name, group in free.items():
            if name in self.open:
                self.open[name][1].update(group)
            else:
                self.open[name] = (at, set(group))

    def _close(self, name: str, at: float) -> Span:
        begin, group = self.open.pop(name)
        due, kind, since = begin + self.bounds.release, RELEASE, begin
        faults = [
            *self.everywhere.items(),
            *(fault for one in group for fault in self.faults.get(one, {}).items()),
        ]
        for fault, when in faults:
            if (by := when + float(getattr(self.bounds, fault))) > due:
                due, kind, since = by, fault, max(begin, when)
        return Span(name, kind, min(since, at), at, due)


_HOLD, _WAIT, _LEAVE, _OUT, _FAULT = range(5)


def _without(begin: float, end: float, pauses: list[Pause]) -> Iterator[tuple[float, float]]:
    for pause in pauses:
        if begin < min(pause.begin, end):
            yield begin, min(pause.begin, end)
        begin = max(begin, pause.until)
    if begin < end:
        yield begin, end


def _groups(wishes: set[tuple[str, ...]]) -> list[set[str]]:
    """Groups of names that are connected by calls that wait for several of them."""
    groups: list[set[str]] = []
    for wish in wishes:
        group = set(wish)
        separate = []
        for other in groups:
            if group.isdisjoint(other):
                separate.append(other)
            else:
                group |= other
        groups = [*separate, group]
    return groups


# Deadlines.


def overruns(story: Story) -> dict[str, list[float]]:
    """Seconds that calls took beyond their `wait`, or after their cancellation, in processes that were not stopped."""
    found: dict[str, list[float]] = {"calm": [], "outage": [], "cancelled": []}
    for call in story.calls:
        over = call.granted or call.ended
        pauses = story.pauses.get(call.who, [])
        if over is None or any(pause.begin < over and pause.until > call.asked for pause in pauses):
            continue
        if call.cancelling is not None:
            found["cancelled"].append(over - call.cancelling)
        elif call.wait is not None and call.how != "interrupted" and over - call.asked > call.wait:
            out = any(outage.begin < over and outage.until > call.asked for outage in story.outages)
            found["outage" if out else "calm"].append(over - call.asked - call.wait)
    return found


def figures(values: Sequence[float]) -> dict[str, float | int]:
    """The count, the median, the 99th percentile and the maximum, rounded to milliseconds."""
    if not values:
        return {"count": 0}
    ordered = sorted(values)
    return {
        "count": len(ordered),
        "p50": round(ordered[len(ordered) // 2], 3),
        "p99": round(ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)], 3),
        "max": round(ordered[-1], 3),
    }


# The verdict.


def judge(events: Iterable[Event], authority: str, tick: float = 0.0) -> dict[str, Any]:
    """The figures of one storm. `broken` lists the violations; it should be empty."""
    story = read(events)
    granted = [call for call in story.calls if call.granted is not None]
    ttl = max((call.ttl for call in granted), default=0.0)
    bounds = Bounds.of(authority, ttl, tick)
    repeated, fallen, overlapping = repeated_tokens(story), fallen_tokens(story), overlaps(story)
    errors = Counter(f"{call.how}: {call.why}" for call in story.calls if call.why)
    odd = {why: count for why, count in errors.items() if why.split(": ", 1)[1] not in EXPECTED}
    free: dict[str, Any] = {}
    broken: list[str] = [
        *(f"token {token} was granted twice" for token in repeated),
        *(f"token {low} was granted after {high}" for high, low in fallen),
        *(f"{name!r} had two holders: tokens {one} and {two}" for name, one, two in overlapping),
        *(f"{count} times {why}" for why, count in odd.items()),
    ]
    found = spans(story, bounds)
    for kind in (RELEASE, CLIENT, OUTAGE, SILENT):
        mine = [span for span in found if span.kind == kind]
        free[f"after_{kind}"] = _free(mine, float(getattr(bounds, kind)))
        broken += [
            f"{span.name!r} was free for {span.seconds:.3f} s (after {kind}, bound {span.bound:.3f} s), "
            f"from {span.begin:.3f} to {span.end:.3f}"
            for span in mine
            if span.over
        ]
    late = overruns(story)
    return {
        "granted_ttl": ttl,
        "calls": len(story.calls),
        "grants": len(granted),
        "tokens_repeated": len(repeated),
        "tokens_fallen": len(fallen),
        "overlaps": len(overlapping),
        "ends": dict(Counter(call.how or "cut off" for call in story.calls)),
        "errors": dict(errors),
        "seconds_of_outages": round(sum(outage.until - outage.begin for outage in story.outages), 1),
        "free_with_live_waiters": free,
        "beyond_the_deadline": {
            "aim": OVERRUN_SECONDS,
            **{
                kind: {**figures(values), "above_aim": sum(value > OVERRUN_SECONDS for value in values)}
                for kind, values in late.items()
            },
        },
        "broken": broken,
    }


EXPECTED = ("Unavailable", "Indeterminate", "LeaseLost", "NotGranted", "KeyboardInterrupt", "CancelledError")


def _free(mine: list[Span], bound: float) -> dict[str, Any]:
    longest = max(mine, key=lambda span: span.seconds, default=None)
    return {
        "bound": round(bound, 3),
        **figures([span.seconds for span in mine]),
        **({"longest_had_bound": round(longest.bound, 3)} if longest is not None else {}),
        "over": sum(span.over for span in mine),
    }
