"""Bodies in chunks: in any pieces, with one meaning, and nothing is waited for that cannot come."""

from __future__ import annotations

from itertools import pairwise

import httptools
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fenced.http1.bodies import COPIED_BYTES, Chunks, after, body_of, chunk
from fenced.http1.heads import UNTIL_CLOSE, BadMessage
from tests.proxy.test_passing import Other

LONG = [b"x" * size for size in (COPIED_BYTES, COPIED_BYTES + 1, 3 * COPIED_BYTES)]


@example([b"x", b"yz"], list(range(40)), b"X: 1\r\n")
@given(
    st.lists(st.binary(min_size=1, max_size=20) | st.sampled_from(LONG)),
    st.lists(st.integers(0, 40_000)),
    st.sampled_from((b"", b"X: 1\r\n")),
)
def test_chunks_in_any_pieces(pieces: list[bytes], cuts: list[int], trailers: bytes) -> None:
    sent = b"".join(b"".join(chunk(piece)) for piece in pieces) + b"0;a=b\r\n" + trailers + b"\r\nGET"
    chunks, got, rest = Chunks(), b"", None
    for start, end in pairwise(sorted({0, len(sent), *(cut % len(sent) for cut in cuts)})):
        if rest is not None:
            rest = bytes(rest) + sent[start:end]
            continue
        found, rest = chunks.feed(memoryview(sent)[start:end])
        got += b"".join(found)
    assert got == b"".join(pieces) and rest == b"GET"


@given(st.binary(max_size=30) | st.sampled_from(LONG), st.lists(st.integers(0, 40_000)))
def test_a_body_of_a_length_in_any_pieces(body: bytes, cuts: list[int]) -> None:
    sent = body + b"GET"
    counted, whole, got, rest = body_of(len(body)), body_of(UNTIL_CLOSE), b"", b""
    for start, end in pairwise(sorted({0, len(sent), *(cut % len(sent) for cut in cuts)})):
        data = after(sent[:end], start)
        assert whole.feed(data) == ([data], None)
        if len(got) < len(body) or not start:
            found, after_it = counted.feed(data)
            got += b"".join(found)
            rest += bytes(after_it or b"")
            assert (after_it is None) == (end < len(body))
        else:
            rest += bytes(data)
    assert (got, rest) == (body, b"GET")


PIECES = (
    "1\r\n|a\r\n|x|\r\n|0\r\n|\r\n\r\n|;a\r\n| |\t|0|g|\n|\r|-1\r\n|+1\r\n|0x1\r\n|X: 1\r\n|X : 1\r\n|\0|1;\n"
)


@given(st.lists(st.sampled_from(PIECES.encode().split(b"|"))).map(b"".join))
def test_chunks_have_one_meaning(data: bytes) -> None:
    try:
        pieces, rest = Chunks().feed(data)
    except BadMessage:
        return
    if rest is not None:
        whole = data[: len(data) - len(rest)]
        other = Other(
            httptools.HttpRequestParser, b"PUT / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" + whole
        )
        assert other.ended and other.body == b"".join(pieces)


def test_a_bad_chunk_is_refused_at_once() -> None:
    for first, bad in (
        (b"", b"zz\r\n"),
        (b"1\r\nx", b"y"),
        (b"0\r\n", b"X\r\n\r\n"),
        (b"", b"1;" + b"a" * 5000),
        (b"1;%b\r\nx" % (b"a" * 4000), b"\r\n1;%b\r\n" % (b"a" * 100)),
    ):
        chunks = Chunks()
        chunks.feed(first)
        with pytest.raises(BadMessage):
            chunks.feed(bad)
