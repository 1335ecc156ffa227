"""Responses: the same events however the bytes are split, and nothing ambiguous. Requests: nothing is injected."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenced.http1.bodies import LAST_CHUNK, chunk
from fenced.http1.heads import BadMessage, ResponseHead, request_head
from fenced.http1.responses import END, Event, ResponseReader
from fenced.http1.writing import reply_head, request

RESPONSES = (
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi",
    b"HTTP/1.1 204 No Content\r\n\r\n",
    b"HTTP/1.1 200 \r\nContent-Length: 99\r\n\r\n",
    b"HTTP/1.1 404\r\nTransfer-Encoding: Chunked\r\n\r\n1\r\n!\r\n00a;x\r\n, my world\r\n0\r\nX-T: 1\r\n\r\n",
    b"HTTP/1.0 200 OK\r\n\r\nto the end",
)
METHODS = ("GET", "POST", "HEAD", "GET", "GET")
EVENTS = [100, 200, b"hi", END, 204, END, 200, END, 404, b"!, my world", END, 200, b"to the end", END]


def read(reader: ResponseReader, pieces: list[bytes], *, end: bool) -> list[object]:
    """All events, with the pieces of a body put together, and the statuses of heads."""
    events: list[object] = []

    def take() -> None:
        while (event := reader.next()) is not None:
            last = events[-1] if events else None
            if isinstance(event, bytes) and isinstance(last, bytes):
                events[-1] = last + event
            else:
                events.append(event.status if isinstance(event, ResponseHead) else event)

    for piece in pieces:
        reader.feed(piece)
        take()
    if end:
        reader.feed_end()
        take()
    return events


def read_all(cut: int | list[int]) -> list[object]:
    """One response after the other, each cut there."""
    reader, events = ResponseReader(1000), []
    for method, data in zip(METHODS, RESPONSES, strict=True):
        reader.expect(method)
        places = sorted(
            {0, len(data), *(min(each, len(data)) for each in ([cut] if isinstance(cut, int) else cut))}
        )
        pieces = [data[start:stop] for start, stop in itertools.pairwise(places)]
        events += read(reader, pieces, end=data is RESPONSES[-1])
    assert reader.is_between
    return events


def test_two_pieces_at_every_byte_and_one_byte_at_a_time() -> None:
    for at in range(max(map(len, RESPONSES)) + 1):
        assert read_all(at) == EVENTS
    assert read_all(list(range(200))) == EVENTS


@given(st.lists(st.integers(0, 200)))
def test_any_pieces(cuts: list[int]) -> None:
    assert read_all(cuts) == EVENTS


def test_an_end_in_the_middle_of_a_message_is_noticed() -> None:
    for method, data in zip(METHODS[:-1], RESPONSES[:-1], strict=True):
        for at in range(len(data)):
            reader = ResponseReader(1000)
            reader.expect(method)
            with pytest.raises(BadMessage, match="ended"):
                read(reader, [data[:at]], end=True)


@pytest.mark.parametrize(
    "response",
    [
        "HTTP/1.1 OK\r\n\r\n",
        "HTTP/1.1 099 x\r\n\r\n",
        "HTTP/1.1 101 x\r\n\r\n",
        "HTTP/2.0 200 OK\r\n\r\n",
        "ICY 200 OK\r\n\r\n",
        "HTTP/1.1 100 x\r\nContent-Length: 1\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\n",
        "HTTP/1.1 200 OK\r\n" + "X: y\r\n" * 200 + "\r\n",
        "HTTP/1.1 200 OK\r\nX: " + "y" * 40_000,
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
def test_responses_that_are_none_are_refused(response: str) -> None:
    reader = ResponseReader(1000)
    reader.expect("GET")
    with pytest.raises(BadMessage):
        read(reader, [response.encode()], end=False)


def test_a_response_that_nobody_asked_for_answers_no_later_request() -> None:
    reader = ResponseReader(1000)
    reader.expect("GET")
    one = b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\none"
    reader.feed(one + one)
    assert [reader.next() for _ in range(3)][1:] == [b"one", END]
    assert not reader.is_between
    with pytest.raises(BadMessage, match="no request"):
        reader.next()
    with pytest.raises(BadMessage, match="no request"):
        reader.expect("GET")


def test_a_body_is_bounded_however_it_comes() -> None:
    for head in (
        b"Content-Length: 11\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n6\r\nhello!\r\n5\r\n",
        b"\r\n",
    ):
        reader = ResponseReader(10)
        reader.expect("GET")
        with pytest.raises(BadMessage, match="more than 10"):
            read(reader, [b"HTTP/1.1 200 OK\r\n" + head, b"hello", b"hello", b"!"], end=False)


names = st.from_regex(r"[a-z][a-z0-9-]{0,10}", fullmatch=True).filter(
    lambda name: name not in ("host", "content-length", "transfer-encoding", "connection", "expect")
)
values = st.text(st.characters(min_codepoint=32, max_codepoint=255, exclude_characters="\x7f"))
headers = st.lists(st.tuples(names, values.map(lambda value: value.strip(" \t"))), max_size=10)


@given(headers, st.binary(max_size=100), st.lists(st.binary(min_size=1, max_size=20)))
def test_a_written_request_is_read_back_unchanged(
    pairs: list[tuple[str, str]], body: bytes, chunks: list[bytes]
) -> None:
    sent = request("POST", "/x", [("host", "h"), *pairs], body)
    head = request_head(sent[: len(sent) - len(body)])
    assert (head.method, head.target, head.length) == (b"POST", b"/x", len(body))
    wanted = [("host", "h"), *pairs, ("content-length", str(len(body)))]
    assert head.headers() == [(name.encode(), value.encode("latin-1")) for name, value in wanted]
    reader = ResponseReader(1000)
    reader.expect("GET")
    reader.feed(reply_head(200, tuple(pairs), b"") + b"transfer-encoding: chunked\r\n\r\n")
    reader.feed(b"".join(b"".join(chunk(each)) for each in chunks) + LAST_CHUNK)
    events: list[Event] = list(iter(reader.next, None))
    assert b"".join(event for event in events if isinstance(event, bytes)) == b"".join(chunks)
    assert events[-1] is END and reader.is_between


@given(
    st.binary(max_size=200), st.sampled_from([b"", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"])
)
def test_any_bytes_are_events_or_a_known_error(data: bytes, before: bytes) -> None:
    reader = ResponseReader(1000)
    reader.expect("GET")
    try:
        events = read(reader, [before, data], end=False)
    except BadMessage:
        return
    assert all(isinstance(event, int | bytes) or event is END for event in events)


@pytest.mark.parametrize(
    "bad", [("a b", "x"), ("a", "x\r\ny: z"), ("a", "x\ny"), ("", "x"), ("a:", "x"), ("a", "\0")]
)
def test_nothing_is_injected(bad: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match="cannot be sent"):
        request("GET", "/", [bad])
    with pytest.raises(ValueError, match="cannot be sent"):
        reply_head(200, (bad,), b"")
    for method, target in (("GET /", "/"), ("GET", "/ HTTP/1.1\r\nx: y"), ("GET", ""), ("GET", "/\u00e9")):
        with pytest.raises(ValueError, match="cannot be sent"):
            request(method, target, [])
