"""Acquiring and releasing a lease: one attempt, retried until it is granted, denied or withdrawn.

After an unknown outcome the engine retries the *same* attempt, so a lost reply cannot leave a grant that nobody uses.
An attempt that the caller gives up is withdrawn, and its tombstone stops a delayed ask. The settler records the attempt
before the withdrawal is sent and retries a failed withdrawal, so no caller waits for a silent server.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import assert_never

from fenced import events
from fenced.core.asked import AskedCall
from fenced.core.callbacks import Reporter, warn_once
from fenced.core.counting import AttemptCounter
from fenced.core.holding import GrantState, State
from fenced.core.keeping import Keeper
from fenced.core.renewing import Renewer
from fenced.core.settling import GivenUp, Settler
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
from fenced.values import timing
from fenced.values.contracts import Authority, Runtime
from fenced.values.model import (
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

LONG_WAIT = 60.0
"""After how many seconds an acquire that waits without a limit says so."""
POLL_MAX = 5.0
"""The longest that a waiter sleeps before it asks again, if neither a wake-up nor a renewal reaches it."""


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    """The names and times that a caller asks for."""

    names: tuple[str, ...]
    ttl: float = timing.TTL_DEFAULT
    wait: float | None = None
    max_hold: float | None = None
    lock_delay: float = 0.0
    at_least_for: float = 0.0

    @classmethod
    def checked(
        cls,
        names: Iterable[object],
        ttl: object = timing.TTL_DEFAULT,
        wait: object = None,
        max_hold: object = None,
        lock_delay: object = 0.0,
        at_least_for: object = 0.0,
    ) -> LeaseRequest:
        """Check every argument before anything is sent; raise Misuse if one is wrong."""
        return cls(
            check_filled(check_names(names)),
            timing.check_ttl(ttl),
            timing.check_wait(wait),
            timing.check_max_hold(max_hold),
            timing.check_lock_delay(lock_delay),
            timing.check_at_least_for(at_least_for),
        )

    async def granted_by(self, engine: LeaseEngine) -> GrantState:
        return await engine.acquire(self)


class LeaseEngine:
    """Acquires and releases the leases of one client, and owns its keeper, listener and settler."""

    grant_type: type[GrantState] = GrantState

    def __init__(
        self,
        authority: Authority,
        runtime: Runtime,
        holder: Holder,
        *,
        guarantee: str = "strict",
        patience: float = timing.PATIENCE_SECONDS,
        emit: Callable[[events.Event], None] | None = None,
        renewer: Renewer | None = None,
    ) -> None:
        """`renewer`: where renewals run, if not in `runtime` and through `authority`."""
        self.authority = authority
        self.runtime = runtime
        self.holder = holder
        self.emit = Reporter(emit, runtime)
        self.renewer = renewer or Renewer(authority, runtime)
        self._counter = AttemptCounter(runtime)
        self.settler = Settler(authority, self.renewer, self._counter.over)
        self.keeper = Keeper(self.renewer, self.emit, self.settler)
        self.listener = Listener(authority, runtime)
        self.closed = False
        self._guarantee = guarantee
        self._patience = patience
        self._standing: Standing | None = None
        self._held: dict[str, GrantState] = {}

    async def standing(self, until: float = math.inf) -> Standing:
        """Open the authority at first use. Misconfigured if its tokens could repeat and the guarantee is strict."""
        if self.closed:
            raise Misuse("this client is closed")
        if self._standing is None:
            # A caller that can wait longer than one request sets no deadline: the authority limits its requests itself.
            hurried = until < self.runtime.now() + timing.CALL_SECONDS
            try:
                standing = await self.authority.open(until=until + self._patience if hurried else None)
            except (Unavailable, Indeterminate) as error:
                if hurried:
                    # Opening the store may take longer than any one caller waits, so every caller could fail.
                    # A background task opens it without a caller's deadline; the next caller uses its result.
                    self.runtime.spawn(self._open, "fenced-open")
                if isinstance(error, Indeterminate):  # perhaps tables were made, but no lease was asked for
                    raise Unavailable(str(error)) from error
                raise
            if standing.doubts and self._guarantee == "strict":
                raise Misconfigured(
                    f"{self.authority.url} cannot promise that tokens never repeat: {'; '.join(standing.doubts)}. "
                    "Change that, or accept it: guarantee='best-effort' (fenced run: --guarantee best-effort)"
                )
            if self._guarantee == "strict":
                warn_once(standing.warnings)
            self.renewer.realm = standing.realm  # first: a renewal follows an acquire, which follows this
            self._standing = standing
        return self._standing

    async def _open(self) -> None:
        with contextlib.suppress(FencedError):  # the next caller opens again and gets the error itself
            await self.standing()

    async def acquire(self, request: LeaseRequest) -> GrantState:
        """Return the granted lease, or raise NotGranted after `request.wait` seconds."""
        began = self.runtime.now()
        until = math.inf if request.wait is None else began + request.wait
        self._refuse_reentrance(request.names)
        asked = AskedCall(request.names, self.runtime, self.emit if self.emit.observed else None)
        try:
            lease = await self._granted(request, until, asked)
        except BaseException as error:
            asked.ended(error, waits=until > began)
            raise
        asked.granted(lease)
        return lease

    async def _granted(self, request: LeaseRequest, until: float, asked: AskedCall) -> GrantState:
        try:
            standing = await self.standing(until)
            while (lease := await self._attempt(request, until, standing.realm, asked)) is None:
                if self.runtime.now() >= until:  # granted, but the answer took longer than the ttl
                    raise _no(request, "the lease had expired before the answer arrived")
        except (Unavailable, Indeterminate) as error:
            if self.runtime.now() >= until:
                error.add_note(
                    f"the server did not answer within wait={request.wait:g} s plus patience={self._patience:g} s; "
                    "for a slow server, raise the patience: Client(..., patience=...)"
                )
            raise
        try:
            self._keep(lease)
        except BaseException:
            self._stop_keeping(lease)
            await self._withdraw(lease.secret, lease.ttl)
            raise
        return lease

    def _keep(self, lease: GrantState) -> None:
        for name in lease.names:
            self._held[name] = lease
        self.keeper.keep(lease)
        if self.closed:
            raise Misuse("this client was closed while waiting")

    def _refuse_reentrance(self, names: tuple[str, ...]) -> None:
        for name in names:
            mine = self._held.get(name)
            if mine is not None and mine.owner == self.runtime.whoami() and mine.remaining() > 0:
                raise Misuse(
                    f"{name!r} is already held by this thread or task (token {mine.token}); "
                    "leases are not re-entrant: pass the lease on instead"
                )

    async def _attempt(
        self, request: LeaseRequest, until: float, realm: str, asked: AskedCall
    ) -> GrantState | None:
        """Run one attempt until it is granted. None: it ended without a usable grant, and a new attempt is due."""
        wait = request.wait is None or request.wait > 0
        secret = self.runtime.secret()
        number, over = self._counter.begin(secret, request.ttl)
        ask = Ask(
            secret,
            request.names,
            request.ttl,
            self.holder,
            wait,
            request.lock_delay,
            series=self._counter.series,
            number=number,
            settled=over,
        )
        entry: QueueEntry | None = None
        doubts: list[Indeterminate] = []
        """Tries whose outcome is unknown: whatever a later one is told, an earlier copy may still be granted."""
        final = False  # True after Busy, which leaves nothing to withdraw, unless an earlier copy may still arrive
        try:
            while True:
                if entry is not None:
                    entry.asking()
                sent, answer = await self._ask(ask, until, doubts, queued=entry is not None)
                match answer:
                    case Granted():
                        lease = self._take(request, ask, answer, sent, realm)
                        if lease is None:
                            self.settler.retry_now(self.settler.give_up(ask.secret, ask.ttl))
                        return lease
                    case Busy(ahead, held_by):
                        final = not doubts
                        raise _not_granted(request, held_by, ahead)
                    case Ended("expired" | "revoked"):
                        self._counter.over(secret)
                        return None  # paused for too long and lost its place: join the queue again at its end
                    case Ended(reason):
                        raise InvariantBroken(f"a live attempt came back as {reason}")
                    case Waiting(check_in, ahead, held_by):
                        entry = entry or self._join_queue(ask)
                        entry.check_at = sent + check_in
                        entry.why = _why_not(held_by, ahead)
                        asked.queued(entry.why)
                        if not await self._wait(request, entry, until):
                            raise _not_granted(request, held_by, ahead)
                    case _:
                        assert_never(answer)
        except GeneratorExit:
            raise  # collected, not cancelled: a finalizer sends nothing, and the attempt expires
        except BaseException as error:
            never = isinstance(error, Unavailable | Misconfigured | Misuse) and not doubts and entry is None
            if final or never:
                self._counter.over(secret)
            else:
                silent = isinstance(error, Unavailable | Indeterminate)
                await self._withdraw(ask.secret, ask.ttl, until, at_once=not silent)
            raise
        finally:
            if entry is not None:
                self.listener.forget(entry)
                self.keeper.drop(entry.secret)

    async def _ask(
        self, ask: Ask, until: float, doubts: list[Indeterminate], *, queued: bool
    ) -> tuple[float, AskAnswer]:
        """Ask until there is an answer. Also returns when it was sent. Tries that are in doubt go into `doubts`.

        A queued attempt tolerates an outage of up to one ttl; a first ask that was not sent fails at once.
        """
        outage_until = self.runtime.now() + ask.ttl
        backoff = BACKOFF_FIRST
        while True:
            sent = self.runtime.now()
            try:
                limit = min(sent + timing.CALL_SECONDS, until + self._patience)
                answer = await self.authority.ask(ask, limit)
                self.emit.reached()
                return sent, answer
            except (Indeterminate, Unavailable) as error:
                self.emit.reached(error)
                if isinstance(error, Indeterminate):
                    doubts.append(error)
                now = self.runtime.now()
                definite = isinstance(error, Unavailable) and not queued and not doubts
                if definite or now + backoff >= min(until, outage_until):
                    # After one Indeterminate answer a later Unavailable does not make the outcome known.
                    raise (doubts[-1] if doubts else error) from None
                await self.runtime.wait(self.runtime.wakeup(), now + backoff)
                backoff = min(backoff * 2, BACKOFF_MAX)

    def _take(
        self, request: LeaseRequest, ask: Ask, granted: Granted, sent: float, realm: str
    ) -> GrantState | None:
        """Turn the answer into a lease; None if the answer took so long that the lease has already expired."""
        if not 1 <= granted.token <= TOKEN_MAX:
            raise InvariantBroken(f"the authority minted {granted.token}")
        lease = self.grant_type(
            self.runtime,
            realm=realm,
            names=ask.names,
            secret=ask.secret,
            granted=granted,
            sent=sent,
            jitter=self.keeper.jitter,
            max_hold=request.max_hold,
            at_least_for=request.at_least_for,
            on_end=self._ended,
            notes=self.keeper.notes,
        )
        return lease if self.runtime.now() < lease.deadline else None

    def _join_queue(self, ask: Ask) -> QueueEntry:
        entry = QueueEntry(self.runtime, ask.secret, ask.ttl, self.keeper.jitter)
        entry.say_at = entry.since + LONG_WAIT
        # The listener first: from the answer `Waiting` on a wake-up may come, and the first renewal is far away.
        self.listener.expect(entry)
        self.keeper.keep(entry)
        return entry

    async def _wait(self, request: LeaseRequest, entry: QueueEntry, until: float) -> bool:
        """Wait until it is time to ask again (True) or until `until` (False)."""
        entry.last_reply = self.runtime.now()
        while (now := self.runtime.now()) < until:
            if self.closed:
                raise Misuse("this client was closed while waiting")
            check_at = min(entry.check_at, entry.last_reply + POLL_MAX)
            if entry.woken or now >= check_at:
                return True
            if now >= entry.say_at:
                entry.say_at = math.inf  # once for each place in a queue
                if request.wait is None:
                    self.emit(events.StillWaiting(request.names, now - entry.since, entry.why))
            await self.runtime.wait(entry.wakeup, min(check_at, until, entry.say_at))
            # Clearing loses nothing: whoever sets the flag has set `woken` before, which is read next.
            entry.wakeup.clear()
        return False

    async def _withdraw(
        self, secret: str, ttl: float, until: float = math.inf, *, at_once: bool = True
    ) -> None:
        """End an attempt. If the authority does not answer within the patience, the settler retries in its own loop.

        Without `at_once` the settler makes the first try: the authority has just failed to answer this caller.
        """
        given_up = self.settler.give_up(secret, ttl)
        if at_once:
            await self._try_to_end(given_up, until)
        else:
            self.settler.retry_now(given_up)

    async def _try_to_end(self, given_up: GivenUp, until: float = math.inf) -> None:
        """End an attempt within the patience, or else leave it to the settler's loop."""
        try:
            await self.settler.end(given_up, min(self.runtime.now(), until) + self._patience)
            return
        except FencedError:
            pass
        except BaseException:
            self.settler.retry_now(given_up)
            raise
        self.settler.retry_now(given_up)

    async def release(self, lease: GrantState, *, at_once: bool = False) -> None:
        """Give the lease back. Raises LeaseLost if it was lost before. Safe to repeat.

        Whatever it raises, the lease has ended for this program. If the authority did not answer, the settler
        ends the attempt later. Unless `at_once`, nobody is granted the names before `lease.taken_until`.
        """
        if lease.released:
            return
        if lease.lost_reason == "forked":
            raise lease.lost_error()
        # `state` compares with the clock: the keeper may not have marked the lease lost yet.
        late, now = lease.state is State.LOST, self.runtime.now()
        self._stop_keeping(lease)
        taken_until = now if at_once or late else lease.taken_until
        # Recorded before the request is sent: an interrupt may come at any time.
        given_up = self.settler.give_up(lease.secret, lease.ttl, taken_until)
        try:
            answer = await self.authority.release(
                lease.secret, now + timing.CALL_SECONDS, keep=max(0.0, taken_until - now)
            )
        except GeneratorExit:
            self.settler.forget(given_up)  # collected, not cancelled: a finalizer sends nothing
            raise
        except BaseException as error:
            if late:
                lease.expire()
            lease.end()
            if lease.lost_reason is None:  # else its end has been told
                why, held = str(error) or "interrupted", self.runtime.now() - lease.acquired
                self.emit(events.ReleaseFailed(lease.names, lease.token, lease.grant, why, held))
            if isinstance(error, FencedError):
                self.settler.retry_now(given_up)
            else:  # cancelled or interrupted: the authority may still answer, so repeat it at once
                await self._try_to_end(given_up)
            raise
        self.settler.forget(given_up)
        match answer:
            case Released():
                if late:
                    lease.expire()  # the keeper may not have noticed it
                lease.end()
                if lease.lost_reason is not None:
                    raise lease.lost_error()
                if self.emit.observed:
                    held = self.runtime.now() - lease.acquired
                    self.emit(events.LeaseReleased(lease.names, lease.token, lease.grant, held))
            case Ended(reason):
                lease.lose(reason)
                raise lease.lost_error()
            case Gone():
                lease.lose("gone")
                raise lease.lost_error()
            case _:
                assert_never(answer)

    async def release_at_exit(self, lease: GrantState, *, raised: bool) -> None:
        """Release at the end of a `with` block, and raise LeaseLost if the lease was lost during the body."""
        lost = lease.state is State.LOST
        try:
            await self.release(lease, at_once=raised)
        except LeaseLost:
            if not raised:
                raise
        except FencedError as error:
            if lost and not raised:
                raise lease.lost_error() from error

    def let_expire(self, lease: GrantState, reason: str = "abandoned") -> None:
        """Nobody acts under this lease, for example because its body was collected. Send nothing: it expires."""
        self._stop_keeping(lease)
        lease.lose(reason)

    def _stop_keeping(self, lease: GrantState) -> None:
        self.keeper.drop(lease.secret)
        for name in lease.names:
            if self._held.get(name) is lease:
                self._held.pop(name, None)

    def _ended(self, lease: GrantState, reason: str) -> None:
        self._stop_keeping(lease)
        now = self.runtime.now()
        late = max(0.0, now - lease.deadline) if reason in ("expired", "max_hold") else 0.0
        held = now - lease.acquired
        paused = self.keeper.paused_seconds(lease.confirmed) if self.emit.observed else 0.0
        self.emit(events.LeaseEnded(lease.names, lease.token, lease.grant, reason, held, late, paused))

    async def close(self) -> None:
        """Stop renewing and disconnect. Leases still held expire by themselves."""
        if self.closed:
            return
        self.closed = True
        for lease in self.keeper.leases():
            lease.lose("closed")
        self.listener.stop()
        self.authority.interrupt()
        # Loops are joined only until the patience is over. A loop that waits for a silent server ends by itself
        # when `close` below closes its connection.
        until = self.runtime.now() + self._patience
        try:
            await self.keeper.close(until)
            await self.listener.close(until)
            await self.settler.close(until)
        finally:
            try:
                await self.authority.close()
            finally:
                await self.renewer.close(until)

    def abandon(self) -> bool:
        """Stop the loops and close the connections without waiting, because the program has dropped its client.

        Releases no lease. The garbage collector may call it in any thread. Returns whether anything was open.
        """
        if self.closed or self._standing is None:
            return False
        self.closed = True
        for loop in (self.keeper, self.listener, self.settler):
            loop.stop()
        self.authority.interrupt()
        self.authority.abandon()
        self.renewer.abandon()
        return True

    def forked(self) -> None:
        """In a forked child: mark the leases lost, because they belong to the parent."""
        for lease in {*self._held.values(), *self.keeper.leases()}:
            lease.forked()
        self.renewer.forked()


def shown_label(label: str) -> str:
    """The holder's label, escaped if it contains characters that could corrupt a terminal or a log."""
    return label if label.isprintable() else shown(label)


def _not_granted(request: LeaseRequest, held_by: HeldBy | None, ahead: int | None) -> NotGranted:
    return _no(request, _why_not(held_by, ahead), held_by, ahead)


def _why_not(held_by: HeldBy | None, ahead: int | None) -> str:
    if held_by is not None:
        holder = held_by.holder
        return (
            f"held by {shown_label(holder.label)} (pid {holder.pid} on {shown_label(holder.host)}, "
            f"token {held_by.token})"
        )
    if ahead:
        return "others wait ahead"
    return "nobody holds it, but it is not free yet, by its last lease's lock_delay or at_least_for"


def check_filled(names: tuple[str, ...]) -> tuple[str, ...]:
    """A name with braces is a template that nobody has filled: everybody would wait for everybody else."""
    for name in names:
        if "{" in name or "}" in name:
            raise Misuse(f"the name {name!r} has braces: did you forget the f of an f-string?")
    return names


def _no(request: LeaseRequest, why: str, held_by: HeldBy | None = None, ahead: int | None = 0) -> NotGranted:
    waited = "" if not request.wait else f" within {request.wait:g} s"
    names = ", ".join(request.names)
    return NotGranted(f"{names} not granted{waited}: {why}", why=why, held_by=held_by, ahead=ahead or 0)
