"""Many operations in one transaction of an SQLite file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fenced.runtime.blocking import BlockingRuntime, step
from fenced.stores.sqlite.authority.authority import SqliteAuthority
from fenced.stores.sqlite.authority.connecting import LeaseFile
from tests.ledger.test_ledger import answered_as_if_alone


def test_a_batch_is_one_transaction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is synced, because it grants. The floor file has its greatest token before the caller has it."""
    began: list[bool] = []
    transaction = LeaseFile.transaction

    def counted(self: LeaseFile, deadline: Any, *, durable: bool, **options: Any) -> Any:
        began.append(durable)
        return transaction(self, deadline, durable=durable, **options)

    authority = SqliteAuthority(tmp_path / "leases.db", BlockingRuntime())
    step(authority.open())
    monkeypatch.setattr(LeaseFile, "transaction", counted)
    answered_as_if_alone(authority)
    assert began == [True]
    assert step(authority.open()).last_token == 2
    authority.abandon()
