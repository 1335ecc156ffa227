"""A row authority and a cell guard of another package: registered by entry points alone, they pass the kits.

`tests/cli/test_engines.py` shows the same of a SQL engine.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import fenced
from fenced.errors import MissingStamp
from fenced.testing import AUTHORITY_CHECKS, GUARD_CHECKS, AuthorityHarness, Check, GuardHarness, run
from fenced.values.contracts import Authority, NamedValues, Runtime, Trait
from fenced.values.decision import Rule
from tests.toy_stores import ToyAuthority, ToyValues


class RowsHarness:
    def __init__(self, runtime: Runtime, folder: Path) -> None:
        self.runtime = runtime
        self._folder = folder
        self._ahead = 0.0

    async def authority(self, namespace: str = "default") -> Authority:
        path = self._folder / namespace.replace("/", "_")
        authority = ToyAuthority(path, self.runtime, lambda: self.runtime.now() + self._ahead)
        await authority.open()
        return authority

    async def pass_time(self, seconds: float) -> None:
        self._ahead += seconds

    async def restart(self) -> None:
        return

    async def close(self) -> None:
        return


class CellsHarness:
    traits: tuple[Trait, ...] = ToyValues.traits

    def __init__(self, runtime: Runtime, folder: Path) -> None:
        self.runtime = runtime
        self._folder = folder
        self._rule: Rule = "retry"

    async def guard(self, rule: Rule = "retry", mode: str = "enforce") -> NamedValues:
        self._rule = rule
        return await self._opened(rule, mode)

    async def reopen(self, rule: Rule | None = None) -> NamedValues:
        return await self._opened(rule, "observe")

    async def _opened(self, rule: Rule | None, mode: str) -> NamedValues:
        self._guard = ToyValues(self._folder / self._rule, self.runtime, rule=rule, mode=mode)
        await self._guard.open()
        return self._guard

    async def write_raw(self, name: str, value: bytes) -> bool:
        try:
            await self._guard.write(None, name, value)
        except MissingStamp:
            return False
        return True

    async def close(self) -> None:
        return


@pytest.mark.parametrize("check", AUTHORITY_CHECKS, ids=lambda check: check.name)
def test_a_row_authority(check: Check[AuthorityHarness], tmp_path: Path) -> None:
    run(check, lambda runtime: RowsHarness(runtime, tmp_path), "blocking")


@pytest.mark.parametrize("check", GUARD_CHECKS, ids=lambda check: check.name)
def test_a_cell_guard(check: Check[GuardHarness], tmp_path: Path) -> None:
    run(check, lambda runtime: CellsHarness(runtime, tmp_path), "blocking")


def test_they_are_found_by_their_entry_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    about = tmp_path / "site" / "toy-1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1\n")
    (about / "entry_points.txt").write_text(
        "[fenced.authorities]\ntoyrows = tests.toy_stores:ToyAuthority\n"
        "[fenced.guards]\ntoycells = tests.toy_stores:ToyValues\n"
    )
    monkeypatch.syspath_prepend(str(about.parent))
    values = fenced.Values(f"toycells:{tmp_path}/values")
    with fenced.Client(f"toyrows:{tmp_path}/leases") as client:
        with client.hold("orders/42", guards=[values]) as lease:
            values.write(lease, "orders/42", b"one")
            paused = lease.next_stamp()
        with client.hold("orders/42") as lease:
            values.write(lease, "orders/42", b"two")
        with pytest.raises(fenced.StaleToken):
            values.write(paused, "orders/42", b"late")
    assert values.peek("orders/42").value == b"two"
