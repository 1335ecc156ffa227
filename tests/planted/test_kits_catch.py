"""The kits can fail: every planted bug is caught by at least one check, and the real parts by none."""

import pytest

from fenced.authorities.memory import MemoryAuthority, MemoryStore
from fenced.contracts import Authority, Guard, Runtime
from fenced.decision import Rule
from fenced.errors import FencedError, MissingStamp
from fenced.guards.memory import MemoryGuard
from fenced.testing import authorities, guards, run
from fenced.testing.kit import Check, CheckFailed
from tests.planted.bugs import AUTHORITY_BUGS, GUARD_BUGS


class BuggyAuthority:
    def __init__(self, runtime: Runtime, store_type: type[MemoryStore]) -> None:
        self.runtime = runtime
        self._store_type = store_type
        self._ahead = 0.0
        self._stores: dict[str, MemoryStore] = {}

    async def authority(self, namespace: str = "default") -> Authority:
        if namespace not in self._stores:
            self._stores[namespace] = self._store_type(lambda: self.runtime.now() + self._ahead)
        return MemoryAuthority(self._stores[namespace], self.runtime)

    async def pass_time(self, seconds: float) -> None:
        self._ahead += seconds

    async def restart(self) -> None:
        return

    async def close(self) -> None:
        return


class BuggyGuard:
    mandatory = True

    def __init__(self, runtime: Runtime, guard_type: type[MemoryGuard]) -> None:
        self.runtime = runtime
        self._guard_type = guard_type
        self._guard = guard_type()

    async def guard(self, rule: Rule = "retry", mode: str = "enforce") -> Guard:
        self._guard = self._guard_type(rule=rule, mode=mode)
        return self._guard

    async def reopen(self) -> Guard:
        return self._guard

    async def write_raw(self, name: str, value: str) -> bool:
        try:
            await self._guard.write(None, name, value)
        except MissingStamp:
            return False
        return True

    async def close(self) -> None:
        return


def is_caught(check: Check, make: object) -> bool:  # type: ignore[type-arg]
    try:
        run(check, make, "blocking")  # type: ignore[arg-type]
    except (CheckFailed, FencedError):
        return True
    return False


@pytest.mark.parametrize("bug", AUTHORITY_BUGS, ids=lambda bug: bug.__name__)
def test_authority_bug_is_caught(bug: type[MemoryStore]) -> None:
    assert any(is_caught(check, lambda runtime: BuggyAuthority(runtime, bug)) for check in authorities.CHECKS)


@pytest.mark.parametrize("bug", GUARD_BUGS, ids=lambda bug: bug.__name__)
def test_guard_bug_is_caught(bug: type[MemoryGuard]) -> None:
    assert any(is_caught(check, lambda runtime: BuggyGuard(runtime, bug)) for check in guards.CHECKS)
