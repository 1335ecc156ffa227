"""Planted bugs: each is a mistake that somebody made, in this or another system. The suites must catch each.

They are kept as subclasses of the real parts, so that they stay in step with them.
"""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import replace
from typing import Any

from fenced import timing
from fenced.authorities.memory import MemoryAttempt, MemoryStore
from fenced.core.acquiring import LeaseEngine
from fenced.core.holding import GrantState
from fenced.decision import Judgement, Mark, Verdict
from fenced.errors import FencedError
from fenced.guards.memory import MemoryGuard
from fenced.guards.shared.cells import Cell, Config
from fenced.model import (
    Ask,
    AskAnswer,
    Credential,
    Ended,
    Granted,
    Kept,
    ReleaseAnswer,
    Released,
    RenewAnswer,
    Stamp,
    grant_id,
)

# Authorities.


class ReleaseDeletesTheCounter(MemoryStore):
    """The next token counts up from what is left: MongoDB's and Litestream's locks restart at 1."""

    def _finish(self, attempt: MemoryAttempt, state: str, now: float) -> ReleaseAnswer:
        answer = super()._finish(attempt, state, now)
        if not self.ledger.claims:
            self.ledger.token = 0
        return answer


class TidyResetsTheCounter(MemoryStore):
    """Clean-up of idle names takes the counter along."""

    def tidy(self) -> int:
        forgotten = super().tidy()
        if not self.ledger.attempts:
            self.ledger.token = 0
        return forgotten


class RenewalRevives(MemoryStore):
    """A renewal that arrives after the expiry brings the lease back."""

    def _renew(self, public: str, now: float) -> RenewAnswer:
        attempt = self.ledger.attempts.get(public)
        if attempt is not None and attempt.state in ("granted", "expired") and attempt.token:
            attempt.state = "granted"
            attempt.expires = now + attempt.ttl
            for name in attempt.names:
                self.ledger.claims.setdefault(name, attempt)
        return super()._renew(public, now)


class RenewalCreates(MemoryStore):
    """A renewal of nothing makes a lease (redis-semaphore #175)."""

    def _renew(self, public: str, now: float) -> RenewAnswer:
        from fenced.model import Gone, Kept

        answer = super()._renew(public, now)
        return Kept(10.0) if isinstance(answer, Gone) else answer


class OneRenewsAll(MemoryStore):
    """All leases of a client depend on one session: a lost lease lives for as long as the client renews another."""

    def _renew(self, public: str, now: float) -> RenewAnswer:
        answer = super()._renew(public, now)
        if isinstance(answer, Kept):
            holder = self.ledger.attempts[public].holder
            for other in self.ledger.attempts.values():
                if other.holder == holder and other.state == "granted" and other.expires > now:
                    other.expires = max(other.expires, now + other.ttl)
        return answer


class AnybodyReleases(MemoryStore):
    """The release of a lease that is over frees the name under its next holder."""

    def release(self, secret: str) -> ReleaseAnswer:
        attempt = self.ledger.attempts.get(grant_id(secret))
        answer = super().release(secret)
        if attempt is not None and isinstance(answer, Ended):
            for name in attempt.names:
                self.ledger.claims.pop(name, None)
        return answer


class TokenAtTheQueue(MemoryStore):
    """The token is minted when the waiter is queued, on an authority that promises `namespace-order`."""

    def _enqueue(self, attempt: MemoryAttempt) -> None:
        super()._enqueue(attempt)
        attempt.token = super()._mint()

    def _grant(self, attempt: MemoryAttempt, now: float) -> Granted:
        early = attempt.token
        granted = super()._grant(attempt, now)
        if early:
            attempt.token = early
            return Granted(early, granted.remaining, granted.ttl)
        return granted


class EveryAskIsNew(MemoryStore):
    """A repeated ask is granted anew: the reply that was lost leaves a second token."""

    def ask(self, ask: Ask) -> AskAnswer:
        attempt = self.ledger.attempts.get(grant_id(ask.secret))
        if attempt is not None and attempt.state == "granted":
            del self.ledger.attempts[attempt.public]
            for name in attempt.names:
                self.ledger.claims.pop(name, None)
        return super().ask(ask)


class NoTombstone(MemoryStore):
    """A withdrawal of an ask that has not arrived yet leaves nothing behind, and the ask makes a ghost."""

    def withdraw(self, secret: str) -> ReleaseAnswer:
        if grant_id(secret) not in self.ledger.attempts:
            return Released()
        return super().withdraw(secret)


class LapsedWaitersAreGranted(MemoryStore):
    """A waiter whose session ended is told "granted" (etcd #11456)."""

    def ask(self, ask: Ask) -> AskAnswer:
        attempt = self.ledger.attempts.get(grant_id(ask.secret))
        if attempt is not None and attempt.state in ("waiting", "expired") and not attempt.token:
            attempt.expires = self.clock() + attempt.ttl
            if attempt.state == "expired":
                attempt.state, attempt.ticket = "waiting", 0
        return super().ask(ask)


class DeadWaitersBlock(MemoryStore):
    """A waiter that fell silent keeps its place for ever."""

    def _check_in(self, attempt: MemoryAttempt, now: float) -> float:
        for name in attempt.names:
            for other in self.ledger.queues.get(name, ()):
                if other is not attempt and (not attempt.ticket or other.ticket < attempt.ticket):
                    return 1.0
        return super()._check_in(attempt, now)


class Barging(MemoryStore):
    """A free name goes to whoever asks next, not to the head of the queue."""

    def _check_in(self, attempt: MemoryAttempt, now: float) -> float:
        claims = [self.ledger.claims.get(name) for name in attempt.names]
        return max((claim.free_at() - now for claim in claims if claim is not None), default=0.0)


class PartialHolds(MemoryStore):
    """Of several names only the first is really taken."""

    def _grant(self, attempt: MemoryAttempt, now: float) -> Granted:
        granted = super()._grant(attempt, now)
        for name in attempt.names[1:]:
            self.ledger.claims.pop(name, None)
        return granted


class LockDelayAfterRelease(MemoryStore):
    """The delay is kept after a release, too."""

    def _free(self, attempt: MemoryAttempt, now: float) -> None:
        if attempt.lock_delay:
            attempt.state, attempt.expires = "expired", now
            return
        super()._free(attempt, now)


class FloorIsSet(MemoryStore):
    """Raising the floor can lower it (a setval re-issued tokens)."""

    def raise_floor(self, above: int) -> int:
        self.ledger.token = super().raise_floor(above) and above
        return above


class SilentRelease(MemoryStore):
    """Nobody is woken."""

    def _free(self, attempt: MemoryAttempt, now: float) -> None:
        listeners, self.listeners = self.listeners, []
        super()._free(attempt, now)
        self.listeners = listeners


AUTHORITY_BUGS: tuple[type[MemoryStore], ...] = (
    ReleaseDeletesTheCounter,
    TidyResetsTheCounter,
    RenewalRevives,
    RenewalCreates,
    OneRenewsAll,
    AnybodyReleases,
    TokenAtTheQueue,
    EveryAskIsNew,
    NoTombstone,
    LapsedWaitersAreGranted,
    DeadWaitersBlock,
    Barging,
    PartialHolds,
    LockDelayAfterRelease,
    FloorIsSet,
    SilentRelease,
)


# Guards.


class NoFence(MemoryGuard):
    """Everything is admitted."""

    def _decide(
        self,
        mark: Mark | None,
        stamp: Stamp | None,
        name: str,
        config: Config,
        announce: bool,
        operation: str,
    ) -> Judgement:
        return Judgement(Verdict.ADMIT, Mark(stamp.token, stamp.grant, stamp.seq or 0) if stamp else mark)


class StrictlyGreater(MemoryGuard):
    """`>` for `>=`: the holder's second operation is taken for a stale one."""

    def _decide(
        self,
        mark: Mark | None,
        stamp: Stamp | None,
        name: str,
        config: Config,
        announce: bool,
        operation: str,
    ) -> Judgement:
        if stamp is not None and not announce and mark is not None and mark.seq and stamp.token <= mark.token:
            return Judgement(Verdict.STALE, mark)
        judged = super()._decide(mark, stamp, name, config, announce, operation)
        risen = judged.mark
        return Judgement(judged.verdict, risen and replace(risen, seq=risen.seq or 1))


class MarkIsOnlyRead(MemoryGuard):
    """The mark is compared but never raised."""

    def _decide(
        self,
        mark: Mark | None,
        stamp: Stamp | None,
        name: str,
        config: Config,
        announce: bool,
        operation: str,
    ) -> Judgement:
        judged = super()._decide(mark, stamp, name, config, announce, operation)
        return Judgement(judged.verdict, mark or judged.mark)


class AnnouncingDoesNothing(MemoryGuard):
    """Writes alone are fenced: B reads, A wakes and writes, B writes back what it read."""

    async def announce(self, credential: Credential) -> None:
        return


class EqualTokenOfAnybody(MemoryGuard):
    """The grant is not compared: two holders of one token are both admitted."""

    def _decide(
        self,
        mark: Mark | None,
        stamp: Stamp | None,
        name: str,
        config: Config,
        announce: bool,
        operation: str,
    ) -> Judgement:
        if stamp is not None and mark is not None and mark.token == stamp.token:
            mark = replace(mark, grant=stamp.grant)
        return super()._decide(mark, stamp, name, config, announce, operation)


class RefusalRaisesTheMark(MemoryGuard):
    """The mark rises before it is known whether the write happens."""

    async def write(
        self, credential: Credential | None, name: str, value: bytes, *, expect: int | None = None
    ) -> int:
        if credential is not None and name in credential.stamps[0].names:
            await self.announce(replace(credential, names=(name,)))
        return await super().write(credential, name, value, expect=expect)


class NamesByPrefix(MemoryGuard):
    """`orders` covers `orders/42`."""

    def _decide(
        self,
        mark: Mark | None,
        stamp: Stamp | None,
        name: str,
        config: Config,
        announce: bool,
        operation: str,
    ) -> Judgement:
        if stamp is not None and any(name.startswith(own) for own in stamp.names):
            stamp = stamp._replace(names=(*stamp.names, name))
        return super()._decide(mark, stamp, name, config, announce, operation)


class ObserveRaisesTheMark(MemoryGuard):
    """What is let through against its verdict moves the mark."""

    async def write(
        self, credential: Credential | None, name: str, value: bytes, *, expect: int | None = None
    ) -> int:
        version = await super().write(credential, name, value, expect=expect)
        if credential is not None:
            (stamp,) = credential.stamps
            put(self, name, mark=Mark(stamp.token, stamp.grant, stamp.seq or 0))
        return version


class FirstNameDecides(MemoryGuard):
    """Of several names only the first is judged."""

    async def write_many(self, credential: Credential | None, values: dict[str, bytes]) -> None:
        first = next(iter(values))
        await self.write(credential, first, values[first])
        for name, value in values.items():
            if name != first:
                put(self, name, value=value)


class HighestIsTheLatest(MemoryGuard):
    """The highest mark is taken to be the one that was set last."""

    async def highest(self) -> int:
        return next((mark.token for mark in reversed(await self.marks())), 0)


class OperationsAreCounted(MemoryGuard):
    """An operation's id is a number that begins again with the guard object: two operations have one id."""

    _operations = 0

    def _new_id(self) -> str:
        self._operations += 1
        return str(self._operations)


class ProofsAreDropped(MemoryGuard):
    """A proof that nobody can check is taken away, and the stamp counts without it."""

    async def write(
        self, credential: Credential | None, name: str, value: bytes, *, expect: int | None = None
    ) -> int:
        bare = credential and replace(credential, proofs=())
        return await super().write(bare, name, value, expect=expect)


class ModesAreRemembered(MemoryGuard):
    """The modes are read once: what another process sets is never seen."""

    async def _config(self, *, fresh: bool = False) -> Any:
        if self._known is None:
            return await super()._config(fresh=fresh)
        return self._known


def put(guard: MemoryGuard, name: str, **changed: Any) -> None:
    """Change a cell from behind the guard's back."""
    version, blob = guard.cells.blobs.get(f"n/{name}", (0, None))
    guard.cells.blobs[f"n/{name}"] = version + 1, replace(Cell.unpacked(name, blob), **changed).packed()


GUARD_BUGS: tuple[type[MemoryGuard], ...] = (
    NoFence,
    StrictlyGreater,
    MarkIsOnlyRead,
    AnnouncingDoesNothing,
    EqualTokenOfAnybody,
    RefusalRaisesTheMark,
    NamesByPrefix,
    ObserveRaisesTheMark,
    FirstNameDecides,
    HighestIsTheLatest,
    OperationsAreCounted,
    ProofsAreDropped,
    ModesAreRemembered,
)


# Clients.


class DeadlineFromTheReply(GrantState):
    """The local deadline counts from when the answer came, not from when the question left."""

    def _set_times(self, sent: float, remaining: float) -> None:
        super()._set_times(self.runtime.now(), remaining)


class LossIsNotFinal(GrantState):
    """A renewal that succeeds after the deadline brings the lease back."""

    def confirm(self, sent: float, remaining: float) -> None:
        self.lost_reason = None
        self.in_doubt = False
        self._set_times(self.runtime.now(), remaining)


class NoMargin(GrantState):
    """The holder believes to the last moment, on a clock that may be slow."""

    def _set_times(self, sent: float, remaining: float) -> None:
        super()._set_times(sent, remaining)
        self.deadline = sent + remaining * (1 + 2 * timing.DRIFT_RATIO)


def engine_with(hold_type: type[GrantState]) -> type[LeaseEngine]:
    class EngineWithBug(LeaseEngine):
        def _take(self, wish: Any, ask: Ask, granted: Granted, sent: float, realm: str) -> GrantState | None:
            return hold_type(
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

    return EngineWithBug


class GivenUpIsForgotten(LeaseEngine):
    """A release that fails is not retried, as in version 0.1: the name stays taken for a whole ttl."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.settler.retry_now = self.settler.settled  # type: ignore[method-assign]


class WithdrawalIsWaitedFor(LeaseEngine):
    """A caller whose time is over waits for the withdrawal of its attempt: a silent server delays it for seconds."""

    async def _withdraw(self, secret: str, ttl: float, until: float = 0.0, *, at_once: bool = True) -> None:
        with contextlib.suppress(FencedError):
            await self.authority.withdraw(secret)


class NewAttemptEachTime(LeaseEngine):
    """An unknown outcome is repeated with a new attempt: the first one may have been granted."""

    async def _ask(self, ask: Ask, until: float, *, queued: bool) -> tuple[float, AskAnswer]:
        from fenced.errors import Indeterminate

        for _ in itertools.count():
            sent = self.runtime.now()
            try:
                return sent, await self.authority.ask(ask)
            except Indeterminate:
                fresh = Ask(self.runtime.secret(), ask.names, ask.ttl, ask.holder, ask.wait, ask.lock_delay)
                object.__setattr__(ask, "secret", fresh.secret)
        raise AssertionError
