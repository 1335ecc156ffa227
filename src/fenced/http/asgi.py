"""Receivers for ASGI apps, such as those of FastAPI and Starlette."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from fenced.client import registry
from fenced.client.values import AsyncValues
from fenced.errors import Refused
from fenced.http.bodies import AsgiBody
from fenced.http.door import PATIENCE_SECONDS, Door, Visit
from fenced.http.kept import KeptReply
from fenced.http.naming import NOT_GUARDED, Names, namer
from fenced.http.protocol import SAFE_METHODS
from fenced.http.receiving import ANSWERED, SCOPE_KEY, Received, answer, is_stamped, read_request
from fenced.http.running import OVERTIME_SECONDS, cut_off
from fenced.net.problems import Problem
from fenced.proofs import VerifyingKey
from fenced.runtime.aio import AioRuntime
from fenced.values.decision import Rule

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class AsyncDoorway:
    """Opens a door at the first request of an event loop. Test clients start a new loop for each request."""

    def __init__(
        self, store: str | AsyncValues, rule: Rule, patience: float, overtime: float = OVERTIME_SECONDS
    ) -> None:
        self.door: Door | None = None
        self._store = store
        self._rule: Rule = rule
        self._patience = patience
        self._overtime = overtime
        self._runtime: AioRuntime | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opening = asyncio.Lock()

    def current(self) -> Door | None:
        """The door, if it is open in this event loop."""
        return self.door if self._loop is asyncio.get_running_loop() else None

    async def open(self) -> Door:
        async with self._opening:  # the first requests wait here until one of them has opened the store
            if (current := self.current()) is not None:
                return current
            if isinstance(self._store, AsyncValues):
                guard, runtime = self._store._guard, self._store._runtime
            else:
                if self._runtime is not None:
                    self._runtime.close()
                self._runtime = runtime = AioRuntime()
                guard = registry.guard(self._store, runtime)
            door = Door(guard, runtime, rule=self._rule, patience=self._patience, overtime=self._overtime)
            await door.open()
            if self.door is not None:
                door.records, door.counted = self.door.records, self.door.counted
            self.door, self._loop = door, asyncio.get_running_loop()
            return door

    async def close(self) -> None:
        """Close the store, unless it is the program's own."""
        if self.door is not None and self._runtime is not None:
            await self.door.store.close()
            self._runtime.close()


class Receiver:
    """Reads the stamp of each request for `fenced.http.atomic`, and answers refusals with problem documents.

        app.add_middleware(fenced.http.Receiver)

    With `keys`, each stamp needs a proof by one of them; otherwise a proof is passed on to the guard. In Starlette and
    FastAPI use `add_middleware`: around the whole app, their own error page would come first.
    """

    def __init__(self, app: App, *, keys: Sequence[VerifyingKey] = ()) -> None:
        self._app = app
        self._keys = tuple(keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def sending(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        body = _body_of(scope, receive) if is_stamped(scope["headers"]) else None
        try:
            scope[SCOPE_KEY] = _read(scope, body, self._keys)
            await self._app(scope, receive if body is None else body.receive, sending)
        except ANSWERED as error:
            if started:
                raise  # the client has a part of another answer already
            await _send(send, answer(error))


class Before:
    """Judges each request by a store of marks *before* the program runs.

        app.add_middleware(fenced.http.Before, store="redis://cache", names={"/orders/{id:int}": "orders/{id}"})

    The requests of this process are kept in order until the program has answered; those of other processes are not. The
    mark and the effect are two steps: after a crash in between, the effect may be missing. A client that sends or reads
    so slowly that a newer token waits for `overtime` seconds is cut off. WebSockets on guarded paths are refused.
    """

    def __init__(
        self,
        app: App,
        *,
        store: str | AsyncValues,
        names: Names,
        rule: Rule = "retry",
        keys: Sequence[VerifyingKey] = (),
        patience: float = PATIENCE_SECONDS,
        overtime: float = OVERTIME_SECONDS,
    ) -> None:
        self._app = app
        self._names = namer(names)
        self._keys = tuple(keys)
        self._rule: Rule = rule
        self._doorway = AsyncDoorway(store, rule, patience, overtime)

    @property
    def door(self) -> Door | None:
        """What it has counted and recorded; None before the first request."""
        return self._doorway.door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = scope["type"]
        if kind == "lifespan":
            await self._live(scope, receive, send)
        elif kind == "websocket":
            await self._judge_websocket(scope, receive, send)
        elif kind != "http" or (scope["method"] in SAFE_METHODS and not is_stamped(scope["headers"])):
            await self._app(scope, receive, send)
        else:
            await self._judge(scope, receive, send)

    async def _live(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        finally:
            await self._doorway.close()

    async def _judge_websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        """No lease covers what goes over a WebSocket: only its first request could carry a stamp."""
        path = _path(scope)
        if self._names(scope, path) != NOT_GUARDED:
            try:
                door = self._doorway.current() or await self._doorway.open()
                await door.upgrade(path)
            except ANSWERED as error:
                await _refuse_websocket(scope, receive, send, answer(error))
                return
        await self._app(scope, receive, send)

    async def _judge(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, method = _path(scope), scope["method"]
        names = self._names(scope, path)
        if names == NOT_GUARDED:
            await self._app(scope, receive, send)
            return
        client = _Client(receive, send)
        body = None if self._rule == "retry" else _body_of(scope, client.receive)
        try:
            try:
                received: Received | Refused = _read(scope, body, self._keys)
                scope[SCOPE_KEY] = received
            except Refused as error:
                received = error
            door = self._doorway.current() or await self._doorway.open()
            visit = await door.enter(
                received, names, about=path, reads=method in SAFE_METHODS, cut=client.cut_off
            )
        except ANSWERED as error:
            await _send(send, answer(error))
            return
        responding = _Responding(client.send)
        receiving = client.receive if body is None else body.receive
        sending = responding.send if visit.last is None else _Keeping(responding, door, visit).send
        try:
            await self._app(scope, receiving, sending)
        except ANSWERED as error:
            if responding.started:
                raise  # the client has a part of another answer already
            await _send(sending, answer(error))  # a reply like any other
        finally:
            door.leave(visit)


class _Client:
    """The client of one request, as the program sees it, until it is cut off."""

    __slots__ = ("_cancelled", "_cut", "_receive", "_send", "_waiting")

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._cut = False
        self._waiting: set[asyncio.Task[Any]] = set()
        """The tasks of the program that wait for the client."""
        self._cancelled: set[asyncio.Task[Any]] = set()
        """Those that `cut_off` has cancelled, which have not noticed it."""

    async def receive(self) -> Message:
        if self._cut:
            raise cut_off()
        task = self._begin_to_wait()
        try:
            return await self._receive()
        except asyncio.CancelledError:
            if not self._was_cut_off(task):
                raise
            raise cut_off() from None
        finally:
            self._waiting.discard(task)

    async def send(self, message: Message) -> None:
        # Also after the cut, as long as the client takes it: what the program has done must be answered.
        task = self._begin_to_wait()
        try:
            await self._send(message)
        except asyncio.CancelledError:
            if not self._was_cut_off(task):
                raise
            raise ConnectionAbortedError("a newer holder waits, and the client reads too slowly") from None
        finally:
            self._waiting.discard(task)

    def _begin_to_wait(self) -> asyncio.Task[Any]:
        task = asyncio.current_task()
        assert task is not None
        self._waiting.add(task)
        return task

    def _was_cut_off(self, task: asyncio.Task[Any]) -> bool:
        """Whether `cut_off` has cancelled this task, and nobody else has."""
        if task not in self._cancelled:
            return False
        self._cancelled.discard(task)
        return task.uncancel() == 0  # `cut_off` has cancelled it once

    def cut_off(self) -> bool:
        """Wake the program if it waits for the client. The request ends when the program does."""
        self._cut = True
        for task in self._waiting - self._cancelled:
            self._cancelled.add(task)
            task.cancel()
        return False


class _Responding:
    """Notes whether the program has begun to answer."""

    __slots__ = ("_send", "started")

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False

    async def send(self, message: Message) -> None:
        self.started = True
        await self._send(message)


class _Keeping:
    """Keeps the reply before its end is sent, if its Content-Length says that it is short enough."""

    def __init__(self, responding: _Responding, door: Door, visit: Visit) -> None:
        self._responding = responding
        self._door = door
        self._visit = visit
        self._start: Message = {}
        self._keeps = False
        self._body = bytearray()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            lengths = [
                value.decode("latin-1")
                for name, value in message.get("headers", ())
                if name.lower() == b"content-length"
            ]
            self._keeps = KeptReply.is_short(message["status"], lengths)
        elif message["type"] == "http.response.body":
            if self._keeps:
                self._body += message.get("body", b"")
            if not message.get("more_body", False):
                await self._door.keep(self._visit, self._start["status"], self._reply())
        await self._responding.send(message)

    def _reply(self) -> KeptReply | None:
        if not self._keeps:
            return None
        headers = [
            (bytes(name).decode("latin-1"), bytes(value).decode("latin-1"))
            for name, value in self._start.get("headers", ())
        ]
        return KeptReply.of(self._start["status"], headers, bytes(self._body))


def _path(scope: Scope) -> str:
    """The path below the place where the app is mounted, as routers see it."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path.removeprefix(root) if root and path.startswith(root + "/") else path


def _body_of(scope: Scope, receive: Receive) -> AsgiBody:
    return AsgiBody(receive, scope["headers"], scope.get("http_version", "1.1"))


def _read(scope: Scope, body: AsgiBody | None, keys: tuple[VerifyingKey, ...]) -> Received:
    query = scope.get("query_string", b"")
    return read_request(scope["method"], _path(scope), scope["headers"], keys, query=query, body=body)


async def _send(send: Send, answered: Problem) -> None:
    """Send an answer. The body of the request is not read, however long it is."""
    headers = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in answered.headers]
    await send({"type": "http.response.start", "status": answered.status, "headers": headers})
    await send({"type": "http.response.body", "body": answered.body})


async def _refuse_websocket(scope: Scope, receive: Receive, send: Send, answered: Problem) -> None:
    """Answer instead of accepting; a server that cannot send an answer there sends 403 by itself."""
    await receive()  # websocket.connect
    if "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close"})
        return
    headers = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in answered.headers]
    await send({"type": "websocket.http.response.start", "status": answered.status, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": answered.body})
