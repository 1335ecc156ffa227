"""Which names a request is about, by its path."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, MutableMapping
from functools import lru_cache
from typing import Any

from fenced.errors import Misuse, shown
from fenced.values.model import check_name

Request = MutableMapping[str, Any]
"""An ASGI scope or a WSGI environment."""
Names = Mapping[str, str | None] | Callable[[Any], str | tuple[str, ...] | None]
"""Path templates with name templates, or a function of the scope or the environment that returns the name or names."""

NOT_GUARDED: tuple[str, ...] = ()
_FIELD = re.compile(r"\{([a-z_][a-z0-9_]*)(:int)?\}", re.ASCII)
_SEGMENT, _INTEGER = "[^/]+", "0|[1-9][0-9]*"


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
    routes = [(_pattern(path), _template(path, name)) for path, name in names.items()]
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


def _named(routes: list[tuple[re.Pattern[str], str | None]], path: str) -> tuple[str, ...] | None:
    for pattern, template in routes:
        found = pattern.fullmatch(path)
        if found is not None:
            return NOT_GUARDED if template is None else checked(template.format_map(found.groupdict()))
    return None


def _pattern(path: object) -> re.Pattern[str]:
    if not isinstance(path, str) or not path.startswith("/"):
        raise Misuse(f"a path begins with /, as in /orders/{{id}}, not {shown(path)}")
    text, end = "", 0
    for field in _FIELD.finditer(path):
        text += re.escape(path[end : field.start()]) + f"(?P<{field[1]}>{_INTEGER if field[2] else _SEGMENT})"
        end = field.end()
    if "{" in (rest := path[end:]) or "}" in rest:
        raise Misuse(f"a field of a path is {{id}} or {{id:int}}, not as in {shown(path)}")
    try:
        return re.compile(text + re.escape(rest))
    except re.error as error:
        raise Misuse(f"{shown(path)}: {error}") from None


def _template(path: str, name: object) -> str | None:
    if name is None:
        return None
    fields = {field[1]: "1" for field in _FIELD.finditer(path)}
    try:
        check_name(str(name).format_map(fields))
    except (KeyError, IndexError, ValueError) as error:
        raise Misuse(
            f"the name {shown(name)} of {shown(path)} may use {', '.join(fields) or 'no field'}: {error}"
        ) from None
    return str(name)
