"""Several stores: what was acknowledged is in all of them in the end, wherever its writer stopped."""

from __future__ import annotations

import random
from typing import Any

import pytest

import fenced
from fenced.recipes.convergent import AsyncConvergent, Change, Convergent, ConvergentBase
from fenced.runtime.blocking import step
from fenced.stores.memory.guard import MemoryValues
from fenced.values.model import Credential, Stamp

NAMES = ("doc", "doc/intent", "doc/complete")


class Stopped(Exception):
    pass


class Store:
    """Values in memory, whose writer may be stopped before any call, for ever or until others have gone on."""

    def __init__(self) -> None:
        self.guard = MemoryValues()

    async def announce(self, fence: Stamp, *names: str) -> None:
        await self.guard.announce(Credential((fence.announcing(),), names))

    async def peek(self, name: str) -> Any:
        return await self.guard.peek(name)

    async def write(self, fence: Stamp, name: str, value: bytes) -> None:
        await self.guard.write(Credential((fence,)), name, value)


class Pausing:
    """A store, seen by one writer: every call is a place where it is suspended."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def _stop(self) -> None:
        await Turn()

    async def announce(self, fence: Stamp, *names: str) -> None:
        await self._stop()
        await self._store.announce(fence, *names)

    async def peek(self, name: str) -> Any:
        await self._stop()
        return await self._store.peek(name)

    async def write(self, fence: Stamp, name: str, value: bytes) -> None:
        await self._stop()
        await self._store.write(fence, name, value)


class Turn:
    def __await__(self) -> Any:
        yield


class AnnouncesNothing(ConvergentBase):
    """It reads first, and is compared only when it writes."""

    async def _announce(self, lease: Any) -> None:
        return


class ForgetsTheIntent(ConvergentBase):
    """It changes what it finds in the stores."""

    async def _present(self) -> list[bytes | None]:
        return await self._stored()


def world(seed: int, kind: type[ConvergentBase]) -> str:
    """Writers that overtake each other at any place. What was broken; empty: nothing."""
    rng = random.Random(seed)
    stores = [Store() for _ in range(3)]
    acknowledged: list[bytes] = []
    live: list[Any] = []
    token = 0

    def writer() -> Any:
        nonlocal token
        token += 1
        item, stamp = f"<{token}>".encode(), Stamp("0" * 16, NAMES, token, None, f"{token:032x}")
        added: Change = lambda old: [(each or b"") + item for each in old]  # noqa: E731

        async def write() -> None:
            await kind("doc", [Pausing(store) for store in stores])._written(stamp, added)
            acknowledged.append(item)

        return write()

    for _ in range(150):
        if not live or rng.random() < 0.07:
            live.append(writer())
        chosen = rng.choice(live) if rng.random() < 0.4 else live[-1]
        try:
            chosen.send(None)
        except (StopIteration, fenced.Refused):
            live.remove(chosen)
    last = writer()
    while True:
        try:
            last.send(None)
        except StopIteration:
            break
    for each in live:
        each.close()
    values = [step(store.peek("doc")).value for store in stores]
    if len(set(values)) != 1:
        return f"the stores differ: {values}"
    lost = [item for item in acknowledged if item not in (values[0] or b"")]
    return f"lost: {lost}" if lost else ""


def test_all_stores_converge_and_nothing_acknowledged_is_lost() -> None:
    for seed in range(300):
        assert world(seed, ConvergentBase) == "", f"seed {seed}"


@pytest.mark.parametrize("kind", [AnnouncesNothing, ForgetsTheIntent])
def test_a_planted_mistake_is_found(kind: type[ConvergentBase]) -> None:
    assert any(world(seed, kind) for seed in range(300))


def test_a_writer_that_stopped_is_finished_by_the_next(url: str, tmp_path: Any) -> None:
    stores = [fenced.Values(f"sqlite:///{tmp_path}/{each}.db") for each in "ab"]
    both = Convergent("doc", stores)
    with fenced.Client(url) as client, stores[0], stores[1]:
        assert both.read() == [None, None]

        def stops(*_: object) -> None:
            raise Stopped

        write = stores[1].write
        stores[1].write = stops  # type: ignore[method-assign,assignment]
        with pytest.raises(Stopped), client.hold_all(both.names) as lease:
            both.write(lease, lambda old: [b"a1", b"b1"])
        with pytest.raises(fenced.Contended, match="under way"):
            both.read()
        stores[1].write = write  # type: ignore[method-assign]
        with client.hold_all(both.names) as lease:
            both.write(lease, lambda old: [(each or b"") + b"2" for each in old])
        assert both.read() == [b"a12", b"b12"]
        with pytest.raises(fenced.Misuse, match="as many values"), client.hold_all(both.names) as lease:
            both.write(lease, lambda old: [b"one"])


async def test_in_asyncio(url: str) -> None:
    stores = [fenced.AsyncValues(f"memory://convergent-{each}") for each in "ab"]
    both = AsyncConvergent("doc", stores)
    async with fenced.AsyncClient(url) as client:
        async with client.hold_all(both.names) as lease:
            await both.write(lease, lambda old: [b"a", b"b"])
        assert await both.read() == [b"a", b"b"]
