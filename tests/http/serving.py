"""Real servers around the apps of the tests, and a client that shows what they answer."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from fenced.http.protocol import fence_headers
from fenced.net.problems import TYPE_PREFIX
from fenced.proofs import Proof
from fenced.values.model import Stamp

ROOT = Path(__file__).parents[2]
REALM = "ab" * 8


def stamp(token: int, seq: int | None, *names: str) -> Stamp:
    return Stamp(REALM, names, token, seq, f"{token:032x}")


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def kind(self) -> str | None:
        """Which problem it is; None if it is none."""
        if self.headers.get("content-type") != "application/problem+json":
            return None
        return str(json.loads(self.body)["type"]).removeprefix(TYPE_PREFIX)

    @property
    def replayed(self) -> bool:
        return self.headers.get("fenced-replayed") == "?1"


class Browser:
    """One connection to a server, kept open."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=100)

    def send(self, method: str, path: str, fence: Stamp | Proof | None = None, **headers: str) -> Reply:
        fenced = fence_headers(fence) if fence is not None else {}
        self._connection.request(method, path, headers={**fenced, **_dashed(headers)})
        found = self._connection.getresponse()
        return Reply(found.status, {k.lower(): v for k, v in found.getheaders()}, found.read())

    def post(self, path: str, fence: Stamp | Proof | None = None, **headers: str) -> Reply:
        return self.send("POST", path, fence, **headers)

    def close(self) -> None:
        self._connection.close()


def _dashed(headers: dict[str, str]) -> dict[str, str]:
    return {name.replace("_", "-"): value for name, value in headers.items()}


@contextmanager
def serving(*command: str, **environment: str) -> Iterator[int]:
    """A server in a process of its own; `{fd}` in its command is a socket that listens. Yields the port.

    A client that connects before the server is ready waits for it.
    """
    path = f"{ROOT}:{ROOT / 'src'}"
    # With the protocol named, asyncio sets TCP_NODELAY: otherwise the second part of each answer is 40 ms late.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port, fd = listener.getsockname()[1], listener.fileno()
        process = subprocess.Popen(
            [sys.executable, "-m", *(word.replace("{fd}", str(fd)) for word in command)],
            env={**os.environ, "PYTHONPATH": path, **environment},
            pass_fds=[fd],
        )
    try:
        yield port
    finally:
        process.terminate()
        process.wait(100)
