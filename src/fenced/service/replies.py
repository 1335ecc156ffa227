"""Requests and replies without a framework, for both ways of a request, and problem documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from msgspec import Struct
from starlette.datastructures import Address
from starlette.responses import Response

from fenced.net.problems import Problem, plain_problem


class HeadersOfRequest(Protocol):
    """Headers by their names in lower case."""

    @property
    def raw(self) -> list[tuple[bytes, bytes]]: ...
    def get(self, key: str, /) -> str | None: ...
    def getlist(self, key: str) -> list[str]: ...


class ServiceRequest(Protocol):
    """What is used of a request without its body. Starlette's requests have it, and those of the short way."""

    @property
    def headers(self) -> HeadersOfRequest: ...
    @property
    def query_params(self) -> Mapping[str, str]: ...
    @property
    def path_params(self) -> dict[str, Any]: ...
    @property
    def client(self) -> Address | None: ...


class ServiceReply(Struct):
    status: int
    headers: Sequence[tuple[str, str]]
    body: bytes


JSON = (("content-type", "application/json"),)
"""The headers of nearly all replies."""


class NotAdmitted(Exception):
    """A request that is answered by this problem before anything is done."""

    def __init__(self, found: Problem, *headers: tuple[str, str]) -> None:
        super().__init__(found.status)
        self.problem = found._replace(headers=[*found.headers, *headers])


def plain(status: int, title: str, detail: str) -> Problem:
    retry = "later" if status in (408, 429) else "no"
    return plain_problem(
        status, {"type": "about:blank", "title": title, "status": status, "detail": detail, "retry": retry}
    )


def as_response(found: Problem | ServiceReply) -> Response:
    return Response(found.body, found.status, dict(found.headers))
