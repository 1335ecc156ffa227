"""Receivers for WSGI apps, such as those of Flask."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from http import HTTPStatus
from types import TracebackType
from typing import Any

from fenced.client import registry
from fenced.client.values import Values
from fenced.errors import Refused
from fenced.http.bodies import WsgiBody
from fenced.http.door import PATIENCE_SECONDS, Door, Visit
from fenced.http.kept import KeptReply
from fenced.http.naming import NOT_GUARDED, Names, namer
from fenced.http.protocol import SAFE_METHODS
from fenced.http.receiving import (
    ANSWERED,
    CREDENTIALS,
    OUR_HEADERS,
    SCOPE_KEY,
    Received,
    answer,
    read_request,
)
from fenced.http.running import OVERTIME_SECONDS, cut_off
from fenced.net.problems import Problem
from fenced.proofs import VerifyingKey
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.values.decision import Rule

Environ = dict[str, Any]
ExcInfo = tuple[type[BaseException], BaseException, TracebackType]
StartResponse = Callable[..., Callable[[bytes], object]]
WsgiApp = Callable[[Environ, StartResponse], Iterable[bytes]]

_HEADERS = [
    (f"HTTP_{name.decode().upper().replace('-', '_')}", name) for name in sorted(OUR_HEADERS | CREDENTIALS)
]
_STATUSES = frozenset(HTTPStatus)


class Doorway:
    """Opens a door at the first request."""

    def __init__(
        self, store: str | Values, rule: Rule, patience: float, overtime: float = OVERTIME_SECONDS
    ) -> None:
        self.door: Door | None = None
        self._store = store
        self._rule: Rule = rule
        self._patience = patience
        self._overtime = overtime
        self._opening = threading.Lock()

    def open(self) -> Door:
        with self._opening:  # the first requests wait here until one of them has opened the store
            if self.door is None:
                store = self._store
                guard = (
                    store._guard if isinstance(store, Values) else registry.guard(store, BlockingRuntime())
                )
                door = Door(
                    guard,
                    BlockingRuntime(),
                    rule=self._rule,
                    patience=self._patience,
                    overtime=self._overtime,
                )
                step(door.open())
                self.door = door
            return self.door


class WsgiReceiver:
    """Reads the stamp of each request for `fenced.http.atomic`, and answers what is not a stamp.

        app.wsgi_app = fenced.http.WsgiReceiver(app.wsgi_app)  # Flask

    Flask and Django answer the errors of their views themselves: register `fenced.http.flask_answer` as an error
    handler, or use `fenced.django.ReceiverMiddleware`. With `keys`, each stamp needs a proof by one of them.
    """

    def __init__(self, app: WsgiApp, *, keys: Sequence[VerifyingKey] = ()) -> None:
        self._app = app
        self._keys = tuple(keys)

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        try:
            body = WsgiBody(environ)
            received = environ[SCOPE_KEY] = _read(environ, body, self._keys)
            if received.stamp is not None and "wsgi.input" in environ:
                environ["wsgi.input"] = body
            return self._app(environ, start_response)
        except ANSWERED as error:
            return _respond(start_response, answer(error))


class WsgiBefore:
    """Judges each request by a store of marks *before* the program runs. See `Before`.

    app.wsgi_app = fenced.http.WsgiBefore(app.wsgi_app, store=URL, names={"/orders/{id:int}": "orders/{id}"})
    """

    def __init__(
        self,
        app: WsgiApp,
        *,
        store: str | Values,
        names: Names,
        rule: Rule = "retry",
        keys: Sequence[VerifyingKey] = (),
        patience: float = PATIENCE_SECONDS,
        overtime: float = OVERTIME_SECONDS,
    ) -> None:
        self._app = app
        self._names = namer(names)
        self._keys = tuple(keys)
        self._doorway = Doorway(store, rule, patience, overtime)

    @property
    def door(self) -> Door | None:
        """What it has counted and recorded; None before the first request."""
        return self._doorway.door

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        reads, upgrades = environ["REQUEST_METHOD"] in SAFE_METHODS, _upgrades(environ)
        path = _path(environ)
        passes = reads and not upgrades and not _is_stamped(environ)
        names = NOT_GUARDED if passes else self._names(environ, path)
        if names == NOT_GUARDED:
            return self._app(environ, start_response)
        client = _WsgiClient()
        body = _CutBody(environ, client)
        try:
            try:
                received: Received | Refused = _read(environ, body, self._keys)
                environ[SCOPE_KEY] = received
            except Refused as error:
                received = error
            door = self._doorway.door or self._doorway.open()
            if upgrades:
                step(door.upgrade(path))
            visit = step(door.enter(received, names, about=path, reads=reads, cut=client.cut_off))
        except ANSWERED as error:
            return _respond(start_response, answer(error))
        if visit.running is not None and "wsgi.input" in environ:
            environ["wsgi.input"] = body
        return self._run(_WsgiResponding(door, visit, client, start_response), environ)

    def _run(self, responding: _WsgiResponding, environ: Environ) -> Iterable[bytes]:
        try:
            try:
                responding.body = self._app(environ, responding.start)
            except ANSWERED as error:
                if responding.status:
                    raise  # the program has begun another answer
                responding.body = _respond(responding.start, answer(error))  # a reply like any other
        except BaseException:
            responding.leave()
            raise
        return responding


class _WsgiClient:
    """The client of one request. A thread that waits for it cannot be woken, so it is cut off when it goes on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cut = self._waits = self._ended = False

    def begin_to_wait(self, *, reads: bool) -> None:
        """From now on this thread waits for the client, and does nothing else of the request."""
        with self._lock:  # a few lines that never wait
            if self._cut and reads:
                raise cut_off()
            self._waits = True

    def go_on(self) -> None:
        with self._lock:
            self._waits = False
        # Safe: it was taken for ended while it waited, so its program must not go on. Nobody sets this any more.
        if self._ended:
            raise cut_off()

    def cut_off(self) -> bool:
        with self._lock:
            self._cut = True
            self._ended = self._ended or self._waits
            return self._waits


class _CutBody(WsgiBody):
    """A body from which a program can read until its client is cut off."""

    def __init__(self, environ: Environ, client: _WsgiClient) -> None:
        super().__init__(environ)
        self._client = client

    def read(self, size: int | None = None) -> bytes:
        self._client.begin_to_wait(reads=True)
        try:
            return super().read(size)
        finally:
            self._client.go_on()

    def readline(self, size: int | None = None) -> bytes:
        self._client.begin_to_wait(reads=True)
        try:
            return super().readline(size)
        finally:
            self._client.go_on()


class _WsgiResponding:
    """The answer of the program. The request has ended when the server calls `close`."""

    def __init__(self, door: Door, visit: Visit, client: _WsgiClient, start_response: StartResponse) -> None:
        self.body: Iterable[bytes] = ()
        self.status = 0
        self._door = door
        self._visit = visit
        self._client = client
        self._start_response = start_response
        self._headers: list[tuple[str, str]] = []

    def start(
        self, status: str, headers: list[tuple[str, str]], exc_info: ExcInfo | None = None
    ) -> Callable[[bytes], object]:
        self.status, self._headers = int(status.split(" ", 1)[0]), list(headers)
        if exc_info is None:
            return self._start_response(status, headers)
        return self._start_response(status, headers, exc_info)

    def __iter__(self) -> Iterator[bytes]:
        for part in self.body if self._visit.last is None else self._kept():
            self._client.begin_to_wait(reads=False)
            yield part  # the server sends it before it asks for the next one
            self._client.go_on()

    def _kept(self) -> Iterator[bytes]:
        """The parts of a reply that is kept before its end is sent."""
        kept = bytearray()
        held = b""
        for part in self.body:
            if not self._is_short():  # not known before the first part is there
                yield part  # streamed: at once
                continue
            if held:
                yield held
            kept += part
            held = part
        reply = KeptReply.of(self.status, self._headers, bytes(kept)) if self._is_short() else None
        step(self._door.keep(self._visit, self.status, reply))
        if held:
            yield held

    def _is_short(self) -> bool:
        lengths = [value for name, value in self._headers if name.lower() == "content-length"]
        return KeptReply.is_short(self.status, lengths)

    def close(self) -> None:
        try:
            if hasattr(self.body, "close"):
                self.body.close()
        finally:
            self.leave()

    def leave(self) -> None:
        self._door.leave(self._visit)


def _headers(environ: Environ) -> list[tuple[bytes, bytes]]:
    """A server joins repeated headers with commas. Two strings in quotation marks are not one, so that is refused."""
    return [(name, environ[key].encode("latin-1", "replace")) for key, name in _HEADERS if key in environ]


def _is_stamped(environ: Environ) -> bool:
    return any(key in environ for key, name in _HEADERS if name in OUR_HEADERS)


def _upgrades(environ: Environ) -> bool:
    """Whether a server may leave HTTP for this request. A client that offers h2c also speaks HTTP/1.1."""
    return str(environ.get("HTTP_UPGRADE", "h2c")).strip().lower() != "h2c"


def _read(environ: Environ, body: WsgiBody, keys: tuple[VerifyingKey, ...]) -> Received:
    query = environ.get("QUERY_STRING", "").encode("latin-1", "replace")
    return read_request(
        environ["REQUEST_METHOD"], _path(environ), _headers(environ), keys, query=query, body=body
    )


def _path(environ: Environ) -> str:
    """PEP 3333: bytes as Latin-1, decoded as UTF-8 by every framework."""
    path: str = environ.get("PATH_INFO", "")
    return path.encode("latin-1", "replace").decode("utf-8", "replace") or "/"


def _respond(start_response: StartResponse, answered: Problem) -> Iterable[bytes]:
    """Answer. The body of the request is not read, however long it is."""
    known = answered.status in _STATUSES
    # A kept reply may have one of its own.
    phrase = HTTPStatus(answered.status).phrase if known else "Unknown"
    start_response(f"{answered.status} {phrase}", list(answered.headers))
    return [answered.body]
