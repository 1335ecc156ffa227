"""Serving: a gate in front of an app that answers only while a lease is held."""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping
from typing import Any, Protocol

BODY = b"This instance does not hold the lease.\n"


class Served(Protocol):
    """A lease, of either colour."""

    def serving(self) -> bool: ...


Source = Served | Callable[[], Served | None]


class _Gate:
    def __init__(
        self, app: Callable[..., Any], lease: Source, *, retry_after: int = 1, ready: str = "/ready"
    ) -> None:
        self._app = app
        self._lease: Callable[[], Served | None] = lease if callable(lease) else lambda: lease
        self._ready = ready
        self._headers = [
            ("content-type", "text/plain; charset=utf-8"),
            ("content-length", str(len(BODY))),
            ("retry-after", str(retry_after)),
        ]

    def _serves(self) -> bool:
        lease = self._lease()
        return lease is not None and lease.serving()


class Serving(_Gate):
    """ASGI: 503 with Retry-After while the lease is not held; `/ready` says the same to a balancer.

        app.add_middleware(fenced.http.Serving, lease=lambda: app.state.lease)

    Best-effort: a pause can come between the question and the answer. It keeps readers away from a leader that knows it
    is none; writes need a guard.
    """

    async def __call__(
        self, scope: MutableMapping[str, Any], receive: Callable[..., Any], send: Callable[..., Any]
    ) -> None:
        serves = scope["type"] not in ("http", "websocket") or self._serves()
        if serves and scope.get("path") != self._ready:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1013})
        elif serves:
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body", "body": b""})
        else:
            headers = [(name.encode(), value.encode()) for name, value in self._headers]
            await send({"type": "http.response.start", "status": 503, "headers": headers})
            await send({"type": "http.response.body", "body": BODY})


class WsgiServing(_Gate):
    """WSGI: the same as `Serving`.

    app.wsgi_app = fenced.http.WsgiServing(app.wsgi_app, lease=lambda: current_lease)
    """

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if not self._serves():
            start_response(
                "503 Service Unavailable", [(name.title(), value) for name, value in self._headers]
            )
            return [BODY]
        if environ.get("PATH_INFO") == self._ready:
            start_response("204 No Content", [])
            return []
        answer: Iterable[bytes] = self._app(environ, start_response)
        return answer
