"""The MariaDB guard passes the kit, in both forms and at every isolation level."""

from __future__ import annotations

from typing import Any

import pymysql
import pytest

from fenced.stores.mariadb.guard.values import MariadbValues
from fenced.testing import COLOURS, GUARD_CHECKS, Check, Colour, GuardHarness, run
from fenced.values.contracts import NamedValues, Runtime, Trait
from fenced.values.decision import Rule
from fenced_testkit.servers import MariadbServer
from tests.colours import alternating, named

BACKEND = "mariadb"
MISSING = 907


class Harness:
    def __init__(
        self, runtime: Runtime, server: MariadbServer, mandatory: bool, isolation: str | None
    ) -> None:
        self.runtime = runtime
        self._mandatory = mandatory
        self._server = server
        self._isolation = isolation
        self._databases: dict[Rule, str] = {}
        self._rule: Rule = "retry"
        self._opened: list[MariadbValues] = []

    @property
    def traits(self) -> tuple[Trait, ...]:
        return self._made("mariadb://root@127.0.0.1/x", "retry", "enforce").traits

    def _made(self, url: str, rule: Rule | None, mode: str) -> MariadbValues:
        return MariadbValues(
            url, self.runtime, rule=rule, mode=mode, mandatory=self._mandatory, isolation=self._isolation
        )

    async def guard(self, rule: Rule = "retry", mode: str = "enforce") -> NamedValues:
        self._rule = rule
        if rule not in self._databases:
            self._databases[rule] = self._server.create_database()
        guard = await self._open(rule, mode)
        await guard.set_mode(mode)
        return guard

    async def _open(self, rule: Rule | None, mode: str) -> NamedValues:
        guard = self._made(self._server.url(self._databases[self._rule]), rule, mode)
        self._opened.append(guard)
        await guard.open()
        return guard

    async def reopen(self, rule: Rule | None = None) -> NamedValues:
        await self._close_guards()
        return await self._open(rule, "observe")  # what is there keeps its own mode

    async def write_raw(self, name: str, value: bytes) -> bool:
        """As a shell would do it: a plain connection, a plain statement."""
        where: Any = {
            "host": self._server.host,
            "port": self._server.port,
            "database": self._databases[self._rule],
        }
        connection = pymysql.connect(**where, user="root", autocommit=True)
        with connection, connection.cursor() as cursor:
            try:
                cursor.execute(
                    "INSERT INTO fenced_value (name, value, version) VALUES (%s, %s, 1) "
                    "ON DUPLICATE KEY UPDATE value = VALUES(value), version = version + 1",
                    (name, value),
                )
            except pymysql.InternalError as error:
                if error.args[0] != MISSING:
                    raise
                return False
        return True

    async def _close_guards(self) -> None:
        while self._opened:
            await self._opened.pop().close()

    async def close(self) -> None:
        await self._close_guards()
        for name in self._databases.values():
            self._server.execute(f"DROP DATABASE `{name}`")


OTHER_FORMS = [check for check in GUARD_CHECKS if check.name != "agrees_with_the_decision"]
"""The procedures that decide are the same ones, whatever the form and the colour."""


# proves guard mariadb: many-names, several-leases, proofs, still-held
@pytest.mark.parametrize(
    ("check", "colour"),
    [
        pytest.param(check, colour, id=f"{check.name}-{colour}")
        for check in GUARD_CHECKS
        for colour in (COLOURS if check in OTHER_FORMS else COLOURS[:1])
    ],
)
def test_mariadb(check: Check[GuardHarness], colour: Colour, mariadb_server: MariadbServer) -> None:
    run(check, lambda runtime: Harness(runtime, mariadb_server, True, None), colour)


@pytest.mark.parametrize(("check", "colour"), alternating(OTHER_FORMS))
def test_the_cooperative_form(
    check: Check[GuardHarness], colour: Colour, mariadb_server: MariadbServer
) -> None:
    run(check, lambda runtime: Harness(runtime, mariadb_server, False, None), colour)


RACING = named(GUARD_CHECKS, "racing_writers_leave_the_highest")
"""Only what happens at the same time differs between the isolation levels: these run at both, the others by turns."""


@pytest.mark.parametrize(
    ("check", "level"),
    [
        pytest.param(check, level, id=f"{check.name}-{level}")
        for number, check in enumerate(OTHER_FORMS)
        for place, level in enumerate(("READ COMMITTED", "SERIALIZABLE"))
        if check in RACING or number % 2 == place
    ],
)
def test_the_other_isolation_levels(
    check: Check[GuardHarness], level: str, mariadb_server: MariadbServer
) -> None:
    run(check, lambda runtime: Harness(runtime, mariadb_server, True, level), "blocking")
