"""Leases in PostgreSQL: rows and short transactions, one function call per operation.

A lease is a row that expires by the server's clock. No state is in a session, so everything works behind a
connection pooler in transaction mode. Only waiting is better with a dedicated connection, to listen on.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import ClassVar

from fenced.errors import FencedError, Indeterminate, Misconfigured, Unavailable
from fenced.leases.pooled import WaitingAttempts
from fenced.leases.rules import NAMESPACE_ORDER, QUEUE_MAX, holder_text, no_namespace
from fenced.net.pool import ConnectionBroken, Pool
from fenced.stores.postgresql import address
from fenced.stores.postgresql.authority import answers
from fenced.stores.postgresql.authority.queries import SQL
from fenced.stores.postgresql.authority.schema import SCHEMA
from fenced.stores.postgresql.authority.session import LibpqConnection, Row
from fenced.values import timing
from fenced.values.contracts import Runtime, Trait
from fenced.values.model import (
    Ask,
    AskAnswer,
    NameView,
    ReleaseAnswer,
    RenewAnswer,
    Standing,
    check_floor,
    check_name,
    grant_id,
)
from fenced.values.past import PastLease
from fenced.values.schema import V0_1, Installed, Schema, check_readable

_UPGRADE = "run `fenced authority install` as the role that owns the schema fenced, or that may create it"
INSTALL_SECONDS = 60.0
"""How long installing the schema may take if the caller sets no deadline; it may wait for another client's install."""
CONNECTIONS_MAX = 8
LOOK_SECONDS = 0.25
"""How often a client that cannot listen checks whether one of its waiters could be granted."""
LOOK_PATIENCE_SECONDS = 1.0
"""How long that check waits for its reply. Short: the reply is only a hint, and close() waits for it, too."""

_UNPREPARED = frozenset({"installed", "version", "enter"})
"""Statements that a client sends only while it opens: preparing them would cost one more round trip."""
_QUEUE_MAX = b"%d" % QUEUE_MAX
_FIRST_ID = b"00000000-0000-0000-0000-000000000000"
_TIDY_AT_ONCE = b"1000"
_PLACE = answers.interval(timing.WAITER_TTL_MAX)
_REMEMBER = answers.interval(timing.REMEMBER_SECONDS_MIN)


class PostgresqlAuthority:
    """One client's access to the schema `fenced` of a database."""

    connections: ClassVar[int] = CONNECTIONS_MAX
    traits: ClassVar[tuple[Trait, ...]] = (
        NAMESPACE_ORDER,
        Trait("synced-grants", "A grant is flushed to the server's disk before its token is handed out."),
        Trait(
            "settings-watched",
            "Each new connection reads the settings again: if they are worse than at opening, nothing is granted.",
        ),
        Trait(
            "given-up-ended",
            "While a statement runs, the server checks four times a second that its client is still connected, and "
            "ends the statement if not; behind a pooler it does not check.",
        ),
        Trait("any-pooler", "No session state is needed: it works behind pgbouncer in transaction mode."),
        Trait(
            "pushed",
            "A release wakes the head of the queue at once, by NOTIFY, where a connection can listen.",
        ),
        Trait(
            "commit-warnings",
            "A grant whose commit was answered with a warning (a cancelled wait for a standby) is unknown.",
        ),
        Trait(
            "history-noticed",
            "After a promotion, a recovery to a point in time or a restored dump nothing is granted until `raise`.",
        ),
        Trait(
            "copy-unnoticed",
            "A copy of the server's files, started as it is, looks like the original: raise the floor.",
        ),
        Trait(
            "reset-unnoticed",
            "After `pg_resetwal`, which throws away the last grants, it looks like any other restart: raise the floor.",
        ),
        Trait(
            "wall-clock",
            "Leases expire by the server's wall clock; a jump of it shortens or lengthens them. Tokens only rise.",
        ),
    )

    def __init__(self, url: str, runtime: Runtime, *, namespace: str = "default") -> None:
        self._address = address.parse(url)
        self.url = self._address.shown
        self._runtime = runtime
        self._namespace_name = check_name(namespace)
        self._namespace = b""
        self._doubts: tuple[str, ...] | None = None
        self._stored: Schema | None = None
        """The doubts that `open` reported. A connection with any other doubt mints no token."""
        self._abandoned = False
        self._alive: set[LibpqConnection] = set()
        self._sessions = Pool(runtime, self._connect, limit=CONNECTIONS_MAX, where=self.url)
        self._keeping = Pool(runtime, self._connect, limit=1, where=self.url)
        self._reset_listening()

    @classmethod
    def at(cls, url: str, runtime: Runtime, namespace: str) -> PostgresqlAuthority:
        return cls(url, runtime, namespace=namespace)

    def _reset_listening(self) -> None:
        self._channel = f"fenced_{secrets.token_hex(8)}".encode()
        self._listener: LibpqConnection | None = None
        self._listeners: set[LibpqConnection] = set()
        """Contains the listener even before it is connected, so that `interrupt` can interrupt connecting."""
        self._cannot_listen = self._address.listen is None
        self._waiting = WaitingAttempts()
        self._interrupted = self._runtime.wakeup()

    async def _connect(self, until: float) -> LibpqConnection:
        return await self._reach(self._address.conninfo, until, self._alive)

    async def _reach(self, conninfo: str, until: float, alive: set[LibpqConnection]) -> LibpqConnection:
        session = await LibpqConnection.connect(conninfo, self._runtime, self.url, until, alive)
        if self._abandoned:
            # While this connection was being made: `abandon` did not see it, so close it here.
            session.close()
            raise Unavailable(f"{self.url}: this client was dropped")
        return session

    async def _run(
        self,
        name: str,
        *parameters: bytes | None,
        pool: Pool[LibpqConnection] | None = None,
        until: float | None = None,
        repeatable: bool = True,
        certain: bool = False,
        mints: bool = False,
    ) -> list[Row]:
        """One statement on one of our connections.

        `certain`: a server warning makes its outcome unknown. `mints`: it moves the token counter.
        """
        until = timing.call_until(self._runtime.now(), until)

        async def work(session: LibpqConnection) -> list[Row]:
            if mints and self._weakened(session):
                await self._recheck_settings(session, until)
            prepared = b"" if name in _UNPREPARED else b"fenced_" + name.encode()
            rows = await session.run(prepared, SQL[name], parameters, until)
            if certain and session.warnings:
                raise Indeterminate(f"{self.url}: {'; '.join(session.warnings)}")
            return rows

        return await (pool or self._sessions).request(work, until, repeatable=repeatable)

    def _weakened(self, session: LibpqConnection) -> list[str]:
        """The doubts that this connection found and that `open` did not report."""
        if not session.doubts or self._doubts is None:
            return []
        return [doubt for doubt in session.doubts if doubt not in self._doubts]

    async def _recheck_settings(self, session: LibpqConnection, until: float) -> None:
        """The settings were wrong when this connection was made; they may have been corrected since."""
        await session.read_settings(until)
        if doubts := self._weakened(session):
            raise Misconfigured(
                f"{self.url}: tokens could not repeat when this client was opened, and now they could: "
                f"{'; '.join(doubts)}. Correct the settings, or open a client with guarantee='best-effort' "
                "(fenced run: --guarantee best-effort)"
            )

    # Opening.

    async def open(self, *, create: bool = True, until: float | None = None) -> Standing:
        limit = timing.call_until(self._runtime.now(), until)
        if await self._prepare(create, limit, until):
            limit = timing.call_until(self._runtime.now(), until)  # installing has a separate limit
            await self._installed(limit)
        name, realm = self._namespace_name.encode(), secrets.token_hex(8).encode()
        rows = await self._run("enter", name, realm, b"t" if create else b"f", until=limit)
        if not rows:
            raise no_namespace(self.url, self._namespace_name)
        number, known_realm, last, clock = (_text(value) for value in rows[0])
        self._namespace = number.encode()
        self._doubts = await self._sessions.request(lambda session: _doubts_of(session, limit), limit)
        return Standing(known_realm, int(last), self._doubts, schema=self._stored, clock=float(clock))

    async def _prepare(self, create: bool, limit: float, until: float | None) -> bool:
        """Make sure that the schema exists; with `create`, install it. Returns whether it was installed now."""
        found = await self._installed(limit)
        usable = found is not None and found.schema.version >= SCHEMA.version
        if not SCHEMA.needs_upgrade(found) or (usable and not create):
            return False
        if not create:
            raise Misconfigured(
                f"{self.url} has no schema fenced; the first client creates it"
                if found is None
                else f"{self.url} has schema {found.schema.version}, this fenced needs {SCHEMA.version}: {_UPGRADE}"
            )
        try:
            await self._install(found, until)
        except Misconfigured as error:
            if usable:  # this role may not replace the functions, and the installed ones can be used
                return False
            raise Misconfigured(f"{error}. The schema must be installed or upgraded: {_UPGRADE}") from error
        except (Unavailable, Indeterminate):
            # Another client has done it meanwhile, or our first try has, and its reply was lost.
            if SCHEMA.needs_upgrade(await self._installed(until)):
                raise
        return True

    async def _installed(self, until: float | None) -> Installed | None:
        ((old, new),) = await self._run("installed", until=until)
        if new != b"t":
            return V0_1 if old == b"t" else None
        ((version, readable_by, release, functions),) = await self._run("version", until=until)
        self._stored = Schema(int(_text(version)), int(_text(readable_by)), _text(release))
        check_readable(self.url, self._stored, SCHEMA.version)
        return Installed(self._stored, _text(functions))

    async def _install(self, found: Installed | None, until: float | None) -> None:
        """Install the schema, or upgrade it, in one transaction."""
        limit = self._runtime.now() + INSTALL_SECONDS if until is None else until
        script = ";\n".join(SCHEMA.upgrade(found)).encode()
        await self._sessions.request(lambda session: session.script(script, limit), limit)

    # The operations.

    async def ask(self, ask: Ask, until: float | None = None) -> AskAnswer:
        until = timing.call_until(self._runtime.now(), until)
        return await self._waiting.asked(ask, self._ask, self, self._sessions, until)

    async def _ask(self, ask: Ask, public: str, until: float) -> AskAnswer:
        rows = await self._run(
            "ask",
            self._namespace,
            public.encode(),
            ask.secret.encode(),
            answers.names_text(ask.names),
            answers.interval(ask.ttl),
            answers.interval(ask.lock_delay),
            _PLACE,
            _REMEMBER,
            b"t" if ask.wait else b"f",
            _QUEUE_MAX,
            b"" if self._cannot_listen else self._channel,
            holder_text(ask.holder).encode(),
            until=until,
            certain=True,
            mints=True,
        )
        return answers.asked(_text(rows[0][0]), ask.ttl)

    async def renew(self, secrets: Sequence[str], until: float | None = None) -> list[RenewAnswer]:
        publics = [grant_id(secret) for secret in secrets]
        rows = await self._run(
            "renew",
            self._namespace,
            answers.array(publics),
            answers.array(secrets),
            _PLACE,
            _REMEMBER,
            pool=self._keeping,
            until=until,
            certain=True,
        )
        found = {_text(public): _text(answer) for public, answer in rows}
        return [answers.renewed(found.get(public)) for public in publics]

    async def release(self, secret: str, until: float | None = None, *, keep: float = 0.0) -> ReleaseAnswer:
        if keep > 0:
            return await self._end("release_later", secret, answers.interval(keep), until)
        return await self._end("release", secret, b"released", until)

    async def withdraw(self, secret: str, until: float | None = None) -> ReleaseAnswer:
        return await self._end("release", secret, b"withdrawn", until)

    async def _end(self, query: str, secret: str, how: bytes, until: float | None) -> ReleaseAnswer:
        public = grant_id(secret)
        # First: a listener that looks for waiters meanwhile must not wake one that has been given up.
        self._waiting.pop(public, None)
        rows = await self._run(
            query, self._namespace, public.encode(), secret.encode(), how, _REMEMBER, until=until
        )
        return answers.released(_text(rows[0][0]))

    # Waiting.

    async def next_wakeups(self, until: float) -> list[str]:
        if self._cannot_listen:
            return await self._poll_waiters(until)
        if self._listener is None:
            await self._begin_to_listen()
            try:
                return await self._ready()  # notifications sent before we listened were lost: check once
            except FencedError:
                self._stop_listening()  # so that the next call checks again
                raise
        try:
            return await self._listener.notified(until)
        except Unavailable:
            self._stop_listening()
            raise

    async def _begin_to_listen(self) -> None:
        until = timing.call_until(self._runtime.now(), None)
        where = self._address.listen
        assert where is not None
        listener = await self._reach(where, until, self._listeners)
        try:
            if listener.pooled:
                # The pooler's server process would receive the notifications and not forward them.
                self._cannot_listen = True
            else:
                await listener.listen(self._channel.decode(), until)
                self._listener = listener
        except ConnectionBroken as error:
            raise Unavailable(str(error)) from error
        finally:
            if self._listener is not listener:
                listener.close()

    def _stop_listening(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()

    async def _poll_waiters(self, until: float) -> list[str]:
        await self._runtime.wait(self._interrupted, min(until, self._runtime.now() + LOOK_SECONDS))
        return [] if self._interrupted.is_set() else await self._ready()

    async def _ready(self) -> list[str]:
        """The public ids of our waiters that could be granted now."""
        waiting = list(self._waiting)
        if not waiting:
            return []
        until = self._runtime.now() + LOOK_PATIENCE_SECONDS
        rows = await self._run("ready", self._namespace, answers.array(waiting), until=until)
        return [_text(public) for (public,) in rows]

    def interrupt(self) -> None:
        self._interrupted.set()
        for listener in list(self._listeners):
            listener.interrupt()

    # Looking and operating.

    async def survey(
        self, *, after: str = "", limit: int = 1000, until: float | None = None
    ) -> list[NameView]:
        rows = await self._run("survey", self._namespace, after.encode(), b"%d" % limit, until=until)
        return [answers.viewed(_text(text)) for (text,) in rows]

    async def observe(self, name: str, until: float | None = None) -> NameView:
        ((text,),) = await self._run("look", self._namespace, check_name(name).encode(), until=until)
        return answers.viewed(_text(text))

    async def past(self, name: str, until: float | None = None) -> list[PastLease]:
        named = check_name(name).encode()
        ((text,),) = await self._run("past", self._namespace, named, _PLACE, _REMEMBER, until=until)
        return answers.remembered(_text(text))

    async def force_release(self, name: str, token: int, until: float | None = None) -> int | None:
        ((minted,),) = await self._run(
            "force_release",
            self._namespace,
            check_name(name).encode(),
            b"%d" % token,
            _REMEMBER,
            repeatable=False,  # a repetition would answer that nothing was done
            until=until,
            certain=True,
            mints=True,
        )
        return None if minted is None else int(minted)

    async def raise_floor(self, above: int, until: float | None = None) -> int:
        above = check_floor(above)
        ((floor,),) = await self._run(
            "raise_floor", self._namespace, b"%d" % above, until=until, certain=True
        )
        return int(_text(floor))

    async def tidy(self, until: float | None = None) -> int:
        forgotten, after = 0, _FIRST_ID
        while after:
            ((gone, last),) = await self._run("tidy", after, _TIDY_AT_ONCE, until=until)
            forgotten += int(_text(gone))
            after = last or b""
        return forgotten

    async def close(self) -> None:
        self._interrupted.set()
        self._sessions.close()
        self._keeping.close()
        self._stop_listening()

    def abandon(self) -> None:
        """Close the connections at once, from any thread, and release nothing.

        Takes no lock of the pools: a finalizer may run in a thread that holds one. A connection that is in use is
        only shut down here and closed by its user: libpq must not free memory that another thread is reading.
        """
        self._abandoned = True
        self._interrupted.set()
        self._sessions.abandon()
        self._keeping.abandon()
        self._listener = None
        for alive in (self._alive, self._listeners):
            sessions = list(alive)
            alive.clear()  # an idle session loses its last reference
            for session in sessions:
                session.interrupt()

    def before_fork(self) -> None:
        """Does nothing: libpq's connections stay the parent's, and `forked` drops the child's references."""

    def forked(self) -> None:
        self._alive = set()
        self._sessions.forked()
        self._keeping.forked()
        self._reset_listening()


async def _doubts_of(session: LibpqConnection, until: float) -> tuple[str, ...]:
    await session.read_settings(until)
    return session.doubts


def _text(value: bytes | None) -> str:
    return "" if value is None else value.decode()
