"""A client's count of its attempts: what it calls settled is over, and one long lease does not stop it for ever."""

from collections.abc import Sequence

import pytest

from fenced.core.acquiring import LeaseRequest
from fenced.core.counting import AttemptCounter
from fenced.errors import NotGranted, Unavailable
from fenced.runtime import clocks
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.stores.memory.authority import MemoryAuthority, MemoryStore
from fenced.testing.kit import lease_engine
from fenced.values.model import Ask, AskAnswer
from tests.shifted import Shifted


def test_settled_is_below_every_open_attempt() -> None:
    runtime = Shifted(BlockingRuntime())
    counter = AttemptCounter(runtime)
    assert [counter.begin(secret, 30.0) for secret in "abc"] == [(1, 0), (2, 0), (3, 0)]
    counter.over("b")
    assert counter.begin("d", 30.0) == (4, 0)
    counter.over("a")
    assert counter.begin("e", 30.0) == (5, 2)
    runtime.ahead += 601.0
    assert counter.begin("f", 30.0) == (6, 5)


class Recording(MemoryAuthority):
    """Remembers what was asked, and can be out of reach."""

    away = False

    def __init__(self, store: MemoryStore, runtime: BlockingRuntime) -> None:
        super().__init__(store, runtime)
        self.asked: list[Ask] = []

    async def ask(self, ask: Ask, until: float | None = None) -> AskAnswer:
        self.asked.append(ask)
        if self.away:
            raise Unavailable("out of reach")
        return await super().ask(ask, until)


def test_a_client_settles_what_is_over() -> None:
    """Held: open. Released, refused as busy, or never sent: over."""
    runtime = BlockingRuntime()
    authority = Recording(MemoryStore(clocks.now), runtime)
    engine = lease_engine(authority, runtime)

    def acquire(name: str) -> object:
        return step(engine.acquire(LeaseRequest((name,), 30.0, wait=0.0)))

    def counted() -> Sequence[tuple[int, int]]:
        return [(ask.number, ask.settled) for ask in authority.asked]

    first, second = acquire("a"), acquire("b")
    step(engine.release(second))  # type: ignore[arg-type]
    acquire("c")
    assert counted() == [(1, 0), (2, 0), (3, 0)]
    step(engine.release(first))  # type: ignore[arg-type]
    authority.away = True
    with pytest.raises(Unavailable):
        acquire("d")
    authority.away = False
    with pytest.raises(NotGranted):
        step(lease_engine(authority, runtime).acquire(LeaseRequest(("c",), 30.0, wait=0.0)))
    acquire("e")
    assert counted()[3:] == [(4, 2), (1, 0), (5, 2)]
    step(engine.close())
