"""A guard over an object store with conditional writes passes the kit: the store is the class `ObjectCells` alone."""

from __future__ import annotations

import base64
import http.client
import itertools
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from fenced.contracts import NamedValues, Runtime, Trait
from fenced.decision import Rule
from fenced.errors import Indeterminate, Misconfigured, Unavailable
from fenced.guards.shared.cellguard import AUDIT_LOCAL, MODE_LAG, CellGuard
from fenced.guards.shared.cells import Cell, Swapped
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.testing import GUARD_CHECKS, Check, Colour, GuardHarness, run
from fenced.testing.servers.base import Server, find_program, free_port
from tests.colours import alternating

pytestmark = pytest.mark.xdist_group("objects")  # one server, which takes long to start


class SeaweedServer(Server):
    """SeaweedFS with its S3 interface, which honours If-Match and If-None-Match."""

    name = "seaweedfs"

    def command(self) -> list[str]:
        parts = ("master", "volume", "filer")
        ports = [f"-{part}.port{kind}={free_port()}" for part in parts for kind in ("", ".grpc")]
        s3 = [
            f"-s3.port={self.port}",
            f"-s3.port.grpc={free_port()}",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
        ]
        weed = find_program("weed", "seaweedfs", Path(sys.executable).parent)
        place = [f"-dir={self.folder}", f"-ip={self.host}", f"-ip.bind={self.host}"]
        small = ["-master.volumeSizeLimitMB=16", "-volume.max=50"]
        return [weed, "server", *place, *ports, "-filer", "-s3", *s3, *small]

    def answers(self) -> bool:
        try:
            cells = ObjectCells(self.port, "probe", BlockingRuntime())
            send(self.port, "PUT", "", b"", {})
            return bool(step(cells.swap([("probe", None, b"x")]))) or step(cells.get("probe"))[1] == b"x"
        except (Indeterminate, Unavailable):
            return False


def send(port: int, method: str, path: str, body: bytes, condition: dict[str, str]) -> tuple[int, Any, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request(method, f"/cells{path}", body, condition)
        reply = connection.getresponse()
        if reply.status not in (200, 404, 409, 412):
            raise OSError(f"it answered {reply.status}")
        return reply.status, reply.headers.get("ETag"), reply.read()
    except (OSError, http.client.HTTPException) as error:
        raise (Indeterminate if method == "PUT" else Unavailable)(f"the store: {error!r}") from error
    finally:
        connection.close()


class ObjectCells:
    """An object for each cell, below a prefix in one bucket; its version is its ETag."""

    def __init__(self, port: int, prefix: str, runtime: Runtime) -> None:
        self._port, self._prefix, self._runtime = port, prefix, runtime

    def _path(self, key: str) -> str:
        text = base64.urlsafe_b64encode(key.encode()).decode()
        return f"/{self._prefix}/" + "/".join(text[i : i + 200] for i in range(0, len(text), 200))

    async def get(self, key: str) -> tuple[str | None, bytes | None]:
        status, tag, content = await self._runtime.call(send, self._port, "GET", self._path(key), b"", {})
        return (tag, content) if status == 200 else (None, None)

    async def swap(self, changes: Sequence[tuple[str, str | None, bytes | None]]) -> Swapped:
        ((key, tag, blob),) = changes
        condition = {"If-Match": tag} if tag else {"If-None-Match": "*"}
        status, tag, _ = await self._runtime.call(send, self._port, "PUT", self._path(key), blob, condition)
        return Swapped((tag,) if status == 200 else None)

    async def keys(self) -> list[str]:
        listing = f"?list-type=2&prefix={self._prefix}/"
        _, _, listed = await self._runtime.call(send, self._port, "GET", listing, b"", {})
        found = re.findall(rf"<Key>{self._prefix}/([^<]*)</Key>", listed.decode())
        return [base64.urlsafe_b64decode(key.replace("/", "")).decode() for key in found]

    async def close(self) -> None:
        return


class ObjectGuard(CellGuard):
    kind = "a guard over objects"
    remembers = True
    traits: tuple[Trait, ...] = (AUDIT_LOCAL, MODE_LAG)


class Harness:
    _numbers = itertools.count()

    def __init__(self, runtime: Runtime, server: SeaweedServer) -> None:
        self.runtime = runtime
        self.traits = ObjectGuard.traits
        self._server = server
        self._of_rule: dict[Rule, str] = {}
        self._rule: Rule = "retry"

    async def guard(self, rule: Rule = "retry", mode: str = "enforce") -> NamedValues:
        self._rule = rule
        self._of_rule.setdefault(rule, f"{next(self._numbers)}-{rule}")
        guard = ObjectGuard(self._cells, self.runtime, "objects:", rule=rule, mode=mode)
        await guard.open()
        return guard

    @property
    def _cells(self) -> ObjectCells:
        return ObjectCells(self._server.port, self._of_rule[self._rule], self.runtime)

    async def reopen(self) -> NamedValues:
        guard = ObjectGuard(self._cells, self.runtime, "objects:", rule="retry", mode="observe")
        await guard.open()  # what is there keeps its own rule and mode
        return guard

    async def write_raw(self, name: str, value: bytes) -> bool:
        """As a program would that knows the format and not the rules."""
        version, blob = await self._cells.get(f"n/{name}")
        cell = Cell.unpacked(name, blob).changed("by hand", None, value)
        return bool(await self._cells.swap([(f"n/{name}", version, cell.packed())]))

    async def close(self) -> None:
        return


@pytest.fixture(scope="session")
def objects() -> Iterator[SeaweedServer]:
    with SeaweedServer() as server:
        yield server


@pytest.mark.parametrize(("check", "colour"), alternating(GUARD_CHECKS))
def test_objects(check: Check[GuardHarness], colour: Colour, objects: SeaweedServer) -> None:
    run(check, lambda runtime: Harness(runtime, objects), colour)


def test_a_foreign_object_is_not_taken_for_a_cell(objects: SeaweedServer) -> None:
    cells = ObjectCells(objects.port, "foreign-object", BlockingRuntime())
    guard = ObjectGuard(cells, BlockingRuntime(), "objects:")
    step(guard.open())
    step(cells.swap([("n/orders", None, b"plain text")]))
    with pytest.raises(Misconfigured, match="something else wrote to it"):
        step(guard.peek("orders"))
