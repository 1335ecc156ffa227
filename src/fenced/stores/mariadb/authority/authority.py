"""Leases in MariaDB and MySQL: rows and short transactions, with the lease algorithm between two requests of each.

A lease is a row that expires by the server's clock. No state is in a session, so everything works behind a pooler in
transaction mode.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import ClassVar, TypeVar

from fenced.errors import FencedError, Indeterminate, Misconfigured, Unavailable
from fenced.leases.pooled import WaitingAttempts
from fenced.leases.rowauthority import Kind, RowAuthority, Work
from fenced.leases.rows import SWEEP_EVERY_TOKENS
from fenced.leases.rules import NAMESPACE_ORDER
from fenced.net.pool import ConnectionBroken, Pool, Wires
from fenced.stores.mariadb.address import MariadbAddress
from fenced.stores.mariadb.authority.opening import enter, install, stored_schema
from fenced.stores.mariadb.authority.rows import (
    SQL,
    ahead_query,
    attempts_query,
    before_query,
    claim_query,
    listed,
    queue_query,
)
from fenced.stores.mariadb.authority.session import LeaseSession, LeaseTransaction
from fenced.stores.mariadb.authority.usual import give, take
from fenced.stores.mariadb.wire.connection import MariadbConnection, connect
from fenced.values import timing
from fenced.values.contracts import Runtime, Trait
from fenced.values.model import (
    Ask,
    AskAnswer,
    Ended,
    Gone,
    Granted,
    NameView,
    ReleaseAnswer,
    RenewAnswer,
    Standing,
    Waiting,
    check_name,
    grant_id,
)

T = TypeVar("T")
Usual = Callable[[LeaseSession, LeaseTransaction], Awaitable[T | None]]
"""A shorter way that may do what is asked for; None: it did nothing."""
CONNECTIONS_MAX = 8
INSTALL_SECONDS = 60.0
"""How long making the tables may take if the caller sets no deadline; it may wait for another client's installation."""
LOOK_FIRST_SECONDS = 0.02
LOOK_SECONDS = 0.25
"""How often a client looks whether one of its waiters could be granted: at first often, for long waits four times a
second. It is one query for all of them."""
LOOK_PATIENCE_SECONDS = 1.0
"""How long that query waits for its reply. Short: the reply is only a hint, and close() waits for it, too."""
REMEMBERED_MAX = 10_000
"""Of how many open attempts a client remembers the names. Of others it asks the server first."""


class MariadbAuthority(RowAuthority):
    """One client's access to the tables of a database."""

    connections: ClassVar[int] = CONNECTIONS_MAX
    shortens: ClassVar[bool] = True
    """Whether the usual cases are one request. The answers are the same without that."""
    traits: ClassVar[tuple[Trait, ...]] = (
        NAMESPACE_ORDER,
        Trait(
            "synced-grants",
            "With innodb_flush_log_at_trx_commit 1, and sync_binlog 1 where there is a binary log, a grant is on the "
            "disk before its token is handed out; other settings are best-effort.",
        ),
        Trait(
            "settings-watched",
            "Each new connection reads the settings again, and each old one after a restart of the server: if they are "
            "worse than at opening, nothing is granted.",
        ),
        Trait("any-pooler", "No session state is needed: it works behind poolers in transaction mode."),
        Trait(
            "polled",
            "Waiters look whether it is their turn: fifty times a second at first, later four times, one query for all "
            "waiters of a client.",
        ),
        Trait(
            "stopped-client-delays",
            "A client that is stopped in the middle of a request keeps its names locked for about three seconds; then "
            "the server undoes the request.",
        ),
        Trait(
            "history-noticed",
            "After a failover to another server, or a restored dump, nothing is granted until `raise`.",
        ),
        Trait(
            "reset-unnoticed",
            "After files were put back in place, or TRUNCATE fenced_number, it may look like any other restart: raise "
            "the floor.",
        ),
        Trait(
            "one-writer",
            "One server takes all writes: Galera and several primaries are best-effort, and then name one node alone.",
        ),
        Trait(
            "wall-clock",
            "Leases expire by the server's wall clock; a jump of it shortens or lengthens them. Tokens only rise.",
        ),
    )

    def __init__(self, url: str, runtime: Runtime, *, namespace: str = "default") -> None:
        self._address = MariadbAddress(url)
        self.url = self._address.url
        self._runtime = runtime
        self._namespace_name = check_name(namespace)
        self._namespace = 0
        self._doubts: tuple[str, ...] = ()
        self._floor = 0
        """As it was found last; a shortcut that finds another one does nothing."""
        self._abandoned = False
        self._wires: Wires[LeaseSession] = Wires()
        self._sessions = Pool(runtime, self._connect, limit=CONNECTIONS_MAX, where=self.url)
        self._keeping = Pool(runtime, self._connect, limit=1, where=self.url)
        self._start_waiting()

    @classmethod
    def at(cls, url: str, runtime: Runtime, namespace: str) -> MariadbAuthority:
        return cls(url, runtime, namespace=namespace)

    def _start_waiting(self) -> None:
        self._waiting = WaitingAttempts()
        self._names: dict[str, tuple[str, ...]] = {}
        """Of open attempts: a hint, so that their names are locked by the first request. The rows decide."""
        self._looked, self._look_after = self._runtime.now(), LOOK_FIRST_SECONDS
        self._interrupted = self._runtime.wakeup()

    async def _connect(self, until: float) -> LeaseSession:
        made: list[LeaseSession] = []

        async def greet(connection: MariadbConnection, limit: float) -> None:
            made[:] = [LeaseSession(connection, self._runtime, self._address.named(connection.endpoint))]
            await made[0].read_settings(limit)

        await connect(self._address, self._runtime, until, greet)
        (session,) = made
        self._wires.add(session)
        if (
            self._abandoned
        ):  # while this connection was being made: `abandon` did not see it, so close it here
            session.close()
            raise Unavailable(f"{self.url}: this client was dropped")
        return session

    async def _transact(self, work: Work[T], until: float | None, kind: Kind) -> T:
        return await self._carry_out(work, until, kind)

    async def _carry_out(
        self,
        work: Work[T],
        until: float | None,
        kind: Kind,
        *,
        names: frozenset[str] = frozenset(),
        facts: Sequence[str] = (),
        near: str = "",
        repeatable: bool = True,
        usual: Usual[T] | None = None,
    ) -> T:
        """One transaction. Unavailable, and not Indeterminate, if no try of it had begun to commit.

        `usual` is tried first, and only once: after it nobody knows what a repetition would find.
        """
        until = timing.call_until(self._runtime.now(), until)
        todo = LeaseTransaction(self._namespace, kind, names, facts, self._doubts, self._floor, near)
        pool = self._keeping if kind is Kind.RENEWS else self._sessions
        shortcuts = [usual] if usual is not None and self.shortens else []

        async def carry_out(session: LeaseSession) -> T:
            todo.committing = False
            try:
                if shortcuts and (answer := await shortcuts.pop()(session, todo)) is not None:
                    return answer
                return await session.transact(work, todo, until)
            except ConnectionBroken:
                todo.doubt |= todo.committing  # whatever a further try finds out about itself
                raise

        try:
            return await pool.request(carry_out, until, repeatable=repeatable)
        except Indeterminate as error:
            if todo.doubt or todo.committing:
                raise
            known = error.__cause__  # why the last try failed
            raise known if isinstance(known, FencedError) else Unavailable(str(error)) from error
        finally:
            self._floor = todo.floor

    # Opening.

    async def open(self, *, create: bool = True, until: float | None = None) -> Standing:
        limit = timing.call_until(self._runtime.now(), until)
        found = await self._sessions.request(lambda session: stored_schema(session, limit), limit)
        if found is None and not create:
            raise Misconfigured(f"{self.url} has no tables of leases; the first client makes them")
        if found is None:
            long = self._runtime.now() + INSTALL_SECONDS if until is None else until
            await self._sessions.request(lambda session: install(session, long), long)
            limit = timing.call_until(self._runtime.now(), until)  # installing has a limit of its own
        name, realm = self._namespace_name, self._runtime.secret()[:16]
        self._namespace, standing = await self._sessions.request(
            lambda session: enter(session, name, realm, create, limit), limit
        )
        self._doubts = standing.doubts
        return standing

    # The operations.

    async def ask(self, ask: Ask, until: float | None = None) -> AskAnswer:
        until = timing.call_until(self._runtime.now(), until)
        return await self._waiting.asked(ask, self._ask, self, self._sessions, until)

    async def _ask(self, ask: Ask, public: str, until: float) -> AskAnswer:
        queries = (claim_query, before_query, ahead_query) if ask.wait else (claim_query, before_query)
        facts = [query(self._namespace, name) for name in ask.names for query in queries]
        again = public in self._names
        answer = await self._carry_out(
            lambda algorithm: (algorithm.ask(ask), ()),
            until,
            Kind.MINTS,
            names=frozenset(ask.names),
            facts=[attempts_query([public]), *facts, SQL["number"]],
            usual=None if again else lambda session, todo: take(session, todo, ask, public, until),
        )
        if isinstance(answer, Granted | Waiting):
            self._remember(public, ask.names)
        if isinstance(answer, Waiting):
            self._look_after = LOOK_FIRST_SECONDS
        if isinstance(answer, Granted) and answer.token % SWEEP_EVERY_TOKENS == 0 and not again:
            with contextlib.suppress(FencedError):  # of the sweep; the grant is made
                await self._sweep(public, until)
        return answer

    async def _sweep(self, near: str, until: float) -> None:
        """What the algorithm does with one in this many of its own grants."""
        await self._carry_out(lambda algorithm: (algorithm.tidy(), ()), until, Kind.ENDS, near=near)

    def _remember(self, public: str, names: tuple[str, ...]) -> None:
        self._names[public] = names
        while len(self._names) > REMEMBERED_MAX:
            # Of leases that were never released. Other threads may change it between the two steps.
            with contextlib.suppress(RuntimeError, StopIteration):
                self._names.pop(next(iter(self._names)), None)

    async def renew(self, secrets: Sequence[str], until: float | None = None) -> list[RenewAnswer]:
        if not secrets:
            return []
        publics = [grant_id(secret) for secret in secrets]
        answers = await self._about(
            publics, lambda algorithm: (algorithm.renew(publics), ()), until, Kind.RENEWS
        )
        for public, answer in zip(publics, answers, strict=True):
            if isinstance(answer, Ended | Gone):
                self._names.pop(public, None)
        return answers

    async def release(self, secret: str, until: float | None = None, *, keep: float = 0.0) -> ReleaseAnswer:
        public = grant_id(secret)
        names = self._names.get(public, ())
        limit = timing.call_until(self._runtime.now(), until)
        return await self._end(
            public,
            lambda algorithm: algorithm.release(secret, keep),
            limit,
            (lambda session, todo: give(session, todo, public, names, limit)) if names and not keep else None,
        )

    async def withdraw(self, secret: str, until: float | None = None) -> ReleaseAnswer:
        return await self._end(grant_id(secret), lambda algorithm: algorithm.withdraw(secret), until)

    async def _end(
        self,
        public: str,
        work: Work[ReleaseAnswer],
        until: float | None,
        usual: Usual[ReleaseAnswer] | None = None,
    ) -> ReleaseAnswer:
        self._waiting.pop(public, None)
        answer = await self._about([public], work, until, Kind.ENDS, usual)
        self._names.pop(public, None)
        return answer

    async def _about(
        self,
        publics: Sequence[str],
        work: Work[T],
        until: float | None,
        kind: Kind,
        usual: Usual[T] | None = None,
    ) -> T:
        """What is done to attempts that are known by their ids alone."""
        names = frozenset(name for public in publics for name in self._names.get(public, ()))
        return await self._carry_out(
            work, until, kind, names=names, facts=[attempts_query(publics)], usual=usual
        )

    async def force_release(self, name: str, token: int, until: float | None = None) -> int | None:
        name = check_name(name)
        return await self._carry_out(
            lambda algorithm: algorithm.force_release(name, token),
            until,
            Kind.MINTS,
            names=frozenset([name]),
            facts=[claim_query(self._namespace, name), SQL["number"]],
            repeatable=False,  # a repetition would answer that nothing was done
        )

    async def observe(self, name: str, until: float | None = None) -> NameView:
        name = check_name(name)
        facts = [claim_query(self._namespace, name), queue_query(self._namespace, name)]
        return await self._carry_out(
            lambda algorithm: (algorithm.observe(name), ()), until, Kind.READS, facts=facts
        )

    async def tidy(self, until: float | None = None) -> int:
        """Page by page, so that nobody waits long for a name."""
        forgotten = 0
        while gone := await super().tidy(until):
            forgotten += gone
        return forgotten

    # Waiting.

    async def next_wakeups(self, until: float) -> list[str]:
        """One query for all waiters, again and again, and more and more rarely."""
        looks_at = self._looked + self._look_after
        await self._runtime.wait(self._interrupted, min(until, looks_at))
        if self._interrupted.is_set() or self._runtime.now() < looks_at:
            return []
        self._looked, self._look_after = self._runtime.now(), min(1.5 * self._look_after, LOOK_SECONDS)
        if not (waiting := list(self._waiting)):
            return []
        limit = self._runtime.now() + LOOK_PATIENCE_SECONDS
        query = SQL["ready"].format(ids=listed(waiting))
        rows = await self._sessions.request(lambda session: session.look(query, limit), limit)
        return [public.decode() for (public,) in rows]

    def interrupt(self) -> None:
        self._interrupted.set()

    # Closing.

    async def close(self) -> None:
        self._interrupted.set()
        self._sessions.close()
        self._keeping.close()

    def abandon(self) -> None:
        """Close the connections at once, from any thread, and release nothing. One in use is closed by its user."""
        self._abandoned = True
        self._interrupted.set()
        self._wires.interrupt()
        self._sessions.abandon()
        self._keeping.abandon()

    def before_fork(self) -> None:
        """Does nothing: the connections stay the parent's, and `forked` drops the child's references."""

    def forked(self) -> None:
        self._wires.forked()
        self._sessions.forked()
        self._keeping.forked()
        self._start_waiting()
