"""Names, stamps, times and errors: what the kits do not reach."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenced import errors
from fenced.errors import InvalidStamp, Misuse, shown
from fenced.testing.kit import stamp
from fenced.values import timing
from fenced.values.model import Stamp, check_name, grant_id

names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=80)


@given(
    st.lists(names, min_size=1, max_size=4, unique=True),
    st.integers(1, 2**53 - 1),
    st.none() | st.integers(0),
)
def test_stamps_go_there_and_back(given_names: list[str], token: int, seq: int | None) -> None:
    valid = []
    for name in given_names:
        try:
            valid.append(check_name(name))
        except Misuse:
            continue
    if valid and (seq is None or seq < 2**53):
        made = Stamp("0" * 16, tuple(sorted(valid, key=str.encode)), token, seq, "a" * 32)
        assert Stamp.parse(str(made)) == made


@given(st.text(max_size=200))
def test_parsing_never_raises_anything_else(text: str) -> None:
    try:
        parsed = Stamp.parse(text)
    except InvalidStamp:
        return
    assert str(parsed) == text


@given(st.integers(0, 200), st.sampled_from("0123456789abcdef:,%/-. x\n"))
def test_a_stamp_with_one_character_changed_is_another_or_none(at: int, character: str) -> None:
    text = str(stamp(5, 1, "orders/42", "a b"))
    changed = text[: at % len(text)] + character + text[at % len(text) + 1 :]
    said = ""
    try:
        assert str(Stamp.parse(changed)) == changed
    except InvalidStamp as refused:
        said = str(refused)
    assert stamp(5, 1, "orders/42", "a b").grant not in said  # messages are logged, and stamps must not be


def test_the_public_id_does_not_tell_the_secret() -> None:
    secret = "0" * 32
    assert secret not in grant_id(secret)
    assert len(grant_id(secret)) == 32


def test_the_deadline_counts_from_before_the_request() -> None:
    assert timing.local_deadline(100.0, 10.0) == pytest.approx(100 + 10 - 0.1 - 0.01)
    assert timing.renew_after(30.0, 0.0) == 10.0
    assert 8.0 < timing.renew_after(30.0, 0.999) < 10.0
    assert timing.remember_for(1000.0) == 4000.0


@pytest.mark.parametrize(
    "value", ["x" * 10**6, b"\xff" * 1000, 10**5000, [1] * 1000, "\ud800", "a\nb"], ids=range(6)
)
def test_hostile_values_are_cut_in_messages(value: object) -> None:
    text = shown(value)
    assert len(text) <= 200
    assert text.isascii()
    assert "\n" not in text


def test_every_error_says_what_to_do() -> None:
    kinds = [e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, errors.FencedError)]
    assert len(kinds) > 20
    for kind in kinds:
        assert kind.retry in ("no", "same-attempt", "later", "transaction")
        assert kind.__doc__
        if issubclass(kind, errors.Refused):
            assert kind.retry == "no"
