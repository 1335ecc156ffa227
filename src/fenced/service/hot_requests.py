"""Requests of the short way: the heads that connections remember, and the request that a connection answers now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from msgspec import Struct
from starlette.datastructures import Address

from fenced.service.access import Admission
from fenced.service.held import HeldAnswer
from fenced.service.routes import ApiRoute
from fenced.service.work import Work


class RawHeaders:
    """The headers of a request as they arrived, with names in lower case."""

    __slots__ = ("_values", "raw")

    def __init__(self, raw: list[tuple[bytes, bytes]]) -> None:
        self.raw = raw
        self._values: dict[str, list[str]] = {}
        for name, value in raw:
            self._values.setdefault(name.decode("latin-1"), []).append(value.decode("latin-1"))

    def getlist(self, key: str) -> list[str]:
        return self._values.get(key, [])

    def get(self, key: str, /) -> str | None:
        found = self._values.get(key)
        return found[0] if found else None


class HotHead(Struct):
    """What the parser has read in the head of a request, and what the head decides."""

    route: ApiRoute
    headers: RawHeaders
    query: Mapping[str, str]
    namespace: str
    length: int
    """Of the body."""
    admission: Admission | None = None


class HotRequest:
    """The request on the short way of one connection, which has one at a time, and uses this object again.

    It stands where uvicorn has its cycle, so what comes behind it is queued.
    """

    __slots__ = (
        "client",
        "disconnected",
        "head",
        "held",
        "keep_alive",
        "realm",
        "response_complete",
        "work",
    )
    head: HotHead
    work: Work
    """There from `Api.serve` to `Api.finish`."""
    realm: str
    path_params: ClassVar[dict[str, Any]] = {}

    def __init__(self, client: Address | None) -> None:
        self.client = client
        self.disconnected = False
        self.response_complete = True
        self.keep_alive = True
        """uvicorn makes it False when the server stops."""
        self.held: HeldAnswer | None = None
        """What holds the answer if that is waiting."""

    @property
    def headers(self) -> RawHeaders:
        return self.head.headers

    @property
    def query_params(self) -> Mapping[str, str]:
        return self.head.query

    @property
    def message_event(self) -> HotRequest:
        """uvicorn sets this event when the connection is lost. Nothing waits for it here."""
        return self

    def set(self) -> None:
        return
