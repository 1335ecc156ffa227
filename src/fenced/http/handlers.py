"""Before, for single handlers: a decorator that judges each request by a store of marks."""

from __future__ import annotations

import functools
import inspect
import string
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, cast

from fenced.decision import Rule
from fenced.errors import Misuse, shown
from fenced.guarding import AsyncValues, Values
from fenced.http.asgi import AsyncDoorway
from fenced.http.door import PATIENCE_SECONDS, Door
from fenced.http.protocol import SAFE_METHODS
from fenced.http.receiving import ANSWERED, Received, answer, received_by
from fenced.http.replies import KeptReply, reply_in
from fenced.http.routes import checked
from fenced.http.wsgi import Doorway
from fenced.runtime.blocking import step

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
        if not names or not all(isinstance(name, str) and _is_template(name) for name in names):
            raise Misuse(f"the names of a handler are templates such as 'orders/{{id}}', not {shown(names)}")
        if self._rule != "retry" and len(names) != 1:
            raise Misuse(f"rule {self._rule} takes one name for each request, not {len(names)}")
        return functools.partial(self._around, names)

    def _around(self, names: tuple[str, ...], handler: F) -> F:
        if inspect.isgeneratorfunction(handler) or inspect.isasyncgenfunction(handler):
            raise Misuse(
                "a generator runs after the decorator has ended: use the middleware fenced.http.Before"
            )
        signature = inspect.signature(handler)

        def look(*args: Any, **kwargs: Any) -> _Read:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            given = (*args, *kwargs.values()) if self._request is None else (self._request,)
            return received_by(*given), _named(names, given, {**bound.arguments, **kwargs})

        around = self._around_coroutine if inspect.iscoroutinefunction(handler) else self._around_function
        return cast("F", functools.update_wrapper(around(handler, look), handler))

    def _around_coroutine(
        self, handler: Callable[..., Any], look: Callable[..., _Read]
    ) -> Callable[..., Any]:
        doorway = self._async_doorway()

        async def judged(*args: Any, **kwargs: Any) -> Any:
            read = look(*args, **kwargs)
            door = doorway.current() or await doorway.open()
            return await _judge(door, read, lambda: handler(*args, **kwargs))

        return judged

    def _around_function(self, handler: Callable[..., Any], look: Callable[..., _Read]) -> Callable[..., Any]:
        doorway = self._blocking_doorway()

        def judged(*args: Any, **kwargs: Any) -> Any:
            async def run() -> Any:
                response = handler(*args, **kwargs)
                if inspect.isawaitable(response):
                    raise Misuse(
                        "the handler has returned an awaitable: decorate the coroutine function itself"
                    )
                return response

            read = look(*args, **kwargs)
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


class _NoSegmentError(Exception):
    """The value of a field is not one segment of a name."""


class _Filling(string.Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        text: str = super().format_field(value, format_spec)
        if value is None or not text or "/" in text:  # with a slash, two templates could give the same name
            raise _NoSegmentError
        return text


def _is_template(text: str) -> bool:
    try:
        return all(name != "" for _, name, _, _ in string.Formatter().parse(text))  # {} has no name
    except ValueError:
        return False


def _named(
    templates: tuple[str, ...], given: tuple[Any, ...], arguments: dict[str, Any]
) -> tuple[str, ...] | None:
    """The names of a request, from the arguments of its handler and, in Starlette, the parameters of the path."""
    fields: dict[str, Any] = {}
    for value in given:
        fields.update(getattr(value, "path_params", None) or {})
    fields.update(arguments)
    try:
        return checked(tuple(_Filling().vformat(template, (), fields) for template in templates))
    except _NoSegmentError:
        return None
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        raise Misuse(
            f"a name in {shown(templates)} has a field that the handler does not get: {shown(error)}"
        ) from None


async def _judge(door: Door, read: _Read, run: Callable[[], Awaitable[Any]]) -> Any:
    received, names = read
    reads = received.method in SAFE_METHODS
    if reads and received.fence is None:
        return await run()
    visit = await door.enter(received, names, about=received.path, reads=reads)
    try:
        response = await run()
        if visit.last is not None:
            await door.keep(visit, reply_in(response))
        return response
    except ANSWERED as error:
        await door.keep(visit, KeptReply.of(*answer(error)))  # a reply like any other
        raise
    finally:
        door.leave(visit)
