"""The admin port: /healthz, /readyz, /metrics, /records and POST /settle."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from functools import partial
from ipaddress import ip_address
from urllib.parse import parse_qs, urlsplit

from fenced.errors import FencedError, Misuse, shown
from fenced.http1.exchanges import ServerExchange
from fenced.http1.heads import BadMessage, RequestHead
from fenced.http1.limits import HttpLimits
from fenced.http1.server import HttpServer, ListenOptions
from fenced.http1.writing import ServerReply
from fenced.proxy.server import FencingProxy
from fenced.values.model import check_name

SETTLE = b"/settle"
LIMITS = HttpLimits(connections=100, request_time=10.0, body_time=10.0, idle_time=10.0)
TEXT = (("content-type", "text/plain; charset=utf-8"),)


class AdminPort:
    """Answers GET /healthz, /readyz, /metrics and /records and POST /settle, one request a connection."""

    def __init__(self, proxy: FencingProxy, host: str, port: int) -> None:
        self._proxy = proxy
        self._host = host
        self.server = HttpServer(self, ListenOptions((host, port)), LIMITS)

    def begin(self, exchange: ServerExchange) -> None:
        exchange.keep = False
        self._proxy.spawn(partial(self._respond, exchange))

    async def _respond(self, exchange: ServerExchange) -> None:
        status, text = await answer(self._proxy, exchange.head, self._host)
        exchange.reply(status, TEXT, text.encode())

    def refusal(self, error: BadMessage) -> ServerReply:
        return ServerReply(503 if error.status == 503 else 400, TEXT, f"{error}\n".encode())


async def answer(proxy: FencingProxy, request: RequestHead, host: str) -> tuple[int, str]:
    if (why := _another_site(request, host)) is not None:
        return 403, f"{why}\n"
    path, _, query = request.target.partition(b"?")
    if path == SETTLE and request.method == b"POST":
        return await _settle(proxy, request, query)
    if path == SETTLE or request.method not in (b"GET", b"HEAD"):
        return 405, "GET or HEAD; POST /settle\n"
    if path == b"/healthz":
        return 200, "alive\n"
    if path == b"/metrics":
        return 200, proxy.metrics()
    if path == b"/records":
        return 200, "".join(proxy.callers.lines())
    if path == b"/readyz":
        why = await proxy.ready()
        return (200, "ready\n") if why is None else (503, f"not ready: {why}\n")
    return 404, "GET /healthz, /readyz, /metrics or /records; POST /settle\n"


def _another_site(request: RequestHead, host: str) -> str | None:
    """Why a request may come from a page of another site in an operator's browser; None if it does not.

    Such a page can make its own name lead to this port, so a name in Host must be one that the operator chose.
    """
    headers = request.headers()
    if any(name == b"origin" for name, _ in headers):
        return "this port answers no pages: the request has an Origin"
    named = next((value.decode("latin-1") for name, value in headers if name == b"host"), None)
    if named is None:
        return None  # HTTP/1.0, which no browser speaks
    try:
        wanted = urlsplit(f"//{named}").hostname or ""
    except ValueError:
        wanted = ""
    if wanted in ("localhost", host.lower()):
        return None
    try:
        ip_address(wanted)
    except ValueError:
        return f"Host is the address of this port, localhost or the host of --admin, not {shown(named)}"
    return None


async def _settle(proxy: FencingProxy, request: RequestHead, query: bytes) -> tuple[int, str]:
    """What an operator knows: nothing of this name runs any more whose outcome was unknown."""
    # The header says who it was, and no page in an operator's browser can send it here.
    operators = [value for name, value in request.headers() if name == b"fenced-operator"]
    names = parse_qs(query.decode()).get("name", [])
    if len(operators) != 1 or not operators[0] or len(names) != 1:
        return (
            400,
            "POST /settle?name=NAME, with a header Fenced-Operator that says who you are\n",
        )
    try:
        settled, left = await proxy.gate.settle(check_name(names[0]))
    except Misuse as error:
        return 400, f"{error}\n"
    except FencedError as error:
        return 503, f"nothing was settled: {error}\n"
    at, by = datetime.now(UTC).isoformat(timespec="milliseconds"), operators[0].decode("latin-1")
    tokens = [permit.token for permit in settled]
    proxy.report(
        "audit " + json.dumps({"at": at, "by": by, "did": "settle", "name": names[0], "tokens": tokens})
    )
    text = f"{names[0]}: {len(settled)} settled\n"
    if left:
        text += f"{len(left)} left, of proxies that may be alive; if one is dead, repeat this in 4 seconds\n"
    return 200, text
