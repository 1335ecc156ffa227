"""The proxy as a whole: listening, sweeping, metrics, and an end that loses nothing."""

from __future__ import annotations

import asyncio
import logging
import math
import ssl
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal
from urllib.parse import urlsplit

from fenced import __version__
from fenced.client import registry
from fenced.errors import (
    REFUSALS,
    FencedError,
    Misconfigured,
    MissingStamp,
    Misuse,
    Refused,
    Unavailable,
    redacted,
    shown,
)
from fenced.http1.exchanges import ServerExchange
from fenced.http1.heads import BadMessage
from fenced.http1.limits import SWEEP_SECONDS, HttpLimits
from fenced.http1.server import HttpServer, ListenOptions
from fenced.http1.writing import ServerReply
from fenced.metrics.numbers import Numbers, exposition
from fenced.net.problems import detail_of
from fenced.proofs import VerifyingKey
from fenced.proxy.callers import Caller, CallerRecords
from fenced.proxy.exchange import Exchange
from fenced.proxy.gate import Gate
from fenced.proxy.names import Naming
from fenced.proxy.passing import reply_of
from fenced.proxy.upstream import UpstreamPool
from fenced.runtime.aio import AioRuntime
from fenced.runtime.logs import LimitedLog, OutageLog

log = logging.getLogger("fenced.proxy")
STORE = "store"
"""The label of the guard of the marks."""
IDLE_UPSTREAM_SECONDS = 1.0
"""How long a connection to the upstream is kept: upstreams close idle ones, and a request may cross that."""


@dataclass(frozen=True, slots=True)
class ProxyOptions:
    """What an operator chooses. Times are in seconds."""

    upstream: str
    names: tuple[str, ...]
    store: str
    listen: tuple[str, int] = ("127.0.0.1", 8080)
    settle: float = 30.0
    """When the outcome of a request is unknown, newer tokens wait for so long: the upstream has ended it by then."""
    timeout: float = 20.0
    """How long the upstream may stay silent."""
    wait: float = 30.0
    """How long a newer request waits for older ones, before it is answered 503."""
    overtime: float = 10.0
    """How long a request may still take once a newer token waits."""
    alone: bool = False
    unnamed: Literal["refuse", "pass"] = "refuse"
    mode: str | None = None
    """Set this mode at the store when the proxy starts."""
    head_bytes_max: int = 32_768
    body_bytes_max: int = -1
    connections_max: int = 1000
    idle: float = 60.0
    """How long the connection of a client is kept between requests."""
    slow: float = 20.0
    """How long a client may take to send a head, and to send or take the next part of a body."""
    grace: float = 30.0
    """How long requests may take to finish when the proxy is stopped."""
    certificate: tuple[str, str] | None = None
    """Files: the chain of certificates, and the key."""
    upstream_ca: str | None = None
    keys: tuple[VerifyingKey, ...] = ()
    """With any, only stamps that one of them has signed count."""


@dataclass(slots=True)
class Counts:
    """What has happened since the proxy was started."""

    answers: Counter[int] = field(default_factory=Counter)
    """Of the upstream, by the first digit of their status."""
    own: Counter[int] = field(default_factory=Counter)
    """Of the proxy itself, by status."""


class FencingProxy:
    """A proxy in front of one upstream."""

    def __init__(self, options: ProxyOptions, report: Callable[[str], None] = lambda _: None) -> None:
        if not options.names:
            raise Misuse("a proxy needs at least one --name, such as 'orders/{path.id}'")
        if options.settle < options.timeout:
            raise Misuse(
                f"--settle ({options.settle:g} s) is shorter than --timeout ({options.timeout:g} s): a request that "
                "the proxy gave up would not be over at the upstream"
            )
        self.options = options
        self.report = report
        self.naming = Naming(options.names)
        self.counts = Counts()
        self.numbers = Numbers("proxy")
        # Each kind has a sample from the start: `increase()` sees no first event of a series that begins with it.
        self.numbers.start("fenced_refusals_total", *((STORE, kind) for kind in REFUSALS))
        self.numbers.start("fenced_unstamped_total", (STORE, "refuse"), (STORE, "pass"))
        self.numbers.set("fenced_build_info", 1, __version__)
        self.callers = CallerRecords()
        self.store_outages = OutageLog(log, "the store of the marks")
        self.upstream_outages = OutageLog(log, "the upstream")
        self._refusals = LimitedLog(log)
        self.runtime = AioRuntime()
        self.gate = Gate(
            registry.guard(options.store, self.runtime),
            self.runtime,
            settle=options.settle,
            alone=options.alone,
            report=report,
        )
        self.pool = _pool(options)
        self._tasks: set[asyncio.Task[None]] = set()
        self.server = HttpServer(
            self,
            ListenOptions(options.listen, certificate=options.certificate),
            HttpLimits(
                options.connections_max,
                head_bytes=options.head_bytes_max,
                request_time=options.slow,
                body_time=options.slow,
                idle_time=options.idle,
                half_open=True,
            ),
        )

    @property
    def stopping(self) -> bool:
        return self.server.stopping

    def begin(self, exchange: ServerExchange) -> None:
        """A request of a client."""
        Exchange(self, exchange).begin()

    def refusal(self, error: BadMessage) -> ServerReply:
        full = "this proxy has as many connections as it takes; try again later"
        found = reply_of(Unavailable(full) if error.status == 503 else error)
        self.counts.own[found.status] += 1
        return found

    async def start(self) -> tuple[str, int]:
        """Open the store and listen; returns the address."""
        for key in self.options.keys:
            key.verifies(b"", b"\2" * 64)  # a package that is missing is missed now
        await self.gate.open()
        if self.options.mode is not None:
            await self.gate.store.set_mode(self.options.mode)
        if (why := self.server.why_not_now()) is not None:
            log.warning("%s", why)
        (listening,) = await self.server.start()
        self.spawn(self._sweeping)
        host, port = listening.getsockname()[:2]
        return host, port

    async def _sweeping(self) -> None:
        """One timer for all connections to the upstream, as the server has one for those of the clients."""
        options = self.options
        seconds = min(SWEEP_SECONDS, options.timeout / 4, options.overtime / 4)
        timeout, idle = (math.ceil(limit / seconds) for limit in (options.timeout, IDLE_UPSTREAM_SECONDS))
        while True:
            await asyncio.sleep(seconds)
            self.pool.sweep(idle, timeout)

    def spawn(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        task = asyncio.get_running_loop().create_task(work())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        """Accept nothing more, finish what is in flight, and give the permits back."""
        await self.server.stop(self.options.grace, lambda: self.pool.busy)
        self.pool.close()
        await asyncio.sleep(0)
        await self.gate.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.runtime.close()

    async def ready(self) -> str | None:
        """None if requests can be decided; otherwise why not."""
        if self.stopping:
            return "stopping"
        try:
            await self.gate.store.modes()
        except FencedError as error:
            self.store_outages.note([error])
            return str(error)
        self.store_outages.worked()
        return None

    def note_refusal(self, error: FencedError) -> None:
        """Count it. The store records refusals; a line for each could fill a disk, so only some are logged."""
        self.store_outages.note([error])
        if isinstance(error, Refused):
            self.numbers.add("fenced_refusals_total", STORE, error.kind)
            self._refusals.warning(f"refused: {detail_of(error)}")

    def note_caller(self, caller: Caller, kind: str, ruling: str, name: str) -> None:
        self.callers.note(caller, kind, ruling, name, datetime.now(UTC))
        if kind == MissingStamp.kind:
            self.numbers.add("fenced_unstamped_total", STORE, ruling)

    def note_unknown(self, name: str, why: str) -> None:
        self.report(f"{name}: the outcome of a request is unknown: {why}")

    def metrics(self) -> str:
        """The counts, for Prometheus. Names are no labels: there may be any number of them."""
        numbers = self.numbers
        for digit, count in self.counts.answers.items():
            numbers.set("fenced_proxy_upstream_answers_total", count, f"{digit}xx")
        for status, count in self.counts.own.items():
            numbers.set("fenced_proxy_own_answers_total", count, str(status))
        numbers.set("fenced_proxy_requests_total", self.server.answered)
        numbers.set("fenced_proxy_unknown_total", self.gate.unknown)
        numbers.set("fenced_proxy_waiting", self.gate.waiting)
        numbers.set("fenced_proxy_connections", len(self.server.connections))
        numbers.set("fenced_proxy_upstream_connections", len(self.pool.open))
        if (certificate := self.server.certificate()) is not None:
            numbers.set("fenced_certificate_seconds", certificate[1], certificate[0])
        return exposition(numbers.samples())


def _pool(options: ProxyOptions) -> UpstreamPool:
    parts = urlsplit(options.upstream)
    try:
        port = parts.port
    except ValueError:
        port = -1
    plain = parts.path in ("", "/") and not parts.query and not parts.fragment and parts.username is None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == -1 or not plain:
        raise Misuse(
            f"an upstream is http://host:port or https://host:port, not {shown(redacted(options.upstream))}"
        )
    if parts.scheme == "http":
        return UpstreamPool(parts.hostname, port or 80, None, options.timeout)
    try:
        context = ssl.create_default_context(cafile=options.upstream_ca)
    except OSError as error:
        raise Misconfigured(f"{options.upstream_ca}: {error}") from error
    context.set_alpn_protocols(["http/1.1"])
    return UpstreamPool(parts.hostname, port or 443, context, options.timeout)
