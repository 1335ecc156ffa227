"""Planted bugs: each is a mistake that somebody made, in this or another system. The suites must catch each.

They are kept as subclasses of the real parts, so that they stay in step with them.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from fenced.client.faces import AsyncClient
from fenced.core.acquiring import LeaseEngine
from fenced.core.holding import GrantState
from fenced.core.keeping import Keeper
from fenced.core.renewing import Renewer
from fenced.core.settling import GivenUp
from fenced.core.waiting import QueueEntry
from fenced.errors import FencedError, Indeterminate
from fenced.guards.cells import Cell
from fenced.leases.dictionaries import MemoryRows
from fenced.leases.rows import NS, AttemptRow, LeaseAlgorithm, names_json
from fenced.runtime.aio import AioRuntime
from fenced.stores.ledger.authority.changes import Change, RecordedRows
from fenced.stores.ledger.authority.ledger import CountingAlgorithm
from fenced.stores.memory.authority import MemoryStore
from fenced.stores.memory.guard import MemoryCells, MemoryValues
from fenced.values import timing
from fenced.values.decision import Judgement, Mark, Verdict
from fenced.values.model import (
    Ask,
    AskAnswer,
    Busy,
    Credential,
    Ended,
    Kept,
    ReleaseAnswer,
    Released,
    RenewAnswer,
    Stamp,
    Unknown,
    Waiting,
    grant_id,
    is_seq,
)


def planted(kind: type, but: type | tuple[()] = ()) -> list[Any]:
    """All bugs above in this module that are planted into a class."""
    here = [each for each in globals().values() if isinstance(each, type) and each.__module__ == __name__]
    return [each for each in here if issubclass(each, kind) and not issubclass(each, but)]


# Authorities. Most are planted into the algorithm, and so into every store that runs it.


class RenewalRevives(LeaseAlgorithm):
    """A renewal that arrives after the expiry brings the lease back."""

    def renew(self, publics: Sequence[str]) -> list[RenewAnswer]:
        for row in self.rows.attempts(publics).values():
            if row.token and row.state in ("granted", "expired"):
                free = tuple(name for name in row.names if self.rows.claim(name) is None)
                self.rows.grant(row._replace(names_json=names_json(free)))
                self.rows.put(row._replace(state="granted", expires=self.now + row.ttl))
        return super().renew(publics)


class RenewalCreates(LeaseAlgorithm):
    """A renewal of nothing makes a lease (redis-semaphore #175)."""

    def _renewed(self, row: AttemptRow | None) -> RenewAnswer:
        return Kept(10.0) if row is None else super()._renewed(row)


class OneRenewsAll(LeaseAlgorithm):
    """All leases of a client depend on one session: a lost lease lives for as long as the client renews another."""

    def _renewed(self, row: AttemptRow | None) -> RenewAnswer:
        answer = super()._renewed(row)
        if row is not None and isinstance(answer, Kept):
            for other in self.rows.overdue(2**62):  # all there are
                if other.holder == row.holder and other.holds(self.now):
                    expires = max(other.expires, self.now + other.ttl)
                    self.rows.update((other.id,), "granted", expires, other.forget)
        return answer


class AnybodyReleases(LeaseAlgorithm):
    """The release of a lease that is over frees the name under its next holder."""

    def _finish(self, row: AttemptRow, state: str, keep: int = 0) -> tuple[ReleaseAnswer, list[AttemptRow]]:
        answer, heads = super()._finish(row, state, keep)
        if isinstance(answer, Ended):
            for name in row.names:
                if (other := self.rows.claim(name)) is not None:
                    self.rows.free(other._replace(names_json=names_json((name,))))
        return answer, heads


class TokenAtTheQueue(LeaseAlgorithm):
    """The token is minted when the waiter is queued, on an authority that promises `namespace-order`."""

    def _enqueue(self, row: AttemptRow, *rest: Any) -> Waiting:
        return super()._enqueue(row._replace(token=self.rows.mint()), *rest)

    def _grant(self, public: str, *rest: Any) -> int:
        waiting = self.rows.attempt(public)
        token = super()._grant(public, *rest)
        granted = self.rows.attempt(public)
        if waiting is None or granted is None:
            return token
        self.rows.put(granted._replace(token=waiting.token))
        return waiting.token


class EveryAskIsNew(LeaseAlgorithm):
    """A repeated ask is granted once more: the reply that was lost leaves a second token."""

    def ask(self, ask: Ask, wake: str = "") -> AskAnswer:
        for row in self.rows.attempts((grant_id(ask.secret),)).values():
            if row.state == "granted":
                self.rows.free(row)
                self.rows.forget(row)
        return super().ask(ask, wake)


class ForcedBlindly(LeaseAlgorithm):
    """An operator takes the name from whoever holds it by now, not from the holder that it has seen."""

    def force_release(self, name: str, token: int) -> tuple[int | None, list[AttemptRow]]:
        claim = self.rows.claim(name)
        return super().force_release(name, token if claim is None else claim.token)


class NoTombstone(LeaseAlgorithm):
    """A withdrawal of an ask that has not arrived yet leaves nothing behind, and the ask makes a ghost."""

    def withdraw(self, secret: str) -> tuple[ReleaseAnswer, list[AttemptRow]]:
        if not self.rows.attempts((grant_id(secret),)):
            return Released(), []
        return super().withdraw(secret)


class LapsedWaitersAreGranted(LeaseAlgorithm):
    """A waiter whose session ended is told "granted" (etcd #11456)."""

    def ask(self, ask: Ask, wake: str = "") -> AskAnswer:
        for row in self.rows.attempts((grant_id(ask.secret),)).values():
            if row.state in ("waiting", "expired") and not row.token:
                ticket = row.ticket if row.state == "waiting" else 0
                self.rows.put(row._replace(state="waiting", ticket=ticket, expires=self.now + row.ttl))
        return super().ask(ask, wake)


class DeadWaitersBlock(LeaseAlgorithm):
    """A waiter that fell silent keeps its place for ever."""

    def _free_at(self, names: Sequence[str], ticket: int) -> tuple[int, list[AttemptRow]]:
        if any(other.ticket < ticket for name in names for other in self.rows.queue(name)):
            return self.now + NS, []
        return super()._free_at(names, ticket)


class Barging(LeaseAlgorithm):
    """A free name goes to whoever asks next, not to the head of the queue."""

    def _free_at(self, names: Sequence[str], ticket: int) -> tuple[int, list[AttemptRow]]:
        _, claims = super()._free_at(names, ticket)
        return max([self.now, *(claim.free_at() for claim in claims)]), claims


class PartialHolds(LeaseAlgorithm):
    """Of several names only the first is really taken."""

    def _grant(self, public: str, *rest: Any) -> int:
        token = super()._grant(public, *rest)
        row = self.rows.attempts((public,))[public]
        self.rows.free(row._replace(names_json=names_json(row.names[1:])))
        return token


class LockDelayAfterRelease(LeaseAlgorithm):
    """The delay is kept after a release, too."""

    def _free(self, row: AttemptRow, state: str) -> list[AttemptRow]:
        if row.lock_delay:
            self.rows.update((row.id,), "expired", self.now, row.forget)
            return []
        return super()._free(row, state)


class KeptNamesAreFreed(LeaseAlgorithm):
    """Releasing a lease again, as after a lost reply, frees the names that its first release keeps taken."""

    def _finish(self, row: AttemptRow, state: str, keep: int = 0) -> tuple[ReleaseAnswer, list[AttemptRow]]:
        if row.state == "released":
            self.rows.free(row)
        return super()._finish(row, state, keep)


class LockDelayIsIgnored(LeaseAlgorithm):
    """A name whose holder has expired is granted at once, whatever its lock_delay."""

    def _free_at(self, names: Sequence[str], ticket: int) -> tuple[int, list[AttemptRow]]:
        free_at, claims = super()._free_at(names, ticket)
        if free_at in [claim.free_at() for claim in claims if claim.state != "released"]:
            free_at = max(self.now, *(claim.expires for claim in claims))
        return free_at, claims


class NewestFirst(LeaseAlgorithm):
    """A waiter does not look at who is ahead of it."""

    def _free_at(self, names: Sequence[str], ticket: int) -> tuple[int, list[AttemptRow]]:
        return super()._free_at(names, 0)


class BusyThoughFree(LeaseAlgorithm):
    """Who does not wait is turned away while anybody is remembered for the name."""

    def _ask_first(self, public: str, ask: Ask, wake: str) -> AskAnswer:
        if not ask.wait and any(self.rows.claim(name) for name in ask.names):
            return Busy(0, None)
        return super()._ask_first(public, ask, wake)


class SilentRelease(LeaseAlgorithm):
    """Nobody is woken."""

    def _free(self, row: AttemptRow, state: str) -> list[AttemptRow]:
        super()._free(row, state)
        return []


ALGORITHM_BUGS = planted(LeaseAlgorithm, but=CountingAlgorithm)


class ReleaseDeletesTheCounter(MemoryRows):
    """The next token counts up from what is left: MongoDB's and Litestream's locks restart at 1."""

    def _free(self, row: AttemptRow) -> None:
        super()._free(row)
        if not self._claims:
            self.token = 0


class TidyResetsTheCounter(MemoryRows):
    """Clean-up of idle names takes the counter along."""

    def forget(self, row: AttemptRow) -> None:
        super().forget(row)
        if not self._attempts:
            self.token = 0


class FloorIsSet(MemoryRows):
    """Raising the floor can lower it (a setval re-issued tokens)."""

    def raise_floor(self, above: int) -> int:
        self.token = above
        return above


AUTHORITY_BUGS = [*planted(MemoryRows), *ALGORITHM_BUGS]


def store_with(bug: type[LeaseAlgorithm] | type[MemoryRows]) -> type[MemoryStore]:
    """The memory store with a bug in its algorithm, or in its rows."""
    where = "algorithm" if issubclass(bug, LeaseAlgorithm) else "rows_type"
    return type(bug.__name__, (MemoryStore,), {where: bug, "__doc__": bug.__doc__})


# The ledger, where clients say which of their attempts are settled.


class SettledFreesTheName(RecordedRows):
    """A settled attempt is deleted together with the claim that keeps its name taken for `keep` or `lock_delay`."""

    def _is_over(self, public: str, now: int) -> bool:
        row = self._attempts.get(public)
        return row is not None and not row.is_open()


class AnybodySettles(CountingAlgorithm):
    """What is settled is counted by the holder's id, which every client may name."""

    __slots__ = ()

    def _ask_first(self, public: str, ask: Ask, wake: str) -> AskAnswer:
        series = ask.holder.id if ask.number else ""
        return super()._ask_first(public, ask._replace(series=series), wake)


class SweptTwice(RecordedRows):
    """The ids of deleted attempts stay in the queue of the sweep. One that comes back is in it twice."""

    def __init__(self, name: str, realm: str, number: int, changes: list[Change]) -> None:
        super().__init__(name, realm, number, changes)
        self._sweep: deque[str] = deque()

    def put(self, row: AttemptRow) -> None:
        if row.id not in self._attempts:
            self._sweep.append(row.id)
        super().put(row)

    def grant(self, row: AttemptRow) -> None:
        if row.id not in self._attempts:
            self._sweep.append(row.id)
        super().grant(row)

    def overdue(self, now: int, near: str = "", limit: int = 0) -> list[AttemptRow]:
        checked = [self._sweep.popleft() for _ in range(min(limit, len(self._sweep)))]
        rows = [self._attempts[public] for public in checked if public in self._attempts]
        self._sweep += [row.id for row in rows]
        return [row for row in rows if row.forget <= now]


LEDGER_BUGS = [*planted(CountingAlgorithm), *planted(RecordedRows)]


# Guards.


# `_decide(mark, stamp, name, config, announce, operation)` of the guard: what is not looked at is in `rest`.


class NoFence(MemoryValues):
    """Everything is admitted."""

    def _decide(self, mark: Mark | None, stamp: Stamp | None, name: str, *rest: Any) -> Judgement:
        return Judgement(Verdict.ADMIT, Mark(stamp.token, stamp.grant, stamp.seq or 0) if stamp else mark)


class StrictlyGreater(MemoryValues):
    """`>` for `>=`: the holder's second operation is taken for a stale one."""

    def _decide(self, mark: Mark | None, stamp: Stamp | None, name: str, *rest: Any) -> Judgement:
        if stamp is not None and not rest[1] and mark is not None and mark.seq and stamp.token <= mark.token:
            return Judgement(Verdict.STALE, mark)
        judged = super()._decide(mark, stamp, name, *rest)
        risen = judged.mark
        return Judgement(judged.verdict, risen and replace(risen, seq=risen.seq or 1))


class MarkIsOnlyRead(MemoryValues):
    """The mark is compared but never raised."""

    def _decide(self, mark: Mark | None, stamp: Stamp | None, name: str, *rest: Any) -> Judgement:
        judged = super()._decide(mark, stamp, name, *rest)
        return Judgement(judged.verdict, mark or judged.mark)


class AnnouncingDoesNothing(MemoryValues):
    """Writes alone are fenced: B reads, A wakes and writes, B writes back what it read."""

    async def announce(self, credential: Credential) -> None:
        return


class EqualTokenOfAnybody(MemoryValues):
    """The grant is not compared: two holders of one token are both admitted."""

    def _decide(self, mark: Mark | None, stamp: Stamp | None, name: str, *rest: Any) -> Judgement:
        if stamp is not None and mark is not None and mark.token == stamp.token:
            mark = replace(mark, grant=stamp.grant)
        return super()._decide(mark, stamp, name, *rest)


class RefusalRaisesTheMark(MemoryValues):
    """The mark rises before it is known whether the write happens."""

    async def write(
        self, credential: Credential | None, name: str, value: bytes, *, expect: int | None = None
    ) -> int:
        if credential is not None and name in credential.stamps[0].names:
            await self.announce(replace(credential, names=(name,)))
        return await super().write(credential, name, value, expect=expect)


class NamesByPrefix(MemoryValues):
    """`orders` covers `orders/42`."""

    def _decide(self, mark: Mark | None, stamp: Stamp | None, name: str, *rest: Any) -> Judgement:
        if stamp is not None and any(name.startswith(own) for own in stamp.names):
            stamp = stamp._replace(names=(*stamp.names, name))
        return super()._decide(mark, stamp, name, *rest)


class ObserveRaisesTheMark(MemoryValues):
    """What is let through against its verdict moves the mark."""

    async def write(
        self, credential: Credential | None, name: str, value: bytes, *, expect: int | None = None
    ) -> int:
        version = await super().write(credential, name, value, expect=expect)
        if credential is not None:
            (stamp,) = credential.stamps
            put(self, name, mark=Mark(stamp.token, stamp.grant, stamp.seq or 0))
        return version


class FirstNameDecides(MemoryValues):
    """Of several names only the first is judged."""

    async def write_many(self, credential: Credential | None, values: dict[str, bytes]) -> None:
        first = next(iter(values))
        await self.write(credential, first, values[first])
        for name, value in values.items():
            if name != first:
                put(self, name, value=value)


class HighestIsTheLatest(MemoryValues):
    """The highest mark is taken to be the one that was set last."""

    async def highest(self) -> int:
        return next((mark.token for mark in reversed(await self.marks())), 0)


class OperationsAreCounted(MemoryValues):
    """An operation's id is a number that begins again with the guard object: two operations have one id."""

    _operations = 0

    def _new_id(self) -> str:
        self._operations += 1
        return str(self._operations)


class AnnouncementsLendTheirIds(MemoryValues):
    """An announced mark has an operation's id, that of the write that follows: the write counts as already recorded."""

    _lent = ""

    async def _operate(self, *arguments: Any, announce: bool = False, **more: Any) -> Any:
        operation = self._lent = self._lent or self._new_id()
        if not announce:
            self._lent = ""
        return await super()._operate(*arguments, announce=announce, operation=operation, **more)

    def _decide(self, mark: Mark | None, stamp: Stamp | None, name: str, *rest: Any) -> Judgement:
        judged = super()._decide(mark, stamp, name, *rest)
        if rest[1] and judged.mark is not None and judged.mark != mark:
            return replace(judged, mark=replace(judged.mark, operation=rest[2]))
        return judged


class AnySeq(MemoryValues):
    """A seq is compared without a look at its range: -1 makes a mark fall."""

    def _decide(self, mark: Mark | None, stamp: Stamp | None, name: str, *rest: Any) -> Judgement:
        if stamp is not None and not is_seq(stamp.seq):
            return Judgement(Verdict.ADMIT, Mark(stamp.token, stamp.grant, stamp.seq or 0, rest[2]))
        return super()._decide(mark, stamp, name, *rest)


class ProofsAreDropped(MemoryValues):
    """A proof that nobody can check is taken away, and the stamp counts without it."""

    async def write(
        self, credential: Credential | None, name: str, value: bytes, *, expect: int | None = None
    ) -> int:
        bare = credential and replace(credential, proofs=())
        return await super().write(bare, name, value, expect=expect)


class ModesAreRemembered(MemoryValues):
    """The modes are read once: what another process sets is never seen."""

    async def _config(self, *, fresh: bool = False) -> Any:
        if self._known is None:
            return await super()._config(fresh=fresh)
        return self._known


class OldCellsDecide(MemoryValues):
    """A refusal, and an announcement of the same token, are decided by a cell that was read earlier."""

    async def _look(self, *arguments: Any) -> Any:
        known, this = await super()._look(*arguments)
        this.current = True
        return known, this


class AnyHolderIsTheSame(MemoryValues):
    """An operation on names that were admitted before is taken for a further one of the same holder."""

    def _compares(self, stamp: Stamp, names: tuple[str, ...], *, announce: bool = False) -> Any:
        before = self._admitted.get(names)
        return super()._compares(before.stamp if before else stamp, names, announce=announce)


def put(guard: MemoryValues, name: str, **changed: Any) -> None:
    """Change a cell from behind the guard's back."""
    version, blob = guard.cells.blobs.get(f"n/{name}", (0, None))
    guard.cells.blobs[f"n/{name}"] = version + 1, replace(Cell.unpacked(name, blob), **changed).packed()


class AskedRuleIsIgnored(MemoryValues):
    """A program that names another rule than the installed one is judged by the installed one, without a word."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._asked = None


class DecisionsDieWithTheirObject(MemoryValues):
    """A guard object keeps what it has decided to itself."""

    def cells_of_decisions(self) -> MemoryCells:
        return MemoryCells()


GUARD_BUGS = planted(MemoryValues)


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
        believed = sent + remaining * (1 + 2 * timing.DRIFT_RATIO)
        self.deadline = believed if self.hold_until is None else min(believed, self.hold_until)


class MaxHoldIsForgotten(GrantState):
    """A renewal moves the deadline past max_hold."""

    def _set_times(self, sent: float, remaining: float) -> None:
        super()._set_times(sent, remaining)
        self.deadline = timing.local_deadline(sent, remaining)


class RenewedByTheWholeTtl(GrantState):
    """A lease of which little is left when it is granted, because an answer was lost, is renewed as late as a whole
    one."""

    def _set_times(self, sent: float, remaining: float) -> None:
        super()._set_times(sent, remaining)
        self.renew_at = sent + timing.renew_after(self.ttl, self._jitter)


def engine_with(grant_type: type[GrantState]) -> type[LeaseEngine]:
    return type(grant_type.__name__, (LeaseEngine,), {"grant_type": grant_type})


class GivenUpIsForgotten(LeaseEngine):
    """A release that fails is not retried, as in version 0.1: the name stays taken for a whole ttl."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.settler.retry_now = self.settler.forget  # type: ignore[method-assign]


class WithdrawalIsWaitedFor(LeaseEngine):
    """A caller whose time is over waits for the withdrawal of its attempt: a silent server delays it for seconds."""

    async def _withdraw(self, secret: str, ttl: float, until: float = 0.0, *, at_once: bool = True) -> None:
        with contextlib.suppress(FencedError):
            await self.authority.withdraw(secret)


class AtLeastForIsForgotten(LeaseEngine):
    """A release frees the names at once, although its lease was to keep them for longer."""

    async def release(self, lease: GrantState, *, at_once: bool = False) -> None:
        await super().release(lease, at_once=True)


class InterruptedIsForgotten(LeaseEngine):
    """A caller that is cancelled or interrupted leaves its attempt at the authority."""

    async def _try_to_end(self, given_up: GivenUp, until: float = math.inf) -> None:
        if isinstance(sys.exc_info()[1], Exception):
            await super()._try_to_end(given_up, until)
        else:
            self.settler.forget(given_up)


class InterruptedWaitsForTheServer(LeaseEngine):
    """A caller that is cancelled or interrupted waits until the authority has ended its attempt, however long."""

    async def _try_to_end(self, given_up: GivenUp, until: float = math.inf) -> None:
        with contextlib.suppress(FencedError):
            await self.settler.end(given_up, self.runtime.now() + timing.CALL_SECONDS)


class UnavailableIsBelieved(LeaseEngine):
    """After an unknown outcome, "nothing happened" to the second try is taken for the first one's, too."""

    async def _ask(
        self, ask: Ask, until: float, doubts: list[Indeterminate], *, queued: bool
    ) -> tuple[float, AskAnswer]:
        while True:
            sent = self.runtime.now()
            try:
                limit = min(sent + timing.CALL_SECONDS, until + self._patience)
                return sent, await self.authority.ask(ask, limit)
            except Indeterminate:
                if self.runtime.now() >= until:
                    raise
                await self.runtime.wait(self.runtime.wakeup(), self.runtime.now() + 0.02)


class OnceTryingKeeper(Keeper):
    def _apply(self, lease: GrantState, answer: RenewAnswer, sent: float) -> None:
        super()._apply(lease, answer, sent)
        if isinstance(answer, Unknown):
            lease.renew_at = math.inf


class RenewalIsTriedOnce(LeaseEngine):
    """A renewal that fails is not tried again, and the lease expires under its holder."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.keeper.__class__ = OnceTryingKeeper


class CrossedRenewalKeeper(Keeper):
    def _apply_to_entry(self, entry: QueueEntry, answer: RenewAnswer, sent: float) -> None:
        super()._apply_to_entry(entry, answer, sent)
        if isinstance(answer, Kept):
            self.drop(entry.secret)


class CrossedRenewalDropsTheLease(LeaseEngine):
    """A waiter is renewed and granted at the same time: the answer to the renewal ends the keeping of its lease."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.keeper.__class__ = CrossedRenewalKeeper


class TheLoopRenews(LeaseEngine):
    """Renewals run in the event loop of the program, which may be blocked."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options | {"renewer": None})


class ClosedClientRenews(LeaseEngine):
    """The keeper goes on renewing when its client was closed: nobody else gets the names."""

    async def close(self) -> None:
        self.closed = True
        await self.authority.close()


class StumblingKeeper(Keeper):
    async def _renew(self, items: list[GrantState | QueueEntry]) -> None:
        known = [{item.secret: item for item in items}]
        await super()._renew(items)
        for item in items:
            if item.secret not in self._leases and item.secret not in self._entries:
                known[0].pop("")  # it left meanwhile


class KeeperStumbles(LeaseEngine):
    """The keeper fails with an error of Python's own when a lease is released under its renewal."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.keeper.__class__ = StumblingKeeper


class NewAttemptEachTime(LeaseEngine):
    """An unknown outcome is repeated with a new attempt: the first one may have been granted."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._newest: dict[str, Ask] = {}

    async def _ask(
        self, ask: Ask, until: float, doubts: list[Indeterminate], *, queued: bool
    ) -> tuple[float, AskAnswer]:
        for _ in itertools.count():
            newest = self._newest.get(ask.secret, ask)
            sent = self.runtime.now()
            try:
                return sent, await self.authority.ask(newest)
            except Indeterminate:
                self._newest[ask.secret] = newest._replace(secret=self.runtime.secret())
        raise AssertionError

    def _take(self, request: Any, ask: Ask, *rest: Any) -> Any:
        return super()._take(request, self._newest.get(ask.secret, ask), *rest)

    def _join_queue(self, ask: Ask) -> Any:
        return super()._join_queue(self._newest.get(ask.secret, ask))


# Clients of asyncio.


class RenewalsInTheLoop(AsyncClient):
    """The event loop renews its leases itself: a body that blocks it loses them."""

    def _make_renewer(self) -> Renewer:
        return Renewer(self._authority, self._runtime)


class CallbacksAnywhere(AioRuntime):
    def deliver(self, call: Callable[..., object], *args: object) -> None:
        call(*args)


class CallbacksInTheKeepersThread(AsyncClient):
    """The program's callbacks run in the keeper's thread, where they must not touch its event loop."""

    def _make_runtime(self) -> AioRuntime:
        return CallbacksAnywhere()


LOOP_BUGS: tuple[type[AsyncClient], ...] = (
    RenewalsInTheLoop,
    CallbacksInTheKeepersThread,
)
