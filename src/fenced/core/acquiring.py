"""Asking for a lease and giving it back: one attempt, repeated until it is granted, denied or withdrawn.

Unknown outcomes are repeated with the *same* attempt, so a lost reply cannot leave a ghost behind. An
attempt that is given up, for whatever reason, is withdrawn, and its tombstone stops a delayed ask. The settler
records the attempt before the withdrawal is sent and retries a failed withdrawal, so no caller waits for a
silent server.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import assert_never

from fenced import events, timing
from fenced.contracts import Authority, Runtime
from fenced.core.callbacks import call_user_callback
from fenced.core.holding import GrantState, State
from fenced.core.keeping import Keeper
from fenced.core.settling import Settler
from fenced.core.waiting import Listener, QueueEntry
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
class LeaseRequest:
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
    ) -> LeaseRequest:
        """Check everything before anything happens; Misuse says what is wrong."""
        return cls(
            check_names(names),
            timing.check_ttl(ttl),
            timing.check_wait(wait),
            timing.check_max_hold(max_hold),
            timing.check_lock_delay(lock_delay),
        )


class LeaseEngine:
    """One client's dealings with one authority: its leases, its keeper, its listener."""

    def __init__(
        self,
        authority: Authority,
        runtime: Runtime,
        holder: Holder,
        *,
        guarantee: str = "strict",
        patience: float = timing.PATIENCE_SECONDS,
        emit: Callable[[events.Event], None] | None = None,
    ) -> None:
        self.authority = authority
        self.runtime = runtime
        self.holder = holder
        self._observed = emit is not None
        self.emit = functools.partial(call_user_callback, emit) if emit is not None else _nobody
        self.settler = Settler(authority, runtime)
        self.keeper = Keeper(authority, runtime, self.emit, self.settler)
        self.listener = Listener(authority, runtime)
        self.closed = False
        self._guarantee = guarantee
        self._patience = patience
        self._standing: Standing | None = None
        self._held: dict[str, GrantState] = {}

    async def standing(self, until: float = math.inf) -> Standing:
        """Open the authority at first use, and refuse one whose tokens could repeat."""
        if self.closed:
            raise Misuse("this client is closed")
        if self._standing is None:
            # A caller that can wait longer than one request sets no deadline: the authority limits its requests itself.
            hurried = until < self.runtime.now() + timing.CALL_SECONDS
            try:
                standing = await self.authority.open(until=until + self._patience if hurried else None)
            except (Unavailable, Indeterminate):
                if hurried:
                    # Opening the store may take longer than any one caller waits, so every caller could fail.
                    # A background task opens it without a caller's deadline; the next caller uses its result.
                    self.runtime.spawn(self._open, "fenced-open")
                raise
            if standing.doubts and self._guarantee == "strict":
                raise Misconfigured(
                    f"{self.authority.url} cannot promise that tokens never repeat: "
                    f"{'; '.join(standing.doubts)}. Change that, or pass guarantee='best-effort'."
                )
            self._standing = standing
        return self._standing

    async def _open(self) -> None:
        with contextlib.suppress(FencedError):  # the next caller opens again and gets the error itself
            await self.standing()

    async def acquire(self, wish: LeaseRequest) -> GrantState:
        """Return a Hold, or raise NotGranted once `wish.wait` is over."""
        began = self.runtime.now()
        until = math.inf if wish.wait is None else began + wish.wait
        self._refuse_reentrance(wish.names)
        try:
            standing = await self.standing(until)
            while (hold := await self._attempt(wish, until, standing.realm)) is None:
                if self.runtime.now() >= until:  # granted, but the answer took longer than the ttl
                    raise _not_granted(wish, None, None)
        except (Unavailable, Indeterminate) as error:
            if self.runtime.now() >= until:
                error.add_note(
                    f"the server did not answer within wait={wish.wait:g} s plus patience={self._patience:g} s; "
                    "for a slow server, raise the patience: Client(..., patience=...)"
                )
            raise
        try:
            self._keep(hold)
        except BaseException:
            self._stop_keeping(hold)
            await self._withdraw(hold.secret, hold.ttl)
            raise
        if self._observed:
            waited = self.runtime.now() - began
            self.emit(events.LeaseGranted(hold.names, hold.token, hold.grant, waited))
        return hold

    def _keep(self, hold: GrantState) -> None:
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

    async def _attempt(self, wish: LeaseRequest, until: float, realm: str) -> GrantState | None:
        """One attempt from its ask to its grant; None when it ended in the queue and a new one is due."""
        wait = wish.wait is None or wish.wait > 0
        ask = Ask(self.runtime.secret(), wish.names, wish.ttl, self.holder, wait, wish.lock_delay)
        place: QueueEntry | None = None
        settled = False  # True after Busy: it is final and leaves no state behind, so nothing is withdrawn
        try:
            while True:
                if place is not None:
                    place.asking()
                sent, answer = await self._ask(ask, until, queued=place is not None)
                match answer:
                    case Granted():
                        hold = self._take(wish, ask, answer, sent, realm)
                        if hold is None:
                            self.settler.retry_now(self.settler.give_up(ask.secret, ask.ttl))
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
                silent = isinstance(error, Unavailable | Indeterminate)
                await self._withdraw(ask.secret, ask.ttl, until, at_once=not silent)
            raise
        finally:
            if place is not None:
                self.listener.forget(place)
                self.keeper.drop(place.secret)

    async def _ask(self, ask: Ask, until: float, *, queued: bool) -> tuple[float, AskAnswer]:
        """Ask until there is an answer.

        A queued attempt tolerates an outage of up to one ttl; a first ask that was not sent fails at once.
        """
        outage_until = self.runtime.now() + ask.ttl
        backoff = BACKOFF_FIRST
        unknown: Indeterminate | None = None
        while True:
            sent = self.runtime.now()
            try:
                return sent, await self.authority.ask(
                    ask, min(sent + timing.CALL_SECONDS, until + self._patience)
                )
            except (Indeterminate, Unavailable) as error:
                if isinstance(error, Indeterminate):
                    unknown = error
                now = self.runtime.now()
                definite = isinstance(error, Unavailable) and not queued and unknown is None
                if definite or now + backoff >= min(until, outage_until):
                    # After one Indeterminate answer a later Unavailable does not make the outcome known.
                    raise unknown or error from None
                await self.runtime.wait(self.runtime.wakeup(), now + backoff)
                backoff = min(backoff * 2, BACKOFF_MAX)

    def _take(
        self, wish: LeaseRequest, ask: Ask, granted: Granted, sent: float, realm: str
    ) -> GrantState | None:
        """Turn the answer into a Hold, unless it took so long to arrive that it is over already."""
        if not 1 <= granted.token <= TOKEN_MAX:
            raise InvariantBroken(f"the authority minted {granted.token}")
        hold = GrantState(
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

    def _enter(self, ask: Ask) -> QueueEntry:
        place = QueueEntry(self.runtime, ask.secret, ask.ttl, self.keeper.jitter)
        self.listener.expect(place)
        self.keeper.keep(place)
        return place

    async def _wait(self, place: QueueEntry, until: float) -> bool:
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

    async def _withdraw(
        self, secret: str, ttl: float, until: float = math.inf, *, at_once: bool = True
    ) -> None:
        """End an attempt. If the authority does not answer within the patience, the settler retries in its own loop.

        Without `at_once` the settler makes the first try: the authority has just failed to answer this caller.
        """
        given_up = self.settler.give_up(secret, ttl)
        try:
            if at_once:
                await self.authority.withdraw(secret, min(self.runtime.now(), until) + self._patience)
                self.settler.settled(given_up)
                return
        except FencedError:
            pass
        except BaseException:
            self.settler.retry_now(given_up)
            raise
        self.settler.retry_now(given_up)

    async def release(self, hold: GrantState) -> None:
        """Give the lease back. Raises LeaseLost when it was lost before; repeating is harmless.

        Whatever it raises, the lease has ended for this program. If the authority did not answer, the settler
        withdraws the attempt later.
        """
        if hold.released:
            return
        if hold.lost_reason == "forked":
            raise hold.lost_error()
        # `state` compares with the clock: the keeper may not have marked the lease lost yet.
        late = hold.state is State.LOST
        self._stop_keeping(hold)
        # Recorded before the request is sent: an interrupt may come at any time.
        given_up = self.settler.give_up(hold.secret, hold.ttl)
        try:
            answer = await self.authority.release(hold.secret, self.runtime.now() + timing.CALL_SECONDS)
        except GeneratorExit:
            self.settler.settled(given_up)  # collected, not cancelled: a finalizer sends nothing
            raise
        except FencedError:
            hold.end()
            self.settler.retry_now(given_up)
            raise
        except BaseException:  # cancelled or interrupted: the authority may still answer, so withdraw at once
            hold.end()
            await self._withdraw(hold.secret, hold.ttl)
            raise
        self.settler.settled(given_up)
        match answer:
            case Released():
                hold.end()
                if late or hold.lost_reason is not None:
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

    async def release_at_exit(self, hold: GrantState, *, raised: bool) -> None:
        """The end of a `with` block: release, and raise if the lease did not last through the body."""
        lost = hold.state is State.LOST
        try:
            await self.release(hold)
        except LeaseLost:
            if not raised:
                raise
        except FencedError as error:
            self.emit(events.ReleaseFailed(hold.names, hold.token, hold.grant, str(error)))
            if lost and not raised:
                raise hold.lost_error() from error

    def let_expire(self, hold: GrantState) -> None:
        """The body was collected before its end: nobody acts under this lease. Send nothing, and let it expire."""
        self._stop_keeping(hold)
        hold.lose("abandoned")

    def _stop_keeping(self, hold: GrantState) -> None:
        self.keeper.drop(hold.secret)
        for name in hold.names:
            if self._held.get(name) is hold:
                self._held.pop(name, None)

    def _ended(self, hold: GrantState, reason: str) -> None:
        self._stop_keeping(hold)
        self.emit(events.LeaseEnded(hold.names, hold.token, hold.grant, reason))

    async def close(self) -> None:
        """Stop renewing and disconnect. Leases still held expire by themselves."""
        if self.closed:
            return
        self.closed = True
        for hold in self.keeper.holds():
            hold.lose("closed")
        self.listener.stop()
        self.authority.interrupt()
        # Loops are joined only until the patience is over. A loop that waits for a silent server ends by itself
        # when `authority.close` below closes its connection.
        until = self.runtime.now() + self._patience
        try:
            await self.keeper.close(until)
            await self.listener.close(until)
            await self.settler.close(until)
        finally:
            await self.authority.close()

    def dropped(self) -> bool:
        """The program has dropped its client: stop the loops and close the connections, without waiting.

        Releases nothing. The garbage collector may call it in any thread. Returns whether anything was open.
        """
        if self.closed or self._standing is None:
            return False
        self.closed = True
        for loop in (self.keeper, self.listener, self.settler):
            loop.stop()
        self.authority.interrupt()
        self.authority.abandon()
        return True

    def forked(self) -> None:
        """In a forked child: the leases are the parent's."""
        for hold in {*self._held.values(), *self.keeper.holds()}:
            hold.forked()


def shown_label(label: str) -> str:
    """A label as its holder chose it, unless it could play tricks on a terminal or a log."""
    return label if label.isprintable() else shown(label)


def _nobody(event: events.Event) -> None:
    """Nobody observes."""


def _not_granted(wish: LeaseRequest, held_by: HeldBy | None, ahead: int | None) -> NotGranted:
    names = ", ".join(wish.names)
    who = "others wait ahead"
    if held_by is not None:
        holder = held_by.holder
        who = (
            f"held by {shown_label(holder.label)} (pid {holder.pid} on {holder.host}, token {held_by.token})"
        )
    waited = "" if not wish.wait else f" within {wish.wait:g} s"
    return NotGranted(f"{names} not granted{waited}: {who}", held_by=held_by, ahead=ahead or 0)
