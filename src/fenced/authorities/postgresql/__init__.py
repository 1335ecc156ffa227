"""Leases in PostgreSQL: rows and short transactions, one function call per operation.

No session holds anything: a lease is a row that expires by the server's clock, so everything works behind a
connection pooler in transaction mode. Only waiting is better with a connection of one's own, to listen on.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from fenced import sqlfile, timing
from fenced.authorities.postgresql import address, answers
from fenced.authorities.postgresql.session import Row, Session
from fenced.contracts import Runtime, Trait
from fenced.errors import FencedError, Indeterminate, Misconfigured, Unavailable
from fenced.model import (
    Ask,
    AskAnswer,
    NameView,
    ReleaseAnswer,
    RenewAnswer,
    Standing,
    Waiting,
    check_floor,
    check_name,
    grant_id,
)
from fenced.runtime.pool import Broken, Pool

HERE = Path(__file__).parent
SCHEMA_VERSION = 1
SQL = {name: text.encode() for name, text in sqlfile.load(HERE / "queries.sql").items()}
INSTALL_SECONDS = 60.0
CONNECTIONS_MAX = 8
LOOK_SECONDS = 0.25
"""How often a client that cannot listen looks whether one of its waiters could be granted."""

_QUEUE_MAX = b"10000"
_FIRST_ID = b"00000000-0000-0000-0000-000000000000"
_TIDY_AT_ONCE = b"1000"
_PLACE = answers.interval(timing.WAITER_TTL_MAX)
_REMEMBER = answers.interval(timing.REMEMBER_SECONDS_MIN)


class PostgresqlAuthority:
    """A client's door to the schema `fenced` of a database."""

    traits: ClassVar[tuple[Trait, ...]] = (
        Trait("synced-grants", "A grant is flushed to the server's disk before its token is handed out."),
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
            "A copy of the server's files, started as it is, cannot be told from the original: raise the floor.",
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
        self._sessions = Pool(runtime, self._connect, limit=CONNECTIONS_MAX, where=self.url)
        self._keeping = Pool(runtime, self._connect, limit=1, where=self.url)
        self._start_listening_anew()

    @classmethod
    def at(cls, url: str, runtime: Runtime, namespace: str) -> PostgresqlAuthority:
        return cls(url, runtime, namespace=namespace)

    def _start_listening_anew(self) -> None:
        self._channel = f"fenced_{secrets.token_hex(8)}".encode()
        self._ear: Session | None = None
        self._deaf = self._address.listen is None
        self._waiting: set[str] = set()
        self._nudged = self._runtime.wakeup()

    async def _connect(self, until: float) -> Session:
        return await Session.connect(self._address.conninfo, self._runtime, self.url, until)

    async def _run(
        self,
        name: str,
        *parameters: bytes | None,
        pool: Pool[Session] | None = None,
        until: float | None = None,
        repeatable: bool = True,
        certain: bool = False,
    ) -> list[Row]:
        """One statement on one of our connections. `certain`: a warning makes its outcome unknown."""
        until = timing.call_until(self._runtime.now(), until)

        async def work(session: Session) -> list[Row]:
            rows = await session.run(b"fenced_" + name.encode(), SQL[name], parameters, until)
            if certain and session.warnings:
                raise Indeterminate(f"{self.url}: {'; '.join(session.warnings)}")
            return rows

        return await (pool or self._sessions).request(work, until, repeatable=repeatable)

    # Opening.

    async def open(self, *, create: bool = True, until: float | None = None) -> Standing:
        await self._check(create)
        name, realm = self._namespace_name.encode(), secrets.token_hex(8).encode()
        rows = await self._run("enter", name, realm, b"t" if create else b"f")
        if not rows:
            raise Misconfigured(f"{self.url} has no namespace {self._namespace_name!r}")
        number, known_realm, last = (_text(value) for value in rows[0])
        self._namespace = number.encode()
        return Standing(known_realm, int(last), tuple(await self._doubts()))

    async def _check(self, create: bool) -> None:
        """What the database must be like, and have; creates what is missing if it may."""
        version, encoding, isolation, messages = await self._found()
        if encoding != "UTF8":
            raise Misconfigured(f"{self.url}: the database's encoding is {encoding}; names need UTF8")
        if isolation != "read committed":
            raise Misconfigured(
                f"{self.url}: default_transaction_isolation is {isolation!r}; for this role or database, "
                "set it to 'read committed'"
            )
        if messages in ("error", "fatal", "panic"):
            raise Misconfigured(
                f"{self.url}: client_min_messages is {messages!r}, which hides that a commit was not replicated; for "
                "this role or database, set it to 'warning' or lower"
            )
        while version < SCHEMA_VERSION:
            if not create:
                raise Misconfigured(f"{self.url} has no schema fenced; the first client creates it")
            version = await self._install(version + 1)
        if version > SCHEMA_VERSION:
            raise Misconfigured(
                f"{self.url} has schema {version}, this fenced knows {SCHEMA_VERSION}: upgrade fenced"
            )

    async def _found(self) -> tuple[int, str, str, str]:
        ((there, encoding, isolation, messages),) = await self._run("installed")
        version = 0
        if there == b"t":
            ((number,),) = await self._run("version")
            version = int(_text(number))
        return version, _text(encoding), _text(isolation), _text(messages)

    async def _install(self, version: int) -> int:
        """One step of the schema, in one transaction; the version that is there afterwards."""
        until = self._runtime.now() + INSTALL_SECONDS
        script = SQL["install_lock"] + b";\n" + (HERE / f"schema_{version}.sql").read_bytes()
        try:
            await self._sessions.request(lambda session: session.script(script, until), until)
        except Misconfigured as error:
            raise Misconfigured(
                f"{error}. The schema is not there yet: connect once as a role that may create it"
            ) from error
        except Unavailable:
            found, *_ = await self._found()
            if found < version:  # not even by somebody else meanwhile
                raise
            return found
        return version

    async def _doubts(self) -> list[str]:
        ((fsync, pages, recovery),) = await self._run("durability")
        if recovery == b"t":
            raise Unavailable(f"{self.url} is a standby; name the primary")
        doubts = []
        if fsync != b"on":
            doubts.append("fsync is off: a power cut may take acknowledged tokens away")
        if pages != b"on":
            doubts.append("full_page_writes is off: a power cut may damage the counter")
        return doubts

    # The operations.

    async def ask(self, ask: Ask, until: float | None = None) -> AskAnswer:
        public = grant_id(ask.secret)
        if ask.wait:
            self._waiting.add(public)  # before it is sent: who begins to listen meanwhile looks for it
        answer: AskAnswer | None = None
        try:
            answer = await self._ask(ask, public, until)
        finally:
            if not isinstance(answer, Waiting):
                self._waiting.discard(public)
        return answer

    async def _ask(self, ask: Ask, public: str, until: float | None) -> AskAnswer:
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
            b"" if self._deaf else self._channel,
            answers.holder_text(ask.holder),
            until=until,
            certain=True,
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

    async def release(self, secret: str, until: float | None = None) -> ReleaseAnswer:
        return await self._end(secret, b"released", until)

    async def withdraw(self, secret: str, until: float | None = None) -> ReleaseAnswer:
        return await self._end(secret, b"withdrawn", until)

    async def _end(self, secret: str, state: bytes, until: float | None) -> ReleaseAnswer:
        public = grant_id(secret)
        self._waiting.discard(public)
        rows = await self._run(
            "release", self._namespace, public.encode(), secret.encode(), state, _REMEMBER, until=until
        )
        return answers.released(_text(rows[0][0]))

    # Waiting.

    async def hear(self, until: float) -> list[str]:
        if self._deaf:
            return await self._look_round(until)
        if self._ear is None:
            await self._begin_to_listen()
            try:
                return await self._ready()  # of what happened before we listened nobody told us
            except FencedError:
                self._stop_listening()  # and look again next time
                raise
        try:
            return await self._ear.notified(until)
        except Unavailable:
            self._stop_listening()
            raise

    async def _begin_to_listen(self) -> None:
        until = timing.call_until(self._runtime.now(), None)
        where = self._address.listen
        assert where is not None
        ear = await Session.connect(where, self._runtime, self.url, until)
        try:
            if ear.pooled:
                self._deaf = True  # another server process would listen for us, and not tell us
            else:
                await ear.listen(self._channel.decode(), until)
                self._ear = ear
        except Broken as error:
            raise Unavailable(str(error)) from error
        finally:
            if self._ear is not ear:
                ear.close()

    def _stop_listening(self) -> None:
        ear, self._ear = self._ear, None
        if ear is not None:
            ear.close()

    async def _look_round(self, until: float) -> list[str]:
        await self._runtime.wait(self._nudged, min(until, self._runtime.now() + LOOK_SECONDS))
        return [] if self._nudged.is_set() else await self._ready()

    async def _ready(self) -> list[str]:
        """Who of our waiters could be granted now."""
        waiting = list(self._waiting)
        if not waiting:
            return []
        rows = await self._run("ready", self._namespace, answers.array(waiting))
        return [_text(public) for (public,) in rows]

    def nudge(self) -> None:
        self._nudged.set()
        if (ear := self._ear) is not None:
            ear.hang_up()

    # Looking and operating.

    async def survey(self, *, after: str = "", limit: int = 1000) -> list[NameView]:
        rows = await self._run("survey", self._namespace, after.encode(), b"%d" % limit)
        return [answers.viewed(_text(text)) for (text,) in rows]

    async def observe(self, name: str) -> NameView:
        ((text,),) = await self._run("look", self._namespace, check_name(name).encode())
        return answers.viewed(_text(text))

    async def force_release(self, name: str) -> int | None:
        ((token,),) = await self._run(
            "force_release",
            self._namespace,
            check_name(name).encode(),
            _REMEMBER,
            repeatable=False,  # a second time it would hit the next holder
            certain=True,
        )
        return None if token is None else int(token)

    async def raise_floor(self, above: int) -> int:
        above = check_floor(above)
        ((floor,),) = await self._run("raise_floor", self._namespace, b"%d" % above, certain=True)
        return int(_text(floor))

    async def tidy(self) -> int:
        forgotten, after = 0, _FIRST_ID
        while after:
            ((gone, last),) = await self._run("tidy", after, _TIDY_AT_ONCE)
            forgotten += int(_text(gone))
            after = last or b""
        return forgotten

    async def close(self) -> None:
        self.abandon()

    def abandon(self) -> None:
        self._nudged.set()
        self._sessions.close()
        self._keeping.close()
        self._stop_listening()

    def before_fork(self) -> None:
        """Nothing: libpq's connections are the parent's, and a child leaves them alone."""

    def forked(self) -> None:
        self._sessions.forked()
        self._keeping.forked()
        self._start_listening_anew()


def _text(value: bytes | None) -> str:
    return "" if value is None else value.decode()
