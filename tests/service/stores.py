"""The stores of servers behind two instances: PostgreSQL and etcd. Those of one machine are in `instances`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast
from urllib.parse import urlsplit

from fenced.stores.etcd.authority.authority import EtcdAuthority
from fenced.stores.postgresql.authority.authority import PostgresqlAuthority
from fenced.values.contracts import Authority, Runtime
from fenced.values.model import RenewAnswer, Standing
from fenced_testkit.servers import EtcdServer, PostgresqlServer
from tests.conformance.authorities.test_postgresql import LATER
from tests.etcd.aging import SCALE, Scaled, Time
from tests.service.instances import Harness, Instances
from tests.shifted import Shifted


class OverPostgresql(Harness):
    """All checks share a database: each has namespaces of its own."""

    def __init__(self, runtime: Runtime, instances: Instances, server: PostgresqlServer, url: str) -> None:
        self._server = server
        self._url = url
        super().__init__(runtime, instances)

    def make(self, runtime: Runtime, namespace: str) -> Authority:
        return PostgresqlAuthority(self._url, runtime, namespace=namespace)

    async def pass_time(self, seconds: float) -> None:
        self._server.execute(LATER.format(round(seconds * 1e6)), urlsplit(self._url).path[1:])

    async def restart(self) -> None:
        await super().restart()
        self._server.restart()


class SharedClock(Shifted):
    """The clock of all etcd clients behind the instances."""

    def __init__(self, runtime: Runtime) -> None:
        self._followers: list[Shifted] = []
        super().__init__(runtime)

    @property
    def ahead(self) -> float:
        return self._ahead

    @ahead.setter
    def ahead(self, ahead: float) -> None:
        self._ahead = ahead
        for each in self._followers:
            each.ahead = ahead

    def follow(self, runtime: Runtime) -> Shifted:
        made = Shifted(runtime)
        made.ahead = self._ahead
        self._followers.append(made)
        return made


class ShiftedEtcd(EtcdAuthority):
    """Its deadlines are given by the clock of the service."""

    _runtime: Shifted

    async def open(self, *, create: bool = True, until: float | None = None) -> Standing:
        return await super().open(create=create, until=self._shifted(until))

    async def renew(self, secrets: Sequence[str], until: float | None = None) -> list[RenewAnswer]:
        return await super().renew(secrets, self._shifted(until))

    async def next_wakeups(self, until: float) -> list[str]:
        return await super().next_wakeups(until + self._runtime.ahead)

    def _shifted(self, until: float | None) -> float | None:
        return None if until is None else until + self._runtime.ahead


class OverEtcd(Harness):
    """A second of the kit is twenty of the server's: tests/etcd/aging.py."""

    def __init__(self, runtime: Runtime, instances: Instances, server: EtcdServer) -> None:
        self._server = server
        self._clock = SharedClock(runtime)
        self._time = Time(server.url(), self._clock)
        super().__init__(runtime, instances)

    def make(self, runtime: Runtime, namespace: str) -> Authority:
        shifted = self._clock.follow(runtime)
        return self._time.bind(ShiftedEtcd.at(self._server.url(), shifted, namespace), shifted)

    async def authority(self, namespace: str = "default") -> Authority:
        return cast(Authority, Scaled(await super().authority(namespace)))

    async def pass_time(self, seconds: float) -> None:
        self._time.pass_by(seconds * SCALE)

    async def restart(self) -> None:
        await super().restart()
        self._server.restart()

    async def close(self) -> None:
        await super().close()
        self._time.pass_by(1e9)  # nothing ends by itself while another check looks at revisions
