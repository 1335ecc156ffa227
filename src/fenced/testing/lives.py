"""What a trace says about one attempt: the calls of its client, and the bounds of time that follow from them.

An authority decides a call at some moment between its sending and its answer. Where the moment itself is known, both
are the same, and every bound below is exact. A call without an answer may have been decided at any later time, or not
at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from fenced.values import timing
from fenced.values.contracts import Trait

NEVER = math.inf
HELD = ("granted", "kept")
OVER = ("released", "ended")


@dataclass(slots=True)
class TracedCall:
    """One call about an attempt, and its answer."""

    op: str
    """ask, renew, release or withdraw; force: an operator takes the name from the holder of this token."""
    attempt: str
    """The public id."""
    sent: float
    at: float = NEVER
    """When it was answered."""
    answer: str = ""
    """granted, waiting, busy, kept, released, ended or gone; empty: nobody knows."""
    token: int = 0
    remaining: float = 0.0
    reason: str = ""
    """How an attempt has ended."""
    names: tuple[str, ...] = ()
    ttl: float = 0.0
    lock_delay: float = 0.0
    keep: float = 0.0

    def __str__(self) -> str:
        said = {"granted": f"granted {self.token}", "ended": f"ended ({self.reason})"}.get(
            self.answer, self.answer
        )
        return f"{self.op} of {self.attempt[:6]} at {self.sent:.4f}, answered {said or 'nothing'}"


class Deviation(AssertionError):
    """Something in a trace that no authority with these promises does."""


@dataclass(frozen=True)
class Promises:
    """What differs between authorities, from their traits."""

    per_name: bool = False
    """A token is minted when the attempt is queued, and rises per name."""
    forgets: bool = False
    """An attempt that has ended may be unknown at any later time, or answered as settled."""
    frees_late: bool = False
    """A name whose lease has expired, or that is kept, may stay taken for longer than it should, by no known time."""
    exact: bool = False
    """The trace has the moments of the decisions, and leases and places end exactly when they should."""
    sessions: bool = False
    """Attempts live in sessions. A release that was carried out, and whose reply was lost, may be answered `expired`
    when it is tried again; and the first of a queue may be told to wait until its session is confirmed."""
    place: Callable[[float], float] = timing.waiter_ttl
    """How long a place in a queue lasts at least, by the ttl."""
    copies: bool = False
    """A call may have been sent more than once: a copy of an ask that was told to wait may have been granted later."""

    @classmethod
    def of(
        cls, traits: Collection[Trait] | Collection[str], *, exact: bool = False, copies: bool = False
    ) -> Promises:
        keys = {trait.key if isinstance(trait, Trait) else trait for trait in traits}
        forgets = not keys.isdisjoint(("settled-forgotten", "own-memory"))
        # Places of sessions end with their session, which may be a third shorter than their ttl.
        shorter = (lambda ttl: timing.waiter_ttl(ttl) * 2 / 3) if "sessions" in keys else timing.waiter_ttl
        late = not keys.isdisjoint(("restart-prolongs", "delay-noticed", "sessions"))
        # What a session has deleted leaves no trace of why, once the session itself is over.
        return cls("per-name-order" in keys, forgets, late, exact, "sessions" in keys, shorter, copies)

    def slack(self, *durations: float) -> float:
        """By how much a clock may differ over these durations."""
        return 1e-6 if self.exact else timing.DRIFT_RATIO * sum(durations) + 2 * timing.DRIFT_SECONDS


def lives_of(calls: Sequence[TracedCall]) -> list[list[TracedCall]]:
    """The calls about one attempt, in the order in which they were sent, for each of its lives.

    It has several if it expired so long ago that it is forgotten: then an ask makes it anew, under another token. A
    renewal makes nothing. What an answer says was true soon after its call was sent, however late it arrived.
    """
    parts: list[list[TracedCall]] = [[]]
    forgotten = NEVER
    for call in calls:
        if call.op == "ask" and call.sent > forgotten:
            parts.append([])
            forgotten = NEVER
        parts[-1].append(call)
        if call.answer in (*HELD, "waiting", "released"):
            ttl = max(each.ttl for each in calls)  # only its asks say it
            forgotten = call.sent + ttl + timing.remember_for(ttl)
    return parts


@dataclass
class Life:
    """One life of an attempt. Bounds that end in `_by` are the latest moment, those in `_from` the earliest."""

    calls: Sequence[TracedCall]
    """In the order in which they were sent."""
    promises: Promises
    forgiven: bool = False
    """The store may have lost what it said: nothing is promised by it."""
    forced_from: float = NEVER
    """When an operator asked for its names."""
    asks: list[TracedCall] = field(init=False)

    def __post_init__(self) -> None:
        self.id = self.calls[0].attempt
        self.asks = [call for call in self.calls if call.op == "ask"]
        first = self.asks[0] if self.asks else self.calls[0]
        self.names, self.ttl, self.delay, self.asked = first.names, first.ttl, first.lock_delay, first.sent
        self.token = next((call.token for call in self.calls if call.answer == "granted"), 0)

    def _answered(self, *answers: str) -> list[TracedCall]:
        return [call for call in self.calls if call.answer in answers]

    @cached_property
    def granted_by(self) -> float:
        return min((call.at for call in self._answered(*HELD)), default=NEVER)

    @cached_property
    def granted_from(self) -> float:
        """It was granted after every answer that it waits; and, if grants are made by asks, by one that was sent."""
        waits = [call.sent for call in self._answered("waiting") if call.sent < self.granted_by]
        grants = ("", "granted", "waiting") if self.promises.copies else ("", "granted")
        asks = [call.sent for call in self.asks if call.answer in grants]
        by_ask = min(asks, default=self.asked) if not self.promises.per_name else self.asked
        return max(self.asked, by_ask, *waits)

    @cached_property
    def queued_by(self) -> float:
        return min((call.at for call in self._answered("waiting")), default=NEVER)

    @cached_property
    def _leaves(self) -> list[TracedCall]:
        """What may have ended it at its client's request."""
        ends = [call for call in self.calls if call.op in ("release", "withdraw")]
        return [
            call
            for call in ends
            if call.answer in ("", "released")
            or call.reason in ("released", "withdrawn")
            or (call.reason == "expired" and self.promises.sessions)
        ]

    @cached_property
    def left_from(self) -> float:
        return min((call.sent for call in self._leaves), default=NEVER)

    def alive_until(self, before: float = NEVER) -> float:
        """Until when it lives, whatever happens, by the answers that had come before; unless its client ends it."""
        known = [call for call in self.calls if call.at <= before]
        leases = [self._lasts(call, call.remaining) for call in known if call.answer in HELD]
        places = [
            self._lasts(call, self.promises.place(self.ttl)) for call in known if call.answer == "waiting"
        ]
        return max(leases or places, default=-NEVER)

    def _lasts(self, call: TracedCall, seconds: float) -> float:
        return call.sent + seconds - self.promises.slack(seconds)

    @cached_property
    def free_from(self) -> float:
        """When its names may be granted to somebody else at the earliest."""
        if not self.token or self.forgiven:
            return -NEVER
        expired = self.alive_until() + self.delay - self.promises.slack(self.delay)
        left = [call.sent + call.keep - self.promises.slack(call.keep) for call in self._leaves]
        revoked = any(call.reason == "revoked" for call in self.calls)
        forced = -NEVER if revoked and self.forced_from == NEVER else self.forced_from
        return min([expired, forced, *left])

    @cached_property
    def waits_until(self) -> float:
        """Until when it surely waits in its queues."""
        if self.queued_by == NEVER or self.forgiven:
            return -NEVER
        places = [self._lasts(call, self.promises.place(self.ttl)) for call in self._answered("waiting")]
        ended = [call.sent for call in self._answered("ended", "gone", "released")]
        return min([max(places), self.left_from, self.granted_from if self.token else NEVER, *ended])

    @cached_property
    def blocks_until(self) -> float:
        """Until when it may have kept others from being granted its names."""
        if self.forgiven:
            return NEVER
        keep = max(call.keep for call in self.calls)
        delay = self.delay
        if self.promises.frees_late:
            keep, delay = NEVER if keep else 0.0, NEVER
        alive = [call for call in self.calls if call.op == "ask" and call.answer in ("granted", "waiting")]
        # A renewal may overtake its ask, or come after the place was forgotten. An ask then makes it anew; also after
        # an end that was so long ago that it was forgotten right after it was answered.
        heard, sent = (
            max((call.at for call in alive), default=-NEVER),
            max((call.sent for call in alive), default=-NEVER),
        )
        ends = [call.at + keep for call in self._answered("gone") if call.sent >= heard]
        ends += [call.at + keep for call in self._answered("released") if call.at > sent]
        for call in self._answered("ended"):
            if call.at > sent:
                ends.append(call.at + (delay if call.reason == "expired" else keep))
        if not self.token and self.calls[-1].answer == "busy" and not self._answered(""):
            ends.append(-NEVER)
        if self.promises.exact and not self._leaves:
            held = [call.at + call.remaining + delay for call in self._answered(*HELD)]
            waits = [call.at + self.promises.place(self.ttl) for call in self._answered("waiting")]
            ends.append(max(held or waits, default=NEVER))
        return min(ends, default=NEVER) + self.promises.slack(self.ttl)
