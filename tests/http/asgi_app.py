"""Counters behind ASGI: FastAPI with SQLAlchemy's AsyncSession.

`python -m tests.http.asgi_app DATABASE STORE DESCRIPTOR` serves on a socket that listens.
"""

import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Any

import uvicorn
from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from fenced import sql
from fenced.http import AsyncAtomic, Before, BeforeHandler, Receiver, atomic
from fenced.http.asgi import App
from tests.http.counting import ADD, LOOK, RULES, crash_if, guard_options, name_of, table_of


def make_app(database: str, store: str) -> App:
    engine = create_async_engine(database.replace("postgresql:", "postgresql+psycopg:"))
    apps: dict[str, App] = {}
    for rule in RULES:
        apps[f"/atomic/{rule}"] = _atomic(engine, rule)
        apps[f"/before/{rule}"] = Before(
            _before(engine, rule),
            store=f"{store}-{rule}",
            names={"/{id:int}": name_of("before", rule, 0).replace("0", "{id}")},
            rule=rule,  # type: ignore[arg-type]
        )
        handlers = BeforeHandler(f"{store}-{rule}", rule=rule)  # type: ignore[arg-type]
        decorated = _before(engine, rule, "handler", handlers(f"handler-{rule}/{{number}}"))
        decorated.add_middleware(Receiver)  # around it, FastAPI would answer 500 first
        apps[f"/handler/{rule}"] = decorated

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            async with _living(receive, send):
                await engine.dispose()
            return
        mount = scope["path"].rpartition("/")[0]
        await apps[mount]({**scope, "root_path": mount}, receive, send)

    return app


@asynccontextmanager
async def _living(receive: Any, send: Any) -> AsyncIterator[None]:
    await receive()
    await send({"type": "lifespan.startup.complete"})
    await receive()
    yield
    await send({"type": "lifespan.shutdown.complete"})


def _atomic(engine: Any, rule: str) -> App:
    app = FastAPI()
    app.add_middleware(Receiver)
    guard = sql.AsyncGuard(**guard_options(rule))  # type: ignore[arg-type]
    table = table_of("atomic", rule)

    async def operation(request: Request) -> AsyncIterator[AsyncAtomic[AsyncSession]]:
        replies = None if rule == "retry" else "fenced_replies"
        async with AsyncSession(engine) as session, atomic(guard, session, request, replies=replies) as found:
            yield found

    Operation = Annotated[Any, Depends(operation, scope="function")]  # noqa: N806 - a type

    @app.post("/{number}")
    async def add(number: int, request: Request, found: Operation) -> Any:
        crash_if(request.headers.get("x-crash"))
        qty = (await found.connection.execute(text(ADD.format(table=table, id=number)))).scalar_one()
        response = JSONResponse({"qty": qty}, 201)
        return response if rule == "retry" else await found.keep(response)

    @app.get("/{number}")
    async def look(number: int) -> Any:
        return await _look(engine, table, number)

    return app


def _before(
    engine: Any, rule: str, way: str = "before", judged: Callable[[Any], Any] = lambda handler: handler
) -> FastAPI:
    app = FastAPI()
    table = table_of(way, rule)

    @app.post("/{number}")
    @judged
    async def add(number: int, request: Request) -> Any:
        crash_if(request.headers.get("x-crash"))
        async with AsyncSession(engine) as session, session.begin():
            qty = (await session.execute(text(ADD.format(table=table, id=number)))).scalar_one()
        return JSONResponse({"qty": qty}, 201)

    @app.get("/{number}")
    async def look(number: int) -> Any:
        return await _look(engine, table, number)

    return app


async def _look(engine: Any, table: str, number: int) -> PlainTextResponse:
    async with engine.connect() as connection:
        found = await connection.execute(text(LOOK.format(table=table, id=number)))
        return PlainTextResponse(str(found.scalar_one()))


def serve_for_ever(app: App, listening: int) -> None:
    """Serve in a child process, and in the next one if that is killed: importing everything takes a second."""
    with socket.socket(fileno=listening) as listener:
        while True:
            child = os.fork()
            if child == 0:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_keep_alive=600)).run(
                    [listener]
                )
                os._exit(0)

            def end(*_: object, child: int = child) -> None:
                os.kill(child, signal.SIGKILL)
                os._exit(0)

            signal.signal(signal.SIGTERM, end)
            os.waitpid(child, 0)


if __name__ == "__main__":
    _, database, store, descriptor = sys.argv
    serve_for_ever(make_app(database, store), int(descriptor))
