"""`fenced exporter`: an HTTP server that shows the last looks, and waits for no store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from fenced.http1.exchanges import ServerExchange
from fenced.http1.heads import BadMessage
from fenced.http1.limits import HttpLimits
from fenced.http1.server import HttpServer, ListenOptions
from fenced.http1.writing import ServerReply
from fenced.metrics.numbers import TEXT, exposition
from fenced.monitoring.looks import Looker, build_info

LIMITS = HttpLimits(connections=100, request_time=10.0, body_time=10.0, idle_time=60.0)
PLAIN = (("content-type", "text/plain; charset=utf-8"),)


class Exporter:
    """Answers GET /metrics and /healthz."""

    def __init__(self, lookers: Sequence[Looker], address: tuple[str, int]) -> None:
        self.lookers = lookers
        self.server = HttpServer(self, ListenOptions(address), LIMITS)

    def begin(self, exchange: ServerExchange) -> None:
        path = exchange.head.target.partition(b"?")[0]
        if exchange.head.method not in (b"GET", b"HEAD"):
            exchange.reply(405, PLAIN, b"GET or HEAD\n")
        elif path == b"/metrics":
            exchange.reply(200, (("content-type", TEXT),), self.text().encode())
        elif path == b"/healthz":
            exchange.reply(200, PLAIN, b"alive\n")
        else:
            exchange.reply(404, PLAIN, b"GET /metrics or /healthz\n")

    def refusal(self, error: BadMessage) -> ServerReply:
        return ServerReply(503 if error.status == 503 else 400, PLAIN, f"{error}\n".encode())

    def text(self) -> str:
        return exposition([*build_info(), *(point for looker in self.lookers for point in looker.points())])

    async def run(self, stop: asyncio.Event, say: Callable[[str], None]) -> None:
        """Look and answer until `stop`."""
        for looker in self.lookers:
            looker.start()
        (listening,) = await self.server.start()
        host, port = listening.getsockname()[:2]
        say(f"listening on http://{host}:{port}/metrics, looking at {len(self.lookers)} stores")
        await stop.wait()
        for looker in self.lookers:
            looker.stop()
        await self.server.stop(1.0)
