"""Claims for programs that block: psycopg, sqlite3, SQLAlchemy's sessions, Django's models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from fenced.client.faces import Client
from fenced.client.guarding import EnteredOnce
from fenced.guards.claims import WorkStatus
from fenced.runtime.blocking import step
from fenced.sql import Announced, Guard
from fenced.values import timing
from fenced.work.claims import ClaimsBase
from fenced.work.working import ClaimedBase, ClaimingWork, ClaimTransactionBase, Outcome

# generated: the blocking twins of aio.py, by `python -m release.twins`


class Claims(ClaimsBase):
    """Claims on the rows of one table."""

    _colour = "blocking"

    def install(self, db: Any = None, mode: str | None = None, *, replace: bool = False) -> None:
        """Add the columns, two indexes and the triggers. A new guard gets mode observe.

        If the connection is in a transaction, this is part of it, and you commit. Otherwise it is committed here.
        """
        step(self._guard(db).install(mode, replace=replace))

    def script(
        self, db: Any = None, mode: str | None = None, *, replace: bool = False, transaction: bool = True
    ) -> str:
        """The SQL that `install` would run, for a migration. It must run in one transaction."""
        return step(self._guard(db).script(mode, replace=replace, transaction=transaction))

    def uninstall(self, db: Any = None) -> None:
        """Remove the triggers. The columns stay: they are the marks."""
        step(self._guard(db).uninstall())

    def set_mode(self, db: Any, mode: str, pattern: str = "*", *, wait: float = 10.0) -> tuple[str, ...]:
        """Set the mode of the names that match; returns the transactions that it does not bind yet."""
        return step(self._guard(db).set_mode(mode, pattern, wait))

    def worker(
        self,
        client: Client,
        *,
        ttl: timing.Seconds = timing.TTL_DEFAULT,
        max_hold: timing.Seconds | None = None,
    ) -> ClaimWorker:
        """`with claims.worker(client) as worker:` one lease, renewed in the background, for all its claims."""
        work = ClaimingWork(
            self._spec,
            self._table,
            client._engine,
            ttl=ttl,
            max_hold=max_hold,
            backoff=self._backoff,
            error=self._error,
        )
        return ClaimWorker(work, client)

    def revoke(self, db: Any = None, *, key: object) -> bool:
        """Take a row from its worker, alive or not, and give it back; False if nobody had it."""
        return step(self._table(db).revoke(key))

    def revive(self, db: Any = None, **where: object) -> int:
        """Make the dead letters with these values of columns ready again; returns how many."""
        return step(self._table(db).revive(where))

    def status(self, db: Any = None, limit: int = 100) -> WorkStatus:
        """How many rows are ready, claimed, held back and dead, and the oldest claims. Reads the whole table."""
        return step(self._table(db).status(limit))


class ClaimWorker:
    """A worker: one lease, and its claims."""

    def __init__(self, work: ClaimingWork, client: Client) -> None:
        self._work = work
        self._client = client  # keeps it alive

    def claim(self, db: Any = None, *, where: Mapping[str, object] | None = None) -> ClaimContext:
        """`with worker.claim(db) as run:` the next ready row, or None. `where`: that row, ready or not.

        Leaving the block gives the row back unless it was finished.
        """
        return ClaimContext(self._work, db, where)

    def claim_many(self, db: Any = None, limit: int = 10) -> list[ClaimedRow]:
        """Up to `limit` ready rows, in one statement."""
        return [ClaimedRow(self._work, row) for row in step(self._work.claim(db, limit))]

    def take(self, db: Any = None, *, limit: int = 1, poll: timing.Seconds = 1.0) -> Iterator[ClaimedRow]:
        """Claims, one after another, until `stop()`. LeaseLost if the worker's lease is lost.

        At most `limit` are open at a time. While nothing is ready it waits for a notification on `db` if the driver
        can listen, at most `poll` seconds.
        """
        while rows := step(self._work.next_rows(db, limit, timing.check_need(poll))):
            claimed = [ClaimedRow(self._work, row) for row in rows]
            self._work.open.update(map(id, claimed))
            yield from claimed

    def give_back(self, db: Any = None) -> int:
        """Give back the rows of workers whose lease is over. Claiming does this every third of the ttl."""
        return step(self._work.give_back(db))

    def stop(self) -> None:
        """Let `take` end. May be called from another thread, or from a signal handler."""
        self._work.stop()

    def check(self, need: timing.Seconds = 0.0) -> None:
        """Raise LeaseLost if the worker's lease is lost, NotEnoughTime if less than `need` seconds remain."""
        self._work.lease.check(timing.check_need(need))

    def __enter__(self) -> ClaimWorker:
        step(self._work.start())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        step(self._work.end(raised=exc is not None))


class ClaimedRow(ClaimedBase):
    __doc__ = ClaimedBase.__doc__

    def transaction(self, db: Any = None, guards: Sequence[Guard] = ()) -> ClaimTransaction:
        """`with run.transaction(db) as tx:` begin, lock the row and compare its token; then your own statements.

        StaleToken if another worker has claimed it since. `guards` are announced to in the same transaction.
        """
        return ClaimTransaction(self, db, guards)

    def update(self, db: Any = None, /, **columns: object) -> None:
        """Write columns of the row, and keep it."""
        step(self._write(db, columns))

    def finish(self, db: Any = None, /, **columns: object) -> None:
        """The last write: one statement, or a part of the transaction of `db`."""
        step(self._finish(db, columns))

    def retry(self, db: Any = None, /, after: timing.Seconds | None = None, **columns: object) -> Outcome:
        """Give it back, not before `after` seconds; by default the back-off. `dead` if its attempts are used up."""
        step(self._retry(db, after, columns))
        assert self.outcome is not None
        return self.outcome

    def within(self, db: Any = None) -> ClaimContext:
        """`with run.within(db):` gives the row back at the end of the block, unless it was finished."""
        return ClaimContext(self._work, db, None, self)


class ClaimContext(EnteredOnce):
    """The block of one claim."""

    def __init__(
        self,
        work: ClaimingWork,
        db: Any,
        where: Mapping[str, object] | None,
        claimed: ClaimedRow | None = None,
    ) -> None:
        self._work = work
        self._db = db
        self._where = where
        self._claimed = claimed

    def __enter__(self) -> ClaimedRow | None:
        self._enter()
        if self._claimed is None:
            rows = step(self._work.claim(self._db, 1, self._where))
            self._claimed = ClaimedRow(self._work, rows[0]) if rows else None
        return self._claimed

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._claimed is not None:
            step(self._claimed._leave(self._db, exc))


class ClaimTransaction(ClaimTransactionBase, EnteredOnce):
    __doc__ = ClaimTransactionBase.__doc__

    def __init__(self, claimed: ClaimedRow, db: Any, guards: Sequence[Guard]) -> None:
        super().__init__(claimed, db, claimed._work.tables(db))
        self._guards = guards
        self._announced: list[Announced[Any]] = []

    def __enter__(self) -> Any:
        self._enter()
        step(self._begin())
        try:
            self._announced = [guard.announce_within(self._db, self._claimed) for guard in self._guards]
        except BaseException as error:
            step(self._leave(error))
            raise
        return self._db

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if exc is None:
            for announced in self._announced:
                announced.clear()  # SQLite's COMMIT fails while a stamp exists
        step(self._leave(exc))


# end
