"""The values of a service as what the holders compete for: both halves of a drill in one process."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TypeVar
from urllib.parse import quote

from fenced.errors import Misconfigured, Unavailable, Unsupported
from fenced.http.protocol import fence_headers
from fenced.net.pool import ConnectionBroken, Pool
from fenced.net.problems import error_from
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.stores.service.address import service_address
from fenced.stores.service.wire.connection import HttpReply, HttpWire, InstanceRoute
from fenced.values import timing
from fenced.values.contracts import Versioned
from fenced.values.model import Stamp

SCHEMES = frozenset({"http", "https", "fenced+unix"})
T = TypeVar("T")


class ServedResource:
    """The values of a service, over one connection."""

    def __init__(self, url: str, *, guarded: bool = True) -> None:
        self.guarded = guarded
        self._address = service_address(url)
        self._runtime = BlockingRuntime()
        self._route = InstanceRoute(self._address, self._runtime)
        self._pool = Pool(self._runtime, self._connect, limit=1, where=self._address.url)

    @property
    def url(self) -> str:
        return self._address.url

    async def _connect(self, until: float) -> HttpWire:
        wire = HttpWire(self._address, self._route, self._runtime)
        await wire.connect(until)
        return wire

    def open(self) -> None:
        """Unsupported if the service has no values."""
        self._call("GET", "/v1/marks/drill", lambda reply: None)

    def announce(self, stamp: Stamp) -> None:
        for name in stamp.names:
            self.read(stamp, name)

    def read(self, stamp: Stamp, name: str) -> Versioned:
        return self._call("GET", _path(name), _value, stamp)

    def peek(self, name: str) -> Versioned:
        return self._call("GET", _path(name), _value)

    def write(self, stamp: Stamp, name: str, value: bytes) -> int:
        return self._call(
            "PUT", _path(name), lambda reply: int(json.loads(reply.body)["version"]), stamp, value
        )

    def _call(
        self,
        method: str,
        path: str,
        understand: Callable[[HttpReply], T],
        stamp: Stamp | None = None,
        body: bytes = b"",
    ) -> T:
        headers = () if stamp is None else tuple(fence_headers(stamp).items())
        until = timing.call_until(self._runtime.now(), None)
        changes = method == "PUT"  # not sent again: the drill wants to know what became of each single write

        async def work(wire: HttpWire) -> T:
            reply = await wire.exchange(method, path, body, until, once=changes, headers=headers)
            if (error := error_from(reply.status, reply.media_type, reply.body)) is not None:
                raise error
            if reply.status >= 500:
                raise ConnectionBroken(f"{self.url}: it answered {reply.status}")
            if reply.status not in (200, 404):
                kind = Unavailable if reply.status == 429 else Misconfigured
                raise kind(f"{self.url}: it answered {reply.status} to {method} {path}")
            return understand(reply)

        return step(self._pool.request(work, until, repeatable=not changes))

    def close(self) -> None:
        self._pool.abandon()


def _path(name: str) -> str:
    return f"/v1/values/{quote(name, safe='/')}"


def _value(reply: HttpReply) -> Versioned:
    return Versioned(None, 0) if reply.status == 404 else Versioned(reply.body, int(reply.etag.strip('"')))


def has_values(url: str) -> bool:
    """Whether this is the address of a service that has values."""
    if url.partition(":")[0] not in SCHEMES:
        return False
    service = ServedResource(url)
    try:
        service.open()
    except Unsupported:
        return False
    finally:
        service.close()
    return True
