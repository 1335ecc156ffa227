"""One table of heads: what is accepted and why, beside what two other parsers say to the same bytes."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import h11
import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenced.http1 import heads
from fenced.http1.bodies import body_of
from fenced.http1.heads import HEAD_END, BadMessage, Heads, RequestHead, request_head
from tests.proxy.test_passing import Other, requests


class Row(NamedTuple):
    data: bytes
    ours: str
    """What becomes of it: "ok", or a status."""
    httptools: str
    """"ok", "no", "upgrade" (it stops there), or "wait" (for more of it)."""
    h11: str
    why: str


def lines(*headers: bytes, first: bytes = b"POST / HTTP/1.1", body: bytes = b"", host: bool = True) -> bytes:
    return b"\r\n".join((first, *((b"Host: a",) if host else ()), *headers, b"", b"")) + body


CHUNKED = b"Transfer-Encoding: chunked"
EMPTY = b"0\r\n\r\n"
TABLE = {
    "plain": Row(lines(), "ok", "ok", "ok", "the grammar"),
    "lower-case method": Row(lines(first=b"get / HTTP/1.1"), "400", "no", "ok",
        "methods are case-sensitive, and ours are capitals"),
    "method with !": Row(lines(first=b"G!T / HTTP/1.1"), "400", "no", "ok",
        "no method that anybody has registered"),
    "method of 40 letters": Row(lines(first=b"A" * 40 + b" / HTTP/1.1"), "400", "no", "ok", "the same"),
    "# in target": Row(lines(first=b"GET /a#b HTTP/1.1"), "400", "ok", "ok",
        "no part of a target; readers differ in what it means"),
    "absolute target": Row(lines(first=b"GET http://a/b HTTP/1.1"), "400", "ok", "ok",
        "it names a second host, and we are no forward proxy"),
    "authority as target": Row(lines(first=b"GET a:1 HTTP/1.1"), "400", "no", "ok", "only CONNECT has one"),
    "a tunnel": Row(lines(first=b"CONNECT a:1 HTTP/1.1"), "501", "upgrade", "ok",
        "what follows it would be no HTTP"),
    "asterisk": Row(lines(first=b"OPTIONS * HTTP/1.1"), "ok", "ok", "ok", "the grammar"),
    "asterisk of GET": Row(lines(first=b"GET * HTTP/1.1"), "400", "ok", "ok", "only OPTIONS has it"),
    "two spaces": Row(lines(first=b"GET  / HTTP/1.1"), "400", "ok", "no", "the grammar"),
    "no host": Row(lines(host=False), "400", "ok", "no", "RFC 9112, 3.2: 400"),
    "two hosts": Row(lines(b"Host: b"), "400", "ok", "no", "RFC 9112, 3.2: 400"),
    "HTTP/1.0 without host": Row(lines(first=b"GET / HTTP/1.0", host=False), "ok", "ok", "ok",
        "it knows no Host"),
    "HTTP/1.0 keep-alive": Row(lines(b"Connection: keep-alive", first=b"GET / HTTP/1.0"), "ok", "ok", "ok",
        "old clients do that"),
    "HTTP/1.2": Row(lines(first=b"GET / HTTP/1.2"), "505", "no", "ok", "nobody knows it"),
    "HTTP/2.0": Row(lines(first=b"GET / HTTP/2.0"), "505", "ok", "ok", "it has another form"),
    "length +5": Row(lines(b"Content-Length: +5", body=b"hello"), "400", "no", "no", "digits alone"),
    "length of nothing": Row(lines(b"Content-Length:"), "400", "no", "no", "digits"),
    "length twice, the same": Row(lines(*[b"Content-Length: 5"] * 2, body=b"hello"), "400", "no", "ok",
        "who is in front may take the other one"),
    "length 5, 5": Row(lines(b"Content-Length: 5, 5", body=b"hello"), "400", "no", "ok", "the same"),
    "two lengths": Row(lines(b"Content-Length: 5", b"Content-Length: 4", body=b"hello"), "400", "no", "no",
        "two messages in one"),
    "length of 19 digits": Row(lines(b"Content-Length: " + b"9" * 19), "400", "wait", "wait",
        "longer than anything, and than integers"),
    "length and chunked": Row(lines(b"Content-Length: 5", CHUNKED, body=EMPTY), "400", "no", "ok",
        "two messages in one"),
    "gzip, chunked": Row(lines(b"Transfer-Encoding: gzip, chunked", body=EMPTY), "501", "ok", "no",
        "RFC 9112, 6.1: a coding that is not understood"),
    "chunked twice": Row(lines(CHUNKED, CHUNKED, body=EMPTY), "501", "no", "no", "the same"),
    "Chunked": Row(lines(b"Transfer-Encoding: Chunked", body=EMPTY), "ok", "ok", "ok",
        "codings are case-insensitive"),
    "chunked in HTTP/1.0": Row(lines(CHUNKED, first=b"POST / HTTP/1.0", body=EMPTY), "400", "ok", "ok",
        "RFC 9112, 6.1: faulty framing"),
    "chunk extension": Row(lines(CHUNKED, body=b"5;x=1\r\nhello\r\n" + EMPTY), "ok", "ok", "ok",
        "RFC 9112, 7.1.1: ignored"),
    "chunk of no size": Row(lines(CHUNKED, body=b"x\r\n" + EMPTY), "400", "no", "no", "the grammar"),
    "trailers": Row(lines(CHUNKED, body=b"0\r\nX: 1\r\n\r\n"), "ok", "ok", "ok", "read, and dropped"),
    "space before colon": Row(lines(b"X : a"), "400", "no", "no", "RFC 9112, 5.1: 400"),
    "folded header": Row(lines(b"X: 1", b" 2"), "400", "no", "ok", "RFC 9112, 5.2: 400"),
    "bare line feeds": Row(b"GET / HTTP/1.1\nHost: a\n\n", "400", "no", "ok",
        "who is in front may not end a line there"),
    "bare carriage return": Row(lines(b"X: 1\r2"), "400", "no", "no", "the same"),
    "obs-text in value": Row(lines(b"X: \xff"), "ok", "ok", "ok", "opaque bytes; nothing of ours has them"),
    "DEL in value": Row(lines(b"X: \x7f"), "400", "no", "ok", "no character of a value"),
    "NUL in value": Row(lines(b"X: \0"), "400", "no", "no", "the same"),
    "empty name": Row(lines(b": x"), "400", "no", "no", "the grammar"),
    "100 headers": Row(lines(*[b"X: 1"] * 99), "ok", "ok", "ok", "so many are"),
    "101 headers": Row(lines(*[b"X: 1"] * 100), "431", "ok", "ok", "more than any client sends"),
    "upgrade to h2c": Row(lines(b"Connection: upgrade", b"Upgrade: h2c"), "ok", "upgrade", "ok",
        "Java's client offers it; ignored, as HTTP allows"),
    "upgrade to websocket": Row(lines(b"Connection: upgrade", b"Upgrade: websocket"), "ok", "upgrade", "ok",
        "ignored; the proxy refuses it, because its upstream might not"),
    "Expect": Row(lines(b"Expect: 100-continue", b"Content-Length: 1", body=b"x"), "ok", "ok", "ok",
        "the grammar"),
    "another Expect": Row(lines(b"Expect: a wonder"), "417", "ok", "ok", "RFC 9110, 10.1.1"),
}  # fmt: skip


def by_us(data: bytes) -> tuple[str, RequestHead | None, bytes]:
    end = data.find(HEAD_END) + 4
    if end < 4:
        return ("400" if heads.NO_HEAD.search(data) else "wait"), None, b""
    try:
        head = request_head(data[:end])
        pieces, rest = body_of(head.length).feed(data[end:])
    except BadMessage as error:
        return str(error.status), None, b""
    return ("wait" if rest is None else "ok"), head, b"".join(pieces)


def by_httptools(data: bytes) -> str:
    seen = Other.__new__(Other)
    seen.target, seen.headers, seen.body, seen.ended, seen.keep = b"", [], b"", False, False
    seen.parser = httptools.HttpRequestParser(seen)
    try:
        seen.parser.feed_data(data)
    except httptools.HttpParserUpgrade:
        return "upgrade"
    except httptools.HttpParserError:
        return "no"
    return "ok" if seen.ended else "wait"


def by_h11(data: bytes) -> tuple[str, h11.Request | None, bytes]:
    connection, head, body = h11.Connection(h11.SERVER), None, b""
    connection.receive_data(data)
    try:
        while True:
            event = connection.next_event()
            if isinstance(event, h11.Request):
                head = event
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            else:
                return ("ok" if isinstance(event, h11.EndOfMessage) else "wait"), head, body
    except h11.RemoteProtocolError:
        return "no", None, b""


@pytest.mark.parametrize("name", TABLE)
def test_the_table(name: str) -> None:
    """What we accept, both others read in the same way. Where they differ from us, they accept more than we do."""
    row = TABLE[name]
    ours, head, body = by_us(row.data)
    theirs, request, their_body = by_h11(row.data)
    assert (ours, by_httptools(row.data), theirs) == (row.ours, row.httptools, row.h11), row.why
    if head is None:
        return
    assert request is not None
    assert (request.method, request.target, their_body) == (head.method, head.target, body)
    theirs_read = [(bytes(name), bytes(value)) for name, value in request.headers]
    assert theirs_read == [
        (name, value.lower() if name == b"transfer-encoding" else value) for name, value in head.headers()
    ]
    if row.httptools == "ok":
        other = Other(httptools.HttpRequestParser, row.data)
        assert (other.target, other.headers[: len(head.headers())], other.body, other.keep) == (
            head.target,
            head.headers(),
            body,
            head.keep,
        )


def test_an_accepted_head_means_the_same_to_h11() -> None:
    """All first lines, and all pairs of headers."""
    accepted = 0
    for data in requests():
        try:
            head = request_head(data)
        except BadMessage:
            continue
        body = EMPTY if head.length == heads.CHUNKED else b"x" * head.length
        verdict, request, their_body = by_h11(data + body)
        accepted += 1
        assert verdict == "ok" and request is not None, data
        assert (request.method, request.target) == (head.method, head.target)
        assert their_body == b"x" * max(0, head.length)
    assert accepted > 400


@given(st.binary(max_size=300))
def test_any_bytes_are_a_head_or_a_known_error(data: bytes) -> None:
    text = b"GET / HTTP/1.1\r\n" + data.replace(HEAD_END, b"") + HEAD_END
    with contextlib.suppress(BadMessage):
        assert request_head(text).text == text


def test_heads_are_remembered_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "REMEMBERED_MAX", 3)
    known = Heads()
    first = known.read(lines())
    assert known.read(lines()) is first
    for number in range(5):
        known.read(lines(b"X: %d" % number))
        assert len(known._known) <= 3
    again = known.read(lines())
    assert again is not first and again.headers() == first.headers()
    long = lines(b"X: " + b"x" * heads.REMEMBERED_BYTES_MAX)
    assert known.read(long) is not known.read(long)
    with pytest.raises(BadMessage):
        known.read(lines(host=False))
