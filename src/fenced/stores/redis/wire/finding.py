"""Which server a Redis connection goes to: the one of the address, or the one that sentinels or a cluster name.

A route remembers the server that it found. `forget` makes it search again: after a connection broke, and after a server
replied that it is no primary. Whether a token may be minted is not decided here: the scripts decide it, by the lineage.
"""

from __future__ import annotations

import binascii
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

from fenced.errors import Misconfigured, Unavailable
from fenced.stores.redis.address import ClusterAddress, RedisAddress, SentinelAddress
from fenced.stores.redis.wire.refusals import connect_failed, login_refused, refused
from fenced.stores.redis.wire.resp import ErrorReply, Incomplete, RespReader, command
from fenced.values.contracts import ByteStream, Endpoint, Runtime

SLOTS = 16_384
REDIRECTS_MAX = 4
"""A cluster that redirects a request more often than this is being reconfigured: the caller retries later."""
Member = tuple[str, int]


class Route(Protocol):
    """Where new connections go."""

    found: bool
    """Whether it searches for the primary. Then a server must confirm that it is one before a connection is used."""

    async def endpoint(self, until: float) -> Endpoint:
        """The server to connect to. Unavailable if no member names it."""

    def forget(self, endpoint: Endpoint) -> None:
        """The server is gone, or is no primary any more: search again before the next connection."""

    def moved(self, endpoint: Member) -> None:
        """A server has replied that another one has our keys now."""


class DirectRoute:
    """The one server that the address names."""

    found = False

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    async def endpoint(self, until: float) -> Endpoint:
        return self._endpoint

    def forget(self, endpoint: Endpoint) -> None:
        return

    def moved(self, endpoint: Member) -> None:
        return


class _FoundRoute(ABC):
    """Asks several servers, one after the other, and remembers the first answer."""

    found = True

    def __init__(self, address: RedisAddress, runtime: Runtime) -> None:
        self._address = address
        self._runtime = runtime
        self._members = list(address.members)
        """The servers to ask; the one that answered last comes first."""
        self._known: Member | None = None

    async def endpoint(self, until: float) -> Endpoint:
        # No lock: several callers may search at the same time, and each result is valid.
        if self._known is None:
            self._known = await self._look(until)
        return self._known

    def forget(self, endpoint: Endpoint) -> None:
        if self._known == endpoint:
            self._known = None

    def moved(self, endpoint: Member) -> None:
        self._known = endpoint

    async def _look(self, until: float) -> Member:
        errors: list[str] = []
        for index, member in enumerate(list(self._members)):
            share = (until - self._runtime.now()) / (len(self._members) - index)
            try:
                found = await self._ask(member, self._runtime.now() + share)
            except Unavailable as error:
                errors.append(str(error))
                continue
            self._members.sort(key=lambda each: each != member)
            return found
        raise Unavailable(f"{self._address.url}: no member names a primary: {'; '.join(errors)}")

    @abstractmethod
    async def _ask(self, member: Member, until: float) -> Member:
        """What one member says. Unavailable: ask the next one."""

    async def _asked(self, member: Member, words: Sequence[str], login: Sequence[str], until: float) -> Any:
        """The reply of one member to one command, on a separate connection."""
        where = f"{member[0]}:{member[1]}"
        requests = [command("AUTH", *login)] if login else []
        requests.append(command(*words))
        try:
            stream = self._runtime.stream(await self._runtime.connect(member, until, self._address.context))
            try:
                reader = RespReader()
                await stream.send(b"".join(requests), until)
                replies = [await read_reply(stream, reader, until) for _ in requests]
            finally:
                stream.close()
        except (OSError, ValueError) as error:
            raise connect_failed(error, where) from error
        if isinstance(replies[0], ErrorReply):
            raise login_refused(replies[0], where) if login else refused(replies[0], where)
        if isinstance(replies[-1], ErrorReply):
            raise refused(replies[-1], where)
        return replies[-1]


class SentinelRoute(_FoundRoute):
    """Asks sentinels which server is the primary of a set."""

    def __init__(self, address: SentinelAddress, runtime: Runtime) -> None:
        super().__init__(address, runtime)
        self._set = address.set
        self._login = address.sentinel_login

    async def _ask(self, member: Member, until: float) -> Member:
        words = ("SENTINEL", "get-master-addr-by-name", self._set)
        found = await self._asked(member, words, self._login, until)
        if not found:
            raise Misconfigured(f"{self._address.url}: this sentinel watches no set {self._set!r}")
        return found[0].decode(), int(found[1])


class ClusterRoute(_FoundRoute):
    """Asks the nodes of a cluster which of them has the slot of our keys."""

    def __init__(self, address: ClusterAddress, runtime: Runtime, key: str) -> None:
        super().__init__(address, runtime)
        self._slot = slot_of(key)
        self._login = address.login

    async def _ask(self, member: Member, until: float) -> Member:
        ranges = await self._asked(member, ("CLUSTER", "SLOTS"), self._login, until)
        for first, last, primary, *_ in ranges:
            if first <= self._slot <= last:
                return primary[0].decode() or member[0], primary[1]
        raise Unavailable(f"{member[0]}:{member[1]}: no node of its cluster has slot {self._slot} now")


def route_to(address: RedisAddress, runtime: Runtime, key: str) -> Route:
    """The route of an address, for connections that serve this key."""
    if isinstance(address, SentinelAddress):
        return SentinelRoute(address, runtime)
    if isinstance(address, ClusterAddress):
        return ClusterRoute(address, runtime, key)
    return DirectRoute(address.endpoint)


def slot_of(key: str | bytes) -> int:
    """The slot of a key: the hash of the part in its first braces, or of the whole key if there are none."""
    raw = key.encode() if isinstance(key, str) else key
    _, opened, rest = raw.partition(b"{")
    tag, closed, _ = rest.partition(b"}")
    return binascii.crc_hqx(tag if opened and closed and tag else raw, 0) % SLOTS


def redirection(reply: Any, asked: Endpoint) -> tuple[Member, bool] | None:
    """Where a reply redirects us, and whether for this request only (ASK); None: it is no redirection.

    The node did not carry out the request, so the same request may be sent to the other node.
    """
    if not isinstance(reply, ErrorReply) or reply.code not in ("MOVED", "ASK"):
        return None
    with contextlib.suppress(ValueError, IndexError):
        host, _, port = str(reply).split()[2].rpartition(":")
        if not host and isinstance(asked, tuple):
            host = asked[0]
        return (host, int(port)), reply.code == "ASK"
    return None


async def read_reply(stream: ByteStream, reader: RespReader, until: float) -> Any:
    """The next reply of a stream. OSError: no reply in time, or the connection has ended."""
    while True:
        if reader.has_bytes:
            with contextlib.suppress(Incomplete):
                return reader.next()
        reader.feed(await stream.receive(until))
