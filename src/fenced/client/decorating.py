"""What `held` does with the function that it decorates: which name a call holds, and where its lease goes."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

from fenced.core.acquiring import LeaseRequest, check_filled
from fenced.errors import Misuse, shown
from fenced.values.contracts import Colour
from fenced.values.model import CallTemplate, check_names

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
L_co = TypeVar("L_co", covariant=True)
RUN_LATER = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)


class Held(Protocol[L_co]):
    """The decorator: of a function that gets the lease first, or of a method that gets it after `self`."""

    @overload
    def __call__(self, function: Callable[Concatenate[L_co, P], R], /) -> Callable[P, R]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[S, L_co, P], R], /
    ) -> Callable[Concatenate[S, P], R]: ...


class AsyncHeld(Protocol[L_co]):
    """The same for `async def`."""

    @overload
    def __call__(
        self, function: Callable[Concatenate[L_co, P], Coroutine[Any, Any, R]], /
    ) -> Callable[P, Coroutine[Any, Any, R]]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[S, L_co, P], Coroutine[Any, Any, R]], /
    ) -> Callable[Concatenate[S, P], Coroutine[Any, Any, R]]: ...


def templated(name: object, *times: object) -> tuple[CallTemplate, LeaseRequest]:
    """The template of the names that a decorated function holds, and its request, with everything else checked."""
    template = CallTemplate(name)
    return template, LeaseRequest.checked(["by the call"] if template.fields else [name], *times)


class HeldFunction:
    """A decorated function, and the template of the name that its calls hold."""

    def __init__(
        self,
        function: Callable[..., Any],
        template: CallTemplate,
        request: LeaseRequest,
        colour: Colour = "blocking",
        *,
        is_method: bool = False,
    ) -> None:
        if colour == "asyncio" and not inspect.iscoroutinefunction(function):
            raise Misuse("held() of an AsyncClient accepts only `async def` functions that do not yield")
        if colour == "blocking" and any(kind(function) for kind in RUN_LATER):
            raise Misuse(
                "held() does not accept generators or coroutines: their body would run after the lease is released"
            )
        first = list(inspect.signature(function).parameters)[:1]
        self._is_method = is_method or first in (["self"], ["cls"])
        # What a wrapper really takes, not what it wraps: another decorator may add arguments, as this one does.
        parameters = list(inspect.signature(function, follow_wrapped=False).parameters.values())
        self.signature = inspect.Signature(
            [each for place, each in enumerate(parameters) if place != self._is_method]
        )
        """Of a call, without the lease."""
        if missing := sorted(template.fields - self.signature.parameters.keys()):
            who = getattr(function, "__qualname__", repr(function))
            raise Misuse(f"{shown(template.text)} has a field {missing[0]!r}, and {who} no such parameter")
        self._template = template
        self._request = request

    def arguments(self, lease: object, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Those of a call, with the lease at its place."""
        return (*args[:1], lease, *args[1:]) if self._is_method else (lease, *args)

    def request(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LeaseRequest:
        """For one call. A field is filled by the argument with its name."""
        if not self._template.fields:
            return self._request
        call = self.signature.bind(*args, **kwargs)
        call.apply_defaults()
        if empty := sorted(field for field in self._template.fields if call.arguments[field] is None):
            raise Misuse(f"{shown(self._template.text)}: the argument {empty[0]!r} is None")
        name = self._template.filled(call.arguments)
        if name is None:
            raise Misuse(
                f"a value for {shown(self._template.text)} has a slash: two things could have the same name"
            )
        return dataclasses.replace(self._request, names=check_filled(check_names([name])))
