"""The options of a guard in its address: `?rule=...&mode=...`, and others of a single guard."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from fenced.errors import Misuse, shown
from fenced.net.address import split_address

OPTIONS = ("rule", "mode")


def split_options(url: str, *more: str) -> tuple[str, dict[str, Any]]:
    """A server's address without the options of a guard (`rule`, `mode` and `more`), and these options."""
    try:
        parts = split_address(url)
    except ValueError:
        return url, {}  # whatever parses the rest says what is wrong
    given = parse_qsl(parts.query, keep_blank_values=True)
    ours = {name: value for name, value in given if name in (*OPTIONS, *more)}
    if not ours:
        return url, {}
    rest = urlencode([(name, value) for name, value in given if name not in ours])
    return urlunsplit(parts._replace(query=rest)), ours


def with_options(url: str, **options: str | None) -> str:
    """An address with these options of a guard; None: it does not have this one."""
    given = {name: value for name, value in options.items() if value is not None}
    return f"{url}{'&' if '?' in url else '?'}{urlencode(given, safe='{}/')}" if given else url


def options_in(url: str) -> dict[str, Any]:
    """`rule` and `mode` from the address of a guard that takes no other options."""
    options = dict(parse_qsl(urlsplit(url).query, keep_blank_values=True))
    if unknown := sorted(options.keys() - set(OPTIONS)):
        raise Misuse(f"a guard's address takes ?rule= and ?mode=, not {shown(', '.join(unknown))}")
    return options
