"""The order on every kind of store: two gates, as two proxies have them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from fenced.client import registry
from fenced.errors import Contended, StaleToken
from fenced.proxy.gate import Gate
from fenced.runtime.aio import AioRuntime
from tests.proxy.worlds import NAME, stamp_of

SERVERS = {
    "postgresql": "postgresql_url",
    "redis": "redis_url",
    "etcd": "etcd_url",
    "zookeeper": "zookeeper_url",
}


@pytest.mark.parametrize("kind", ["memory", "sqlite", "file", "postgresql", "redis"])
def test_two_proxies_on_one_store(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    url = {
        "memory": f"memory:{tmp_path}",
        "sqlite": f"sqlite:///{tmp_path}/marks.db",
        "file": f"file://{tmp_path}",
    }.get(kind) or request.getfixturevalue(SERVERS[kind])
    asyncio.run(_story(url))


async def _story(url: str) -> None:
    runtime = AioRuntime()
    one, two = (Gate(registry.guard(url, runtime), runtime, settle=60.0) for _ in range(2))
    for gate in (one, two):
        await gate.open()
    forever = runtime.now() + 60
    old = await one.enter(NAME, stamp_of(1), forever)
    assert old is not None
    newer = asyncio.create_task(two.enter(NAME, stamp_of(2), forever))
    # The mark rises at once, although the older request is in flight.
    while (mark := await one.store.mark(NAME)) is None or mark.token < 2:
        await asyncio.sleep(0.001)
    with pytest.raises(StaleToken):
        await two.enter(NAME, stamp_of(1), forever)
    settled, left = await two.settle(NAME)
    assert not settled and [permit.token for permit in left] == [1]  # of a proxy that is alive
    assert not newer.done()
    one.answered(old, 1)
    line = await newer
    assert line is not None
    two.doubt(line, 2)
    while b"true" not in ((await two.store.peek(NAME)).value or b""):
        await asyncio.sleep(0.01)
    with pytest.raises(Contended):
        await one.enter(NAME, stamp_of(3), runtime.now() + 0.1)
    settled, left = await one.settle(NAME)
    assert [(permit.token, permit.unknown) for permit in settled] == [(2, True)]
    assert await one.enter(NAME, stamp_of(3), forever) is not None
    await one.unstamped("orders/43")
    for gate in (one, two):
        await gate.close()
    runtime.close()
