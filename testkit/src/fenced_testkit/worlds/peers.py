"""A client that no program of ours is: it sends several requests at once, and some that are none.

Each answer must be the one to the request in its place, and none may come to what is no request of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

from fenced.http1.bodies import body_of
from fenced.http1.heads import BadMessage, response_head
from fenced.values.contracts import Endpoint
from fenced_testkit.runtime.network import SimulatedNetwork
from fenced_testkit.runtime.simulated import SimulatedRuntime
from fenced_testkit.runtime.world import Process

ANSWER_SECONDS = 5.0
QUIET_SECONDS = 0.5
HIDDEN = b"GET /hidden HTTP/1.1\r\nHost: a\r\n\r\n"
"""A request that is the body of another one."""


class PipedRequest(NamedTuple):
    data: bytes
    statuses: tuple[int, ...]
    """What it may be answered with, while nothing fails."""
    marker: bytes = b""
    """What an answer with status 200 has in its body."""
    ends: bool = False
    """It is no request, so the connection ends with its answer."""


def hiding(path: bytes, statuses: tuple[int, ...]) -> PipedRequest:
    """A request whose body looks like a request."""
    head = b"POST %b HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % (path, len(HIDDEN))
    return PipedRequest(head + HIDDEN, statuses)


def two_lengths(path: bytes) -> PipedRequest:
    """What could be two requests."""
    head = b"POST %b HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\nContent-Length: 36\r\n\r\n" % path
    return PipedRequest(head + HIDDEN, (400,), ends=True)


class PipeliningPeer:
    """One connection to a server of the world."""

    def __init__(
        self,
        process: Process,
        network: SimulatedNetwork,
        requests: Sequence[PipedRequest],
        broken: Callable[[str], None],
    ) -> None:
        self._process = process
        self._network = network
        self._requests = requests
        self._broken = broken
        self._data = b""
        self.answered = 0

    def send(self, endpoint: Endpoint) -> None:
        runtime = SimulatedRuntime(self._process, self._network)

        async def story() -> None:
            try:
                await self._send(runtime, endpoint)
            except OSError:
                return  # a fault of the network, or of the server

        runtime.spawn(story, "peer")

    async def _send(self, runtime: SimulatedRuntime, endpoint: Endpoint) -> None:
        rng = self._process.world.rng
        link = await runtime.connect(endpoint, runtime.now() + ANSWER_SECONDS)
        stream, sent = runtime.stream(link), b"".join(each.data for each in self._requests)
        at = 0
        while at < len(sent):
            size = rng.choice((len(sent), rng.randint(1, len(sent))))
            await stream.send(sent[at : at + size], runtime.now() + ANSWER_SECONDS)
            at += size
            if rng.random() < 0.5:
                await runtime.wait(runtime.wakeup(), runtime.now() + rng.random() * 0.01)
        for request in self._requests:
            while not self._answer(request):
                self._data += await stream.receive(runtime.now() + ANSWER_SECONDS)
            self.answered += 1
            if request.ends:
                break
        with contextlib.suppress(OSError):  # nothing comes, as it should
            self._data += await stream.receive(runtime.now() + QUIET_SECONDS)
        if self._data:
            self._broken(f"an answer to no request: {self._data[:200]!r}")
        stream.close()

    def _answer(self, request: PipedRequest) -> bool:
        """Whether the answer to this request has come. Judges it."""
        try:
            head = response_head(self._data)
            if head is None:
                return False
            pieces, rest = body_of(head.length).feed(self._data[len(head.text) :])
        except BadMessage as error:
            self._broken(f"{error}: {self._data[:200]!r}")
            return False
        if rest is None:
            return False
        self._data, body = bytes(rest), b"".join(pieces)
        if head.status < 500 and head.status not in request.statuses:
            self._broken(f"{request.data[:60]!r} was answered {head.status}: {body[:100]!r}")
        if head.status == 200 and request.marker not in body:
            self._broken(f"{request.data[:60]!r} got the answer to another request: {body[:100]!r}")
        return True
