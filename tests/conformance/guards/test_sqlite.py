"""The SQLite guard passes the kit, in both forms."""

import sqlite3
from pathlib import Path

import pytest

from fenced.contracts import Guard, Runtime
from fenced.decision import Rule
from fenced.guards.sqlite import SqliteGuard
from fenced.testing import COLOURS, GUARD_CHECKS, Check, Colour, GuardHarness, run

BACKEND = "sqlite"


class Harness:
    def __init__(self, runtime: Runtime, folder: Path, mandatory: bool) -> None:
        self.runtime = runtime
        self.mandatory = mandatory
        self._folder = folder
        self._rule: Rule = "retry"
        self._opened: list[SqliteGuard] = []

    async def guard(self, rule: Rule = "retry", mode: str = "enforce") -> Guard:
        self._rule = rule
        return await self._open(rule, mode)

    async def _open(self, rule: Rule, mode: str) -> Guard:
        guard = SqliteGuard(self._path, self.runtime, rule=rule, mode=mode, mandatory=self.mandatory)
        await guard.open()
        self._opened.append(guard)
        return guard

    @property
    def _path(self) -> Path:
        return self._folder / f"{self._rule}.db"

    async def reopen(self) -> Guard:
        await self.close()
        return await self._open("retry", "observe")  # what is there keeps its own rule and mode

    async def write_raw(self, name: str, value: str) -> bool:
        """As the sqlite3 shell would do it: a plain connection, a plain statement."""
        with sqlite3.connect(self._path) as connection:
            try:
                connection.execute(
                    "INSERT INTO fenced_value (name, value, version) VALUES (?, ?, 1) ON CONFLICT (name) "
                    "DO UPDATE SET value = excluded.value, version = version + 1",
                    (name, value),
                )
            except sqlite3.IntegrityError:
                return False
            finally:
                connection.commit()
        connection.close()
        return True

    async def close(self) -> None:
        while self._opened:
            await self._opened.pop().close()


# proves guard sqlite: durable-marks
@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("form", ["mandatory", "cooperative"])
@pytest.mark.parametrize("check", GUARD_CHECKS, ids=lambda check: check.name)
def test_sqlite(check: Check[GuardHarness], form: str, colour: Colour, tmp_path: Path) -> None:
    run(check, lambda runtime: Harness(runtime, tmp_path, form == "mandatory"), colour)
