"""The SQLite guard passes the kit, in both forms."""

import sqlite3
from pathlib import Path

import pytest

from fenced.runtime.blocking import BlockingRuntime, step
from fenced.stores.sqlite.guard.values import SqliteValues
from fenced.testing import COLOURS, GUARD_CHECKS, Check, Colour, GuardHarness, run
from fenced.testing.kit import stamp
from fenced.values.contracts import NamedValues, Runtime, Trait
from fenced.values.decision import Rule
from fenced.values.model import Credential

BACKEND = "sqlite"


class Harness:
    def __init__(self, runtime: Runtime, folder: Path, mandatory: bool) -> None:
        self.runtime = runtime
        self._mandatory = mandatory
        self._folder = folder
        self._rule: Rule = "retry"
        self._opened: list[SqliteValues] = []

    @property
    def traits(self) -> tuple[Trait, ...]:
        return self._made("retry", "enforce").traits

    def _made(self, rule: Rule | None, mode: str) -> SqliteValues:
        return SqliteValues(self._path, self.runtime, rule=rule, mode=mode, mandatory=self._mandatory)

    async def guard(self, rule: Rule = "retry", mode: str = "enforce") -> NamedValues:
        self._rule = rule
        return await self._open(rule, mode)

    async def _open(self, rule: Rule | None, mode: str) -> NamedValues:
        guard = self._made(rule, mode)
        self._opened.append(guard)
        await guard.open()
        return guard

    @property
    def _path(self) -> Path:
        return self._folder / f"{self._rule}.db"

    async def reopen(self, rule: Rule | None = None) -> NamedValues:
        await self.close()
        return await self._open(rule, "observe")  # what is there keeps its own mode

    async def write_raw(self, name: str, value: bytes) -> bool:
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


# proves guard sqlite: many-names
@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("form", ["mandatory", "cooperative"])
@pytest.mark.parametrize("check", GUARD_CHECKS, ids=lambda check: check.name)
def test_sqlite(check: Check[GuardHarness], form: str, colour: Colour, tmp_path: Path) -> None:
    run(check, lambda runtime: Harness(runtime, tmp_path, form == "mandatory"), colour)


# proves guard sqlite: durable-marks
def test_marks_and_values_are_synced_together(tmp_path: Path) -> None:
    """One transaction holds both, on a connection that syncs it: neither can be on the disk without the other."""
    guard = SqliteValues(tmp_path / "values.db", BlockingRuntime())
    step(guard.open())
    seen: list[str] = []
    connection = guard._idle[-1].connection
    connection.set_trace_callback(seen.append)
    step(guard.write(Credential((stamp(5),)), "orders/42", b"A"))
    connection.set_trace_callback(None)
    assert connection.execute("PRAGMA synchronous").fetchone() == (2,)
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    begins = [index for index, statement in enumerate(seen) if statement.startswith("BEGIN")]
    commits = [index for index, statement in enumerate(seen) if statement.startswith("COMMIT")]
    written = [i for i, text in enumerate(seen) if "INTO fenced_mark" in text or "INTO fenced_value" in text]
    assert len(begins) == len(commits) == 1
    assert len(written) >= 2
    assert begins[0] < min(written) <= max(written) < commits[0]
    step(guard.close())
