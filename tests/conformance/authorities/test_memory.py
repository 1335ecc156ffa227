"""The reference model passes its own kit."""

import pytest

from fenced.stores.memory.authority import MemoryAuthority, MemoryStore
from fenced.testing import AUTHORITY_CHECKS, COLOURS, AuthorityHarness, Check, Colour, run
from fenced.values.contracts import Authority, Runtime

BACKEND = "memory"


class Harness:
    def __init__(self, runtime: Runtime, store_type: type[MemoryStore] = MemoryStore) -> None:
        self.runtime = runtime
        self._store_type = store_type
        self._ahead = 0.0
        self._stores: dict[str, MemoryStore] = {}

    async def authority(self, namespace: str = "default") -> Authority:
        if namespace not in self._stores:
            self._stores[namespace] = self._store_type(lambda: self.runtime.now() + self._ahead)
        authority = MemoryAuthority(self._stores[namespace], self.runtime)
        await authority.open()
        return authority

    async def pass_time(self, seconds: float) -> None:
        self._ahead += seconds

    async def restart(self) -> None:
        """A dictionary has nothing to restart: its clients are new, the rows are the same."""
        for store in self._stores.values():
            store.listeners.clear()

    async def close(self) -> None:
        return


# proves authority memory: namespace-order, one-process, realm-per-store
@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("check", AUTHORITY_CHECKS, ids=lambda check: check.name)
def test_memory(check: Check[AuthorityHarness], colour: Colour) -> None:
    run(check, Harness, colour)
