"""FileGuard: files and folders are replaced whole or not at all, and only by the newest holder."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import signal
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fenced
from fenced import files
from fenced.errors import Contended, Misconfigured, Misuse, StaleToken, Unavailable, Uncovered
from fenced.files import FileGuard
from fenced.guards.files import disk, pages
from fenced.guards.files import folder as folders
from fenced.guards.files.folder import GuardedFolder
from fenced.model import Stamp
from fenced.runtime import machine

REALM = "00000000000000aa"
NAME = "daily.csv"
LINE = b"a new line, too long for one write"
WRITE_PAGE, EXIT = pages.write, files._Replacing.__exit__


def stamp(token: int, seq: int = 1, name: str = NAME) -> Stamp:
    return Stamp(REALM, (name,), token, seq, f"{token:032x}")


def contents(folder: Path) -> dict[str, bytes | str]:
    """Every file and link below a folder."""
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


def unfinished(folder: Path) -> list[str]:
    """What writers have left."""
    return [path for path in contents(folder) if ".fenced/new/" in path or path.endswith(".new")]


# What it does.


# proves guard file: one-machine, synced-writes, stopped-writer-blocks, cooperative
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
    guard.write(stamp(6), NAME, LINE)
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


def kill() -> None:
    os._exit(9)


def interrupt() -> None:
    raise KeyboardInterrupt


def dies_at(count: int, work: Callable[[], None], death: Callable[[], None] = kill) -> bool:
    """Run `work` in a process that dies before the system call with this number; False if it made fewer calls."""

    def child() -> None:
        calls, pwrite = iter(range(count)), os.pwrite

        def deadly(call: Callable[..., object]) -> Callable[..., object]:
            def counted(*args: object, **kwargs: object) -> object:
                if next(calls, None) == count - 1:
                    death()
                if call is pwrite:  # in parts, as a kernel may do it
                    descriptor, body, offset = args
                    part = body[: max(20, len(body) // 2)]  # type: ignore[arg-type,index]
                    return pwrite(descriptor, part, offset)  # type: ignore[arg-type]
                return call(*args, **kwargs)

            return counted

        for name in DEADLY:
            setattr(os, name, deadly(getattr(os, name)))
        try:
            work()
        except KeyboardInterrupt:
            os._exit(9)

    status = forked(child)
    assert status in (0, 9), "the write failed in another way"
    return status == 9


def deaths(
    folder: Path, write: Callable[[FileGuard], None], death: Callable[[], None] = kill
) -> Iterator[FileGuard]:
    """Yields a guard after each death of a writer."""
    count = 1
    while True:
        here = folder / str(count)
        here.mkdir()
        guard = FileGuard(here, rule="sequenced")
        guard.write(stamp(5, 1), NAME, b"old")
        with guard.replace_folder(stamp(5, 1, "site"), "site") as new:
            (new / "index.html").write_bytes(b"old")
        if not dies_at(count, lambda guard=guard: write(guard), death):  # type: ignore[misc]
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
@pytest.mark.parametrize("death", [kill, interrupt], ids=["killed", "interrupted"])
def test_a_writer_that_dies_leaves_all_or_nothing(
    tmp_path: Path, how: str, newer: Stamp, death: Callable[[], None]
) -> None:
    after = LINE if how == "write" else b"old" + LINE
    outcomes = set()
    for guard in deaths(tmp_path, lambda guard: getattr(guard, how)(newer, NAME, LINE), death):
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


def test_the_first_writer_of_a_name_dies(tmp_path: Path) -> None:
    """Its mark file has no page yet that is whole."""
    name, outcomes = "new.csv", set()
    for guard in deaths(tmp_path, lambda guard: guard.write(stamp(6, 1, name), name, LINE)):
        other = FileGuard(guard._folder.path)
        path = guard._folder.path / name
        marked = fenced.runtime.blocking.step(other._marks.mark(name)) is not None
        assert path.exists() == marked and (not marked or path.read_bytes() == LINE)
        assert unfinished(guard._folder.path) == []
        outcomes.add(marked)
        other.write(stamp(7, 1, name), name, b"last")
    assert outcomes == {False, True}


def test_a_guard_that_does_not_list_finds_what_a_dead_writer_left(tmp_path: Path) -> None:
    """A further write under the same mark lists no new contents. A writer that dies under another mark is noticed."""
    outcomes, guard = set(), FileGuard(tmp_path)
    for count in range(1, 40):
        token = 10 * count
        for _ in range(3):
            guard.write(stamp(token), NAME, b"old")
        assert guard._target(NAME).key in guard._folder._swept
        died = dies_at(count, lambda token=token: guard.write(stamp(token + 1), NAME, LINE))  # type: ignore[misc]
        risen = is_at(guard, NAME)[0] > token
        assert (tmp_path / NAME).read_bytes() == (LINE if risen else b"old")
        outcomes.add(risen)
        for _ in range(2):
            guard.write(stamp(token + 2), NAME, b"last")
        assert unfinished(tmp_path) == []
        if not died:
            break
    assert outcomes == {False, True}


def test_a_damaged_mark_is_not_taken_for_none(tmp_path: Path) -> None:
    guard = FileGuard(tmp_path)
    for token in (5, 6):
        guard.write(stamp(token), NAME, b"one")
    mark = Path(guard._folder.file("marks", guard._target(NAME).key, ".mark"))
    whole = mark.read_bytes()
    mark.write_bytes(whole[:50] + b"x" + whole[51 : pages.SIZE + 50] + b"x" + whole[pages.SIZE + 51 :])
    with pytest.raises(Misconfigured, match="restore it"):
        guard.write(stamp(7), NAME, b"two")
    mark.write_bytes(whole)
    guard.write(stamp(7), NAME, b"two")


def test_a_writer_of_a_folder_that_dies_leaves_all_or_nothing(tmp_path: Path) -> None:
    def write(guard: FileGuard) -> None:
        with guard.replace_folder(stamp(6, 1, "site"), "site") as new:
            (new / "index.html").write_bytes(LINE)

    outcomes = set()
    for guard in deaths(tmp_path, write):
        folder = guard._folder.path
        other = FileGuard(folder)
        mark = is_at(other, "site")
        assert (folder / "site/index.html").read_bytes() == (LINE if mark == (6, 1) else b"old")
        outcomes.add(mark)
        with other.replace_folder(stamp(7, 1, "site"), "site") as new:
            (new / "index.html").write_bytes(b"last")
        other.announce(stamp(8, 0, "site"), "site")
        assert unfinished(folder) == []
        pages = [path for path in contents(folder) if path.endswith("index.html")]
        assert len(pages) <= 2, "what the dead writer made is removed"
    assert outcomes == {(5, 1), (6, 1)}


@pytest.mark.parametrize("death", [kill, interrupt], ids=["killed", "interrupted"])
def test_an_append_under_rule_retry_is_undone_if_its_writer_dies(
    tmp_path: Path, death: Callable[[], None]
) -> None:
    """The mark stays as it is, so nothing but the note in the mark file says that the append is not complete."""
    seen = set()
    for count in range(1, 40):
        here = tmp_path / str(count)
        here.mkdir()
        guard = FileGuard(here)
        guard.write(stamp(5), NAME, b"old")
        died = dies_at(count, lambda guard=guard: guard.append(stamp(5), NAME, LINE), death)  # type: ignore[misc]
        FileGuard(here).announce(stamp(6, 0), NAME)
        found = (here / NAME).read_bytes()
        seen.add(found)
        assert found in ((b"old", b"old" + LINE) if died else (b"old" + LINE,))
        if not died:
            break
    assert seen == {b"old", b"old" + LINE}


# The checks can fail.


def _no_recovery(self: GuardedFolder, key: str, marked: folders.Marked | None, mine: str) -> None:
    """Whoever locks next does not complete what a dead writer has committed."""


def _never_lists_again(self: GuardedFolder, key: str, page: pages.Page | None) -> bool:
    """Once all contents were at their place, nobody looks whether the mark is still the same."""
    return key in self._swept


def _no_undo(self: GuardedFolder, lock: int, noted: bytes) -> None:
    """An append that was not complete stays."""


def _mark_before_contents(
    self: GuardedFolder, key: str, marked: folders.Marked, contents: bytes | None = None
) -> None:
    """The mark says that the write has happened before its contents are on the disk."""
    self._write_page(self.file("marks", key, ".mark"), self._locks.__dict__[key], marked)
    if contents is not None:
        disk.write_synced(self.new_path(key, marked.operation), contents)
    self.finish(key, marked.operation, marked.place)


def _no_lock(self: GuardedFolder, key: str) -> int:
    """Two processes judge by the same mark."""
    return os.open(self.file("marks", key, ".mark"), os.O_RDWR | os.O_CREAT)


def _one_page(path: str, after: pages.Page | None, body: bytes) -> pages.Page:
    """A mark is written over the mark before it, which is lost if the writer dies."""
    return WRITE_PAGE(path, after and after._replace(number=after.number + 1), body)


def _no_checksum(body: bytes, number: int) -> int:
    """A mark that was written in part counts."""
    return 0


def _removes_what_is_committed(self: files._Replacing, *error: Any) -> None:
    """An interrupted writer cleans up, although its mark has risen."""
    try:
        EXIT(self, *error)
    except BaseException:
        disk.remove(self._new)
        raise


def _new_token_dies(path: Path) -> None:
    test_a_writer_that_dies_leaves_all_or_nothing(path, "write", stamp(6), kill)


def _new_token_is_interrupted(path: Path) -> None:
    test_a_writer_that_dies_leaves_all_or_nothing(path, "write", stamp(6), interrupt)


@pytest.mark.parametrize(
    ("owner", "function", "bug", "check"),
    [
        (GuardedFolder, "_recover", _no_recovery, _new_token_dies),
        (
            GuardedFolder,
            "_is_swept",
            _never_lists_again,
            test_a_guard_that_does_not_list_finds_what_a_dead_writer_left,
        ),
        (
            GuardedFolder,
            "_undo_append",
            _no_undo,
            lambda path: test_an_append_under_rule_retry_is_undone_if_its_writer_dies(path, kill),
        ),
        (
            GuardedFolder,
            "commit",
            _mark_before_contents,
            lambda path: test_a_writer_that_dies_leaves_all_or_nothing(path, "append", stamp(6), kill),
        ),
        (GuardedFolder, "_lock", _no_lock, test_tokens_of_eight_processes_never_fall),
        (pages, "write", _one_page, _new_token_dies),
        (pages, "crc32", _no_checksum, _new_token_dies),
        (files._Replacing, "__exit__", _removes_what_is_committed, _new_token_is_interrupted),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_checks_can_fail(
    owner: object,
    function: str,
    bug: Callable[..., object],
    check: Callable[[Path], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(owner, function, bug)
    with pytest.raises((AssertionError, OSError, Misconfigured)):
        check(tmp_path)


def test_a_rule_that_is_not_installed(tmp_path: Path) -> None:
    FileGuard(tmp_path).write(stamp(5), NAME, b"one")
    with pytest.raises(Misconfigured, match=r"rule retry.*says once"):
        FileGuard(tmp_path, rule="once").write(stamp(5, 2), NAME, b"two")
    assert (tmp_path / NAME).read_bytes() == b"one"
