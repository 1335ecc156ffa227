"""How a worker claims rows, gives back those of dead workers, and ends its claims. Written once for both colours.

A worker has one ordinary lease. It shows that the worker is alive, whatever the number of its claims: nothing is
renewed in the table. There is no reaper: every worker gives back the rows of workers whose lease is over.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Literal

from fenced.client.guarding import ClaimFence
from fenced.core.acquiring import LeaseEngine, LeaseRequest
from fenced.core.holding import GrantState, State
from fenced.errors import Indeterminate, LeaseLost, Misuse, NotGranted, Refused, StaleToken, shown
from fenced.guards.claims import ClaimedKey, ClaimTable, ClaimTerms, Ends, Row, check_token, claim_grant
from fenced.guards.spec import Spec
from fenced.http.protocol import fence_headers
from fenced.values import timing
from fenced.values.contracts import Runtime
from fenced.values.model import Stamp

Outcome = Literal["done", "retried", "dead", "lost"]
TRIES = 10
"""How often a claim is tried again with a new token, if others have claimed the same rows in between."""
ERROR_LENGTH_MAX = 2000


class ClaimGrant:
    """What makes the stamps of a claim: its own token, under the lease of its worker."""

    def __init__(self, lease: GrantState, name: str, token: int) -> None:
        self._lease = lease
        self.runtime: Runtime = lease.runtime
        self.realm = lease.realm
        self.names: tuple[str, ...] = (name,)
        self.token = token
        self.grant = claim_grant(lease.realm, token, name)
        self.hold_until = lease.hold_until
        self.released = False
        self._sequence = itertools.count(1)

    def next_stamp(self) -> Stamp:
        return Stamp(self.realm, self.names, self.token, next(self._sequence), self.grant)

    def announcement(self) -> Stamp:
        return Stamp(self.realm, self.names, self.token, 0, self.grant)

    def bare_stamp(self) -> Stamp:
        return Stamp(self.realm, self.names, self.token, None, self.grant)

    def error_if_lost(self) -> LeaseLost | None:
        return self._lease.error_if_lost()


class ClaimingWork:
    """One worker: its lease, and its claims on one table."""

    def __init__(
        self,
        spec: Spec,
        tables: Callable[[Any], ClaimTable],
        engine: LeaseEngine,
        *,
        ttl: timing.Seconds,
        max_hold: timing.Seconds | None,
        backoff: tuple[float, float],
        error: str | None,
    ) -> None:
        assert spec.claims is not None
        self.spec = spec
        self.claiming = spec.claims
        self.tables = tables
        self.engine = engine
        self.runtime = engine.runtime
        self.backoff = backoff
        self.error = error
        self._id = engine.runtime.secret()
        self._request = LeaseRequest.checked([self._name(self._id)], ttl, None, max_hold)
        self._lease: GrantState | None = None
        self._minted: bool | None = None
        self._token = 0
        self._looked = -timing.TTL_MAX
        self._kept: tuple[Any, ClaimTable] | None = None
        self.stopping = False
        self.changed = engine.runtime.wakeup()
        self.open: set[int] = set()
        """The claims that `take` has handed out and that have not ended."""

    def table(self, db: Any) -> ClaimTable:
        """For single statements, which leave nothing behind in it: that of the last connection is kept.

        Transactions have one of their own, from `tables`. Threads may share a worker: each reads the pair once.
        """
        kept = self._kept
        if kept is not None and kept[0] is db:
            return kept[1]
        found = self.tables(db)
        if db is not None and found.is_on(db):
            self._kept = (db, found)
        return found

    def _name(self, worker: str) -> str:
        return f"{self.spec.table}/workers/{worker}"

    async def start(self) -> None:
        if self._lease is not None:
            raise Misuse("this worker was started before; call worker() again")
        self._lease = await self.engine.acquire(self._request)
        self._token = self._lease.token

    async def end(self, *, raised: bool) -> None:
        """Release the lease: whatever the worker has not ended is given back by the others."""
        self.stop()
        await self.engine.release_at_exit(self.lease, raised=raised)

    def stop(self) -> None:
        """Let `take` end after the claim that it has handed out last."""
        self.stopping = True
        self.changed.set()

    @property
    def lease(self) -> GrantState:
        if self._lease is None:
            raise Misuse("enter the worker first: with claims.worker(client) as worker")
        return self._lease

    @property
    def holder(self) -> str:
        """How rows name this worker. Where the database mints tokens, it looks the lease up by its grant."""
        return self.lease.grant if self._minted else self._id

    async def claim(self, db: Any, limit: int, where: Mapping[str, object] | None = None) -> list[Row]:
        if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= 1000:
            raise Misuse(f"a worker claims 1 to 1000 rows at once, not {shown(limit)}")
        self.lease.check()
        table = self.table(db)
        if self._minted is None:
            self._minted = await table.begin_work(self.lease.realm)
        if self.runtime.now() >= self._looked + self.lease.ttl / 3:
            await self.give_back(db)
        for _ in range(TRIES):
            try:
                return await table.claim(self._terms(), limit, where)
            except StaleToken:
                # A row was claimed under a later token since this worker has got its own: get a new one.
                if self._minted:
                    raise
                self._token = await self._next_token()
        return []

    def _terms(self) -> ClaimTerms:
        token = None if self._minted else check_token(self._token)
        return ClaimTerms(self.holder, token, self.lease.realm)

    async def _next_token(self) -> int:
        """A token above every one that was handed out before, from the authority of the worker's lease."""
        request = LeaseRequest((f"{self._name(self._id)}/token",), self.lease.ttl)
        grant = await self.engine.acquire(request)
        await self.engine.release(grant)
        return grant.token

    async def give_back(self, db: Any) -> int:
        """Give back the rows of workers whose lease is over. Returns how many."""
        table = self.table(db)
        if self._minted is None:
            self._minted = await table.begin_work(self.lease.realm)
        self._looked = self.runtime.now()
        if self._minted:
            return await table.give_back(None)
        over = [holder for holder in await table.holders() if await self._is_over(holder)]
        return await table.give_back(over) if over else 0

    async def _is_over(self, holder: str) -> bool:
        """Whether a worker's lease is over for ever. Only a grant of its name proves that: a lease that has expired and
        that nobody has asked for since might still be renewed."""
        if holder == self._id:
            return False
        name = self._name(holder)
        if (await self.engine.authority.observe(name)).held_by is not None:
            return False
        try:
            grant = await self.engine.acquire(LeaseRequest((name,), self.lease.ttl, 0.0))
        except NotGranted:
            return False
        await self.engine.release(grant)
        return True

    async def next_rows(self, db: Any, limit: int, poll: float) -> list[Row]:
        """Wait until rows could be claimed. Empty: the worker stops."""
        while not self.stopping:
            self.changed.clear()  # before the look: a change after it sets the flag, and the wait below returns
            room = limit - len(self.open)
            if room > 0:
                rows = await self.claim(db, room)
                if rows:
                    return rows
                if await self.table(db).wait_for_rows(poll) is not None:
                    continue
            await self.runtime.wait(self.changed, self.runtime.now() + poll)
        return []

    def pause(self, attempt: int) -> float:
        """How long a row waits after this attempt: twice as long each time, with jitter."""
        first, longest = self.backoff
        return min(longest, first * 2.0 ** min(attempt - 1, 60)) * (0.75 + self.runtime.random() / 2)


class ClaimedBase(ClaimFence):
    """A row that this worker has claimed: `run["column"]` is the row as it was then. Guards take it as a lease."""

    def __init__(self, work: ClaimingWork, row: Row) -> None:
        self._work = work
        self._row = row
        self._key = ClaimedKey(work.spec, row, work.lease.realm)
        self._writes = 0
        self._unsure = False
        self._refused: Refused | None = None
        self.outcome: Outcome | None = None
        """How it ended: `done`, `retried`, `dead` (its attempts are used up), `lost`; None while it has not."""

    @cached_property
    def _grant(self) -> ClaimGrant:
        """Made with the first stamp: most rows are written by the number alone."""
        return ClaimGrant(self._work.lease, self._key.name, self._key.token)

    def __getitem__(self, column: str) -> Any:
        return self._row[column]

    @property
    def row(self) -> Mapping[str, Any]:
        """The whole row, as it was claimed."""
        return self._row

    @property
    def id(self) -> Any:
        """The key of the row."""
        return self._key.key

    @property
    def name(self) -> str:
        """The name that other guards know it by."""
        return self._key.name

    @property
    def token(self) -> int:
        """The fencing token of this claim: above that of every earlier claim of the row."""
        return self._key.token

    @property
    def realm(self) -> str:
        """The id of the authority's namespace."""
        return self._key.realm

    @property
    def attempt(self) -> int:
        """How often the row was claimed, this claim included."""
        return int(self._row["claim_attempts"])

    @property
    def state(self) -> State:
        """That of the worker's lease: `held`, `jeopardy`, `lost` or `released`."""
        return self._work.lease.state

    def check(self, need: timing.Seconds = 0.0) -> None:
        """Raise LeaseLost if the worker's lease is lost, NotEnoughTime if less than `need` seconds remain."""
        self._work.lease.check(timing.check_need(need))

    def next_stamp(self) -> Stamp:
        """The stamp of the next operation. To retry that operation, send the same stamp again."""
        return self._grant.next_stamp()

    def bare_stamp(self) -> Stamp:
        """A stamp without seq, for a child process or another service; rule `retry` alone accepts it."""
        return self._grant.bare_stamp()

    def headers(self) -> dict[str, str]:
        """The headers that carry the next stamp to a service."""
        return fence_headers(self.next_stamp())

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} token={self.token} {self.outcome or self.state}>"

    async def _write(self, db: Any, columns: Mapping[str, object], ends: Ends | None = None) -> None:
        if self.outcome is not None and (ends is None or ends.held_by is None):
            raise Misuse(f"this claim of {self.name} has ended: {self.outcome}")
        repeat = self._unsure
        if not repeat:
            self._writes += 1
        self._unsure = False
        try:
            await self._work.table(db).write(self._key, self._writes, columns, ends, repeat=repeat)
        except Indeterminate:
            self._unsure = True  # the next call repeats this write, and finds out whether it was applied
            raise
        except Refused as error:
            self._refused = error
            self.outcome = "lost"
            self._is_over()
            raise

    async def _finish(self, db: Any, columns: Mapping[str, object]) -> None:
        await self._write(db, columns, Ends())
        self.outcome = "done"
        self._is_over()

    async def _retry(
        self, db: Any, after: timing.Seconds | None, columns: Mapping[str, object], held_by: str | None = None
    ) -> None:
        dead = self.attempt >= self._work.claiming.max_attempts
        pause = self._work.pause(self.attempt) if after is None else timing.check_need(after)
        await self._write(db, columns, Ends(pause, dead, held_by))
        self.outcome = "dead" if dead else "retried"
        self._is_over()

    def _is_over(self) -> None:
        self._work.open.discard(id(self))
        self._work.changed.set()

    async def _leave(self, db: Any, error: BaseException | None) -> None:
        """The end of a block: give the row back unless it was finished. A late worker writes nothing."""
        if error is None:
            if self.outcome is None:
                await self._retry(db, None, {})
            return
        if isinstance(error, Refused | LeaseLost):
            self.outcome = "lost"
            self._is_over()
            return
        column = self._work.error
        columns = {column: f"{type(error).__name__}: {error}"[:ERROR_LENGTH_MAX]} if column else {}
        try:
            # Only if this worker still has the row: the block may have finished it in a transaction that was rolled
            # back, or that was committed before it raised.
            await self._retry(db, None, columns, held_by=self._work.holder)
        except Exception as failed:  # noqa: BLE001 - the error of the block is the one to raise
            error.add_note(
                f"({self.name} was not given back: {failed}; it is, when the worker's lease is over)"
            )


class ClaimTransactionBase:
    """A transaction of a claimant on the program's connection: begins, locks the row, compares the token, commits."""

    def __init__(self, claimed: ClaimedBase, db: Any, table: ClaimTable) -> None:
        self._claimed = claimed
        self._db = db
        self._table = table

    async def _begin(self) -> None:
        if self._claimed.outcome is not None:
            raise Misuse(f"this claim of {self._claimed.name} has ended: {self._claimed.outcome}")
        try:
            await self._table.enter(self._claimed._key)
        except Refused:
            self._claimed.outcome = "lost"
            self._claimed._is_over()
            raise

    async def _leave(self, error: BaseException | None) -> None:
        claimed = self._claimed
        before, claimed._refused = claimed._refused, None
        if before is not None and error is before and before.__cause__ is not None:
            error = before.__cause__  # as the driver raised it: then the refusal is recorded
        try:
            await self._table.leave(error)
        except BaseException:
            if claimed.outcome in ("done", "retried", "dead"):
                claimed.outcome = None  # nothing was committed
            raise
        if error is not None and claimed.outcome in ("done", "retried", "dead"):
            claimed.outcome = None
