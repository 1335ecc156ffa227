"""Damage at every place of the newest segment: it is refused, or no token repeats.

A flipped bit, zeros from there to the end of the batch, or the end of the file. Nothing vouches for the last batch: it
may be lost, but its tokens are skipped.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from fenced.errors import Misconfigured, Misuse, Unavailable
from fenced.runtime.blocking import step
from fenced.stores.ledger.authority.ledger import BATCH_TOKENS_MAX
from fenced.testing.kit import asking
from fenced.values.model import Granted, Kept, Released
from tests.ledger.test_journal import places, segment
from tests.ledger.test_ledger import RUNTIME, lease, opened, token_of


@pytest.fixture
def no_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing cuts the power here, and hundreds of ledgers are opened."""
    monkeypatch.setattr("os.fdatasync", lambda _: None)
    monkeypatch.setattr("os.fsync", lambda _: None)


def used(folder: Path) -> tuple[int, list[str]]:
    """A ledger whose process was killed: the last token, and leases whose batches something vouches for."""
    ledger = opened(folder / "leases.db")
    vouched = [lease(f"kept/{number}") for number in range(3)]
    for each in vouched:
        token_of(ledger, each)
        ended = asking(RUNTIME, "ended")
        token_of(ledger, ended)
        assert step(ledger.release(ended.secret)) == Released()  # not synced
    last = token_of(ledger, lease("last"))
    for file in folder.iterdir():
        shutil.copy(file, folder.parent / "killed" / file.name)
    ledger.abandon()
    return last, [each.secret for each in vouched]


def damages(whole: bytes, ends: list[int], every: int) -> Iterator[tuple[str, int, bytes]]:
    for at in range(random.randrange(every), ends[-1], every):
        flipped = bytearray(whole)
        flipped[at] ^= 1 << random.randrange(8)
        yield "flipped", at, bytes(flipped)
        if at % 5 == 0:
            end = next(end for end in ends if end > at)
            yield "zeros", at, whole[:at] + bytes(end - at) + whole[end:]
            yield "cut", at, whole[:at]


def damaged(folder: Path, every: int) -> tuple[int, int]:
    """How many ledgers were refused, and how many have lost the end that nothing vouches for."""
    for name in ("used", "killed"):
        (folder / name).mkdir()
    last, vouched = used(folder / "used")
    file = segment(folder / "killed" / "leases.db", 1)
    ends = [end for _, end in places(file)]
    refused = dropped = 0
    for what, at, contents in damages(file.read_bytes(), ends, every):
        shutil.copytree(folder / "killed", broken := folder / "broken")
        segment(broken / "leases.db", 1).write_bytes(contents)
        try:
            ledger = opened(broken / "leases.db")
        except Misconfigured:
            refused += 1
        else:
            # Whatever was cut off belongs to the last batch, or to the release that was synced with it.
            assert at >= ends[-3] and what != "cut", f"{what} at {at} of {ends}"
            dropped += 1
            assert token_of(ledger, lease("new")) > last, f"{what} at {at} of {ends}"
            assert step(ledger.renew(vouched)) == [Kept(300.0)] * len(vouched)
            ledger.abandon()
        shutil.rmtree(broken)
    return refused, dropped


# proves authority ledger: damage-noticed
@pytest.mark.usefixtures("no_syncs")
def test_damage_at_any_place(tmp_path: Path) -> None:
    """A sample, another one in each run. `make evidence ARGS=ledger` takes every byte."""
    refused, dropped = damaged(tmp_path, every=7)
    assert refused > 3 * dropped > 60


def test_tokens_that_were_skipped_are_skipped_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is killed again and again, and each time the last batch is lost, as if it had never been written."""
    path, highest = tmp_path / "leases.db", 0
    for _ in range(5):
        ledger = opened(path)
        token = token_of(ledger, lease(RUNTIME.secret()))
        assert token > highest
        highest = token
        killed = tmp_path / "killed"
        shutil.copytree(tmp_path, killed, ignore=shutil.ignore_patterns("killed"))
        ledger.abandon()
        for file in tmp_path.glob("leases.db*"):
            shutil.copy(killed / file.name, file)
        shutil.rmtree(killed)
        newest = max(tmp_path.glob("*.journal-*"), key=lambda each: int(each.name.rpartition("-")[2]))
        begin, end = places(newest)[-1]
        whole = newest.read_bytes()
        newest.write_bytes(whole[:begin] + bytes(end - begin) + whole[end:])


def test_a_floor_is_vouched_for(tmp_path: Path) -> None:
    """It may be higher than what the next process skips."""
    path = tmp_path / "leases.db"
    ledger = opened(path)
    above = 10 * BATCH_TOKENS_MAX
    step(ledger.raise_floor(above))
    file = segment(path, 1)
    whole, (*_, (raised, vouches), _) = file.read_bytes(), places(file)
    # The floor is on the disk before it is raised: whoever shares its batch is not above it.
    assert raised < vouches
    first = step(ledger.ask(lease("first")))
    assert isinstance(first, Granted) and first.token == above + 1
    (tmp_path / "killed").mkdir()
    for each in tmp_path.glob("leases.db*"):
        shutil.copy(each, tmp_path / "killed")
    ledger.abandon()
    copy = segment(tmp_path / "killed" / "leases.db", 1)
    copy.write_bytes(whole[:raised] + b"x" + whole[raised + 1 :])
    with pytest.raises(Misconfigured, match="damaged"):
        opened(tmp_path / "killed" / "leases.db")
    copy.write_bytes(whole[:vouches] + bytes(len(whole) - vouches))
    again = opened(tmp_path / "killed" / "leases.db")
    assert token_of(again, lease("a")) > above
    again.abandon()


def test_an_older_copy_of_a_segment_is_refused_where_the_head_can_tell(tmp_path: Path) -> None:
    """The process has closed the ledger, so the head says where the journal ends."""
    path = tmp_path / "leases.db"
    ledger = opened(path)
    token_of(ledger, lease("a"))
    older = segment(path, 1).read_bytes()
    last = token_of(ledger, lease("b"))
    ledger.abandon()
    newer = segment(path, 1).read_bytes()
    segment(path, 1).write_bytes(older)
    with pytest.raises(Misconfigured, match="ends at batch"):
        opened(path)
    segment(path, 1).write_bytes(newer)
    again = opened(path)
    assert token_of(again, lease("c")) == last + 1  # nothing is skipped after an orderly end
    again.abandon()


def test_one_batch_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that hangs collects no more than the next process would skip."""
    monkeypatch.setattr("fenced.stores.ledger.authority.ledger.OPERATIONS_MAX", 8)
    monkeypatch.setattr("fenced.stores.ledger.authority.authority.OPERATIONS_MAX", 8)
    authority = opened(tmp_path / "leases.db")
    ledger, rows = authority._ledger, authority._rows
    assert ledger is not None and rows is not None
    for _ in range(8):
        ledger.do(rows, lambda algorithm: algorithm.ask(lease(RUNTIME.secret())))
    with pytest.raises(Unavailable, match="nothing happened"):
        ledger.do(rows, lambda algorithm: algorithm.ask(lease("more")))
    ledger.write(ledger.collected())
    assert token_of(authority, lease("more")) == 9
    with pytest.raises(Misuse, match="at most 8"):
        step(authority.many([lease(f"m/{number}") for number in range(9)]))
    authority.abandon()
