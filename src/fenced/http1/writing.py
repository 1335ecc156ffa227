"""HTTP/1.1 messages as bytes: requests, and the heads of replies. Pure. Nothing that is written can be read as more."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from http import HTTPStatus
from typing import NamedTuple

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
REASONS = {status.value: status.phrase for status in HTTPStatus}

_METHOD = re.compile(r"[A-Z][A-Z-]{0,31}")
_TARGET = re.compile(r"[!\"$-~]+")
_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*")


class ServerReply(NamedTuple):
    """A whole answer. Its length is added."""

    status: int
    headers: tuple[tuple[str, str], ...]
    """Names in lower case."""
    body: bytes


def request(method: str, target: str, headers: Iterable[tuple[str, str]], body: bytes = b"") -> bytes:
    """A complete request. The caller passes the host header; the length is added."""
    if not _METHOD.fullmatch(method) or not _TARGET.fullmatch(target):
        raise ValueError("a method or a target that cannot be sent")
    sized = [("content-length", str(len(body)))] if body or method in ("POST", "PUT", "PATCH") else []
    return _head(f"{method} {target} HTTP/1.1", [*headers, *sized]) + b"\r\n" + body


@lru_cache(256)
def reply_head(status: int, headers: tuple[tuple[str, str], ...], date: bytes, connection: str = "") -> bytes:
    """The head of a reply without the lines that say how long its body is, and without the empty line.

    Nearly all replies of a second have one of a few heads, so these are remembered. `date`: a line, or nothing.
    """
    more = (("connection", connection),) if connection else ()
    return _head(f"HTTP/1.1 {status} {REASONS[status]}", (*headers, *more)) + date


def _head(first: str, headers: Iterable[tuple[str, str]]) -> bytes:
    lines = [first]
    for name, value in headers:
        if not _NAME.fullmatch(name) or not _VALUE.fullmatch(value):
            raise ValueError("a header that cannot be sent")
        lines.append(f"{name}: {value}")
    return ("\r\n".join(lines) + "\r\n").encode("latin-1")
