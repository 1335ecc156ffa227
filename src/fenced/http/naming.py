"""Which names a request is about, by its path."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from functools import lru_cache
from typing import Any

from fenced.errors import Misuse, shown
from fenced.values.model import check_name
from fenced.values.templates import Field, Parts, RouteTemplate, check_parts, parts_of

Request = MutableMapping[str, Any]
"""An ASGI scope or a WSGI environment."""
Names = Mapping[str, str | None] | Callable[[Any], str | tuple[str, ...] | None]
"""Path templates with name templates, or a function of the scope or the environment that returns the name or names."""

NOT_GUARDED: tuple[str, ...] = ()


def namer(names: Names) -> Callable[[Request, str], tuple[str, ...] | None]:
    """A function of a request and its path that returns its names.

    NOT_GUARDED: the route has no name, and the program says so. None: no name is known.
    """
    if callable(names):
        return lambda request, _: checked(names(request))
    if not isinstance(names, Mapping) or not names:
        raise Misuse(
            f"names= is a mapping such as {{'/orders/{{id}}': 'orders/{{id}}'}}, or a function, not {shown(names)}"
        )
    found = [(path, _route(path), name) for path, name in names.items()]
    routes = [(route, _parts(route, path, name)) for path, route, name in found]
    named = lru_cache(maxsize=1024)(lambda path: _named(routes, path))
    return lambda _, path: named(path)


def checked(found: str | tuple[str, ...] | None) -> tuple[str, ...] | None:
    """The names, if they can be names; otherwise None, which means that no name is known."""
    if found is None:
        return None
    try:
        return tuple(check_name(name) for name in ((found,) if isinstance(found, str) else found))
    except Misuse:  # made from a path that gives no name
        return None


def _named(routes: list[tuple[RouteTemplate, Parts | None]], path: str) -> tuple[str, ...] | None:
    segments = path.split("/")[1:]
    for route, parts in routes:
        if len(segments) == len(route.segments) and (found := route.matched(segments)) is not None:
            if parts is None:
                return NOT_GUARDED
            return checked("".join(found[part.name] if isinstance(part, Field) else part for part in parts))
    return None


def _route(path: object) -> RouteTemplate:
    if not isinstance(path, str) or not path.startswith("/"):
        raise Misuse(f"a path begins with /, as in /orders/{{id}}, not {shown(path)}")
    return RouteTemplate.of(path.split("/")[1:], path)


def _parts(route: RouteTemplate, path: str, name: object) -> Parts | None:
    if name is None:
        return None
    if not isinstance(name, str):
        raise Misuse(f"the name of {shown(path)} is a text such as orders/{{id}}, not {shown(name)}")
    parts = parts_of(name)
    check_parts(parts, route, f"{path} = {name}")
    return parts
