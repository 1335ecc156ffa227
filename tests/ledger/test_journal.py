"""The files of a ledger: what a crash may leave in them, and what does not belong together."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

import fenced
from fenced.errors import Indeterminate, Misconfigured, Misuse, Unavailable
from fenced.runtime.blocking import step
from fenced.stores.ledger.authority import journal as journals
from fenced.stores.ledger.authority import segments
from fenced.stores.ledger.authority.authority import LedgerAuthority
from fenced.stores.ledger.authority.journal import Batch, FileJournal
from fenced.stores.ledger.authority.ledger import Ledger
from tests.ledger.test_ledger import RUNTIME, batches, lease, opened, token_of


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "leases.db"


def segment(path: Path, index: int) -> Path:
    return path.with_name(f"{path.name}.journal-{index}")


def batch(number: int, what: str) -> Batch:
    return Batch(number, 1000 + number, [[0, "namespace", what, "realm"]])


def appended(path: Path, *new: Batch, unsynced: int = 0) -> list[Batch]:
    """What the files have; then write these, as a process that was started again. It never finishes its journal."""
    journal = FileJournal(path)
    journal.open(create=True)
    try:
        found = list(journal.read())
        journal.clock_ahead(0, found[-1].now if found else 0)
        for each in new:
            journal.append(each, sync=each.number != unsynced)
    finally:
        journal.close()
    return found


def places(file: Path) -> list[tuple[int, int]]:
    """Where the entries of a segment begin and end."""
    found, at = [], 0
    for entry in segments.read(file):
        size = segments._ENTRY.size + len(entry.body)
        found.append((at, at + size))
        at += size
    return found


def test_a_batch_that_was_cut_off_is_not_there(path: Path) -> None:
    first, second, third = (batch(number, "abc"[number - 1]) for number in (1, 2, 3))
    appended(path, first, second, third)
    file = segment(path, 1)
    whole, (begin, end) = file.read_bytes(), places(file)[-1]
    assert not any(whole[end:])  # nothing but zeros
    for cut in range(begin, end):
        file.write_bytes(whole[:cut])  # no crash makes a file shorter that was synced
        with pytest.raises(Misconfigured, match="bytes"):
            appended(path)
        zeros = whole[:cut] + bytes(len(whole) - cut)
        file.write_bytes(zeros)
        assert appended(path) == ([first, second, third] if zeros == whole else [first, second])
        flipped = bytearray(whole)
        flipped[cut] ^= 0x10
        file.write_bytes(flipped)
        assert appended(path) == [first, second]
    file.write_bytes(whole)
    assert appended(path) == [first, second, third]


def test_a_batch_cut_off_by_a_crash_never_comes_back(path: Path) -> None:
    """A disk may keep a batch and lose the one before it, if neither was synced."""
    appended(path, batch(1, "a"), batch(2, "b"), batch(3, "lost"), unsynced=2)
    file = segment(path, 1)
    begin, end = places(file)[-2]
    with file.open("r+b") as damaged:
        damaged.seek(begin)
        damaged.write(bytes(end - begin))
    assert appended(path, batch(2, "c")) == [batch(1, "a")]
    assert b"lost" in file.read_bytes()
    assert appended(path) == [batch(1, "a"), batch(2, "c")]


class SyncedDisk:
    """Remembers what each file had when it was synced last, and its name when its folder was. Then cuts the power."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        self._synced: dict[int, bytes] = {}
        self._names: dict[str, int] = {}
        monkeypatch.setattr(os, "fdatasync", self._sync)
        monkeypatch.setattr(os, "fsync", self._sync)

    def _sync(self, file: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{file}"))
        if path == self._folder:
            self._names = {each.name: each.stat().st_ino for each in self._folder.iterdir()}
        else:
            self._synced[path.stat().st_ino] = path.read_bytes()

    def cut(self) -> None:
        for path in self._folder.iterdir():
            path.unlink()
        for name, inode in self._names.items():
            (self._folder / name).write_bytes(self._synced.get(inode, b""))


@pytest.mark.parametrize("how", ["snapshot", "killed", "killed in a snapshot"])
def test_a_synced_batch_includes_those_of_earlier_segments(
    path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Endings are not synced. A batch of the next segment that is must not be there without them."""
    disk = SyncedDisk(path.parent, monkeypatch)
    journal = FileJournal(path)
    journal.open(create=True)
    ending = Batch(2, 1002, [[0, "dequeue", "a"]])
    journal.append(batch(1, "a"), sync=True)
    if how == "killed in a snapshot":
        journal._new_segment(1).close()
    journal.append(ending, sync=False)
    if how == "snapshot":
        journal.trim(0)
        journal.append(batch(3, "c"), sync=True)
        journal.close()
    else:
        journal.close()  # as the kernel does it
        assert appended(path, batch(3, "c")) == [batch(1, "a"), ending]
    disk.cut()
    assert appended(path) == [batch(1, "a"), ending, batch(3, "c")]


def test_after_a_failed_sync_nothing_is_appended(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may say once that it has lost something, and then that all is well."""
    journal = FileJournal(path)
    journal.open(create=True)
    journal.append(batch(1, "a"), sync=True)
    journal.append(Batch(2, 1002, [[0, "dequeue", "a"]]), sync=False)
    old, sync = segment(path, 1), os.fdatasync

    def fail(file: int) -> None:
        if os.readlink(f"/proc/self/fd/{file}") == str(old):
            raise OSError(errno.EIO, "lost")
        sync(file)

    monkeypatch.setattr(os, "fdatasync", fail)
    with pytest.raises(OSError, match="lost"):
        journal.trim(0)
    monkeypatch.setattr(os, "fdatasync", sync)
    with pytest.raises(Unavailable, match="lost"):
        journal.append(batch(3, "c"), sync=True)
    journal.close()


def test_a_segment_that_the_head_does_not_name_is_not_read(path: Path) -> None:
    """The process has crashed while it began the segment."""
    appended(path, batch(1, "a"))
    head = path.read_bytes()
    appended(path, batch(2, "b"))
    whole = segment(path, 2).read_bytes()
    path.write_bytes(head)
    with pytest.raises(Misconfigured, match="newer"):  # it has a batch, so another head has named it
        appended(path)
    for contents in (b"", whole[:9], whole[: places(segment(path, 2))[0][1]]):
        segment(path, 2).write_bytes(contents)
        assert appended(path) == [batch(1, "a")]
        assert not segment(path, 2).exists()
    assert appended(path, batch(2, "c")) == [batch(1, "a")]
    assert appended(path) == [batch(1, "a"), batch(2, "c")]


def test_missing_and_damaged_segments_are_noticed(path: Path) -> None:
    for number in (1, 2, 3):
        appended(path, batch(number, "abc"[number - 1]))
    for index in (1, 2, 3):
        whole = segment(path, index).read_bytes()
        _, (begin, _) = places(segment(path, index))
        segment(path, index).unlink()
        with pytest.raises(Misconfigured, match="is missing"):
            appended(path)
        segment(path, index).write_bytes(b"x" + whole[1:])
        with pytest.raises(Misconfigured, match="is damaged"):
            appended(path)
        if index < 3:  # behind the newest one nothing shows that a batch was there
            segment(path, index).write_bytes(whole[:begin] + bytes(len(whole) - begin))
            with pytest.raises(Misconfigured, match="is missing"):
                appended(path)
        segment(path, index).write_bytes(whole)
    assert appended(path) == [batch(number, "abc"[number - 1]) for number in (1, 2, 3)]


def test_many_starts_leave_few_segments(path: Path) -> None:
    for number in range(4 * journals.SEGMENTS_MAX):
        ledger = opened(path)
        token_of(ledger, lease(f"n/{number}"))
        assert ledger._ledger is not None
        ledger._ledger.snapshot_if_due()
        ledger.abandon()
    assert len(list(path.parent.glob("*.journal-*"))) < 2 * journals.SEGMENTS_MAX
    ledger = opened(path)
    assert len(step(ledger.survey())) == 4 * journals.SEGMENTS_MAX
    ledger.abandon()


def test_all_files_have_the_rights_of_the_head(path: Path) -> None:
    path.touch(mode=0o600)
    ledger = opened(path)
    token_of(ledger, lease("a"))
    assert ledger._ledger is not None
    ledger._ledger.snapshot()
    ledger.abandon()
    modes = {file.name: file.stat().st_mode & 0o777 for file in path.parent.iterdir()}
    assert modes == dict.fromkeys(("leases.db", "leases.db.journal-2", "leases.db.snapshot"), 0o600)


# proves authority ledger: restore-unnoticed
def test_files_are_restored_together(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of one backup look like the original; a journal without its snapshot, or a damaged one, is refused."""
    monkeypatch.setattr(Ledger, "snapshot_changes", 10**9)
    ledger = opened(path)
    for n in range(10):
        token_of(ledger, lease(f"n/{n}"))
    assert ledger._ledger is not None
    ledger._ledger.snapshot()
    snapshot = path.with_name("leases.db.snapshot")
    ledger.abandon()
    whole = snapshot.read_bytes()
    snapshot.unlink()
    with pytest.raises(Misconfigured, match="missing"):  # also while nothing was written since
        opened(path)
    snapshot.write_bytes(whole)
    ledger = opened(path)
    last = token_of(ledger, lease("after"))
    ledger.abandon()
    backup = tmp_path / "backup"
    backup.mkdir()
    for file in path.parent.glob("leases.db*"):
        shutil.copy(file, backup)
    assert batches(path) == 1

    ledger = opened(path)
    later = token_of(ledger, lease("later"))
    ledger.abandon()
    restored = opened(backup / "leases.db")
    assert token_of(restored, lease("later")) == later == last + 1
    step(restored.raise_floor(1000))
    assert token_of(restored, lease("above")) == 1001
    restored.abandon()

    whole = snapshot.read_bytes()
    for contents, says in (
        (whole[:-20], "damaged"),
        (whole.replace(b"n/5", b"n/X"), "match"),
        (None, "missing"),
    ):
        if contents is None:
            snapshot.unlink()
        else:
            snapshot.write_bytes(contents)
        with pytest.raises(Misconfigured, match=says):
            opened(path)
    snapshot.write_bytes(whole)
    head = path.read_bytes()
    for contents in (b"", bytes(512)):
        path.write_bytes(contents)
        with pytest.raises(Misconfigured, match="is empty"):
            opened(path)
    path.write_bytes(head)
    opened(path).abandon()


def test_a_removed_log_is_noticed(path: Path) -> None:
    ledger = opened(path)
    token_of(ledger, lease("a"))
    segment(path, 1).unlink()
    with pytest.raises(Indeterminate, match="removed"):
        step(ledger.ask(lease("b")))
    with pytest.raises(Unavailable, match="restart"):
        step(ledger.ask(lease("b")))
    ledger.abandon()


def test_other_files_are_refused(tmp_path: Path) -> None:
    with fenced.Client(f"sqlite:///{tmp_path}/leases.db") as client:
        client.acquire("a").release()
    for name, says in (("leases.db", "another program"), ("no/such.db", "folder"), ("", "folder")):
        with pytest.raises(Misconfigured, match=says):
            opened(tmp_path / name)
    with pytest.raises(Misconfigured, match="there is no file"):
        step(LedgerAuthority(tmp_path / "none.db", RUNTIME).open(create=False))
    with pytest.raises(Misuse, match="ledger:///"):
        fenced.Client("ledger:relative")
