"""The ledger passes the kit, and after every check the files make the state again that was in memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from fenced.runtime import clocks
from fenced.stores.ledger.authority import authority as module
from fenced.stores.ledger.authority.authority import LedgerAuthority
from fenced.stores.ledger.authority.journal import FileJournal
from fenced.stores.ledger.authority.ledger import Ledger
from fenced.testing import AUTHORITY_CHECKS, COLOURS, AuthorityHarness, Check, Colour, run
from fenced.testing.kit import ensure
from fenced.values.contracts import Authority, Runtime
from tests.colours import alternating

BACKEND = "ledger"


def picture(ledger: Ledger) -> list[object]:
    """All that a ledger knows."""
    return [
        (
            rows.name,
            rows.realm,
            rows.token,
            rows.ticket,
            sorted(rows._attempts.items()),
            sorted(rows._claims.items()),
            sorted(rows._queues.items()),
            sorted(rows.settled()),
        )
        for rows in ledger._namespaces
    ]


class Harness:
    def __init__(self, runtime: Runtime, folder: Path) -> None:
        self.runtime = runtime
        self._path = folder / "leases.db"
        self._ahead_ns = 0
        self._opened: list[LedgerAuthority] = []

    def _clock(self) -> int:
        return clocks.now_ns() + self._ahead_ns

    async def authority(self, namespace: str = "default") -> Authority:
        authority = LedgerAuthority(self._path, self.runtime, namespace=namespace, clock=self._clock)
        await authority.open()
        self._opened.append(authority)
        return authority

    async def pass_time(self, seconds: float) -> None:
        self._ahead_ns += round(seconds * 1e9)

    async def restart(self) -> None:
        await self.close()

    async def close(self) -> None:
        """Compare the state with what the files make of it."""
        opened = [authority for authority in self._opened if authority._ledger is not None]
        self._opened.clear()
        if not opened:
            return
        before = opened[0]._ledger
        assert before is not None
        for authority in opened:
            await authority.close()
        again = Ledger(self._path, FileJournal(self._path), self._clock)
        again.open(create=False)
        again.close()
        ensure(picture(again) == picture(before), f"replayed: {picture(again)}, before: {picture(before)}")


# proves authority ledger: namespace-order
@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("check", AUTHORITY_CHECKS, ids=lambda check: check.name)
def test_ledger(
    check: Check[AuthorityHarness], colour: Colour, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a snapshot after every few changes."""
    monkeypatch.setattr(Ledger, "snapshot_changes", 3)
    run(check, lambda runtime: Harness(runtime, tmp_path), colour)
    assert not module._ledgers


@pytest.mark.parametrize(("check", "colour"), alternating(AUTHORITY_CHECKS))
def test_ledger_without_snapshots(check: Check[AuthorityHarness], colour: Colour, tmp_path: Path) -> None:
    run(check, lambda runtime: Harness(runtime, tmp_path), colour)
    assert not (tmp_path / "leases.db.snapshot").exists()
