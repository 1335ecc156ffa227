"""The SQLite authority passes the kit, on a clock that the tests can move."""

from pathlib import Path

import pytest

from fenced.runtime import clocks
from fenced.stores.sqlite.authority.authority import SqliteAuthority
from fenced.testing import AUTHORITY_CHECKS, COLOURS, AuthorityHarness, Check, Colour, run
from fenced.values.contracts import Authority, Runtime

BACKEND = "sqlite"


class Harness:
    def __init__(self, runtime: Runtime, folder: Path) -> None:
        self.runtime = runtime
        self._path = folder / "leases.db"
        self._ahead_ns = 0
        self._opened: list[SqliteAuthority] = []

    async def authority(self, namespace: str = "default") -> Authority:
        authority = SqliteAuthority(
            self._path, self.runtime, namespace=namespace, clock=lambda: clocks.now_ns() + self._ahead_ns
        )
        await authority.open()
        self._opened.append(authority)
        return authority

    async def pass_time(self, seconds: float) -> None:
        self._ahead_ns += round(seconds * 1e9)

    async def restart(self) -> None:
        await self.close()

    async def close(self) -> None:
        while self._opened:
            await self._opened.pop().close()


# proves authority sqlite: namespace-order
@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("check", AUTHORITY_CHECKS, ids=lambda check: check.name)
def test_sqlite(check: Check[AuthorityHarness], colour: Colour, tmp_path: Path) -> None:
    run(check, lambda runtime: Harness(runtime, tmp_path), colour)
