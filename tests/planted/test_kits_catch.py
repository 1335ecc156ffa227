"""The kits can fail: every planted bug is caught by at least one check."""

from functools import partial
from pathlib import Path

import pytest

from fenced.errors import FencedError
from fenced.leases.dictionaries import MemoryRows
from fenced.leases.rows import LeaseAlgorithm
from fenced.stores.ledger.authority.changes import RecordedRows
from fenced.stores.ledger.authority.ledger import CountingAlgorithm, Ledger
from fenced.stores.memory.guard import MemoryValues
from fenced.stores.sqlite.authority.store import Store
from fenced.testing import authorities, counting, guards, operating, run, wandering
from fenced.testing.kit import Check, CheckFailed
from fenced.values.contracts import Runtime
from tests.conformance.authorities.test_ledger import Harness as LedgerHarness
from tests.conformance.authorities.test_memory import Harness as AuthorityHarness
from tests.conformance.authorities.test_sqlite import Harness as SqliteHarness
from tests.conformance.guards.test_memory import Harness as GuardHarness
from tests.planted.bugs import ALGORITHM_BUGS, AUTHORITY_BUGS, GUARD_BUGS, LEDGER_BUGS, store_with

CHECKS = [*authorities.CHECKS, *counting.CHECKS, *operating.CHECKS, *wandering.CHECKS]


def is_caught(check: Check, make: object) -> bool:  # type: ignore[type-arg]
    try:
        run(check, make, "blocking")  # type: ignore[arg-type]
    except (CheckFailed, FencedError, LookupError):
        return True
    return False


@pytest.mark.parametrize("bug", AUTHORITY_BUGS, ids=lambda bug: bug.__name__)
def test_authority_bug_is_caught(bug: type[LeaseAlgorithm] | type[MemoryRows]) -> None:
    assert any(
        is_caught(check, lambda runtime: AuthorityHarness(runtime, store_with(bug))) for check in CHECKS
    )


@pytest.mark.parametrize("bug", ALGORITHM_BUGS, ids=lambda bug: bug.__name__)
def test_the_same_bug_in_sqlite_is_caught(
    bug: type[LeaseAlgorithm], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug in the algorithm is in every store that runs it, and the kit finds it there, too."""
    monkeypatch.setattr(Store, "algorithm", bug)
    folders = (tmp_path / check.name for check in CHECKS)
    assert any(
        is_caught(check, partial(_sqlite, folder)) for check, folder in zip(CHECKS, folders, strict=True)
    )


def _sqlite(folder: Path, runtime: Runtime) -> SqliteHarness:
    folder.mkdir()
    return SqliteHarness(runtime, folder)


@pytest.mark.parametrize("bug", LEDGER_BUGS, ids=lambda bug: bug.__name__)
def test_ledger_bug_is_caught(
    bug: type[CountingAlgorithm] | type[RecordedRows], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Ledger, "algorithm" if issubclass(bug, CountingAlgorithm) else "rows_type", bug)
    assert any(
        is_caught(check, partial(_ledger, tmp_path / check.name))
        for check in counting.CHECKS  # the others know nothing of it, and take long
    )


def _ledger(folder: Path, runtime: Runtime) -> LedgerHarness:
    folder.mkdir()
    return LedgerHarness(runtime, folder)


@pytest.mark.parametrize("bug", GUARD_BUGS, ids=lambda bug: bug.__name__)
def test_guard_bug_is_caught(bug: type[MemoryValues]) -> None:
    assert any(is_caught(check, lambda runtime: GuardHarness(runtime, bug)) for check in guards.CHECKS)
