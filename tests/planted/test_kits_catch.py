"""The kits can fail: every planted bug is caught by at least one check."""

import pytest

from fenced.authorities.memory import MemoryStore
from fenced.errors import FencedError
from fenced.guards.memory import MemoryGuard
from fenced.testing import authorities, guards, run
from fenced.testing.kit import Check, CheckFailed
from tests.conformance.authorities.test_memory import Harness as AuthorityHarness
from tests.conformance.guards.test_memory import Harness as GuardHarness
from tests.planted.bugs import AUTHORITY_BUGS, GUARD_BUGS


def is_caught(check: Check, make: object) -> bool:  # type: ignore[type-arg]
    try:
        run(check, make, "blocking")  # type: ignore[arg-type]
    except (CheckFailed, FencedError):
        return True
    return False


@pytest.mark.parametrize("bug", AUTHORITY_BUGS, ids=lambda bug: bug.__name__)
def test_authority_bug_is_caught(bug: type[MemoryStore]) -> None:
    assert any(
        is_caught(check, lambda runtime: AuthorityHarness(runtime, bug)) for check in authorities.CHECKS
    )


@pytest.mark.parametrize("bug", GUARD_BUGS, ids=lambda bug: bug.__name__)
def test_guard_bug_is_caught(bug: type[MemoryGuard]) -> None:
    assert any(is_caught(check, lambda runtime: GuardHarness(runtime, bug)) for check in guards.CHECKS)
