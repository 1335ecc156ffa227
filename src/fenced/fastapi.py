"""A dependency of FastAPI that leases what a request writes, and answers for what can go wrong.

Guarded = fenced.fastapi.guarded(orders, sessions, leases, wait=2, id=int)
fenced.fastapi.answers(app)

@app.post("/orders/{id}/sell")
async def sell(id: int, session: Annotated[AsyncSession, Guarded]):
    (await session.get_one(Order, id)).qty -= 1
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

from fenced.client import registry

try:
    from fastapi import Depends, FastAPI, Request, Response
except ImportError as error:
    raise registry.needs_package(__name__, error) from error

from fenced.client.faces import AsyncClient
from fenced.errors import FencedError, Misuse, NotGranted, shown
from fenced.http.receiving import answer
from fenced.net.problems import plain_problem
from fenced.sql import AsyncGuard
from fenced.values.timing import Seconds

__all__ = ["answers", "guarded"]


def __dir__() -> list[str]:
    return __all__


WAIT_SECONDS = 10.0
"""A request does not wait for ever."""


def guarded(
    guard: AsyncGuard,
    connections: Callable[[], AbstractAsyncContextManager[Any]],
    leases: AsyncClient | Callable[[], AsyncClient],
    *,
    ttl: Seconds = 10.0,
    wait: Seconds = WAIT_SECONDS,
    max_hold: Seconds | None = None,
    still_held: bool = False,
    **columns: type,
) -> Any:
    """A dependency: lease the row's name, take a connection, and begin a guarded transaction on it.

    The columns of the guard's name are parameters of the request, of the path if it has them: `columns` gives their
    types, by default str. `connections` and `leases` are called for each request: `async_sessionmaker(engine)`,
    `lambda: app.state.pool.acquire()`. The handler gets the connection, and the lease as `request.state.lease`. The
    transaction is committed and the lease released before the answer is sent. If the lease is lost, the handler is
    cancelled, and what it wrote is rolled back.
    """
    if not isinstance(guard, AsyncGuard):
        raise Misuse(
            f"give an AsyncGuard, not {shown(guard)}: FastAPI may end a blocking block in another thread"
        )
    if unknown := columns.keys() - set(guard.columns):
        raise Misuse(f"the name of {guard.table} has no column {', '.join(sorted(unknown))}")

    async def dependency(request: Request, **row: object) -> AsyncIterator[Any]:
        client = leases if isinstance(leases, AsyncClient) else leases()
        held = client.hold(guard.name_for(**row), ttl=ttl, wait=wait, max_hold=max_hold)
        # The connection is taken under the lease, so that requests which wait for one hold no connection.
        async with held as lease, connections() as connection:
            request.state.lease = lease
            async with guard.transaction(connection, lease, still_held=still_held):
                yield connection

    # What FastAPI reads: the request, and one parameter for each column.
    kind = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter("request", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Request)]
    parameters += [inspect.Parameter(each, kind, annotation=columns.get(each, str)) for each in guard.columns]
    dependency.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    # By default FastAPI ends a dependency after the answer: the caller would have its 200 before COMMIT is refused.
    return Depends(dependency, scope="function")


def answers(app: FastAPI) -> None:
    """Answer the errors of leases and guards as the protocol says.

    412 for who was overtaken and must not retry; 503 with Retry-After for what another try may get, such as a name that
    was not granted in time.
    """
    app.add_exception_handler(FencedError, _answered)


async def _answered(request: Request, error: Exception) -> Response:
    assert isinstance(error, FencedError)
    if isinstance(error, NotGranted):
        busy = {"type": "about:blank", "title": "Somebody else is at it", "status": 503, "retry": error.retry}
        status, headers, body = plain_problem(503, busy)
    else:
        status, headers, body = answer(error)
    return Response(body, status, headers=dict(headers))
