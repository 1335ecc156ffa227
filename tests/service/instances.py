"""Two instances of the service in a thread of the tests, before one store whose clock the tests can move."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fenced.http1.heads import Heads
from fenced.http1.server import ListenOptions, listening
from fenced.runtime import clocks
from fenced.service.api import Api
from fenced.service.server import RunningInstance
from fenced.stores.ledger.authority.authority import LedgerAuthority
from fenced.stores.memory.authority import MemoryAuthority, MemoryStore
from fenced.stores.service.authority.authority import ServiceAuthority
from fenced.stores.service.wire.connection import InstanceRoute
from fenced.stores.sqlite.authority.authority import SqliteAuthority
from fenced.values.contracts import Authority, Runtime

MakeAuthority = Callable[[Runtime, str], Authority]


class Instances:
    """Instances that serve the stores of one check after the other. Each namespace begins with the check's own id."""

    def __init__(self, loop: asyncio.AbstractEventLoop, count: int) -> None:
        self._loop = loop
        self._apis: list[Api] = []
        self._makers: dict[str, MakeAuthority] = {}
        self._sockets = [listening(ListenOptions(("127.0.0.1", 0))) for _ in range(count)]
        self._servers: list[RunningInstance] = []
        self._tasks: list[asyncio.Task[None]] = []
        ports = [sockets[0].getsockname()[1] for sockets in self._sockets]
        self.url = "http://" + ",".join(f"127.0.0.1:{port}" for port in ports)

    def _make(self, runtime: Runtime, namespace: str) -> Authority:
        place = namespace.partition("/")[0]
        return self._makers[place](runtime, namespace)

    async def start(self) -> None:
        self._apis = [Api(self._make) for _ in self._sockets]
        for index, sockets in enumerate(self._sockets):
            server = RunningInstance(self._apis[index], ListenOptions())
            self._servers.append(server)
            self._tasks.append(asyncio.create_task(server.serve(sockets)))
        for server in self._servers:
            await server.started.wait()

    async def stop(self) -> None:
        for server, api in zip(self._servers, self._apis, strict=True):
            server.api = api
            server.stop()
        await asyncio.gather(*self._tasks)

    def serve(self, make: MakeAuthority) -> str:
        """Serve this store; returns what the namespaces of its clients begin with."""
        place = secrets.token_hex(8)
        self._makers[place] = make
        return place

    def renew_apis(self) -> None:
        """As a restart of both instances, as far as a store can tell."""

        async def swap() -> None:
            old = self._apis
            self._apis = [Api(self._make) for _ in old]
            for server, api in zip(self._servers, self._apis, strict=True):
                server.http.handler = api
                server.http.heads = {False: Heads(), True: Heads()}  # the old API has noted something on them
            for api in old:
                await api.close()

        asyncio.run_coroutine_threadsafe(swap(), self._loop).result(60)

    def forget(self, place: str) -> None:
        self.renew_apis()
        self._makers.pop(place, None)


@contextmanager
def running(count: int = 2) -> Iterator[Instances]:
    loop = asyncio.new_event_loop()
    instances = Instances(loop, count)
    thread = threading.Thread(target=loop.run_forever, name="instances", daemon=True)
    thread.start()
    asyncio.run_coroutine_threadsafe(instances.start(), loop).result(60)
    try:
        yield instances
    finally:
        asyncio.run_coroutine_threadsafe(instances.stop(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()


class RoundRobin(InstanceRoute):
    """Each new connection leads to the next instance."""

    async def connect(self, until: float) -> Any:
        made = await super().connect(until)
        self.failed(made[1])
        return made


class Wandering(ServiceAuthority):
    """A client whose requests reach the instances by turns."""

    route_type = RoundRobin

    async def _call(self, *arguments: Any, **options: Any) -> Any:
        self._pool.close_idle()
        self._renewals.close_idle()
        return await super()._call(*arguments, **options)


class Harness:
    """Clients whose requests reach two instances by turns. Subclasses say which store is behind them."""

    def __init__(self, runtime: Runtime, instances: Instances) -> None:
        self.runtime = runtime
        self._instances = instances
        self._place = instances.serve(self.make)
        self._opened: list[Authority] = []
        self.ahead = 0.0

    def make(self, runtime: Runtime, namespace: str) -> Authority:
        raise NotImplementedError

    async def authority(self, namespace: str = "default") -> Authority:
        authority = Wandering.at(self._instances.url, self.runtime, f"{self._place}/{namespace}")
        self._opened.append(authority)
        await authority.open()
        return authority

    async def pass_time(self, seconds: float) -> None:
        self.ahead += seconds

    async def restart(self) -> None:
        await self._close()
        self._instances.renew_apis()

    async def _close(self) -> None:
        while self._opened:
            await self._opened.pop().close()

    async def close(self) -> None:
        await self._close()
        self._instances.forget(self._place)


class OverMemory(Harness):
    def __init__(self, runtime: Runtime, instances: Instances) -> None:
        self._stores: dict[str, MemoryStore] = {}
        super().__init__(runtime, instances)

    def make(self, runtime: Runtime, namespace: str) -> Authority:
        store = self._stores.setdefault(namespace, MemoryStore(lambda: clocks.now() + self.ahead))
        return MemoryAuthority(store, runtime)


class OverSqlite(Harness):
    authority_type: type[SqliteAuthority] | type[LedgerAuthority] = SqliteAuthority

    def __init__(self, runtime: Runtime, instances: Instances, folder: Path) -> None:
        self._path = folder / "leases.db"
        super().__init__(runtime, instances)

    def make(self, runtime: Runtime, namespace: str) -> Authority:
        return self.authority_type(self._path, runtime, namespace=namespace, clock=self._clock)

    def _clock(self) -> int:
        return clocks.now_ns() + round(self.ahead * 1e9)


class OverLedger(OverSqlite):
    """Both instances are in one process here, so both can have the ledger. A restart reads it again."""

    authority_type = LedgerAuthority
