"""Which name a request is about: templates over its path, headers and query. Pure.

    orders/{path.id}                      POST /orders/42, and whatever is below it
    /v1/shops/{shop}/orders/{id} = orders/{path.shop}/{path.id}
    carts/{header.x-cart}                 every path

The grammar is that of `fenced.values.templates`, with the sources path, header and query. The route before ` = ` says
which paths a name is for; without a route, the path looks like the name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote_to_bytes

from fenced.errors import Misuse, shown
from fenced.http1.heads import Headers
from fenced.proxy.passing import plain_name
from fenced.values.model import check_name
from fenced.values.templates import Field, Parts, RouteTemplate, check_parts, parts_of

_SOURCES = ("path", "header", "query")
FOUND_MAX = 4096


class NoName(Misuse):
    """A request whose path, headers or query do not say clearly which name it is about."""


@dataclass(frozen=True, slots=True)
class NameTemplate:
    """A route and a name with fields in it."""

    route: RouteTemplate
    parts: Parts

    @classmethod
    def parse(cls, text: str) -> NameTemplate:
        """Read `NAME` or `/ROUTE = NAME`."""
        path, equals, name = text.partition(" = ")
        if not text.startswith("/"):
            path, name = "/" + _looks_like(text), text
        elif not equals:
            raise Misuse(f"a route and its name are '/orders/{{id}} = orders/{{path.id}}', not {shown(text)}")
        parts = tuple(
            Field("header", part.name.lower())
            if isinstance(part, Field) and part.source == "header"
            else part
            for part in parts_of(name, _SOURCES)
        )
        route = RouteTemplate.of(filter(None, path.strip().split("/")), text)
        check_parts(parts, route, text)
        return cls(route, parts)

    def name(self, path: dict[str, str], headers: Iterable[tuple[bytes, bytes]], query: str) -> str:
        """The name. NoName unless every field has exactly one value, which is not empty and has no slash."""
        texts = []
        for part in self.parts:
            if isinstance(part, str):
                texts.append(part)
                continue
            source, field = part
            if source == "path":
                values = [path[field]]
            else:
                values = _in_headers(headers, field) if source == "header" else _in_query(query, field)
            if len(values) != 1 or not values[0] or "/" in values[0]:
                raise NoName(
                    f"{{{source}.{field}}} needs one value without a slash; the request has {len(values)}"
                )
            texts.append(values[0])
        try:
            return check_name("".join(texts))
        except Misuse as error:
            raise NoName(str(error)) from None


def _in_headers(headers: Iterable[tuple[bytes, bytes]], field: str) -> list[str]:
    """The values of a header. NoName if a service may take another one for it: x_cart for x-cart."""
    wanted = field.encode()
    found = [(name.lower(), value) for name, value in headers if plain_name(name) == plain_name(wanted)]
    if any(name != wanted for name, _ in found):
        raise NoName(
            f"{field} and a header that differs from it in a sign: a service may take one for the other"
        )
    return [_text(value) for _, value in found]


def _in_query(query: str, field: str) -> list[str]:
    """The values of a parameter. NoName if a service may read the query in another way.

    Some services separate parameters by `;`, take `cart[]` for `cart`, ignore case and signs, or decode twice.
    """
    try:
        pairs = parse_qsl(query, keep_blank_values=True, errors="strict")
    except ValueError:
        raise NoName(f"the query is not UTF-8: {shown(query)}") from None
    found = [(name, value) for name, value in pairs if _plain_parameter(name) == _plain_parameter(field)]
    twice = any("%" in name for name, _ in pairs) or any("%" in value for _, value in found)
    if twice or ";" in query or any(name != field for name, _ in found):
        raise NoName(f"the query {shown(query)} can be read in more than one way")
    return [value for _, value in found]


def _plain_parameter(name: str) -> str:
    """The name of a parameter as a service may read it: without an index, and with one sign for all signs."""
    return re.sub(r"\W", "_", re.split(r"[\[\0]", name, maxsplit=1)[0].strip()).lower()


def segments_of(path: str) -> tuple[str, ...]:
    """The segments of a path, decoded. NoName if another program could read the path in another way."""
    segments = [_text(unquote_to_bytes(segment)) for segment in path.split("/")[1:]]
    if segments and segments[-1] == "":
        segments.pop()  # /orders/42/ is /orders/42
    for segment in segments:
        if segment in ("", ".", "..") or any(sign in segment for sign in "/\\;%\0"):
            raise NoName(f"the path {shown(path)} can be read in more than one way")
    return tuple(segments)


class Naming:
    """Finds the name of a request by the first template whose route matches."""

    def __init__(self, templates: Sequence[str]) -> None:
        self._templates = [NameTemplate.parse(text) for text in templates]
        self._by_path = all(
            part.source == "path"
            for template in self._templates
            for part in template.parts
            if isinstance(part, Field)
        )
        self._found: dict[bytes, str] = {}
        """By target, if the path alone decides: the same paths come again and again."""

    def name_of(self, target: bytes, headers: Callable[[], Headers]) -> str | None:
        """The name; None if no route matches. NoName if the request does not say clearly which one."""
        name = self._found.get(target)
        if name is not None:
            return name
        name = self._look(target, () if self._by_path else headers())
        if self._by_path and name is not None:
            if len(self._found) >= FOUND_MAX:
                self._found.clear()
            self._found[target] = name
        return name

    def _look(self, target: bytes, headers: Iterable[tuple[bytes, bytes]]) -> str | None:
        path, _, query = _text(target).partition("?")
        segments = segments_of(path)
        for template in self._templates:
            if (found := template.route.matched(segments)) is not None:
                return template.name(found, headers, query)
        return None


def _looks_like(name: str) -> str:
    """The route of a name that has none: its segments up to the first field that is not of the path."""
    segments = []
    for segment in name.split("/"):
        parts = parts_of(segment, _SOURCES)
        if not all(isinstance(part, str) or (part.source == "path" and len(parts) == 1) for part in parts):
            break
        segments.append("".join(part if isinstance(part, str) else f"{{{part.name}}}" for part in parts))
    return "/".join(segments) if any("{" in segment for segment in segments) else ""


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise NoName(f"not UTF-8: {shown(value)}") from None
