"""Time that passes at once: for what ZooKeeper measures, and for what its clients do.

A client's clock is moved on. A session that it has not kept alive for long enough by then is ended, as the server
would have done it. Times that are stored are moved back.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from typing import Any, TypeVar

from fenced.errors import Unavailable
from fenced.stores.zookeeper.authority.authority import ZooKeeperAuthority
from fenced.stores.zookeeper.authority.session import ZooKeeperSession
from fenced.stores.zookeeper.wire import jute
from tests.shifted import Shifted
from tests.zookeeper.raw import Raw

T = TypeVar("T")


class Mortal(ZooKeeperAuthority):
    """A client whose sessions are known after its death: the server ends them later."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.left: list[tuple[ZooKeeperSession, float]] = []

    def abandon(self) -> None:
        self.left += [(each, each.confirmed) for each in self._own.sessions.values()]
        super().abandon()


def end_session(session: ZooKeeperSession) -> None:
    """Its own client may take the session back at once: once more, then."""
    known = jute.Connected(10_000, session.id, session._password)
    host, port = session._address.members[0]
    while True:
        with (
            contextlib.suppress(OSError, Unavailable),
            Raw(f"zookeeper://{host}:{port}", known) as client,
        ):
            if client.session.timeout <= 0:
                return
            client.end_session()


def pass_time(seconds: float, runtime: Shifted, authorities: Iterable[ZooKeeperAuthority], url: str) -> None:
    runtime.ahead += seconds
    roots = set()
    for authority in authorities:
        roots.add(authority._nodes.paths.root)
        left = authority.left if isinstance(authority, Mortal) else []
        for session, confirmed in left + [
            (each, each.confirmed) for each in authority._own.sessions.values()
        ]:
            if session.id and confirmed + session.ttl <= runtime.now():
                end_session(session)
    with Raw(url) as client:
        for root in roots:
            _move_back(client, root, seconds)
        client.end_session()


def _move_back(client: Raw, root: str, seconds: float) -> None:
    def move(path: str, key: str) -> None:
        told = json.loads(client.get(path)[0])
        if told[key] is not None:
            told[key] -= seconds
            client.set(path, json.dumps(told).encode())

    for tomb in client.children(f"{root}/t"):
        move(f"{root}/t/{tomb}", "remember")
    for name in client.children(f"{root}/n"):
        for child in client.children(f"{root}/n/{name}"):
            if child.startswith("~"):
                move(f"{root}/n/{name}/{child}", "until")
