"""The headers that carry a stamp, and the answers that mean errors, there and back."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fenced import errors
from fenced.http.protocol import fence_headers, read_fence
from fenced.net import problems
from fenced.net.problems import PROBLEM_MEDIA_TYPE, PROBLEM_TYPES, error_from, problem
from fenced.proofs import Proof
from fenced.testing import vectors
from fenced.values.model import NAMES_MAX, SEQ_MAX, TOKEN_MAX, Stamp

HEX = "0123456789abcdef"
NAMES = st.text(
    st.characters(codec="utf-8", exclude_categories=("Cc", "Cs", "Zl", "Zp", "Zs", "Cf")), min_size=1
)
STAMPS = st.builds(
    Stamp,
    st.text(HEX, min_size=16, max_size=16),
    st.sampled_from(vectors.CANARY_NAMES).map(lambda name: (name,)),
    st.integers(1, TOKEN_MAX),
    st.none() | st.integers(0, SEQ_MAX),
    st.text(HEX, min_size=32, max_size=32),
)
PROOFS = st.builds(
    Proof,
    STAMPS,
    st.builds(
        "{}:{}".format,
        st.text("ab-_9", min_size=1, max_size=32),
        st.sampled_from((64, 128)).flatmap(lambda size: st.text(HEX, min_size=size, max_size=size)),
    ),
)
ANSWERED = [row.error for row in PROBLEM_TYPES]
OWN = {errors.NotGranted, errors.NotEnoughTime, errors.Refused, errors.Overtaken, errors.FencedError}
"""Errors that say nothing about a request: a receiver's own, and parents that nobody raises."""


def every_error(kind: type[errors.FencedError] = errors.FencedError) -> set[type[errors.FencedError]]:
    ours = [child for child in kind.__subclasses__() if child.__module__ == "fenced.errors"]
    return {kind, *(each for child in ours for each in every_error(child))}


def test_every_error_has_one_answer_and_every_answer_one_error() -> None:
    assert every_error() - set(ANSWERED) == OWN | {errors.InvariantBroken}
    assert len(set(ANSWERED)) == len({row.uri for row in PROBLEM_TYPES}) == len(PROBLEM_TYPES)
    assert 409 not in {row.status for row in PROBLEM_TYPES}, "widely used SDKs repeat a 409 by themselves"
    assert {kind.kind for kind in errors.REFUSALS.values()} <= {row.kind for row in PROBLEM_TYPES}


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_an_error_survives_the_wire(data: st.DataObject) -> None:
    """And takes no stamp, proof or grant along, wherever in its message one stands."""
    kind = data.draw(st.sampled_from(ANSWERED))
    proof = data.draw(PROOFS)
    stamp, newer = proof.stamp, data.draw(st.text(HEX, min_size=32, max_size=32))
    fields: dict[str, Any] = {}
    if issubclass(kind, errors.Refused):
        name, mark = data.draw(st.none() | st.text()), data.draw(st.none() | st.integers(1, TOKEN_MAX))
        fields = {"name": name, "mark": mark, "stamp": stamp, "holder": newer}
    elif issubclass(kind, errors.LeaseLost):
        fields = {"reason": data.draw(st.text())}
    plain = data.draw(st.text(st.characters(exclude_characters=HEX), min_size=1, max_size=300))
    secrets = data.draw(st.lists(st.sampled_from([str(stamp), proof.text, ascii(str(stamp))])))
    error = kind(" ".join([plain, *secrets]), **fields)

    status, headers, body = problem(error)
    found = error_from(status, dict(headers)["Content-Type"], body)
    assert type(found) is kind
    assert found.retry == json.loads(body)["retry"] == kind.retry
    assert ("Retry-After" in dict(headers)) == (status == 503)
    assert int(dict(headers)["Content-Length"]) == len(body)
    assert len(str(found)) <= problems.DETAIL_LENGTH_MAX
    if not secrets:
        assert str(found) == plain
    texts = (str(found), json.loads(body)["detail"])
    assert not any(secret in text for text in texts for secret in (str(stamp), proof.text, proof.text[-64:]))
    if secrets or issubclass(kind, errors.Refused):
        assert not any(stamp.grant in text for text in texts)
    for field in {"name", "mark", "reason"} & fields.keys():
        assert getattr(found, field) == fields[field]
    assert "stamp" not in json.loads(body)
    assert "holder" not in json.loads(body)


@pytest.mark.parametrize("kind", sorted(OWN | {errors.InvariantBroken}, key=str))
def test_an_error_of_the_receiver_itself_is_not_explained_to_a_stranger(
    kind: type[errors.FencedError],
) -> None:
    fields: dict[type, dict[str, Any]] = {errors.NotEnoughTime: {"remaining": 1.0, "need": 2.0}}
    status, headers, body = problem(kind("the password is 1234", **fields.get(kind, {})))
    assert status == 500
    assert b"1234" not in body
    assert error_from(status, dict(headers)["Content-Type"], body) is None


@settings(max_examples=200, deadline=None)
@given(fence=STAMPS | PROOFS, case=st.sampled_from([str.lower, str.upper, str.title]), encoded=st.booleans())
def test_a_stamp_survives_the_wire(fence: Stamp | Proof, case: Any, encoded: bool) -> None:
    pairs: list[Any] = [
        ("Accept", "*/*"),
        *((case(key), value) for key, value in fence_headers(fence).items()),
    ]
    if encoded:
        pairs = [(key.encode(), value.encode()) for key, value in pairs]
    assert read_fence(pairs) == fence


TEXTS = st.text(max_size=300) | st.binary(max_size=300)
PARTS = (
    STAMPS.map(str)
    | PROOFS.map(lambda proof: proof.text)
    | st.sampled_from(['"', "\\", ",", ";a=1", " ", "\t"])
)
VALUES = TEXTS | st.lists(PARTS | st.text(max_size=3), max_size=6).map("".join)
KEYS = st.sampled_from(
    ["Fenced-Stamp", "fenced-proof", b"fenced-stamp", b"Fenced-Proof", "Idempotency-Key", ""]
)


@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(KEYS, VALUES), max_size=3))
def test_no_header_breaks_the_parser(headers: list[tuple[str | bytes, str | bytes]]) -> None:
    try:
        found = read_fence(headers)
    except errors.InvalidStamp as error:
        said = str(error)
        assert not any(str(value) in said for _, value in headers if len(value) > 40)
    else:
        sent = [value for key, value in headers if key in ("Fenced-Stamp", b"fenced-stamp")]
        stamp = found.stamp if isinstance(found, Proof) else found
        assert [f'"{stamp}"'] == [
            (value if isinstance(value, str) else value.decode("latin-1")).strip(" \t") for value in sent
        ] or (stamp is None and not sent)


@settings(max_examples=200, deadline=None)
@given(
    status=st.sampled_from(sorted({row.status for row in PROBLEM_TYPES})) | st.integers(),
    content_type=st.sampled_from([None, "", PROBLEM_MEDIA_TYPE, "Application/Problem+JSON; charset=utf-8"])
    | st.text(),
    body=st.binary(max_size=100)
    | st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    ).map(lambda value: json.dumps(value).encode())
    | st.fixed_dictionaries(
        {"type": st.sampled_from([row.uri for row in PROBLEM_TYPES]) | st.integers()},
        optional={
            field: st.none() | st.text() | st.integers() for field in ("detail", "name", "mark", "reason")
        },
    ).map(lambda document: json.dumps(document).encode()),
)
def test_no_answer_breaks_the_sender(status: int, content_type: str | None, body: bytes) -> None:
    found = error_from(status, content_type, body)
    assert found is None or problem(found).status == status


def test_an_answer_is_ours_only_as_a_whole() -> None:
    status, _, body = problem(errors.StaleToken("too old"))
    assert isinstance(error_from(status, PROBLEM_MEDIA_TYPE, body), errors.StaleToken)
    assert error_from(409, PROBLEM_MEDIA_TYPE, body) is None, "a status that somebody on the way has changed"
    assert error_from(status, "application/json", body) is None
    assert error_from(status, PROBLEM_MEDIA_TYPE, b"[" * 60_000) is None
    assert error_from(status, PROBLEM_MEDIA_TYPE, body + b" " * problems.PROBLEM_BYTES_MAX) is None


def test_a_stamp_that_is_too_long_for_a_header_is_not_sent() -> None:
    names = tuple(f"{number:02}/{'x' * 190}" for number in range(NAMES_MAX))
    with pytest.raises(errors.Misuse, match="hold fewer names"):
        fence_headers(Stamp("0" * 16, names, 1, 1, "1" * 32))


def test_a_key_names_one_operation() -> None:
    stamp = Stamp("0" * 16, ("a",), 1, 1, "1" * 32)
    stamps = stamp, stamp._replace(seq=2), stamp._replace(grant="2" * 32)
    keys = {fence_headers(each)["Idempotency-Key"] for each in stamps}
    assert len(keys) == 3
    assert not any(stamp.grant in key for key in keys)
    assert "Idempotency-Key" not in fence_headers(stamp.announcing()) | fence_headers(
        stamp._replace(seq=None)
    )


def test_titles_name_who_answers() -> None:
    def title(**options: str) -> str:
        return str(json.loads(problem(errors.Unavailable("x"), **options).body)["title"])

    assert title() == "The receiver cannot serve this request now"
    assert title(by="service") == "The service cannot serve this request now"
    assert title(by="proxy", title="The upstream cannot be reached") == "The upstream cannot be reached"
