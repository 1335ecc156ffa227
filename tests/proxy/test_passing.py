"""What the proxy passes on, compared with another parser: it has one meaning."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import product
from typing import Any

import httptools
import pytest

from fenced.http1.heads import (
    CHUNKED,
    HOP_BY_HOP,
    UNTIL_CLOSE,
    BadMessage,
    Headers,
    RequestHead,
    ResponseHead,
    request_head,
    response_head,
)
from fenced.proxy import passing
from fenced.proxy.passing import PassedRequest, PassedResponse
from tests.proxy.worlds import stamp_of

STAMP = f'"{stamp_of(7, seq=1)}"'
LINES = (
    "Host: shop|host:shop|HOST: a b|Content-Length: 3|content-length:\t3 |Content-Length: 03|Content-Length: +3|"
    "Content-Length: 3, 3|CONTENT-LENGTH: 4|Content-Length:|Transfer-Encoding: chunked|transfer-encoding: CHUNKED |"
    "Transfer-Encoding: gzip, chunked|Connection: keep-alive|Connection: close|connection: Keep-Alive, x-a|"
    "Connection:keep-alive|Connection: content-length|Keep-Alive: 5|X-A: 1|x-a:|Accept: */*|User-Agent: \xe9|"
    f"Fenced-Stamp: {STAMP}|fenced-stamp:{STAMP} |Fenced-Stamp: a b|Fenced-Proof: a|Expect: 100-continue|Expect: no|"
    "TE: gzip|Trailer: x|Upgrade: h2c|X-HTTP-Method: PUT|Host : a|: a|X-A: \0|X-A: 1\n2|X-A: 1\r2|X-A: 1\r\n 2|"
    "X A: 1|X-A|Content_Length: 3|Fenced_Stamp: a|X_HTTP_Method_Override: PUT|Transfer.Encoding: chunked|"
    "X-Original-URL: /|x_a: 1"
).split("|")
TARGETS = "/orders/42|/?a=%20|/#|/\xe9|*|http://a/|a:1||\t/|/ ".split("|")
METHODS = ("PUT", "GET", "OPTIONS", "CONNECT", "put", "P\xdcT", "")
VERSIONS = ("HTTP/1.1", "HTTP/1.0", "HTTP/2.0", "HTTP/1.1 ", "http/1.1", "")
STATUS = ("200 OK", "200", "404 \xe9", "304 -", "204 ", "103 -", "99 -", "2000", "-200", "200 \0", "")


def requests() -> Iterator[bytes]:
    """All first lines, and all pairs of headers."""
    for method, target, version in product(METHODS, TARGETS, VERSIONS):
        yield f"{method} {target} {version}\r\nHost: shop\r\n\r\n".encode("latin-1")
    for version, first, second in product(("1.1", "1.0"), LINES, LINES):
        for host in ("", "Host: shop\r\n"):
            yield f"PUT / HTTP/{version}\r\n{first}\r\n{host}{second}\r\n\r\n".encode("latin-1")


def responses() -> Iterator[bytes]:
    for version, status in product(VERSIONS, STATUS):
        yield f"{version} {status}\r\nContent-Length: 3\r\n\r\n".encode("latin-1")
    for version, first, second in product(("1.1", "1.0"), LINES, LINES):
        yield f"HTTP/{version} 200 OK\r\n{first}\r\n{second}\r\n\r\n".encode("latin-1")


class Other:
    """What another parser reads."""

    def __init__(self, kind: Any, data: bytes) -> None:
        self.target, self.headers, self.body, self.ended = b"", Headers(), b"", False
        self.keep = False
        self.parser = kind(self)
        with contextlib.suppress(httptools.HttpParserUpgrade):
            self.parser.feed_data(data)

    def on_url(self, target: bytes) -> None:
        self.target += target

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value.strip(b" \t")))

    def on_headers_complete(self) -> None:
        self.keep = self.parser.should_keep_alive()

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.ended = True


def test_a_request_has_one_meaning() -> None:
    """If we pass a head on, another parser reads the same in it, and the same in what is passed on."""
    passed = refused = 0
    for data in requests():
        try:
            head = request_head(data)
            found = passing.passed(head)
        except BadMessage:
            refused += 1
        else:
            _check_request(data, head, found)
            passed += 1
    assert min(passed, refused) > 400


def _check_request(data: bytes, head: RequestHead, found: PassedRequest) -> None:
    body = b"0\r\n\r\n" if head.length == CHUNKED else b"x" * head.length
    for text in (data, found.passed_on):
        other = Other(httptools.HttpRequestParser, text + body)
        assert other.ended and other.body == b"x" * max(0, head.length), text
        assert (other.parser.get_method(), other.target) == (head.method, head.target)
        if text is data:
            assert other.headers == head.headers()
            assert not head.keep or other.keep  # of two answers we take the careful one
    assert other.parser.get_http_version() == "1.1" and other.keep
    connection = [value.lower() for name, value in head.headers() if name == b"connection"]
    named = {word.strip() for value in connection for word in value.split(b",")}
    gone = (HOP_BY_HOP | {b"expect"} | named) - {b"content-length"}
    kept = [(name, value) for name, value in head.headers() if name not in gone]
    coding = [(b"transfer-encoding", b"chunked")] * (head.length == CHUNKED)
    assert other.headers == [*kept, *coding, (b"via", b"1.1 fenced")], data
    assert found.fence == [h for name in passing.FENCE for h in head.headers() if h[0] == name]


@pytest.mark.parametrize(
    "other", [b"X_HTTP_Method_Override", b"x-http_method.override", b"Fenced_Stamp", b"Te_"]
)
def test_a_header_that_a_service_may_take_for_one_that_matters(other: bytes) -> None:
    """CGI and WSGI know no difference between hyphens and underscores."""
    data = b"GET / HTTP/1.1\r\nHost: shop\r\n%b: DELETE\r\n\r\n" % other
    if other.endswith(b"_"):
        assert passing.passed(request_head(data)).safe  # another name
    else:
        with pytest.raises(BadMessage, match="hyphens"):
            passing.passed(request_head(data))


@pytest.mark.parametrize("name", [b"X-Original-URL", b"x-rewrite-url", b"X_Original_URL"])
def test_a_header_that_names_another_path(name: bytes) -> None:
    head = b"PUT /orders/42 HTTP/1.1\r\nHost: shop\r\n%b: /orders/43\r\n\r\n" % name
    stamped = head.replace(b"PUT", b"GET").replace(
        b"\r\n\r\n", b"\r\nFenced-Stamp: %b\r\n\r\n" % STAMP.encode()
    )
    for data in (head, stamped):
        with pytest.raises(BadMessage):
            passing.passed(request_head(data))
    if b"_" not in name:
        assert passing.passed(request_head(head.replace(b"PUT", b"GET"))).safe  # a read, wherever it leads


@pytest.mark.parametrize("to_head", [False, True])
def test_an_answer_has_one_meaning(to_head: bool) -> None:
    passed = refused = 0
    for data in responses():
        try:
            head = response_head(b"123" + data, 3, to_head=to_head)
        except BadMessage:
            refused += 1
            continue
        if head:
            _check_response(data, head, passing.passed_back(head), to_head)
            passed += 1
    assert min(passed, refused) > 200


def _check_response(data: bytes, head: ResponseHead, found: PassedResponse, to_head: bool) -> None:
    assert head.text == data and (not found.same or found.lines + b"\r\n" == data)
    if to_head or head.status in (103, 204, 304):
        assert head.length == 0
        return
    body = {CHUNKED: b"1\r\nx\r\n0\r\n\r\n", UNTIL_CLOSE: b"x"}.get(head.length, b"x" * head.length)
    other = Other(httptools.HttpResponseParser, data + body)
    assert other.parser.get_status_code() == head.status
    assert len(other.body) == (1 if head.length < 0 else head.length)
    assert other.ended == (head.length != UNTIL_CLOSE)
    assert not head.keep or other.keep
    hops = HOP_BY_HOP | {
        word.strip().lower()
        for name, value in head.headers()
        if name == b"connection"
        for word in value.split(b",")
    }
    kept = [
        (name, value)
        for name, value in head.headers()
        if name not in hops - {b"content-length", *passing.FENCE}
    ]
    lines = [line.partition(b":") for line in found.lines.split(b"\r\n")[1:-1]]
    assert [(name.lower(), value.strip(b" \t")) for name, _, value in lines] == kept
    assert found.lines.startswith(b"HTTP/1.1 %d" % head.status)
