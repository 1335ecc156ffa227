"""Which ttl? From recorded pauses: how often a lease would be lost that is held all the time, for each ttl. Pure.

A holder believes in its lease until a deadline, counted from the renewal that was last confirmed, and renews after a
third of the ttl. A pause ends the belief if it lasts beyond the deadline; whether it does depends on how long ago the
last renewal was when it began. So the recorded pauses are walked through in their order, by clients that renew at
different moments, and the losses are counted.

This is about how often, never about whether: a guard refuses the late write at any ttl.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fenced.pauses import LONG_SECONDS, Buckets, Recording
from fenced.values import timing

DAY = 86_400.0
TTLS = (0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 15.0, 30.0, 60.0)
CANDIDATES = (
    0.5,
    1.0,
    1.5,
    2.0,
    3.0,
    5.0,
    8.0,
    10.0,
    15.0,
    20.0,
    30.0,
    45.0,
    60.0,
    90.0,
    120.0,
    180.0,
    300.0,
)
ACCEPTED_A_DAY = 1 / 30
"""One false expiry a month."""
MARGIN_SECONDS = 0.1
SHORT_SECONDS = DAY
WALKS = 8
"""By so many jitters and beginnings the losses are averaged."""


@dataclass(frozen=True, slots=True)
class TtlRow:
    """What a ttl would mean."""

    ttl: float
    heartbeat: float
    """Seconds from one renewal to the next."""
    expiries: float
    """Expected false expiries a day of one lease that is always held."""
    at_most: float | None
    """If no pause was long enough: so many a day, with 95 % certainty; else None."""
    failover: float
    """Seconds until the next in line is granted after a crash, on average. At most: the ttl."""
    renewals: float
    """Requests a second of each client, whatever the number of its leases."""


@dataclass(frozen=True, slots=True)
class Advice:
    """What the rules say."""

    longest: float
    by_pause: float
    """1.5 times the longest pause, and a margin: it would have lost nothing in this recording."""
    by_rate: float | None
    """The shortest ttl with at most one false expiry a month; None: longer than every candidate."""
    by_section: float | None
    """For a lease that is not renewed: the 99.9th percentile of the section, and the longest pause."""
    ttl: float | None
    """The one to take for a lease that is renewed."""


def expiries(recording: Recording, ttl: float, round_trip: float) -> float:
    """Expected false expiries a day, on average over clients with different jitter that began at different times."""
    walks = [
        _walk(recording, ttl, round_trip, (jitter + 0.5) / WALKS, began / WALKS)
        for jitter in range(WALKS)
        for began in range(WALKS)
    ]
    return sum(walks) / len(walks) * DAY / recording.seconds


def _walk(recording: Recording, ttl: float, round_trip: float, jitter: float, began: float) -> int:
    """How often one client would have lost its lease. `began`: how far it was into an interval when it started."""
    interval, deadline = timing.renew_after(ttl, jitter), timing.local_deadline(0.0, ttl)
    age, now, lost = round_trip + began * interval, 0.0, 0
    # `age`: since the renewal was sent that was last confirmed. It is confirmed one round trip later.
    for start, length in recording.pauses:
        age = round_trip + (age - round_trip + max(0.0, start - now)) % interval
        now = start + length
        if age + length >= deadline:
            lost += 1
        if age + length >= interval:  # renewed, or acquired again, as soon as it wakes up
            age, now = round_trip, now + round_trip
        else:
            age += length
    return lost


def row(recording: Recording, ttl: float, round_trip: float) -> TtlRow:
    found = expiries(recording, ttl, round_trip)
    heartbeat = timing.renew_after(ttl, 0.5)
    at_most = 3 * DAY / recording.seconds if found == 0.0 else None  # the rule of three
    return TtlRow(ttl, heartbeat, found, at_most, ttl - heartbeat / 2, 1 / heartbeat)


def advice(recording: Recording, round_trip: float, section: float | None = None) -> Advice:
    longest = max((*(length for _, length in recording.pauses), _longest_counted(recording)))
    by_pause = 1.5 * longest + MARGIN_SECONDS
    by_rate = next((t for t in CANDIDATES if expiries(recording, t, round_trip) <= ACCEPTED_A_DAY), None)
    wanted = None if by_rate is None else max(by_pause, by_rate)
    ttl = None if wanted is None else next((t for t in CANDIDATES if t >= wanted), None)
    by_section = None if section is None else section + longest + MARGIN_SECONDS
    return Advice(longest, by_pause, by_rate, by_section, ttl)


def _longest_counted(recording: Recording) -> float:
    """Of the pauses that were only counted."""
    places = [place for place in recording.counts if Buckets.upper(place) <= LONG_SECONDS]
    return Buckets.upper(max(places)) if places else 0.0


def histogram(recording: Recording) -> list[tuple[float, int]]:
    """How many wake-ups were late by at most so many seconds, and by more than the entry before; from 1 ms on."""
    found: dict[float, int] = {}
    for place, count in sorted(recording.counts.items()):
        upper = 0.001
        while upper < Buckets.upper(place):
            upper *= 2
        found[upper] = found.get(upper, 0) + count
    if not found:
        return []
    uppers, upper = [], 0.001
    while upper <= max(found):
        uppers.append(upper)
        upper *= 2
    return [(upper, found.get(upper, 0)) for upper in uppers]


# For people.


def lines(recording: Recording, rows: Sequence[TtlRow], advised: Advice) -> Iterator[str]:
    yield f"recorded: {span(recording.seconds)}; {len(recording.pauses):,} pauses of {LONG_SECONDS:g} s or more"
    yield ""
    yield from _bars(recording)
    yield ""
    yield f"{'ttl':>6}  {'heartbeat':>9}  {'false expiries a day':>22}  {'fail-over mean/max':>18}  {'renewals/s':>10}"
    for each in rows:
        failover = f"{each.failover:.1f}/{each.ttl:g} s"
        yield f"{each.ttl:>5g}s  {each.heartbeat:>8.2f}s  {rate(each):>22}  {failover:>18}  {each.renewals:>10.2f}"
    yield ""
    yield from said(advised)
    if recording.seconds < SHORT_SECONDS:
        yield f"this is what {span(recording.seconds)} show: record for days, and where the programs run"
    yield ""
    yield NEVER


NEVER = "A ttl changes how often a lease is lost, never whether its holder can do harm: a guard refuses the late write."


def said(advised: Advice) -> Iterator[str]:
    yield f"longest pause: {advised.longest:.2f} s. 1.5 times that, and a margin: {advised.by_pause:.1f} s"
    if advised.by_rate is None:
        yield f"no ttl up to {CANDIDATES[-1]:g} s has at most one false expiry a month: look for the pauses first"
    else:
        yield f"at most one false expiry a month: {advised.by_rate:g} s"
    if advised.by_section is not None:
        yield f"a lease that is not renewed: {advised.by_section:.1f} s, for the section and the longest pause"
    if advised.ttl is not None:
        yield f"take ttl {advised.ttl:g} s for a lease that is renewed; its length need not cover the section"


def rate(each: TtlRow) -> str:
    return f"{each.expiries:.2f}" if each.at_most is None else f"none seen; < {each.at_most:,.3g}"


def _bars(recording: Recording) -> Iterator[str]:
    found = histogram(recording)
    most = max((count for _, count in found), default=1)
    for upper, count in found:
        # By the logarithm, or a handful of long pauses would not be seen beside all short ones.
        width = round(40 * (count.bit_length() / most.bit_length())) if count else 0
        yield f"  to {length(upper):>7}  {count:>9,}  {'#' * width}"


def length(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def span(seconds: float) -> str:
    for size, unit in ((DAY, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} seconds"


def as_json(recording: Recording, rows: Sequence[TtlRow], advised: Advice) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "seconds": recording.seconds,
        "pauses": len(recording.pauses),
        "histogram": [{"up_to": upper, "count": count} for upper, count in histogram(recording)],
        "ttls": [asdict(each) for each in rows],
        "advice": asdict(advised),
    }
