"""What a consumer answers to its broker, and the stamp in the headers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fenced
from fenced import errors, messages
from fenced.messages import Settlement
from fenced.messages.outcomes import Headers
from fenced.proofs import HmacKey
from fenced.values.model import Stamp

STAMP = Stamp("00000000000000aa", ("orders/42",), 5, 1, "1" * 32)
OTHERS = STAMP._replace(names=("consumers/orders",), grant="2" * 32)
PROOF = HmacKey("shop-1", b"x" * 32).sign(STAMP)


@pytest.mark.parametrize(
    "error, answer",
    [
        (None, Settlement.ACK),
        (errors.AlreadyApplied("orders/42"), Settlement.ACK),
        *(
            (kind("no", stamp=STAMP, name="orders/42"), Settlement.REJECT)
            for kind in errors.REFUSALS.values()
            if kind not in (errors.ForeignRealm, errors.MissingStamp)
        ),
        (errors.InvalidStamp("no"), Settlement.REJECT),
        (errors.Uncovered("no", stamp=OTHERS, name="orders/43"), Settlement.REJECT),
        (errors.ForeignRealm("a move", stamp=STAMP, name="orders/42"), Settlement.RETRY),
        (errors.Uncovered("another table", stamp=STAMP, name="audit/7"), Settlement.RETRY),
        (errors.MissingStamp("written without the fence"), Settlement.RETRY),
        (errors.StaleToken("the consumer's own lease", stamp=OTHERS), Settlement.RETRY),
        (errors.LeaseLost("the consumer's own lease", reason="expired"), Settlement.RETRY),
        *((kind("later"), Settlement.RETRY) for kind in (errors.Contended, errors.Unavailable)),
        *((kind("who knows"), Settlement.RETRY) for kind in (errors.Indeterminate, errors.Conflict)),
        (ZeroDivisionError(), Settlement.RETRY),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, Settlement) else value,
)
def test_every_outcome_has_one_answer(error: Exception | None, answer: Settlement) -> None:
    for fence in (STAMP, PROOF):
        assert messages.settlement(error, fence) is answer


def test_without_a_stamp_every_refused_stamp_is_the_consumers() -> None:
    assert messages.settlement(errors.StaleToken("no", stamp=STAMP), None) is Settlement.RETRY
    assert messages.settlement(errors.MissingStamp("no"), None) is Settlement.REJECT


def test_the_stamp_travels_in_the_headers() -> None:
    with fenced.Client("memory:") as client, client.hold("orders/42") as lease:
        first, second = messages.headers(lease), messages.headers(lease)
        assert [Stamp.parse(one["fenced-stamp"]).seq for one in (first, second)] == [1, 2]
        assert messages.fence_of(first) == Stamp.parse(first["fenced-stamp"])
    assert messages.fence_of(messages.headers(PROOF)) == PROOF
    text = str(STAMP)
    for spelled in (
        {"fenced-stamp": text},
        {"Fenced-Stamp": text.encode()},
        [(b"fenced-stamp", text.encode())],
    ):
        assert messages.fence_of({"other": [1], **spelled} if isinstance(spelled, dict) else spelled) == STAMP
    nothing: list[Headers] = [None, {}, [], {"other": 1}]
    assert [messages.fence_of(headers) for headers in nothing] == [None] * 4
    with pytest.raises(errors.Misuse):
        messages.headers([STAMP, OTHERS])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "headers",
    [
        [("fenced-stamp", str(STAMP)), ("fenced-stamp", str(STAMP))],
        {"fenced-stamp": str(STAMP), "Fenced-Stamp": str(STAMP)},
        {"fenced-stamp": [str(STAMP)]},
        {"fenced-stamp": 5},
        {"fenced-stamp": None},
        {"fenced-stamp": ""},
        {"fenced-stamp": bytearray(b"\xff")},
        {"fenced-proof": PROOF.text},
        {"fenced-stamp": str(STAMP), "fenced-proof": "x"},
    ],
    ids=str,
)
def test_anything_but_one_stamp_is_invalid(headers: Headers) -> None:
    with pytest.raises(errors.InvalidStamp):
        messages.fence_of(headers)


ANYTHING = st.none() | st.integers() | st.text() | st.binary() | st.lists(st.text(), max_size=2)


@given(
    st.dictionaries(st.sampled_from(["fenced-stamp", "FENCED-STAMP", "fenced-proof", "x"]), ANYTHING)
    | st.lists(st.tuples(st.sampled_from([b"fenced-stamp", "fenced-proof", 5, ""]), ANYTHING))
)
def test_no_headers_raise_anything_else(headers: Headers) -> None:
    try:
        fence = messages.fence_of(headers)
    except errors.InvalidStamp:
        return
    assert fence is None
