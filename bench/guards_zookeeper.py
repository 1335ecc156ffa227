"""What a guard over ZooKeeper costs: a set behind the fence against a bare set, on one kazoo client."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

from kazoo.client import KazooClient  # type: ignore[import-untyped]

from bench.figures import Figure, ratio
from bench.interleaved import Effort, medians
from bench.on_zookeeper import SETTINGS
from fenced.client.values import Values
from fenced.values.model import Stamp
from fenced.zookeeper import ZooKeeperGuard
from fenced_testkit.servers import ZooKeeperServer

ROUNDS = 1000
BODY = b"x" * 100


def run(_: Path, effort: Effort) -> Iterator[Figure]:
    with ZooKeeperServer(SETTINGS) as server, Values(server.url() + "/values") as values:
        client = KazooClient(f"{server.host}:{server.port}")
        client.start()
        for path in ("/bare", "/ours"):
            client.create(path, b"")
        guard = ZooKeeperGuard()
        tokens = itertools.count(2)

        def bare() -> None:
            client.set("/bare", BODY)

        def fenced(token: int = 1) -> None:
            with guard.transaction(client, _stamp("same" if token == 1 else "new", token)) as tx:
                tx.set_data("/ours", BODY)

        for key, what, action, target in (
            ("set", "fenced set", fenced, 1.2),
            ("new", "... a new token each: announced, then set", lambda: fenced(next(tokens)), None),
            ("value", "write of a value under a name", lambda: values.write(_stamp("v", 1), "v", BODY), None),
        ):
            theirs, ours = medians(bare, action, rounds=effort.of(ROUNDS), warm_up=effort.size(100))
            whole = f"ZooKeeper {server.version}: {what}"
            yield ratio(
                f"guards_zookeeper.{key}",
                whole,
                ours,
                theirs,
                target=target,
                against="kazoo's set of 100 bytes",
            )
        client.stop()
        client.close()


def _stamp(name: str, token: int) -> Stamp:
    return Stamp("00000000000000aa", (name,), token, None, f"{token:032x}")
