"""Before, for single handlers: a decorator that judges each request by a store of marks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, cast

from fenced.client.values import AsyncValues, Values
from fenced.errors import Misuse
from fenced.http.asgi import AsyncDoorway
from fenced.http.door import PATIENCE_SECONDS, Door
from fenced.http.kept import KeptReply, reply_in
from fenced.http.naming import checked
from fenced.http.protocol import SAFE_METHODS
from fenced.http.receiving import ANSWERED, Received, answer, received_by
from fenced.http.wsgi import Doorway
from fenced.runtime.blocking import step
from fenced.values.decision import Rule
from fenced.values.model import CallTemplate

F = TypeVar("F", bound=Callable[..., Any])
_Read = tuple[Received, tuple[str, ...] | None]
"""What a request carries, and its names."""


class BeforeHandler:
    """Judges the requests of single handlers by a store of marks *before* the handler runs. See `Before`.

        before = fenced.http.BeforeHandler("redis://cache")

        @app.post("/valves/{id}/open")
        @before("valves/{id}")
        async def open_valve(id: int, request: Request): ...

    The fields of a name are arguments of the handler or parameters of the path. The request is one of the arguments;
    where it is not, give it: `BeforeHandler(store, request=flask.request)`. The middleware `Receiver`, `WsgiReceiver`
    or `fenced.django.ReceiverMiddleware` reads the stamp and answers errors.

    All requests that one of these judges are kept in order until their handlers have returned, so use one for all
    handlers that share names. Either all of its handlers are coroutine functions, or none is.
    """

    def __init__(
        self,
        store: str | Values | AsyncValues,
        *,
        rule: Rule = "retry",
        patience: float = PATIENCE_SECONDS,
        request: Any = None,
    ) -> None:
        self._store = store
        self._rule: Rule = rule
        self._patience = patience
        self._request = request
        self._doorway: Doorway | AsyncDoorway | None = None

    @property
    def door(self) -> Door | None:
        """What it has counted and recorded; None before the first request."""
        return self._doorway.door if self._doorway is not None else None

    def __call__(self, *names: str) -> Callable[[F], F]:
        """A decorator for the handler of requests about these names."""
        if not names:
            raise Misuse("a decorated handler needs the name that it is about, such as 'orders/{id}'")
        if self._rule != "retry" and len(names) != 1:
            raise Misuse(f"rule {self._rule} takes one name for each request, not {len(names)}")
        return functools.partial(self._around, tuple(CallTemplate(name) for name in names))

    def _around(self, templates: tuple[CallTemplate, ...], handler: F) -> F:
        if inspect.isgeneratorfunction(handler) or inspect.isasyncgenfunction(handler):
            raise Misuse(
                "a generator runs after the decorator has ended: use the middleware fenced.http.Before"
            )
        reader = _CallReader(handler, templates, self._request)
        around = self._around_coroutine if inspect.iscoroutinefunction(handler) else self._around_function
        return cast("F", functools.update_wrapper(around(handler, reader), handler))

    def _around_coroutine(self, handler: Callable[..., Any], reader: _CallReader) -> Callable[..., Any]:
        doorway = self._async_doorway()

        async def judged(*args: Any, **kwargs: Any) -> Any:
            read = reader.read(args, kwargs)
            door = doorway.current() or await doorway.open()
            return await _judge(door, read, lambda: handler(*args, **kwargs))

        return judged

    def _around_function(self, handler: Callable[..., Any], reader: _CallReader) -> Callable[..., Any]:
        doorway = self._blocking_doorway()

        def judged(*args: Any, **kwargs: Any) -> Any:
            async def run() -> Any:
                response = handler(*args, **kwargs)
                if inspect.isawaitable(response):
                    raise Misuse(
                        "the handler has returned an awaitable: decorate the coroutine function itself"
                    )
                return response

            read = reader.read(args, kwargs)
            return step(_judge(doorway.door or doorway.open(), read, run))

        return judged

    def _async_doorway(self) -> AsyncDoorway:
        if self._doorway is None and not isinstance(self._store, Values):
            self._doorway = AsyncDoorway(self._store, self._rule, self._patience)
        if not isinstance(self._doorway, AsyncDoorway):
            raise Misuse("this BeforeHandler, or its store, is for handlers that block: use another one")
        return self._doorway

    def _blocking_doorway(self) -> Doorway:
        if self._doorway is None and not isinstance(self._store, AsyncValues):
            self._doorway = Doorway(self._store, self._rule, self._patience)
        if not isinstance(self._doorway, Doorway):
            raise Misuse("this BeforeHandler, or its store, is for coroutine functions: use another one")
        return self._doorway


class _CallReader:
    """Reads the calls of one handler: what the request carries, and its names."""

    def __init__(
        self, handler: Callable[..., Any], templates: tuple[CallTemplate, ...], request: Any
    ) -> None:
        parameters = inspect.signature(handler).parameters.values()
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self._positional = [one.name for one in parameters if one.kind in positional]
        self._defaults = {one.name: one.default for one in parameters if one.default is not one.empty}
        self._templates = templates
        self._request = request

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Read:
        given = (*args, *kwargs.values()) if self._request is None else (self._request,)
        fields = dict(self._defaults)
        for value in given:
            if path_params := getattr(value, "path_params", None):  # in Starlette
                fields.update(path_params)
        fields.update(zip(self._positional, args, strict=False))
        fields.update(kwargs)
        names: list[str] = []
        for template in self._templates:
            name = template.filled(fields)
            if name is None:
                return received_by(*given), None
            if name not in names:
                names.append(name)
        return received_by(*given), checked(tuple(names))


async def _judge(door: Door, read: _Read, run: Callable[[], Awaitable[Any]]) -> Any:
    received, names = read
    reads = received.method in SAFE_METHODS
    if reads and received.fence is None:
        return await run()
    visit = await door.enter(received, names, about=received.path, reads=reads)
    try:
        response = await run()
        if visit.last is not None:
            reply = reply_in(response)
            await door.keep(visit, response.status_code, reply)
        return response
    except ANSWERED as error:
        answered = answer(error)
        await door.keep(visit, answered.status, KeptReply.of(*answered))  # a reply like any other
        raise
    except Exception as error:
        await door.keep(visit, _status_of(error), None)
        raise
    finally:
        door.leave(visit)


_ANSWERS = {
    "starlette.exceptions.HTTPException": "status_code",
    "werkzeug.exceptions.HTTPException": "code",
}
"""The exceptions that a framework turns into an answer, and where they have its status."""


def _status_of(error: Exception) -> int:
    """The status that an exception of the framework becomes. 500 for any other, also if it has a status of its own."""
    for kind in type(error).__mro__:
        if (attribute := _ANSWERS.get(f"{kind.__module__}.{kind.__qualname__}")) is not None:
            return int(getattr(error, attribute) or 500)
    return 500
