"""`fenced stamp`."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

import fenced
from fenced.cli import app

LOCK = ("etcd-revision", "main", "7", "lease/key", "b", "a")


def run(*words: str) -> str:
    return CliRunner().invoke(app, ["stamp", *words], catch_exceptions=False).output


def test_it_makes_the_stamp_of_another_lock() -> None:
    made = fenced.Stamp.foreign("etcd-revision", "main", ["a", "b"], 7, "lease/key", seq=3)
    assert run("foreign", *LOCK, "--seq", "3") == f"{made}\n"


def test_a_number_that_could_repeat_is_refused_under_strict() -> None:
    with pytest.raises(fenced.Misconfigured, match="starts again at 0"):
        run("foreign", "zookeeper-sequence", *LOCK[1:])


@pytest.mark.parametrize("seq, said", [(None, "none: rule retry"), (0, "0: it announces"), (5, "5")])
def test_it_reads_any_stamp(seq: int | None, said: str) -> None:
    stamp = fenced.Stamp("ab" * 8, ("a", "b"), 7, seq, "cd" * 16)
    assert run("read", str(stamp)).splitlines() == [
        "names  a, b", "token  7", f"seq    {said}", f"realm  {stamp.realm}", f"grant  {stamp.grant}",
    ]  # fmt: skip
    assert json.loads(run("read", str(stamp), "--json"))["announces"] is (seq == 0)


def test_a_text_that_is_no_stamp_is_refused() -> None:
    with pytest.raises(fenced.InvalidStamp):
        run("read", "1:2")
