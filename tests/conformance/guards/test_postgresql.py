"""The PostgreSQL guard passes the kit, in both forms and at every isolation level."""

import psycopg
import pytest
from psycopg import IsolationLevel

from fenced.stores.postgresql.guard.values import PostgresqlValues
from fenced.testing import COLOURS, GUARD_CHECKS, Check, Colour, GuardHarness, run
from fenced.values.contracts import NamedValues, Runtime, Trait
from fenced.values.decision import Rule
from fenced_testkit.servers import PostgresqlServer
from tests.colours import alternating, named

BACKEND = "postgresql"


_templates: dict[tuple[int, Rule, bool], str] = {}


class Harness:
    def __init__(
        self, runtime: Runtime, server: PostgresqlServer, mandatory: bool, isolation: IsolationLevel | None
    ) -> None:
        self.runtime = runtime
        self._mandatory = mandatory
        self._server = server
        self._isolation = isolation
        self._databases: dict[Rule, str] = {}
        self._rule: Rule = "retry"
        self._opened: list[PostgresqlValues] = []

    @property
    def traits(self) -> tuple[Trait, ...]:
        return self._made("postgresql:", "retry", "enforce").traits

    def _made(self, url: str, rule: Rule | None, mode: str) -> PostgresqlValues:
        return PostgresqlValues(
            url, self.runtime, rule=rule, mode=mode, mandatory=self._mandatory, isolation=self._isolation
        )

    async def guard(self, rule: Rule = "retry", mode: str = "enforce") -> NamedValues:
        self._rule = rule
        if rule not in self._databases:
            template = await self._template(rule)
            self._databases[rule] = self._server.create_database(template=template)
        guard = await self._open(rule, mode)
        await guard.set_mode(mode)
        return guard

    async def _template(self, rule: Rule) -> str:
        """A database in which the guard is installed: installing takes longer than copying."""
        key = (self._server.port, rule, self._mandatory)
        if key not in _templates:
            self._databases[rule] = name = self._server.create_database()
            await (await self._open(rule, "enforce")).close()
            _templates[key] = name
        return _templates[key]

    async def _open(self, rule: Rule | None, mode: str) -> NamedValues:
        guard = self._made(self._url, rule, mode)
        self._opened.append(guard)
        await guard.open()
        return guard

    @property
    def _url(self) -> str:
        return self._server.url(self._databases[self._rule])

    async def reopen(self, rule: Rule | None = None) -> NamedValues:
        await self._close_guards()
        return await self._open(rule, "observe")  # what is there keeps its own mode

    async def write_raw(self, name: str, value: bytes) -> bool:
        """As psql would do it: a plain connection, a plain statement."""
        with psycopg.connect(self._url, autocommit=True) as connection:
            try:
                connection.execute(
                    "INSERT INTO fenced_guard.value AS v (name, value, is_bytes, version) VALUES (%s, %s, true, 1) "
                    "ON CONFLICT (name) DO UPDATE SET value = excluded.value, version = v.version + 1",
                    (name, value),
                )
            except psycopg.DatabaseError as error:
                if error.sqlstate != "ZF007":
                    raise
                return False
        return True

    async def _close_guards(self) -> None:
        while self._opened:
            await self._opened.pop().close()

    async def close(self) -> None:
        await self._close_guards()
        for name in self._databases.values():
            self._server.discard_database(name)


OTHER_FORMS = [check for check in GUARD_CHECKS if check.name != "agrees_with_the_decision"]
"""The function that decides is the same one, whatever the form and the colour."""


# proves guard postgresql: many-names, several-leases, proofs, still-held, announces-separately
@pytest.mark.parametrize(
    ("check", "colour"),
    [
        pytest.param(check, colour, id=f"{check.name}-{colour}")
        for check in GUARD_CHECKS
        for colour in (COLOURS if check in OTHER_FORMS else COLOURS[:1])
    ],
)
def test_postgresql(check: Check[GuardHarness], colour: Colour, postgresql_server: PostgresqlServer) -> None:
    run(check, lambda runtime: Harness(runtime, postgresql_server, True, None), colour)


@pytest.mark.parametrize(("check", "colour"), alternating(OTHER_FORMS))
def test_the_cooperative_form(
    check: Check[GuardHarness], colour: Colour, postgresql_server: PostgresqlServer
) -> None:
    run(check, lambda runtime: Harness(runtime, postgresql_server, False, None), colour)


RACING = named(GUARD_CHECKS, "racing_writers_leave_the_highest")
"""Only what happens at the same time differs between the isolation levels: these run at both, the others by turns."""


@pytest.mark.parametrize(
    ("check", "level"),
    [
        pytest.param(check, level, id=f"{check.name}-{level.name}")
        for number, check in enumerate(OTHER_FORMS)
        for place, level in enumerate((IsolationLevel.REPEATABLE_READ, IsolationLevel.SERIALIZABLE))
        if check in RACING or number % 2 == place
    ],
)
def test_the_other_isolation_levels(
    check: Check[GuardHarness], level: IsolationLevel, postgresql_server: PostgresqlServer
) -> None:
    run(check, lambda runtime: Harness(runtime, postgresql_server, True, level), "blocking")
