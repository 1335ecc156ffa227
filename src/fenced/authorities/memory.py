"""The reference model: an authority in a dictionary, for one process. Its answers are the oracle.

Whoever wants to know what an authority must do reads this file; the others are tested against it.
"""

from __future__ import annotations

import math
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from fenced import timing
from fenced.authorities.shared.rules import NAMESPACE_ORDER, NOBODY, QUEUE_MAX, reused_attempt, tokens_used_up
from fenced.contracts import Runtime, Trait, Wakeup
from fenced.model import (
    TOKEN_MAX,
    Ask,
    AskAnswer,
    Busy,
    Ended,
    Gone,
    Granted,
    HeldBy,
    Holder,
    Kept,
    NameView,
    ReleaseAnswer,
    Released,
    RenewAnswer,
    Standing,
    Waiter,
    Waiting,
    check_floor,
    check_name,
    grant_id,
)


@dataclass(slots=True)
class MemoryAttempt:
    """One ask, from its first arrival until it is forgotten."""

    public: str
    names: tuple[str, ...]
    ttl: float
    lock_delay: float
    holder: Holder
    state: str = "waiting"  # waiting, granted, or how it ended
    ticket: int = 0
    token: int = 0
    expires: float = 0.0
    forget: float = math.inf

    def free_at(self) -> float:
        """When a name that this attempt holds, or held until it expired, may be granted again."""
        return self.expires + self.lock_delay


@dataclass(slots=True)
class Ledger:
    """The whole state of one namespace. Counting state is never deleted."""

    realm: str
    token: int = 0
    ticket: int = 0
    attempts: dict[str, MemoryAttempt] = field(default_factory=dict)
    claims: dict[str, MemoryAttempt] = field(default_factory=dict)
    queues: dict[str, list[MemoryAttempt]] = field(default_factory=dict)


class MemoryStore:
    """One namespace for the clients of one process, with a clock of its own."""

    def __init__(self, clock: Callable[[], float], *, realm: str | None = None) -> None:
        self.clock = clock
        self.ledger = Ledger(realm or secrets.token_hex(8))
        self.listeners: list[Callable[[str], None]] = []
        self._lock = threading.Lock()

    def renew_lock(self) -> None:
        """In a forked child: a thread that is not here may hold the inherited one."""
        self._lock = threading.Lock()

    def ask(self, ask: Ask) -> AskAnswer:
        with self._lock:
            now = self.clock()
            attempt = self.ledger.attempts.get(grant_id(ask.secret))
            if attempt is None:
                attempt = self._new(ask)
            elif attempt.names and (attempt.names, attempt.ttl) != (ask.names, ask.ttl):
                raise reused_attempt()
            if attempt.state == "granted" and attempt.expires > now:
                return Granted(attempt.token, attempt.expires - now, attempt.ttl)
            queued = attempt.state == "waiting" and attempt.ticket > 0
            if attempt.state == "granted" or (queued and attempt.expires <= now):
                self._end(attempt, "expired", now)
            if attempt.state != "waiting":
                return Ended(attempt.state)
            return self._grant_or_queue(attempt, ask.wait, now)

    def _new(self, ask: Ask) -> MemoryAttempt:
        return MemoryAttempt(grant_id(ask.secret), ask.names, ask.ttl, ask.lock_delay, ask.holder)

    def _grant_or_queue(self, attempt: MemoryAttempt, wait: bool, now: float) -> AskAnswer:
        check_in = self._check_in(attempt, now)
        if check_in <= 0:
            return self._grant(attempt, now)
        held_by = self._held_by(attempt.names, now)
        ahead = max(self._ahead(attempt, name) for name in attempt.names)
        if not attempt.ticket:
            full = any(len(self.ledger.queues.get(name, ())) >= QUEUE_MAX for name in attempt.names)
            if not wait or full:
                return Busy(ahead, held_by)
            self._enqueue(attempt)
        attempt.expires = now + timing.waiter_ttl(attempt.ttl)
        attempt.forget = attempt.expires + timing.remember_for(attempt.ttl)
        return Waiting(check_in, ahead, held_by)

    def _check_in(self, attempt: MemoryAttempt, now: float) -> float:
        """Seconds until this attempt could be granted if nobody else says another word; 0: now."""
        until = now
        for name in attempt.names:
            claim = self.ledger.claims.get(name)
            if claim is not None:
                until = max(until, claim.free_at())
            for other in list(self.ledger.queues.get(name, ())):
                if attempt.ticket and other.ticket >= attempt.ticket:
                    break
                if other.expires <= now:
                    self._end(other, "expired", now)
                else:
                    until = max(until, other.expires)
        return until - now

    def _ahead(self, attempt: MemoryAttempt, name: str) -> int:
        queue = self.ledger.queues.get(name, ())
        return sum(1 for other in queue if not attempt.ticket or other.ticket < attempt.ticket)

    def _enqueue(self, attempt: MemoryAttempt) -> None:
        self.ledger.ticket += 1
        attempt.ticket = self.ledger.ticket
        self.ledger.attempts[attempt.public] = attempt
        for name in attempt.names:
            self.ledger.queues.setdefault(name, []).append(attempt)

    def _grant(self, attempt: MemoryAttempt, now: float) -> Granted:
        attempt.token = self._mint()
        self._leave_queues(attempt)
        attempt.state = "granted"
        attempt.expires = now + attempt.ttl
        attempt.forget = attempt.free_at() + timing.remember_for(attempt.ttl)
        self.ledger.attempts[attempt.public] = attempt
        for name in attempt.names:
            if (before := self.ledger.claims.get(name)) is not None:
                self._end(before, "expired", now)
            self.ledger.claims[name] = attempt
        return Granted(attempt.token, attempt.ttl, attempt.ttl)

    def _mint(self) -> int:
        if self.ledger.token >= TOKEN_MAX:
            raise tokens_used_up()
        self.ledger.token += 1
        return self.ledger.token

    def _end(self, attempt: MemoryAttempt, state: str, now: float) -> None:
        self._leave_queues(attempt)
        attempt.state = state
        delayed = attempt.free_at() if state == "expired" else now  # forgetting it would end its lock_delay
        attempt.forget = max(now, delayed) + timing.remember_for(attempt.ttl)

    def _leave_queues(self, attempt: MemoryAttempt) -> None:
        if not attempt.ticket or attempt.state != "waiting":
            return
        for name in attempt.names:
            queue = self.ledger.queues[name]
            queue.remove(attempt)
            if not queue:
                del self.ledger.queues[name]

    def renew(self, secret_ids: Sequence[str]) -> list[RenewAnswer]:
        with self._lock:
            now = self.clock()
            return [self._renew(grant_id(secret), now) for secret in secret_ids]

    def _renew(self, public: str, now: float) -> RenewAnswer:
        attempt = self.ledger.attempts.get(public)
        if attempt is None:
            return Gone()
        if attempt.state in ("granted", "waiting") and attempt.expires <= now:
            self._end(attempt, "expired", now)
        if attempt.state == "granted":
            attempt.expires = now + attempt.ttl
            attempt.forget = attempt.free_at() + timing.remember_for(attempt.ttl)
            return Kept(attempt.ttl)
        if attempt.state == "waiting":
            attempt.expires = now + timing.waiter_ttl(attempt.ttl)
            attempt.forget = attempt.expires + timing.remember_for(attempt.ttl)
            return Waiting(self._check_in(attempt, now))
        return Ended(attempt.state)

    def release(self, secret: str) -> ReleaseAnswer:
        with self._lock:
            now = self.clock()
            attempt = self.ledger.attempts.get(grant_id(secret))
            if attempt is None:
                return Gone()
            return self._finish(attempt, "released", now)

    def withdraw(self, secret: str) -> ReleaseAnswer:
        with self._lock:
            now = self.clock()
            public = grant_id(secret)
            attempt = self.ledger.attempts.get(public)
            if attempt is None:
                attempt = MemoryAttempt(public, (), 0.0, 0.0, NOBODY, "withdrawn")
                attempt.forget = now + timing.remember_for(0.0)
                self.ledger.attempts[public] = attempt
                return Released()
            return self._finish(attempt, "withdrawn", now)

    def _finish(self, attempt: MemoryAttempt, state: str, now: float) -> ReleaseAnswer:
        """End an attempt by its owner's wish; the names that this frees go to their heads."""
        if attempt.state in ("granted", "waiting") and attempt.expires <= now:
            self._end(attempt, "expired", now)
        if attempt.state in ("released", "withdrawn"):
            return Released()
        if attempt.state not in ("granted", "waiting"):
            return Ended(attempt.state)
        self._end(attempt, state, now)
        self._free(attempt, now)
        return Released()

    def _free(self, attempt: MemoryAttempt, now: float) -> None:
        heads: dict[str, None] = {}
        for name in attempt.names:
            if self.ledger.claims.get(name) is attempt:
                del self.ledger.claims[name]
            for other in self.ledger.queues.get(name, ()):
                if other.expires > now:
                    heads[other.public] = None
                    break
        for public in heads:
            for listener in self.listeners:
                listener(public)

    def force_release(self, name: str) -> int | None:
        with self._lock:
            now = self.clock()
            attempt = self.ledger.claims.get(name)
            if attempt is None or attempt.state != "granted" or attempt.expires <= now:
                return None
            token = self._mint()
            self._end(attempt, "revoked", now)
            self._free(attempt, now)
            return token

    def raise_floor(self, above: int) -> int:
        with self._lock:
            self.ledger.token = max(self.ledger.token, check_floor(above))
            return self.ledger.token

    def tidy(self) -> int:
        with self._lock:
            now = self.clock()
            over = [a for a in self.ledger.attempts.values() if a.forget <= now]
            for attempt in over:
                self._leave_queues(attempt)
                for name in attempt.names:
                    if self.ledger.claims.get(name) is attempt:
                        del self.ledger.claims[name]
                del self.ledger.attempts[attempt.public]
            return len(over)

    def survey(self, after: str, limit: int) -> list[NameView]:
        with self._lock:
            now = self.clock()
            names = sorted({*self.ledger.claims, *self.ledger.queues}, key=str.encode)
            views = (self._view(name, now) for name in names if name.encode() > after.encode())
            live = (view for view in views if view.held_by or view.waiters or view.free_in > 0)
            return [view for _, view in zip(range(limit), live, strict=False)]

    def observe(self, name: str) -> NameView:
        with self._lock:
            return self._view(check_name(name), self.clock())

    def _view(self, name: str, now: float) -> NameView:
        claim = self.ledger.claims.get(name)
        held_by = self._held_by((name,), now)
        waiters = tuple(
            Waiter(other.holder, other.names, other.expires - now)
            for other in self.ledger.queues.get(name, ())
            if other.expires > now
        )
        return NameView(
            name,
            held_by,
            claim.names if claim and held_by else (),
            claim.ttl if claim and held_by else None,
            max(0.0, claim.free_at() - now) if claim else 0.0,
            waiters,
        )

    def _held_by(self, names: tuple[str, ...], now: float) -> HeldBy | None:
        for name in names:
            claim = self.ledger.claims.get(name)
            if claim is not None and claim.state == "granted" and claim.expires > now:
                return HeldBy(claim.holder, claim.token, claim.public, claim.expires - now)
        return None


class MemoryAuthority:
    """A client's door to a MemoryStore."""

    traits: ClassVar[tuple[Trait, ...]] = (
        NAMESPACE_ORDER,
        Trait("one-process", "All clients live in one process; nothing survives it."),
        Trait(
            "realm-per-store",
            "Every new store is a realm of its own, so guards refuse its predecessor's stamps.",
        ),
    )
    url = "memory:"

    def __init__(self, store: MemoryStore, runtime: Runtime) -> None:
        self._store = store
        self._runtime = runtime
        self._heard: dict[str, None] = {}
        self._wakeup: Wakeup | None = None
        store.listeners.append(self._hear)

    @classmethod
    def at(cls, url: str, runtime: Runtime, namespace: str) -> MemoryAuthority:
        """A store of its own: `memory:` names no place that two clients could share."""
        return cls(MemoryStore(runtime.now), runtime)

    def _hear(self, public: str) -> None:
        self._heard[public] = None
        if self._wakeup is not None:
            self._wakeup.set()

    async def open(self, *, create: bool = True, until: float | None = None) -> Standing:
        return Standing(self._store.ledger.realm, self._store.ledger.token)

    async def ask(self, ask: Ask, until: float | None = None) -> AskAnswer:
        return self._store.ask(ask)

    async def renew(self, secrets: Sequence[str], until: float | None = None) -> list[RenewAnswer]:
        return self._store.renew(secrets)

    async def release(self, secret: str, until: float | None = None) -> ReleaseAnswer:
        return self._store.release(secret)

    async def withdraw(self, secret: str, until: float | None = None) -> ReleaseAnswer:
        return self._store.withdraw(secret)

    async def next_wakeups(self, until: float) -> list[str]:
        if self._wakeup is None:
            self._wakeup = self._runtime.wakeup()
        if not self._heard:
            await self._runtime.wait(self._wakeup, until)
        self._wakeup.clear()
        heard = list(self._heard)
        for public in heard:
            self._heard.pop(public, None)
        return heard

    def interrupt(self) -> None:
        if self._wakeup is not None:
            self._wakeup.set()

    async def survey(
        self, *, after: str = "", limit: int = 1000, until: float | None = None
    ) -> list[NameView]:
        return self._store.survey(after, limit)

    async def observe(self, name: str, until: float | None = None) -> NameView:
        return self._store.observe(name)

    async def force_release(self, name: str, until: float | None = None) -> int | None:
        return self._store.force_release(check_name(name))

    async def raise_floor(self, above: int, until: float | None = None) -> int:
        return self._store.raise_floor(above)

    async def tidy(self, until: float | None = None) -> int:
        return self._store.tidy()

    async def close(self) -> None:
        self.abandon()

    def abandon(self) -> None:
        if self._hear in self._store.listeners:
            self._store.listeners.remove(self._hear)

    def before_fork(self) -> None:
        return

    def forked(self) -> None:
        """The child has a copy of the store that nobody else sees: a realm of its own."""
        self._store.renew_lock()
        self._store.ledger.realm = secrets.token_hex(8)
