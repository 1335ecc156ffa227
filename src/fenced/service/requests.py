"""The requests of one instance: which route each takes, and what is known of it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import parse_qsl, unquote

from msgspec import Struct

from fenced.http1.exchanges import ServerExchange
from fenced.http1.heads import Headers, RequestHead
from fenced.service.access import EVERYBODY, Admission, Principal
from fenced.service.bodies import BatchBody, RenewBody
from fenced.service.routes import ApiRoute

BODY_BYTES_MAX = 65_536
LARGE_BODY_BYTES_MAX = 2**20
"""Of a batch, and of a renewal of thousands of leases."""
FORM_BYTES_MAX = 4096
WORK = ("ask", "renew", "release", "withdraw", "batch")


class RequestHeaders:
    """The headers of a request, by their names in lower case."""

    __slots__ = ("_values", "raw")

    def __init__(self, raw: Headers) -> None:
        self.raw = raw
        self._values: dict[str, list[str]] = {}
        for name, value in raw:
            self._values.setdefault(name.decode("latin-1"), []).append(value.decode("latin-1"))

    def getlist(self, key: str) -> list[str]:
        return self._values.get(key, [])

    def get(self, key: str) -> str | None:
        found = self._values.get(key)
        return found[0] if found else None


class ServiceHead(Struct):
    """What a head says to this service, and what it decides. It is noted on the head, which clients send again."""

    route: ApiRoute
    headers: RequestHeaders
    query: Mapping[str, str]
    name: str
    """The one in the path."""
    body_max: int
    """How long the body may be."""
    is_work: bool
    """Whether `GroupedWork` carries it out, without a task."""
    admission: Admission | None = None


class Call(Struct):
    """One request: its namespace, its decoded body, and the rest."""

    exchange: ServerExchange
    head: ServiceHead
    body: Any = None
    namespace: str = "default"
    realm: str = ""
    by: Principal = EVERYBODY

    @property
    def headers(self) -> RequestHeaders:
        return self.head.headers

    @property
    def query(self) -> Mapping[str, str]:
        return self.head.query

    @property
    def name(self) -> str:
        return self.head.name

    @property
    def client(self) -> str | None:
        """Its address; None: it is at a Unix socket."""
        return self.exchange.peer


def _body_max(route: ApiRoute) -> int:
    if route.page:
        return FORM_BYTES_MAX
    return LARGE_BODY_BYTES_MAX if route.body in (BatchBody, RenewBody) else BODY_BYTES_MAX


class Router:
    """Which route a request takes. A path that a name is part of has one for each form of the path."""

    def __init__(self, routes: Iterable[ApiRoute]) -> None:
        self._exact: dict[str, dict[str, ApiRoute]] = {}
        self._named: dict[str, dict[str, ApiRoute]] = {}
        for route in routes:
            known = self._named if "{name}" in route.path else self._exact
            methods = known.setdefault(route.path, {})
            methods[route.method] = route
            if route.method == "GET":
                methods["HEAD"] = route
        # The longer ones first: /v1/names/{name} is also the form of /v1/names/{name}/force-release.
        self._patterns = [
            (re.compile(re.escape(path).replace(r"\{name\}", "(.+)"), re.DOTALL), methods)
            for path, methods in sorted(self._named.items(), key=lambda item: -len(item[0]))
        ]

    def find(self, head: RequestHead) -> ServiceHead | list[str] | None:
        """The route and what it needs; or the methods of the path, if this is none of them; None: no such path."""
        target, _, text = head.target.partition(b"?")
        path, method = unquote(target.decode("ascii")), head.method.decode()
        allowed: list[str] | None = None
        for name, methods in self._matching(path):
            if method in methods:
                query = dict(parse_qsl(text.decode("ascii"), keep_blank_values=True))
                route, headers = methods[method], RequestHeaders(head.headers())
                return ServiceHead(route, headers, query, name, _body_max(route), route.handler in WORK)
            allowed = allowed or sorted(methods)
        return allowed

    def _matching(self, path: str) -> Iterable[tuple[str, dict[str, ApiRoute]]]:
        if path in self._exact:
            yield "", self._exact[path]
        for pattern, methods in self._patterns:
            found = pattern.fullmatch(path)
            if found is not None:
                yield found[1], methods
