"""gRPC over HTTP/2, as bytes: what a server may say, in whatever pieces, and what follows from it."""

import struct

import pytest
from hpack import Encoder
from hypothesis import given
from hypothesis import strategies as st

from fenced.stores.etcd.wire import http2
from fenced.stores.etcd.wire.http2 import GrpcConnection, GrpcStatus, MalformedFrame, StreamRefused, frame

HEAD = http2.head("http", "h1:2379", "/a/b", [("hasleader", "true")], "")
GREETED = frame(http2.HEADERS, http2.END_HEADERS, 1, b"\x88")
"""Status 200, from HPACK's table."""


def trailers(*pairs: tuple[str, str]) -> bytes:
    return bytes(Encoder().encode(pairs or [("grpc-status", "0"), ("grpc-message", "")]))


def ended(block: bytes, stream: int = 1) -> bytes:
    return frame(http2.HEADERS, http2.END_HEADERS | http2.END_STREAM, stream, block)


def message(body: bytes) -> bytes:
    return struct.pack(">BI", 0, len(body)) + body


def frames(said: bytes) -> list[tuple[int, int, int, bytes]]:
    """Kind, flags, stream and payload of each frame."""
    found = []
    while said:
        size = int.from_bytes(said[:3], "big")
        found.append((said[3], said[4], int.from_bytes(said[5:9], "big"), said[9 : 9 + size]))
        said = said[9 + size :]
    return found


def begun(*requests: bytes) -> GrpcConnection:
    grpc = GrpcConnection()
    grpc.hello()
    grpc.begin(HEAD, requests or (b"request",))
    return grpc


# What we say.


def test_headers_are_those_of_grpc() -> None:
    token = "t" * 300  # its length takes two bytes
    told = http2.headers(http2.head("https", "h1:2379", "/a/b", [("hasleader", "true")], token))
    assert told == {
        ":method": "POST",
        ":scheme": "https",
        ":path": "/a/b",
        ":authority": "h1:2379",
        "te": "trailers",
        "content-type": "application/grpc",
        "user-agent": "fenced",
        "hasleader": "true",
        "token": token,
    }


def test_a_call_is_one_head_and_its_requests() -> None:
    assert GrpcConnection().hello().startswith(http2.PREFACE)
    grpc = GrpcConnection()
    assert frames(grpc.begin(HEAD, (b"one", b"two"))) == [
        (http2.HEADERS, http2.END_HEADERS, 1, HEAD),
        (http2.DATA, http2.END_STREAM, 1, message(b"one") + message(b"two")),
    ]
    grpc.receive(ended(trailers()))
    assert frames(grpc.begin(HEAD, (b"three",)))[0][2] == 3


def test_nothing_is_sent_that_the_server_has_no_room_for() -> None:
    """Neither on the stream nor on the connection nor in one frame; what is left goes when there is room."""
    body = bytes(100_000)
    grpc = GrpcConnection()
    first = frames(grpc.begin(HEAD, (body,)))[1:]
    assert [len(each[3]) for each in first] == [http2.FRAME_MAX] * 3 + [http2.WINDOW - 3 * http2.FRAME_MAX]
    assert not any(each[1] for each in first)
    more = struct.pack(">I", 50_000)
    assert grpc.receive(frame(http2.WINDOW_UPDATE, 0, 0, more)) == b""
    rest = frames(grpc.receive(frame(http2.WINDOW_UPDATE, 0, 1, more)))
    assert rest[-1][1] == http2.END_STREAM
    assert b"".join(each[3] for each in first + rest) == message(body)


def test_settings_change_the_room() -> None:
    grpc = GrpcConnection()
    small = frame(http2.SETTINGS, 0, 0, struct.pack(">HI", http2.INITIAL_WINDOW_SIZE, 10))
    assert frames(grpc.receive(small)) == [(http2.SETTINGS, http2.ACK, 0, b"")]
    assert len(frames(grpc.begin(HEAD, (bytes(20),)))[1][3]) == 10
    large = frame(http2.SETTINGS, 0, 0, struct.pack(">HI", http2.INITIAL_WINDOW_SIZE, 100))
    rest, acknowledged = frames(grpc.receive(large))
    assert (len(rest[3]), rest[1]) == (15, http2.END_STREAM)
    assert acknowledged == (http2.SETTINGS, http2.ACK, 0, b"")


def test_pings_are_answered_and_never_sent() -> None:
    """A client that pings too often is thrown out by etcd. When an answer goes is the caller's choice."""
    grpc = begun()
    assert grpc.receive(frame(http2.PING, 0, 0, b"12345678")) == b""
    assert frames(grpc.pings) == [(http2.PING, http2.ACK, 0, b"12345678")]
    grpc.pings = b""
    assert grpc.receive(frame(http2.PING, http2.ACK, 0, b"12345678")) + grpc.pings == b""


def test_the_server_is_told_that_it_may_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each stream as much as came on it: Go's HTTP/2 server breaks a call off whose window overflows."""
    monkeypatch.setattr(http2, "LET_FLOW", 2**18)  # instead of 2**24
    grpc = begun()
    half, size = http2.LET_FLOW // 2 // http2.FRAME_MAX, struct.pack(">I", http2.LET_FLOW)
    answers = b"".join(grpc.receive(frame(http2.DATA, 0, 1, bytes(http2.FRAME_MAX))) for _ in range(half))
    grpc.receive(ended(trailers()))
    grpc.begin(HEAD, (b"another",))
    part = frame(http2.DATA, 0, 3, bytes(http2.FRAME_MAX))
    answers += b"".join(grpc.receive(part) for _ in range(half))
    assert frames(answers) == [(http2.WINDOW_UPDATE, 0, 0, size)]
    answers = b"".join(grpc.receive(part) for _ in range(half))
    assert frames(answers) == [(http2.WINDOW_UPDATE, 0, 3, size)]


# What the server says.


@given(st.data(), st.lists(st.binary(max_size=50), max_size=4))
def test_replies_come_in_any_pieces(data: st.DataObject, replies: list[bytes]) -> None:
    """Of the connection, of frames, of headers, with padding and priorities."""
    body = b"".join(map(message, replies))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=3)))
    block = trailers(("grpc-status", "5"), ("grpc-message", "no%20such%20lease"))
    head = b"\x02" + bytes(5) + b"\x88" + bytes(2)
    said = frame(http2.HEADERS, http2.END_HEADERS | http2.PADDED | http2.PRIORITY, 1, head)
    for start, end in zip([0, *cuts], [*cuts, len(body)], strict=True):
        said += frame(http2.DATA, http2.PADDED, 1, b"\x03" + body[start:end] + bytes(3))
    said += frame(http2.HEADERS, http2.END_STREAM, 1, block[:4])
    said += frame(http2.CONTINUATION, http2.END_HEADERS, 1, block[4:])
    said += frame(0x7F, 0xFF, 1, b"of a later version")
    grpc = begun()
    step = data.draw(st.integers(1, 40))
    for at in range(0, len(said), step):
        assert grpc.receive(said[at : at + step]) == b""
    assert list(grpc.messages) == replies
    assert grpc.status == GrpcStatus(5, "no such lease")


def test_frames_of_an_earlier_call_are_ignored() -> None:
    grpc = begun()
    grpc.receive(GREETED + ended(trailers()))
    assert grpc.status == GrpcStatus(0, "")
    grpc.begin(HEAD, (b"another",))
    late = frame(http2.DATA, 0, 1, message(b"late")) + frame(http2.RST_STREAM, 0, 1, bytes(4))
    grpc.receive(late + ended(trailers(), 1))
    assert grpc.status is None and not grpc.messages


def test_a_call_that_was_not_begun_is_refused() -> None:
    """And one that was, or nobody knows, is not."""
    with pytest.raises(StreamRefused):
        begun().receive(frame(http2.RST_STREAM, 0, 1, struct.pack(">I", http2.REFUSED_STREAM)))
    with pytest.raises(StreamRefused):
        begun().receive(frame(http2.GOAWAY, 0, 0, struct.pack(">II", 0, 0)))
    grpc = begun()
    grpc.receive(frame(http2.GOAWAY, 0, 0, struct.pack(">II", 1, 0) + b"why"))
    assert grpc.closing and grpc.status is None
    grpc.receive(ended(trailers()))
    assert grpc.status == GrpcStatus(0, "")
    with pytest.raises(StreamRefused):
        grpc.begin(HEAD, (b"another",))
    broken = begun()
    broken.receive(frame(http2.RST_STREAM, 0, 1, struct.pack(">I", 8)))
    assert broken.status is not None and broken.status.code == http2.UNKNOWN


@pytest.mark.parametrize(
    "said",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        frame(http2.HEADERS, http2.END_HEADERS, 1, b"\x8d"),  # status 404
        frame(http2.HEADERS, http2.END_HEADERS, 1, b"\xff\xff\xff\xff"),
        frame(http2.HEADERS, http2.END_HEADERS, 1, b"\xbe"),  # refers to a table that we do not keep
        frame(http2.HEADERS, http2.END_HEADERS | http2.END_STREAM, 1, b"\x88"),
        frame(http2.CONTINUATION, http2.END_HEADERS, 1, b"\x88"),
        frame(http2.DATA, http2.PADDED, 1, b"\x09"),
        frame(http2.DATA, 0, 1, b"\x01" + bytes(4)),  # compressed
        frame(http2.SETTINGS, 0, 0, b"\0"),
        frame(http2.GOAWAY, 0, 0, b"\0"),
        b"\x01\0\0\0\0\0\0\0\0",
    ],
)
def test_frames_that_no_grpc_server_sends_are_malformed(said: bytes) -> None:
    with pytest.raises(MalformedFrame):
        begun().receive(said)


@given(st.binary(max_size=200))
def test_nothing_else_comes_of_it(said: bytes) -> None:
    grpc = begun()
    try:
        grpc.receive(said)
    except (MalformedFrame, StreamRefused):
        assert grpc.status is None
