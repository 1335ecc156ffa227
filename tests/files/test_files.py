"""FileGuard: files and folders are replaced whole or not at all, and only by the newest holder."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import signal
import stat
from pathlib import Path

import pytest

import fenced
from fenced.errors import Contended, Misconfigured, Misuse, StaleToken, Unavailable, Uncovered
from fenced.files import FileGuard
from fenced.runtime import machine
from fenced.stores.files.guard import folder as folders
from fenced.stores.files.guard import pages
from fenced.stores.files.guard.locked import file_of
from tests.files.support import NAME, contents, fork, forked, stamp

# What it does.


def test_a_stale_holder_changes_nothing(tmp_path: Path) -> None:
    with fenced.Client("memory:") as client:
        guard = FileGuard(tmp_path, prefix="reports/")
        with client.hold("reports/daily.csv") as first:
            guard.write(first, NAME, b"one")
            old = first.next_stamp()
        with client.hold("reports/daily.csv") as new:
            assert guard.read(new, NAME) == b"one"
            guard.append(new, NAME, b", two")
            before = contents(tmp_path)
            with pytest.raises(StaleToken), guard.replace(old, NAME) as file:
                file.write(b"late")
            with pytest.raises(StaleToken):
                guard.append(old, NAME, b"late")
            assert contents(tmp_path) == before
    assert (tmp_path / NAME).read_bytes() == b"one, two"


def test_a_lease_is_announced_at_its_grant(tmp_path: Path) -> None:
    """By hold(guards=[...]), for the files of all its names."""
    guard = FileGuard(tmp_path, prefix="reports/")
    with fenced.Client("memory:") as client:
        older = client.acquire("reports/a", "reports/b")
        stamps = [older.next_stamp(), older.next_stamp()]
        older.release()
        with client.hold_all(["reports/a", "reports/b"], guards=[guard]) as lease:
            for path, old in zip("ab", stamps, strict=True):
                with pytest.raises(StaleToken):
                    guard.write(old, path, b"late")
                guard.write(lease, path, b"new")
        with pytest.raises(Misuse, match="begin with reports/"), client.hold("other", guards=[guard]):
            pass


def test_a_thousand_late_writes(tmp_path: Path) -> None:
    guard = FileGuard(tmp_path)
    guard.write(stamp(5), NAME, b"old")
    guard.write(stamp(6), NAME, b"new")
    before = contents(tmp_path)
    for seq in range(1000):
        with pytest.raises(StaleToken):
            guard.append(stamp(5, seq), NAME, b"late")
    assert contents(tmp_path) == before


def test_tokens_of_eight_processes_never_fall(tmp_path: Path) -> None:
    """Each appends under ever newer tokens, of which the others have drawn higher ones meanwhile."""
    tokens, done = multiprocessing.Value("q", 0), multiprocessing.Array("b", 201)
    guard = FileGuard(tmp_path)
    guard.write(stamp(1), NAME, b"")

    def holder() -> None:
        for _ in range(25):
            with tokens.get_lock():
                tokens.value += 1
                mine = stamp(tokens.value)
            with contextlib.suppress(StaleToken):
                guard.read(mine, NAME)
                guard.append(mine, NAME, b"%d\n" % mine.token)
                done[mine.token] = 1

    holders = [fork(holder) for _ in range(8)]
    assert [os.waitpid(pid, 0)[1] for pid in holders] == [0] * 8
    admitted = [int(line) for line in (tmp_path / NAME).read_bytes().split()]
    assert admitted == [token for token in range(201) if done[token]] and admitted[-1] == 200


def test_an_error_in_the_block_changes_nothing(tmp_path: Path) -> None:
    guard = FileGuard(tmp_path)
    guard.write(stamp(5), NAME, b"one")
    before = contents(tmp_path)
    with pytest.raises(ZeroDivisionError), guard.replace(stamp(6), NAME) as file:
        file.write(b"half")
        raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError), guard.replace_folder(stamp(6, name="site"), "site") as new:
        (new / "index.html").write_bytes(b"half")
        raise ZeroDivisionError
    assert contents(tmp_path) == before


def test_folders(tmp_path: Path) -> None:
    """A link leads to the newest folder; the one before it stays for its readers, older ones are removed."""
    guard = FileGuard(tmp_path)
    for token in (1, 2, 2, 3):
        with guard.replace_folder(stamp(token, name="site"), "site") as new:
            (new / "pages").mkdir()
            (new / "pages" / "index.html").write_bytes(b"%d" % token)
        assert (tmp_path / "site/pages/index.html").read_bytes() == b"%d" % token
    with pytest.raises(StaleToken), guard.replace_folder(stamp(2, name="site"), "site"):
        pass
    guard.announce(stamp(4, name="site"), "site")
    trees = [path for path in contents(tmp_path) if path.endswith("index.html")]
    assert len(trees) == 2, trees


# proves guard file: cooperative
def test_a_program_without_the_guard_is_not_stopped(tmp_path: Path) -> None:
    guard = FileGuard(tmp_path, mode="require")
    guard.write(stamp(5), NAME, b"one")
    (tmp_path / NAME).write_bytes(b"by hand")
    assert guard.read(stamp(5), NAME) == b"by hand"


def test_mode_and_links_are_kept(tmp_path: Path) -> None:
    guard = FileGuard(tmp_path)
    (tmp_path / "real.csv").write_bytes(b"")
    (tmp_path / "real.csv").chmod(0o640)
    os.symlink("real.csv", tmp_path / "link.csv")
    assert guard.name_for("link.csv") == "real.csv"
    guard.write(stamp(1, name="real.csv"), "link.csv", b"x")
    assert (tmp_path / "link.csv").is_symlink() and (tmp_path / "real.csv").read_bytes() == b"x"
    assert stat.S_IMODE((tmp_path / "real.csv").stat().st_mode) == 0o640


@pytest.mark.parametrize("path", ["../out", "/etc/passwd", "", ".", "..", "link/out", ".fenced/config"])
def test_files_elsewhere_are_refused(tmp_path: Path, path: str) -> None:
    os.symlink("/tmp", tmp_path / "link")
    with pytest.raises(Misuse):
        FileGuard(tmp_path).write(stamp(1), path, b"")


# proves guard file: one-machine
def test_odd_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Misconfigured, match="does not exist"):
        FileGuard(tmp_path / "missing").write(stamp(1), NAME, b"")
    guard = FileGuard(tmp_path)
    with pytest.raises(Uncovered):
        guard.write(stamp(1), "other.csv", b"")
    (tmp_path / "folder").mkdir()
    with pytest.raises(Misuse, match="is not a file"):
        guard.write(stamp(1, name="folder"), "folder", b"")
    with pytest.raises(Misuse, match="move it away"), guard.replace_folder(stamp(1, name="folder"), "folder"):
        pass
    listed = tmp_path / "mountinfo"
    listed.write_text(f"1 0 8:1 / / rw - ext4 x rw\n2 1 0:9 / {tmp_path} rw - nfs4 server:/x rw\n")
    monkeypatch.setattr(machine, "_MOUNTS", listed)
    with pytest.raises(Misconfigured, match="network file system"):
        FileGuard(tmp_path).write(stamp(1), NAME, b"")


def visible(folder: Path) -> dict[str, bytes | str]:
    return {path: found for path, found in contents(folder).items() if not path.endswith(".mark")}


def test_a_full_disk(tmp_path: Path) -> None:
    """The kernel refuses to let a file grow; everything is as it was before."""
    guard = FileGuard(tmp_path)
    guard.write(stamp(5), NAME, b"one")
    before = visible(tmp_path)

    def child() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))  # more than a mark file has
        for write in (guard.write, guard.append):
            for token in (5, 6):
                with pytest.raises(Unavailable, match="full"):
                    write(stamp(token, 2), NAME, b"x" * 10_000)

    assert forked(child) == 0
    assert visible(tmp_path) == before
    guard.write(stamp(5), NAME, b"token 6 has written nothing")


# proves guard file: stopped-writer-blocks
def test_a_stopped_writer_blocks_its_name_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guard = FileGuard(tmp_path)
    guard.write(stamp(5), NAME, b"one")
    monkeypatch.setattr(folders, "LOCK_SECONDS", 0.2)

    def child() -> None:
        with guard._folder.locked(guard._target(NAME).key):
            os.kill(os.getpid(), signal.SIGSTOP)

    pid = fork(child)
    assert os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1])
    with pytest.raises(Contended, match="fuser"):
        guard.write(stamp(6), NAME, b"two")
    guard.write(stamp(6, name="other"), "other", b"two")
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    guard.write(stamp(6), NAME, b"two")


# Marks.


def test_a_damaged_mark_is_not_taken_for_none(tmp_path: Path) -> None:
    guard = FileGuard(tmp_path)
    for token in (5, 6):
        guard.write(stamp(token), NAME, b"one")
    mark = tmp_path / f".fenced/marks/{file_of(guard._target(NAME).key)}.mark"
    whole = mark.read_bytes()
    mark.write_bytes(whole[:50] + b"x" + whole[51 : pages.SIZE + 50] + b"x" + whole[pages.SIZE + 51 :])
    with pytest.raises(Misconfigured, match="restore it"):
        guard.write(stamp(7), NAME, b"two")
    mark.write_bytes(whole)
    guard.write(stamp(7), NAME, b"two")


def test_a_rule_that_is_not_installed(tmp_path: Path) -> None:
    FileGuard(tmp_path).write(stamp(5), NAME, b"one")
    with pytest.raises(Misconfigured, match=r"rule retry.*says once"):
        FileGuard(tmp_path, rule="once").write(stamp(5, 2), NAME, b"two")
    assert (tmp_path / NAME).read_bytes() == b"one"
