"""FileGuard: files and folders are replaced whole or not at all, and only by the newest holder."""

from __future__ import annotations

import os
import resource
import signal
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import fenced
from fenced.errors import Contended, Misconfigured, Misuse, StaleToken, Unavailable, Uncovered
from fenced.files import FileGuard
from fenced.guards.files import folder as folders
from fenced.model import Stamp
from fenced.runtime import machine

REALM, GRANTS = "00000000000000aa", "0123456789abcdef"
NAME = "daily.csv"


def stamp(token: int, seq: int = 1, name: str = NAME) -> Stamp:
    return Stamp(REALM, (name,), token, seq, GRANTS[token] * 32)


def contents(folder: Path) -> dict[str, bytes | str]:
    """Every file and link below a folder, except for locks, whose files stay."""
    found = (path for path in sorted(folder.rglob("*")) if ".fenced/locks" not in str(path))
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in found
        if path.is_symlink() or path.is_file()
    }


def unfinished(folder: Path) -> list[str]:
    """What writers have left."""
    return [path for path in contents(folder) if ".fenced/new/" in path or path.endswith(".new")]


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


def test_a_thousand_late_writes(tmp_path: Path) -> None:
    guard = FileGuard(tmp_path)
    guard.write(stamp(5), NAME, b"old")
    guard.write(stamp(6), NAME, b"new")
    before = contents(tmp_path)
    for seq in range(1000):
        with pytest.raises(StaleToken):
            guard.append(stamp(5, seq), NAME, b"late")
    assert contents(tmp_path) == before


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


def test_odd_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guard = FileGuard(tmp_path)
    with pytest.raises(Uncovered):
        guard.write(stamp(1), "other.csv", b"")
    (tmp_path / "folder").mkdir()
    with pytest.raises(Misuse, match="is a folder"):
        guard.write(stamp(1, name="folder"), "folder", b"")
    with pytest.raises(Misuse, match="move it away"), guard.replace_folder(stamp(1, name="folder"), "folder"):
        pass
    with pytest.raises(Misconfigured, match="does not exist"):
        FileGuard(tmp_path / "missing").write(stamp(1), NAME, b"")
    listed = tmp_path / "mountinfo"
    listed.write_text(f"1 0 8:1 / / rw - ext4 x rw\n2 1 0:9 / {tmp_path} rw - nfs4 server:/x rw\n")
    monkeypatch.setattr(machine, "_MOUNTS", listed)
    with pytest.raises(Misconfigured, match="network file system"):
        FileGuard(tmp_path).write(stamp(1), NAME, b"")


def test_a_full_disk(tmp_path: Path) -> None:
    """The kernel refuses to let a file grow; everything is as it was before."""
    guard = FileGuard(tmp_path)
    guard.write(stamp(5), NAME, b"one")
    before = contents(tmp_path)

    def child() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        for write in (guard.write, guard.append):
            for token in (5, 6):
                with pytest.raises(Unavailable, match="full"):
                    write(stamp(token, 2), NAME, b"x" * 10_000)

    assert forked(child) == 0
    assert contents(tmp_path) == before


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


# Writers that die.

DEADLY = ("replace", "rename", "fsync", "pwrite", "ftruncate", "truncate", "unlink", "symlink", "rmdir")
"""The system calls by which a write changes something. A writer dies at each of them in turn."""


def fork(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException:  # noqa: BLE001 - a child must not continue as a second pytest
            os._exit(1)
    return pid


def forked(work: Callable[[], None]) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(fork(work), 0)[1])


def dies_at(count: int, work: Callable[[], None]) -> bool:
    """Run `work` in a process that dies before the system call with this number; False if it made fewer calls."""

    def child() -> None:
        calls = iter(range(1, count))

        def deadly(call: Callable[..., object]) -> Callable[..., object]:
            def counted(*args: object, **kwargs: object) -> object:
                if next(calls, None) is None:
                    os._exit(9)
                return call(*args, **kwargs)

            return counted

        for name in DEADLY:
            setattr(os, name, deadly(getattr(os, name)))
        work()

    status = forked(child)
    assert status in (0, 9), "the write failed in another way"
    return status == 9


def deaths(folder: Path, write: Callable[[FileGuard], None]) -> Iterator[FileGuard]:
    """Yields a guard after each death of a writer."""
    count = 1
    while True:
        here = folder / str(count)
        here.mkdir()
        guard = FileGuard(here, rule="sequenced")
        guard.write(stamp(5, 1), NAME, b"old")
        with guard.replace_folder(stamp(5, 1, "site"), "site") as new:
            (new / "index.html").write_bytes(b"old")
        if not dies_at(count, lambda guard=guard: write(guard)):  # type: ignore[misc]
            assert count > 8, "it died at every step of the way"
            return
        yield guard
        count += 1


def is_at(guard: FileGuard, name: str) -> tuple[int, int]:
    mark = fenced.runtime.blocking.step(guard._marks.mark(guard.name_for(name)))
    assert mark is not None
    return mark.token, mark.seq


@pytest.mark.parametrize("newer", [stamp(5, 2), stamp(6, 1)], ids=["same token", "new token"])
@pytest.mark.parametrize("how", ["write", "append"])
def test_a_writer_that_dies_leaves_all_or_nothing(tmp_path: Path, how: str, newer: Stamp) -> None:
    after = b"new" if how == "write" else b"oldnew"
    outcomes = set()
    for guard in deaths(tmp_path, lambda guard: getattr(guard, how)(newer, NAME, b"new")):
        folder = guard._folder.path
        other = FileGuard(folder)
        other.announce(stamp(5, 0), NAME) if is_at(other, NAME)[0] == 5 else None  # takes the lock
        mark = is_at(other, NAME)
        assert (folder / NAME).read_bytes() == (after if mark == (newer.token, newer.seq) else b"old")
        assert unfinished(folder) == []
        outcomes.add(mark)
        other.write(stamp(7), NAME, b"last")
        assert (folder / NAME).read_bytes() == b"last"
    assert outcomes == {(5, 1), (newer.token, newer.seq)}, "some died before the commit point, some after it"


def test_a_writer_of_a_folder_that_dies_leaves_all_or_nothing(tmp_path: Path) -> None:
    def write(guard: FileGuard) -> None:
        with guard.replace_folder(stamp(6, 1, "site"), "site") as new:
            (new / "index.html").write_bytes(b"new")

    outcomes = set()
    for guard in deaths(tmp_path, write):
        folder = guard._folder.path
        other = FileGuard(folder)
        mark = is_at(other, "site")
        assert (folder / "site/index.html").read_bytes() == (b"new" if mark == (6, 1) else b"old")
        outcomes.add(mark)
        with other.replace_folder(stamp(7, 1, "site"), "site") as new:
            (new / "index.html").write_bytes(b"last")
        other.announce(stamp(8, 0, "site"), "site")
        assert unfinished(folder) == []
        pages = [path for path in contents(folder) if path.endswith("index.html")]
        assert len(pages) <= 2, "what the dead writer made is removed"
    assert outcomes == {(5, 1), (6, 1)}


def test_an_append_under_rule_retry_is_undone_if_its_writer_dies(tmp_path: Path) -> None:
    """The mark stays as it is, so nothing but the note in the lock file says that the append is not complete."""
    seen = set()
    for count in range(1, 40):
        here = tmp_path / str(count)
        here.mkdir()
        guard = FileGuard(here)
        guard.write(stamp(5), NAME, b"old")
        died = dies_at(count, lambda guard=guard: guard.append(stamp(5), NAME, b"new"))  # type: ignore[misc]
        FileGuard(here).announce(stamp(6, 0), NAME)
        found = (here / NAME).read_bytes()
        seen.add(found)
        assert found == (b"oldnew" if not died else found) and found in (b"old", b"oldnew")
        if not died:
            break
    assert seen == {b"old", b"oldnew"}
