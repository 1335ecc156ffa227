"""HTTP/1.1: the same events however the bytes are split, and nothing ambiguous."""

from __future__ import annotations

import itertools
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenced.net import http1
from fenced.net.http1 import END, Event, HttpReader, MalformedHttp, RequestHead, ResponseHead

REQUESTS = (
    b"GET /a?b=1 HTTP/1.1\r\nHost: h\r\n\r\n"
    b"POST /b HTTP/1.1\r\nhost:h\r\nContent-Length:  5 \r\nX-Odd: a:b \t\r\n\r\nhello"
    b"PUT * HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"5\r\nhello\r\n00a\r\n, my world\r\n0\r\nX-T: 1\r\n\r\n"
    b"POST /c HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\nConnection: x, Close\r\n\r\n"
)
REQUEST_EVENTS: list[Event] = [
    RequestHead("GET", "/a?b=1", [("host", "h")], True),
    END,
    RequestHead("POST", "/b", [("host", "h"), ("content-length", "5"), ("x-odd", "a:b")], True),
    b"hello",
    END,
    RequestHead("PUT", "*", [("host", "h"), ("transfer-encoding", "chunked")], True),
    b"hello, my world",
    END,
    RequestHead("POST", "/c", [("host", "h"), ("content-length", "0"), ("connection", "x, Close")], False),
    END,
]
RESPONSES = (
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"
    b"HTTP/1.1 204 No Content\r\n\r\nHTTP/1.1 200 \r\nContent-Length: 99\r\n\r\n"
    b"HTTP/1.1 404\r\nTransfer-Encoding: Chunked\r\n\r\n1\r\n!\r\n0\r\n\r\nHTTP/1.0 200 OK\r\n\r\nto the end"
)
METHODS = ("GET", "POST", "HEAD", "GET", "GET")
RESPONSE_EVENTS: list[Event] = [
    ResponseHead(100, "Continue", [], True),
    ResponseHead(200, "OK", [("content-length", "2")], True),
    b"hi",
    END,
    ResponseHead(204, "No Content", [], True),
    END,
    ResponseHead(200, "", [("content-length", "99")], True),
    END,
    ResponseHead(404, "", [("transfer-encoding", "Chunked")], True),
    b"!",
    END,
    ResponseHead(200, "OK", [], False),
    b"to the end",
    END,
]
Reads = Literal["requests", "responses"]


def read(reads: Reads, pieces: list[bytes], *, end: bool = True) -> list[Event]:
    """All events, with the pieces of a body put together."""
    reader = HttpReader(reads)
    for method in METHODS if reads == "responses" else ():
        reader.expect(method)
    events: list[Event] = []
    for piece in [*pieces, None] if end else pieces:
        if piece is None:
            reader.feed_end()
        else:
            reader.feed(piece)
        while (event := reader.next()) is not None:
            last = events[-1] if events else None
            if isinstance(event, bytes) and isinstance(last, bytes):
                events[-1] = last + event
            else:
                events.append(event)
    if end:
        assert reader.between_messages
    return events


ROLES: list[tuple[Reads, bytes, list[Event]]] = [
    ("requests", REQUESTS, REQUEST_EVENTS),
    ("responses", RESPONSES, RESPONSE_EVENTS),
]
each_role = pytest.mark.parametrize(("reads", "stream", "events"), ROLES, ids=["requests", "responses"])


@each_role
def test_two_pieces_at_every_byte_and_one_byte_at_a_time(
    reads: Reads, stream: bytes, events: list[Event]
) -> None:
    for at in range(len(stream) + 1):
        assert read(reads, [stream[:at], stream[at:]]) == events
    assert read(reads, [bytes([byte]) for byte in stream]) == events


@each_role
@given(cuts=st.lists(st.integers(0, 400)))
def test_any_pieces(reads: Reads, stream: bytes, events: list[Event], cuts: list[int]) -> None:
    places = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    assert read(reads, [stream[start:end] for start, end in itertools.pairwise(places)]) == events


@each_role
def test_an_end_in_the_middle_of_a_message_is_noticed(
    reads: Reads, stream: bytes, events: list[Event]
) -> None:
    whole = stream.removesuffix(b"to the end")
    seen = 0
    for at in range(len(whole)):
        try:
            read(reads, [whole[:at]])
        except (MalformedHttp, AssertionError):
            seen += 1
    assert seen >= len(whole) - 4, "only between two messages a connection ends well"


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ("GET / HTTP/1.1\nHost: h\n\n" + "x" * 40_000, 431),
        ("GET / HTTP/1.1\r\n\r\n", 400),
        ("GET / HTTP/1.1\r\nHost: h\r\nHost: h\r\n\r\n", 400),
        ("GET / HTTP/2.0\r\nHost: h\r\n\r\n", 400),
        ("GET  / HTTP/1.1\r\nHost: h\r\n\r\n", 400),
        ("GET /a b HTTP/1.1\r\nHost: h\r\n\r\n", 400),
        ("GET / HTTP/1.1\r\nHost : h\r\n\r\n", 400),
        ("GET / HTTP/1.1\r\nHost: h\r\n folded\r\n\r\n", 400),
        ("GET / HTTP/1.1\r\nHost: h\r\nX: a\0b\r\n\r\n", 400),
        ("GET / HTTP/1.1\r\nHost: h\r\nX: a\nY: b\r\n\r\n", 400),
        ("GET / HTTP/1.1\r\nHost: h\r\nX: a\rb\r\n\r\n", 400),
        ("\r\nGET / HTTP/1.1\r\nHost: h\r\n\r\n", 400),
        ("POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\n", 400),
        ("POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 1, 1\r\n\r\n", 400),
        ("POST / HTTP/1.1\r\nHost: h\r\nContent-Length: +1\r\n\r\n", 400),
        ("POST / HTTP/1.1\r\nHost: h\r\nContent-Length: -1\r\n\r\n", 400),
        ("POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 1_0\r\n\r\n", 400),
        ("POST / HTTP/1.1\r\nHost: h\r\nContent-Length:\r\n\r\n", 400),
        ("POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 99999999999\r\n\r\n", 413),
        ("POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        ("POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        ("POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", 501),
        (
            "POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n",
            501,
        ),
        ("POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: \x0bchunked\r\n\r\n", 400),
        ("GET / HTTP/1.1\r\nHost: h\r\n" + "X: y\r\n" * 200 + "\r\n", 431),
        ("GET / HTTP/1.1\r\nHost: h\r\nX: " + "y" * 40_000 + "\r\n\r\n", 431),
    ],
)
def test_what_is_ambiguous_is_refused(head: str, status: int) -> None:
    with pytest.raises(MalformedHttp) as told:
        read("requests", [head.encode("latin-1")], end=False)
    assert told.value.status == status


@pytest.mark.parametrize(
    "body",
    [
        "x\r\n",
        "5;a=b\r\nhello\r\n",
        "5 \r\nhello\r\n",
        "0x5\r\nhello\r\n",
        "-1\r\n",
        "\r\n",
        "5\nhello\r\n0\r\n\r\n",
        "3\r\nhello\r\n0\r\n\r\n",
        "0\r\nX : y\r\n\r\n",
        "f" * 16 + "\r\n",
        "1" * 30,
        "5\r\nhelloX",
    ],
)
def test_chunks_that_are_none_are_refused(body: str) -> None:
    head = "POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
    with pytest.raises(MalformedHttp):
        read("requests", [(head + body).encode()], end=True)


@pytest.mark.parametrize(
    "response",
    [
        "HTTP/1.1 600 x\r\n\r\n",
        "HTTP/1.1 OK\r\n\r\n",
        "HTTP/1.1 101 x\r\n\r\n",
        "ICY 200 OK\r\n\r\n",
        "HTTP/1.1 100 x\r\nContent-Length: 1\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhell",
    ],
)
def test_responses_that_are_none_are_refused(response: str) -> None:
    with pytest.raises(MalformedHttp):
        read("responses", [response.encode()])


def test_a_response_that_nobody_asked_for_answers_no_later_request() -> None:
    reader = HttpReader("responses")
    reader.expect("GET")
    reader.feed(http1.response(200, "OK", [], b"one") + http1.response(200, "OK", [], b"two"))
    assert [reader.next() for _ in range(3)][1:] == [b"one", END]
    with pytest.raises(MalformedHttp, match="no request"):
        reader.next()


def test_a_body_is_bounded_however_it_comes() -> None:
    for head in (
        b"Content-Length: 11\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n6\r\nhello!\r\n5\r\n",
        b"\r\n",
    ):
        reader = HttpReader("responses", body_max=10)
        reader.expect("GET")
        with pytest.raises(MalformedHttp) as told:
            for piece in (b"HTTP/1.1 200 OK\r\n" + head, b"hello", b"hello", b"!"):
                reader.feed(piece)
                while reader.next() is not None:
                    pass
        assert told.value.status == 413


names = st.from_regex(r"[a-z][a-z0-9-]{0,10}", fullmatch=True).filter(
    lambda name: name not in ("host", "content-length", "transfer-encoding", "connection")
)
values = st.text(st.characters(min_codepoint=32, max_codepoint=255, exclude_characters="\x7f"))
headers = st.lists(st.tuples(names, values.map(lambda value: value.strip(" \t"))), max_size=10)


@given(headers, st.binary(max_size=100), st.lists(st.binary(max_size=20)))
def test_what_is_written_is_read(pairs: list[tuple[str, str]], body: bytes, chunks: list[bytes]) -> None:
    sent = http1.request("POST", "/x", [("host", "h"), *pairs], body)
    head, *rest = read("requests", [sent])
    assert isinstance(head, RequestHead) and head[:2] == ("POST", "/x")
    assert list(head.headers) == [("host", "h"), *pairs, ("content-length", str(len(body)))]
    assert rest == [body, END] if body else rest == [END]
    streamed = (
        http1.chunked_response(200, "OK", pairs) + b"".join(map(http1.chunk, chunks)) + http1.LAST_CHUNK
    )
    reader = HttpReader("responses")
    reader.expect("GET")
    reader.feed(streamed)
    events = list(iter(reader.next, None))
    assert b"".join(event for event in events if isinstance(event, bytes)) == b"".join(chunks)
    assert events[-1] is END and reader.between_messages


@given(st.binary(max_size=200), st.sampled_from(["requests", "responses"]))
def test_any_bytes_are_events_or_a_known_error(data: bytes, reads: Reads) -> None:
    for prefix in (b"", b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"):
        try:
            read(reads, [prefix, data], end=False)
        except MalformedHttp:
            continue


@pytest.mark.parametrize(
    "bad", [("a b", "x"), ("a", "x\r\ny: z"), ("a", "x\ny"), ("", "x"), ("a:", "x"), ("a", "\0")]
)
def test_nothing_is_injected(bad: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match="cannot be sent"):
        http1.request("GET", "/", [bad])
    with pytest.raises(ValueError, match="cannot be sent"):
        http1.response(200, "OK", [bad])
    for method, target in (("GET /", "/"), ("GET", "/ HTTP/1.1\r\nx: y"), ("GET", ""), ("GET", "/\u00e9")):
        with pytest.raises(ValueError, match="cannot be sent"):
            http1.request(method, target, [])
    with pytest.raises(ValueError, match="cannot be sent"):
        http1.response(200, "OK\r\nx: y", [])
    with pytest.raises(ValueError, match="no body"):
        http1.response(204, "No Content", [], b"x")
