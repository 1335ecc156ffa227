"""Every authority under a blocked event loop: asyncio's, and uvloop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import uvloop

from fenced.client.registry import one_per_class
from fenced.testing import LOOP_CHECKS, Address, Check
from fenced_testkit.servers import ServiceServer

TTL = 1.8
"""Long enough for a renewal on a busy machine."""
LEAST = {"etcd": 2.0, "zookeeper": 3.0}
"""These servers do not grant less."""
LOOPS: tuple[Callable[[], asyncio.AbstractEventLoop], ...] = (
    asyncio.new_event_loop,
    uvloop.new_event_loop,
)


@pytest.fixture(scope="module")
def service_url() -> Iterator[str]:
    with ServiceServer() as server:
        yield server.url()


@pytest.fixture
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    scheme: str = request.param
    match scheme:
        case "memory":
            return f"memory:{tmp_path.name}"
        case "sqlite" | "ledger":
            return f"{scheme}:///{tmp_path}/leases"
        case "http":
            service: str = request.getfixturevalue("service_url")
            return service
    found: str = request.getfixturevalue(f"{scheme}_url")
    return found


def _run(check: Check[Address], address: Address, loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(check.body(address))


SCHEMES = [scheme for kind, scheme in one_per_class() if kind == "fenced.authorities"]


@pytest.mark.parametrize("url", SCHEMES, indirect=True)
def test_every_authority(url: str) -> None:
    """All checks at the same time, because they mostly wait."""
    ttl = LEAST.get(url.partition(":")[0], TTL)
    with ThreadPoolExecutor(len(LOOPS) * len(LOOP_CHECKS)) as pool:
        runs = [
            pool.submit(_run, check, Address(url, ttl, f"{check.name}-{number}"), loop)
            for check in LOOP_CHECKS
            for number, loop in enumerate(LOOPS)
        ]
    for run in runs:
        run.result()
