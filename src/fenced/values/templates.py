"""Templates of names, and the routes of paths that they are for: one grammar, of receivers and of the proxy. Pure.

    /shops/{shop}/orders/{id:int}    a route: {shop} is a segment, {id:int} a number without leading zeros
    orders/{shop}/{id}               a name with fields of the path; {path.id} is the same as {id}
    carts/{header.x-cart}            a name with a field of another source, where there is one

`{id:int}` has no leading zeros, because a service may read 042 as 42.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fenced.errors import Misuse, shown
from fenced.values.model import check_name

_FIELD = re.compile(r"\{(?:([a-z]+)\.)?([A-Za-z0-9_-]+)\}")
_IN_ROUTE = re.compile(r"\{([A-Za-z0-9_-]+)(:int)?\}")
_ANY, _INTEGER = "([^/]+)", "(0|[1-9][0-9]*)"


class Field(NamedTuple):
    """A field of a name: where its value comes from, and what it is called there."""

    source: str
    name: str


@dataclass(frozen=True, slots=True)
class RouteTemplate:
    """Segments of a path: the pattern of each, and the fields in it."""

    segments: tuple[tuple[re.Pattern[str], tuple[str, ...]], ...]

    @classmethod
    def of(cls, segments: Iterable[str], text: str) -> RouteTemplate:
        """`text`: the whole of it, for the message of Misuse."""
        made = cls(tuple(_segment(segment, text) for segment in segments))
        names = [name for _, fields in made.segments for name in fields]
        if len(set(names)) < len(names):
            raise Misuse(f"{shown(text)} has two fields of the same name")
        return made

    @property
    def fields(self) -> set[str]:
        return {name for _, fields in self.segments for name in fields}

    def matched(self, segments: Sequence[str]) -> dict[str, str] | None:
        """The values of the fields, if a path begins with this route; None if it does not."""
        if len(segments) < len(self.segments):
            return None
        found: dict[str, str] = {}
        for (pattern, fields), segment in zip(self.segments, segments, strict=False):
            match = pattern.fullmatch(segment)
            if match is None:
                return None
            found.update(zip(fields, match.groups(), strict=True))
        return found


def _segment(segment: str, text: str) -> tuple[re.Pattern[str], tuple[str, ...]]:
    pattern, fields, end = "", [], 0
    for field in _IN_ROUTE.finditer(segment):
        pattern += re.escape(segment[end : field.start()]) + (_INTEGER if field[2] else _ANY)
        fields.append(field[1])
        end = field.end()
    if set("{}") & set(_IN_ROUTE.sub("", segment)):
        raise Misuse(f"a field of a path is {{id}} or {{id:int}}, not as in {shown(text)}")
    return re.compile(pattern + re.escape(segment[end:]), re.ASCII), tuple(fields)


Parts = tuple[str | Field, ...]


def parts_of(name: str, sources: Sequence[str] = ("path",)) -> Parts:
    """The texts and the fields of a name, in their order."""
    parts: list[str | Field] = []
    end = 0
    for found in _FIELD.finditer(name):
        parts += [name[end : found.start()], Field(found[1] or "path", found[2])]
        end = found.end()
    parts.append(name[end:])
    texts = "".join(part for part in parts if isinstance(part, str))
    unknown = any(isinstance(part, Field) and part.source not in sources for part in parts)
    if "{" in texts or "}" in texts or unknown:
        known = " and ".join(f"{{{source}.x}}" for source in sources)
        raise Misuse(f"the fields of a name are {known}, and {{x}} is {{path.x}}: {shown(name)}")
    return tuple(part for part in parts if part)


def check_parts(parts: Parts, route: RouteTemplate, text: str) -> None:
    """Misuse if the name cannot be a name, or has fields of the path that the route has not."""
    for part in parts:
        if isinstance(part, Field) and part.source == "path" and part.name not in route.fields:
            raise Misuse(f"{shown(text)}: its route has no field {{{part.name}}}")
    check_name("".join("1" if isinstance(part, Field) else part for part in parts))
