"""Before, for single handlers: the same story in every framework, within this process."""

import asyncio
import itertools
import urllib.error
from collections.abc import Callable
from contextlib import suppress
from email.message import Message
from typing import Any

import flask
import pytest
from fastapi import FastAPI, HTTPException, Request, WebSocket
from fastapi.responses import JSONResponse
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Route

import fenced
from fenced.http import BeforeHandler, Receiver, WsgiReceiver, flask_answer
from fenced.values.model import Stamp
from tests.http.calling import call_asgi, call_wsgi, pairs_of
from tests.http.serving import Reply, stamp

STORES = itertools.count()
NAME = "valves/7"
Post = Callable[..., Reply]


def new_store() -> str:
    return f"memory:handlers-{next(STORES)}?mode=require"


class Valve:
    """Counts how often it was opened. The first attempt fails, and nothing has happened."""

    def __init__(self) -> None:
        self.opened = -1

    def open(self) -> dict[str, int]:
        self.opened += 1
        if not self.opened:
            raise fenced.Contended("somebody else turns it")
        return {"opened": self.opened}


def fastapi_of(valve: Valve, blocks: bool) -> Any:
    before, app = BeforeHandler(new_store(), rule="sequenced"), FastAPI()
    app.add_middleware(Receiver)

    async def open_valve(number: int, request: Request) -> Any:
        return JSONResponse(valve.open(), 201)

    def open_valve_blocking(number: int, request: Request) -> Any:
        return JSONResponse(valve.open(), 201)

    path = app.api_route("/valves/{number}", methods=["GET", "POST"])
    if blocks:
        path(before("valves/{number}")(open_valve_blocking))
    else:
        path(before("valves/{number}")(open_valve))
    return app


def starlette_of(valve: Valve) -> Any:
    before = BeforeHandler(new_store(), rule="sequenced")

    @before("valves/{number}")
    async def open_valve(request: Request) -> Any:
        return JSONResponse(valve.open(), 201)

    routes = [Route("/valves/{number:int}", open_valve, methods=["GET", "POST"])]
    return Starlette(routes=routes, middleware=[Middleware(Receiver)])


def flask_of(valve: Valve) -> Any:
    before, app = BeforeHandler(new_store(), rule="sequenced", request=flask.request), flask.Flask(__name__)
    app.register_error_handler(fenced.FencedError, flask_answer)

    @app.route("/valves/<int:number>", methods=["GET", "POST"])
    @before("valves/{number}")
    def open_valve(number: int) -> Any:
        return flask.make_response(valve.open(), 201)

    return WsgiReceiver(app.wsgi_app)


APPS: dict[str, Callable[[Valve], Any]] = {
    "fastapi": lambda valve: fastapi_of(valve, blocks=False),
    "fastapi-blocking": lambda valve: fastapi_of(valve, blocks=True),
    "starlette": starlette_of,
    "flask": flask_of,
}


@pytest.mark.parametrize("framework", APPS)
async def test_a_decorated_handler(framework: str) -> None:
    valve = Valve()
    app = APPS[framework](valve)

    async def call(method: str, fence: Stamp | None, path: str = "/valves/7", by: bytes = b"owner") -> Reply:
        headers = [*pairs_of(fence), (b"authorization", by)]
        if framework == "flask":
            return call_wsgi(app, method, path, headers)
        return await call_asgi(app, method, path, headers)

    first = stamp(2, 1, NAME)
    assert (await call("POST", first)).kind == "contended"
    assert (await call("POST", first)).body.replace(b" ", b"").strip() == b'{"opened":1}', "it runs now"
    assert (await call("POST", first)).replayed
    stranger = await call("POST", first, by=b"somebody else")
    assert (stranger.kind, stranger.replayed) == ("applied", False)
    assert (await call("POST", stamp(2, 2, NAME), "/valves/07")).status == 201, "the name is what is opened"
    assert (await call("POST", stamp(1, 9, NAME))).kind == "stale"
    assert (await call("POST", stamp(3, 1, "valves/8"))).kind == "uncovered"
    assert (await call("POST", None)).kind == "missing"
    assert valve.opened == 2
    assert (await call("GET", None)).status == 201, "a safe method passes"
    assert (await call("GET", stamp(4, 0, NAME))).status == 201
    assert (await call("POST", stamp(3, 1, NAME))).kind == "stale", "the read has announced"


@pytest.mark.parametrize("framework", ["fastapi", "flask"])
def test_a_stranger_that_the_handler_turns_away_leaves_nothing(framework: str) -> None:
    """By an exception of the framework. Any other one says nothing about what has happened."""

    class Locked(Valve):
        def __init__(self) -> None:
            super().__init__()
            self.opened, self.status = 0, 401

        def open(self) -> dict[str, int]:
            if self.status == 201:
                return super().open()
            if self.status == 500:  # of another service, which the handler has called
                raise urllib.error.HTTPError("http://a", 404, "", Message(), None)
            if framework == "flask":
                flask.abort(self.status)
            raise HTTPException(self.status)

    valve = Locked()
    app = APPS[framework](valve)

    def post(seq: int, status: int) -> Reply:
        valve.status, mine = status, pairs_of(stamp(1, seq, NAME))
        if framework == "flask":
            return call_wsgi(app, "POST", "/valves/7", mine)
        return asyncio.run(call_asgi(app, "POST", "/valves/7", mine))

    assert [post(1, 401).status, post(1, 404).status, post(1, 201).status] == [401, 404, 201]
    assert post(1, 201).replayed
    with suppress(urllib.error.HTTPError):
        post(2, 500)
    assert post(2, 201).kind == "indeterminate"


async def test_handlers_that_share_names_are_ordered_with_each_other() -> None:
    log: list[str] = []
    begun, release = asyncio.Event(), asyncio.Event()
    before, app = BeforeHandler(new_store()), FastAPI()
    app.add_middleware(Receiver)

    @app.post("/open")
    @before(NAME)
    async def open_valve(request: Request) -> str:
        begun.set()
        await release.wait()
        log.append("opened")
        return "opened"

    @app.post("/close")
    @before(NAME)
    async def close_valve(request: Request) -> str:
        log.append("closed")
        return "closed"

    old = asyncio.create_task(call_asgi(app, "POST", "/open", pairs_of(stamp(1, 1, NAME))))
    await begun.wait()
    assert before.door is not None
    (running,) = before.door.running._by_name[NAME]
    new = asyncio.create_task(call_asgi(app, "POST", "/close", pairs_of(stamp(2, 1, NAME))))
    while running.ended is None and not new.done():  # until it waits, or does not
        await asyncio.sleep(0)
    release.set()
    assert [(await old).status, (await new).status] == [200, 200]
    assert log == ["opened", "closed"]


def received(name: str = NAME) -> dict[str, Any]:
    """An environment that a receiver has read."""
    found: dict[str, Any] = {}

    def app(environ: dict[str, Any], start_response: Any) -> Any:
        found.update(environ)
        start_response("200 OK", [])
        return []

    call_wsgi(WsgiReceiver(app), "POST", "/", pairs_of(stamp(1, 1, name)))
    return found


def test_names_of_several_things_and_of_none() -> None:
    before = BeforeHandler(new_store())

    @before("valves/{first}", "valves/{second.id}")
    def swap(request: Any, first: str, second: Any = None) -> str:
        return "swapped"

    class Second:
        id = 8

    assert swap(received("valves/8"), "8", Second) == "swapped", "one thing twice"
    with pytest.raises(fenced.Uncovered, match="valves/8"):
        swap(received(), "7", Second)
    for first in ("7/open", ""):  # not one segment
        with pytest.raises(fenced.Uncovered, match="no name is known"):
            swap(received(), first, Second)
    with pytest.raises(fenced.Misuse, match="field"):
        swap(received(), "7")

    @before("valves/{number}")
    def anything(*args: Any, **kwargs: Any) -> str:
        return "opened"

    assert anything(received(), number=7) == "opened"
    with pytest.raises(fenced.Uncovered):
        anything(received(), number=8)


def websocket_app() -> Any:
    app, before = FastAPI(), BeforeHandler(new_store())
    app.add_middleware(Receiver)

    @app.websocket("/")
    @before(NAME)
    async def talk(websocket: WebSocket) -> None:
        await websocket.accept()

    return app


def test_misuse_of_the_decorator() -> None:
    once = BeforeHandler(new_store(), rule="once")
    wrong: list[Any] = [(), (7,), ("a/{b",), ("a/{}",), ("a/1", "a/2")]
    for names in wrong:
        with pytest.raises(fenced.Misuse):
            once(*names)
    with pytest.raises(fenced.Misuse, match="Receiver"):
        once(NAME)(lambda: "no request")()
    with pytest.raises(fenced.Misuse, match="takes a response"):
        once(NAME)(lambda request: "not a response")(received())

    async def open_valve(request: Any) -> None: ...

    with pytest.raises(fenced.Misuse, match="block"):
        once(NAME)(open_valve)

    class Awaitable:
        def __await__(self) -> Any: ...

    with pytest.raises(fenced.Misuse, match="coroutine function"):
        BeforeHandler(new_store())(NAME)(lambda request: Awaitable())(received())
    with pytest.raises(fenced.Misuse, match="generator"):
        BeforeHandler(new_store())(NAME)(lambda request: (yield))
    websocket = {"type": "websocket", "path": "/", "headers": [], "query_string": b""}
    with pytest.raises(fenced.Misuse, match="Receiver"):
        asyncio.run(websocket_app()(websocket, None, None))
    with fenced.Values(new_store()) as values, pytest.raises(fenced.Misuse, match="block"):
        BeforeHandler(values)(NAME)(open_valve)
