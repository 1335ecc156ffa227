"""The Redis protocol: replies are the same however their bytes are split, and no reply costs quadratic time."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenced.stores.redis.wire.resp import ErrorReply, Incomplete, MalformedResp, RespReader, command

STREAM = (
    b"+OK\r\n:42\r\n:-1\r\n$-1\r\n$0\r\n\r\n$6\r\na\r\nb\r\n\r\n*-1\r\n*0\r\n"
    b"*3\r\n$1\r\nx\r\n*2\r\n:1\r\n*1\r\n*0\r\n-ERR no such thing\r\n-NOSCRIPT x\r\n"
)
REPLIES = [
    b"OK",
    42,
    -1,
    None,
    b"",
    b"a\r\nb\r\n",
    None,
    [],
    [b"x", [1, [[]]], ErrorReply("ERR no such thing")],
    ErrorReply("NOSCRIPT x"),
]


def whole(reader: RespReader) -> list[Any]:
    replies: list[Any] = []
    try:
        while True:
            replies.append(reader.next())
    except Incomplete:
        return replies


@given(st.lists(st.integers(0, len(STREAM))))
def test_replies_are_the_same_however_they_are_split(cuts: list[int]) -> None:
    reader, replies = RespReader(), []
    places = [0, *sorted(cuts), len(STREAM)]
    for start, end in itertools.pairwise(places):
        reader.feed(STREAM[start:end])
        replies += whole(reader)
    assert replies == REPLIES and not reader.has_bytes


def test_two_pieces_at_every_byte_and_one_byte_at_a_time() -> None:
    for at in range(len(STREAM) + 1):
        reader = RespReader()
        reader.feed(STREAM[:at])
        before = whole(reader)
        assert reader.has_bytes == (len(before) < len(REPLIES) and STREAM[:at] != _written(len(before)))
        reader.feed(STREAM[at:])
        assert before + whole(reader) == REPLIES
    reader, replies = RespReader(), []
    for byte in STREAM:
        reader.feed(bytes([byte]))
        replies += whole(reader)
    assert replies == REPLIES


def _written(count: int) -> bytes:
    """The bytes of the first replies."""
    for at in range(len(STREAM) + 1):
        reader = RespReader()
        reader.feed(STREAM[:at])
        if len(whole(reader)) == count:
            return STREAM[:at]
    raise AssertionError


class Counting(RespReader):
    elements = 0

    def _element(self) -> Any:
        self.elements += 1
        return super()._element()


def test_an_array_in_pieces_is_not_read_from_its_beginning_each_time() -> None:
    items = 1000
    reader = Counting()
    reader.feed(b"*%d\r\n" % items)
    for _ in range(items - 1):
        with pytest.raises(Incomplete):
            reader.next()
        reader.feed(b"$1\r\nx\r\n")
    with pytest.raises(Incomplete):
        reader.next()
    reader.feed(b"$1\r\nx\r\n")
    assert reader.next() == [b"x"] * items
    assert reader.elements < 3 * items, "each feed reads one item, and finds that the next is missing"


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 400 Bad Request\r\n",
        b"\r\n",
        b"$3\r\nabcde\r\n",
        b"$-2\r\n",
        b"$x\r\n",
        b"$99999999999\r\n",
        b"*-2\r\n",
        b":x\r\n",
        b"*--1\r\n",
        b"+" + b"x" * 70_000,
        b"+" + b"x" * 70_000 + b"\r\n",
        b"*1\r\n" * 40,
    ],
)
def test_bytes_that_are_not_resp_are_malformed(data: bytes) -> None:
    reader = RespReader()
    reader.feed(data)
    with pytest.raises(MalformedResp):
        reader.next()


@given(st.binary(max_size=60), st.lists(st.binary(max_size=20)))
def test_any_bytes_end_in_a_reply_or_a_known_error(first: bytes, more: list[bytes]) -> None:
    reader = RespReader()
    for data in (first, *more):
        reader.feed(data)
        try:
            whole(reader)
        except MalformedResp:
            return


@given(st.lists(st.one_of(st.text(), st.binary(), st.integers()), min_size=1))
def test_a_request_is_an_array_of_its_words(words: list[str | bytes | int]) -> None:
    reader = RespReader()
    reader.feed(command(*words))
    assert reader.next() == [word if isinstance(word, bytes) else str(word).encode() for word in words]


def test_an_error_has_a_code() -> None:
    assert ErrorReply("NOSCRIPT No matching script").code == "NOSCRIPT"
