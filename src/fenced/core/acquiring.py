"""Asking for a lease and giving it back: one attempt, repeated until it is granted, denied or withdrawn.

Unknown outcomes are repeated with the *same* attempt, so a lost reply cannot leave a ghost behind; an
attempt that is given up, for whatever reason, is withdrawn, and its tombstone stops a delayed ask.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import assert_never

from fenced import events, timing
from fenced.contracts import Authority, Runtime
from fenced.core.holding import Hold
from fenced.core.keeping import Keeper, Listener, Place
from fenced.core.telling import tell
from fenced.errors import (
    FencedError,
    Indeterminate,
    InvariantBroken,
    LeaseLost,
    Misconfigured,
    Misuse,
    NotGranted,
    Unavailable,
    shown,
)
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
    Released,
    Standing,
    Waiting,
    check_names,
)

BACKOFF_FIRST = 0.02
BACKOFF_MAX = 0.5
POLL_MAX = 5.0
"""The longest a waiter sleeps without looking when it hears nothing, not even from its keeper."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What a caller asks for, checked."""

    names: tuple[str, ...]
    ttl: float = timing.TTL_DEFAULT
    wait: float | None = None
    max_hold: float | None = None
    lock_delay: float = 0.0

    @classmethod
    def of(
        cls,
        names: Iterable[object],
        *,
        ttl: object = timing.TTL_DEFAULT,
        wait: object = None,
        max_hold: object = None,
        lock_delay: object = 0.0,
    ) -> Wish:
        """Check everything before anything happens; Misuse says what is wrong."""
        return cls(
            check_names(names),
            timing.check_ttl(ttl),
            timing.check_wait(wait),
            timing.check_max_hold(max_hold),
            timing.check_lock_delay(lock_delay),
        )


class Desk:
    """One client's dealings with one authority: its leases, its keeper, its listener."""

    def __init__(
        self,
        authority: Authority,
        runtime: Runtime,
        holder: Holder,
        *,
        guarantee: str = "strict",
        emit: Callable[[events.Event], None] | None = None,
    ) -> None:
        self.authority = authority
        self.runtime = runtime
        self.holder = holder
        self._observed = emit is not None
        self.emit = functools.partial(tell, emit) if emit is not None else _nobody
        self.keeper = Keeper(authority, runtime, self.emit)
        self.listener = Listener(authority, runtime)
        self.closed = False
        self._guarantee = guarantee
        self._standing: Standing | None = None
        self._held: dict[str, Hold] = {}

    async def standing(self) -> Standing:
        """Open the authority at first use, and refuse one whose tokens could repeat."""
        if self.closed:
            raise Misuse("this client is closed")
        if self._standing is None:
            standing = await self.authority.open()
            if standing.doubts and self._guarantee == "strict":
                raise Misconfigured(
                    f"{self.authority.url} cannot promise that tokens never repeat: "
                    f"{'; '.join(standing.doubts)}. Change that, or pass guarantee='best-effort'."
                )
            self._standing = standing
        return self._standing

    async def acquire(self, wish: Wish) -> Hold:
        """Return a Hold, or raise NotGranted once `wish.wait` is over."""
        began = self.runtime.now()
        self._refuse_reentrance(wish.names)
        standing = await self.standing()
        until = math.inf if wish.wait is None else began + wish.wait
        while True:
            hold = await self._attempt(wish, until, standing.realm)
            if hold is not None:
                break
            if self.runtime.now() >= until:  # granted, but it took longer than the ttl to hear of it
                raise _not_granted(wish, None, None)
        try:
            self._keep(hold)
        except BaseException:
            self._let_go(hold)
            await self.runtime.finish(lambda: self._withdraw(hold.secret))
            raise
        if self._observed:
            waited = self.runtime.now() - began
            self.emit(events.LeaseGranted(hold.names, hold.token, hold.grant, waited))
        return hold

    def _keep(self, hold: Hold) -> None:
        for name in hold.names:
            self._held[name] = hold
        self.keeper.keep(hold)
        if self.closed:
            raise Misuse("this client was closed while waiting")

    def _refuse_reentrance(self, names: tuple[str, ...]) -> None:
        for name in names:
            mine = self._held.get(name)
            if mine is not None and mine.owner == self.runtime.whoami() and mine.remaining() > 0:
                raise Misuse(
                    f"{name!r} is held by this very thread or task (token {mine.token}); "
                    "leases are not re-entrant: pass the lease on instead"
                )

    async def _attempt(self, wish: Wish, until: float, realm: str) -> Hold | None:
        """One attempt from its ask to its grant; None when it ended in the queue and a new one is due."""
        wait = wish.wait is None or wish.wait > 0
        ask = Ask(self.runtime.secret(), wish.names, wish.ttl, self.holder, wait, wish.lock_delay)
        place: Place | None = None
        settled = False  # a definite no: there is nothing to withdraw
        try:
            while True:
                if place is not None:
                    place.asking()
                sent, answer = await self._ask(ask, until, queued=place is not None)
                match answer:
                    case Granted():
                        hold = self._take(wish, ask, answer, sent, realm)
                        if hold is None:
                            await self.runtime.finish(lambda: self.authority.release(ask.secret))
                        return hold
                    case Busy(ahead, held_by):
                        settled = True
                        raise _not_granted(wish, held_by, ahead)
                    case Ended("expired" | "revoked"):
                        return None  # paused past its place in the queue: join again at the end
                    case Ended(reason):
                        raise InvariantBroken(f"a live attempt came back as {reason}")
                    case Waiting(check_in, ahead, held_by):
                        place = place or self._enter(ask)
                        place.check_at = sent + check_in
                        if not await self._wait(place, until):
                            raise _not_granted(wish, held_by, ahead)
                    case _:
                        assert_never(answer)
        except GeneratorExit:
            raise  # collected, not cancelled: nothing is done by a finalizer, and the attempt lapses
        except BaseException as error:
            if not settled and not (
                place is None and isinstance(error, Unavailable | Misconfigured | Misuse)
            ):
                await self.runtime.finish(lambda: self._withdraw(ask.secret))
            raise
        finally:
            if place is not None:
                self.listener.forget(place)
                self.keeper.drop(place.secret)

    async def _ask(self, ask: Ask, until: float, *, queued: bool) -> tuple[float, AskAnswer]:
        """Ask until there is an answer. Who stands in the queue bears an outage for one TTL."""
        patience = self.runtime.now() + ask.ttl
        backoff = BACKOFF_FIRST
        unknown: Indeterminate | None = None
        while True:
            sent = self.runtime.now()
            try:
                return sent, await self.authority.ask(ask)
            except (Indeterminate, Unavailable) as error:
                if isinstance(error, Indeterminate):
                    unknown = error
                now = self.runtime.now()
                definite = isinstance(error, Unavailable) and not queued and unknown is None
                if definite or now + backoff >= min(until, patience):
                    raise unknown or error from None  # once unknown, it stays so
                await self.runtime.wait(self.runtime.wakeup(), now + backoff)
                backoff = min(backoff * 2, BACKOFF_MAX)

    def _take(self, wish: Wish, ask: Ask, granted: Granted, sent: float, realm: str) -> Hold | None:
        """Turn the answer into a Hold, unless it took so long to arrive that it is over already."""
        if not 1 <= granted.token <= TOKEN_MAX:
            raise InvariantBroken(f"the authority minted {granted.token}")
        hold = Hold(
            self.runtime,
            realm=realm,
            names=ask.names,
            secret=ask.secret,
            granted=granted,
            sent=sent,
            jitter=self.keeper.jitter,
            max_hold=wish.max_hold,
            on_end=self._ended,
        )
        return hold if self.runtime.now() < hold.deadline else None

    def _enter(self, ask: Ask) -> Place:
        place = Place(self.runtime, ask.secret, ask.ttl, self.keeper.jitter)
        self.listener.expect(place)
        self.keeper.keep(place)
        return place

    async def _wait(self, place: Place, until: float) -> bool:
        """Wait until it is time to ask again (True) or `until` has come (False)."""
        place.heard = self.runtime.now()
        while (now := self.runtime.now()) < until:
            if self.closed:
                raise Misuse("this client was closed while waiting")
            check_at = min(place.check_at, place.heard + POLL_MAX)
            if place.woken or now >= check_at:
                return True
            await self.runtime.wait(place.wakeup, min(check_at, until))
            place.wakeup.clear()
        return False

    async def _withdraw(self, secret: str) -> None:
        try:
            await self.authority.withdraw(secret)
        except FencedError:
            return  # nobody renews it: the lease or the place in the queue ends by itself

    async def release(self, hold: Hold) -> None:
        """Give the lease back. Raises LeaseLost when it was lost before; repeating is harmless."""
        if hold.released:
            return
        if hold.lost_reason == "forked":
            raise hold.lost_error()
        self.keeper.drop(hold.secret)
        await self.runtime.finish(lambda: self._release(hold))

    async def _release(self, hold: Hold) -> None:
        answer = await self.authority.release(hold.secret)
        self._let_go(hold)
        match answer:
            case Released():
                late = hold.lost_reason is not None
                hold.end()
                if late:
                    raise hold.lost_error()
                if self._observed:
                    held = self.runtime.now() - hold.acquired
                    self.emit(events.LeaseReleased(hold.names, hold.token, hold.grant, held))
            case Ended(reason):
                hold.lose(reason)
                raise hold.lost_error()
            case Gone():
                hold.lose("gone")
                raise hold.lost_error()
            case _:
                assert_never(answer)

    async def leave(self, hold: Hold, *, raised: bool) -> None:
        """The end of a `with` block: release, and raise if the lease did not last through the body."""
        try:
            await self.release(hold)
        except LeaseLost:
            if not raised:
                raise
        except FencedError as error:
            self._let_go(hold)
            why = str(error)
            self.emit(events.ReleaseFailed(hold.names, hold.token, hold.grant, why))
            if not raised and hold.remaining() <= 0:
                raise hold.lost_error() from error
        except BaseException:
            self._let_go(hold)  # cancelled, and nobody knows what became of it
            raise

    def abandon(self, hold: Hold) -> None:
        """The body was collected and not run to its end: nobody acts under this lease, let it lapse."""
        self._let_go(hold)
        hold.lose("abandoned")

    def _let_go(self, hold: Hold) -> None:
        self.keeper.drop(hold.secret)
        for name in hold.names:
            if self._held.get(name) is hold:
                self._held.pop(name, None)

    def _ended(self, hold: Hold, reason: str) -> None:
        self._let_go(hold)
        self.emit(events.LeaseEnded(hold.names, hold.token, hold.grant, reason))

    async def close(self) -> None:
        """Stop renewing and disconnect. Leases still held expire by themselves."""
        if self.closed:
            return
        self.closed = True
        for hold in self.keeper.holds():
            hold.lose("closed")
        self.listener.stop()
        self.authority.nudge()
        try:
            await self.keeper.close()
            await self.listener.close()
        finally:
            await self.authority.close()

    def forked(self) -> None:
        """In a forked child: the leases are the parent's."""
        for hold in {*self._held.values(), *self.keeper.holds()}:
            hold.forked()


def shown_label(label: str) -> str:
    """A label as its holder chose it, unless it could play tricks on a terminal or a log."""
    return label if label.isprintable() else shown(label)


def _nobody(event: events.Event) -> None:
    """Nobody observes."""


def _not_granted(wish: Wish, held_by: HeldBy | None, ahead: int | None) -> NotGranted:
    names = ", ".join(wish.names)
    who = "others wait ahead"
    if held_by is not None:
        holder = held_by.holder
        who = (
            f"held by {shown_label(holder.label)} (pid {holder.pid} on {holder.host}, token {held_by.token})"
        )
    waited = "" if not wish.wait else f" within {wish.wait:g} s"
    return NotGranted(f"{names} not granted{waited}: {who}", held_by=held_by, ahead=ahead or 0)
