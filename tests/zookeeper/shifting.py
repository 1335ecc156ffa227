"""Time that passes at once: for what ZooKeeper measures, and for what its clients do.

A client's clock is moved on. A session that it has not kept alive for long enough by then is ended, as the server
would have done it. Times that are stored are moved back.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from typing import TypeVar

from kazoo.client import KazooClient

from fenced.authorities.zookeeper import ZooKeeperAuthority, jute
from fenced.authorities.zookeeper.address import Address
from fenced.authorities.zookeeper.session import Session
from fenced.authorities.zookeeper.wire import dial
from fenced.contracts import Colour, Readable, Runtime, Wakeup
from fenced.runtime.blocking import BlockingRuntime, step

T = TypeVar("T")


class Shifted:
    """A runtime whose clock can be moved on."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.ahead = 0.0
        self.colour: Colour = runtime.colour
        self.random, self.secret, self.whoami = runtime.random, runtime.secret, runtime.whoami
        self.wakeup, self.lock, self.call = runtime.wakeup, runtime.lock, runtime.call
        self.finish, self.spawn = runtime.finish, runtime.spawn

    def now(self) -> float:
        return self._runtime.now() + self.ahead

    async def wait(self, wakeup: Wakeup, until: float | None) -> bool:
        return await self._runtime.wait(wakeup, None if until is None else until - self.ahead)

    async def readable(self, source: Readable, until: float) -> bool:
        return await self._runtime.readable(source, until - self.ahead)

    async def writable(self, source: Readable, until: float) -> bool:
        return await self._runtime.writable(source, until - self.ahead)


def end_session(session: Session, address: Address) -> None:
    """What the server does when it has heard nothing for too long."""
    runtime = BlockingRuntime()
    hello = jute.Connected(10_000, session.id, session._password)

    async def end() -> None:
        until = runtime.now() + 5
        link, told = await dial(address, address.members[0], runtime, hello, 0, until)
        with link:
            if told.timeout > 0:
                link.setblocking(True)
                link.sendall(jute.frame(struct.pack(">i", 1) + jute.close()))
                while link.recv(4096):
                    pass

    step(end())


def pass_time(
    seconds: float, runtime: Shifted, authorities: Iterable[ZooKeeperAuthority], client: KazooClient
) -> None:
    runtime.ahead += seconds
    roots = set()
    for authority in authorities:
        roots.add(authority._paths.root)
        for session in authority._sessions.values():
            if session.id and session.confirmed + session.ttl <= runtime.now():
                end_session(session, authority._address)
    for root in roots:
        _move_back(client, root, seconds)


def _move_back(client: KazooClient, root: str, seconds: float) -> None:
    for tomb in client.get_children(f"{root}/t"):
        told = json.loads(client.get(f"{root}/t/{tomb}")[0])
        told["remember"] -= seconds
        client.set(f"{root}/t/{tomb}", json.dumps(told).encode())
    for name in client.get_children(f"{root}/n"):
        for child in client.get_children(f"{root}/n/{name}"):
            if child.startswith("~"):
                told = json.loads(client.get(f"{root}/n/{name}/{child}")[0])
                if told["until"] is not None:
                    told["until"] -= seconds
                    client.set(f"{root}/n/{name}/{child}", json.dumps(told).encode())
