"""FileGuard: where a write may lead, who may write into `.fenced`, and errors that say what has happened."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fenced.errors import FencedError, Misconfigured, Misuse, StaleToken, Unavailable
from fenced.files import FileGuard
from fenced.stores.files.guard.locked import Marked, file_of
from fenced.stores.files.guard.pages import SIZE, Page
from fenced.values.model import Stamp
from tests.files.support import NAME, contents, fork, forked, stamp, unfinished


def write(guard: FileGuard, fence: Stamp, path: str) -> None:
    guard.write(fence, path, b"new")


def append(guard: FileGuard, fence: Stamp, path: str) -> None:
    guard.append(fence, path, b"new")


def replace(guard: FileGuard, fence: Stamp, path: str) -> None:
    with guard.replace(fence, path) as file:
        file.write(b"new")


def replace_folder(guard: FileGuard, fence: Stamp, path: str) -> None:
    with guard.replace_folder(fence, path) as tree:
        (tree / "index.html").write_bytes(b"new")


OPERATIONS = [write, append, replace, replace_folder]
Operation = Callable[[FileGuard, Stamp, str], None]


# Folders that are not there.


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)
def test_a_missing_subfolder_is_named_and_nothing_is_left(tmp_path: Path, operation: Operation) -> None:
    guard = FileGuard(tmp_path)
    with pytest.raises(Misconfigured, match="create it first"):
        operation(guard, stamp(6, name="sub/x"), "sub/x")
    assert unfinished(tmp_path) == []
    FileGuard(tmp_path).write(stamp(5), NAME, b"others go on")
    (tmp_path / "sub").mkdir()
    operation(FileGuard(tmp_path), stamp(5, name="sub/x"), "sub/x")  # no mark was left by token 6, either


@pytest.mark.parametrize("before", [5, 6], ids=["new token", "same token"])
def test_a_subfolder_that_vanishes_while_a_file_is_written(tmp_path: Path, before: int) -> None:
    guard, sub = FileGuard(tmp_path), tmp_path / "sub"
    sub.mkdir()
    guard.write(stamp(before, name="sub/x"), "sub/x", b"old")
    with pytest.raises(Misconfigured), guard.replace(stamp(6, name="sub/x"), "sub/x"):
        shutil.rmtree(sub)
    assert unfinished(tmp_path) == []
    sub.mkdir()
    FileGuard(tmp_path).write(stamp(before, name="sub/x"), "sub/x", b"old again")


# Contents that vanish before they are at their place.


@pytest.mark.parametrize("before", [5, 6], ids=["new token", "same token"])
def test_contents_that_vanished_are_not_acknowledged(tmp_path: Path, before: int) -> None:
    guard = FileGuard(tmp_path)
    guard.write(stamp(before), NAME, b"old")
    with pytest.raises(FencedError), guard.replace(stamp(6), NAME) as file:
        file.write(b"new")
        file.flush()
        for path in unfinished(tmp_path):
            (tmp_path / path).unlink()
    assert (tmp_path / NAME).read_bytes() == b"old"
    FileGuard(tmp_path).write(stamp(before), NAME, b"token 6 has written nothing")


def test_a_long_name_is_no_folder_of_another(tmp_path: Path) -> None:
    """The file names of long keys once were folders, in which other names had their contents."""
    short = ":" * 50 + "a" * 46  # 200 characters, quoted
    long = short + "0" * 32
    guard = FileGuard(tmp_path)
    with guard.replace(stamp(6, name=long), long) as file:
        file.write(b"new")
        guard.write(stamp(6, name=short), short, b"other")
    assert (tmp_path / long).read_bytes() == b"new"


# A writer's files while it lives.


def test_new_contents_of_a_live_writer_stay(tmp_path: Path) -> None:
    """Others complete and remove only what dead writers have left."""
    guard = FileGuard(tmp_path)
    with guard.replace(stamp(5), NAME) as file:
        FileGuard(tmp_path).write(stamp(5), NAME, b"quick")
        file.write(b"slow")
    assert (tmp_path / NAME).read_bytes() == b"slow"
    with guard.replace_folder(stamp(5, name="site"), "site") as tree:
        with FileGuard(tmp_path).replace_folder(stamp(5, name="site"), "site"):
            pass
        (tree / "index.html").write_bytes(b"slow")
    assert (tmp_path / "site/index.html").read_bytes() == b"slow"


def test_a_stopped_writer_does_not_keep_new_guards_from_other_names(tmp_path: Path) -> None:
    guard = FileGuard(tmp_path)
    guard.write(stamp(5), NAME, b"one")

    def child() -> None:
        with guard.replace(stamp(6), NAME) as file:
            file.write(b"two")
            file.flush()
            with guard._folder.locked(guard._target(NAME).key):
                os.kill(os.getpid(), signal.SIGSTOP)

    pid = fork(child)
    assert os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1])
    try:
        FileGuard(tmp_path).write(stamp(6, name="other"), "other", b"two")
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


# Two guards for one file.


def test_guards_on_overlapping_folders_are_refused(tmp_path: Path) -> None:
    outer, inner = tmp_path, tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    FileGuard(inner).write(stamp(5, name="x"), "x", b"inner")
    for use in (FileGuard.announce, append):
        with pytest.raises(Misconfigured, match="two marks"):
            use(FileGuard(outer), stamp(6, name="a/b/x"), "a/b/x")
    FileGuard(outer).write(stamp(6, name="a/y"), "a/y", b"outer")  # no other guard has it
    with pytest.raises(Misconfigured, match="two marks"):
        FileGuard(tmp_path / "a").write(stamp(6, name="y"), "y", b"")


def test_guards_with_other_prefixes_are_refused(tmp_path: Path) -> None:
    FileGuard(tmp_path, prefix="reports/").write(stamp(5, name="reports/x"), "x", b"one")
    with pytest.raises(Misconfigured, match="reports/"):
        FileGuard(tmp_path).write(stamp(5, name="x"), "x", b"two")


# Errors.


@pytest.mark.parametrize("token", [5, 6], ids=["same token", "new token"])
def test_an_append_on_a_full_disk_leaves_no_torn_tail(tmp_path: Path, token: int) -> None:
    guard = FileGuard(tmp_path)
    guard.write(stamp(5), NAME, b"x" * 11_000)
    before = contents(tmp_path)

    def child() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        # The mark has room, the appended line has not.
        resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, 12_000))
        with pytest.raises(Unavailable, match="full"):
            guard.append(stamp(token), NAME, b"y" * 4000)

    assert forked(child) == 0
    assert (tmp_path / NAME).read_bytes() == before[NAME]
    guard.append(stamp(5), NAME, b"last")
    assert (tmp_path / NAME).stat().st_size == 11_004


@pytest.mark.parametrize(
    "path",
    ["a\0b", "\ud800", "x" * 300, "x" * 5000, f"{NAME}/below", "fifo", "folder"],
    ids=["null", "surrogate", "long", "longer", "below a file", "fifo", "folder"],
)
def test_odd_paths_raise_our_errors(tmp_path: Path, path: str) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    guard = FileGuard(tmp_path)
    guard.write(stamp(5), NAME, b"")
    fence = stamp(5, name=path)
    for operation in (append, guard.read, guard.open, guard.announce, write):
        args = (guard, fence, path) if operation in (append, write) else (fence, path)
        with contextlib.suppress(FencedError):
            operation(*args)
        if path == "fifo" and operation is not guard.announce:
            assert stat.S_ISFIFO((tmp_path / "fifo").lstat().st_mode)
    assert unfinished(tmp_path) == []


def test_a_file_that_is_not_there_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        FileGuard(tmp_path).read(stamp(5), NAME)


# Outsiders who may write into the folder.


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    """A folder elsewhere, with a file that stays as it is."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "x").write_bytes(b"precious")
    yield folder
    assert contents(folder) == {"x": b"precious"}


@pytest.fixture
def inside(tmp_path: Path) -> Path:
    folder = tmp_path / "inside"
    (folder / "sub").mkdir(parents=True)
    return folder


def interrupted(guard: FileGuard, path: str) -> None:
    """A writer that dies between its mark and its rename."""
    guard.write(stamp(5), NAME, b"old")

    def child() -> None:
        for function in ("replace", "rename"):
            setattr(os, function, lambda *_, **__: os._exit(9))
        guard.write(stamp(6, name=path), path, b"new")

    assert forked(child) == 9


def lead_outside(inside: Path, outside: Path) -> None:
    (inside / "sub").rename(inside / "moved")
    os.symlink(outside, inside / "sub")


def test_a_folder_that_becomes_a_link_is_not_followed(inside: Path, outside: Path) -> None:
    guard = FileGuard(inside)
    with pytest.raises(Misconfigured), guard.replace(stamp(6, name="sub/x"), "sub/x") as file:
        file.write(b"new")
        lead_outside(inside, outside)


def test_a_recovery_follows_no_link(inside: Path, outside: Path) -> None:
    interrupted(FileGuard(inside), "sub/x")
    lead_outside(inside, outside)
    FileGuard(inside).write(stamp(7), NAME, b"others go on")
    assert unfinished(inside) == []


def test_a_file_that_becomes_a_link_is_not_read_or_appended_to(
    inside: Path, outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at the path and the use of it."""
    guard = FileGuard(inside)
    guard.write(stamp(5), NAME, b"old")
    target = guard._target(NAME, "file")
    monkeypatch.setattr(guard, "_target", lambda *_: target)
    (inside / NAME).unlink()
    os.symlink(outside / "x", inside / NAME)
    for token in (5, 6):
        with pytest.raises(Misuse):
            guard.append(stamp(token), NAME, b"new")
    with pytest.raises(Misconfigured):
        guard.read(stamp(6), NAME)


def test_a_private_folder_that_is_a_link_is_refused(inside: Path, outside: Path) -> None:
    os.symlink(outside, inside / ".fenced")
    with pytest.raises(Misconfigured):
        FileGuard(inside).write(stamp(6), NAME, b"new")


# proves guard file: one-user
def test_a_private_folder_of_others_is_refused(inside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guard, mine = FileGuard(inside), os.geteuid()
    guard.write(stamp(5), NAME, b"old")
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    for user in (guard, FileGuard(inside)):
        with pytest.raises(Misconfigured, match="another user"):
            user.write(stamp(6), NAME, b"new")
    monkeypatch.undo()
    for part in (".fenced", ".fenced/marks", ".fenced/new", ".fenced/trees"):
        mode = (inside / part).stat().st_mode
        (inside / part).chmod(0o775)
        with pytest.raises(Misconfigured, match="chmod"):
            FileGuard(inside).write(stamp(6), NAME, b"new")
        (inside / part).chmod(mode)
    guard.write(stamp(6), NAME, b"new")


@pytest.mark.parametrize("part", ["marks", "new", "trees"])
def test_a_part_that_is_a_link_is_refused(inside: Path, outside: Path, part: str) -> None:
    FileGuard(inside).write(stamp(5), NAME, b"old")
    shutil.rmtree(inside / ".fenced" / part)
    os.symlink(outside, inside / ".fenced" / part)
    with pytest.raises(Misconfigured):
        FileGuard(inside).write(stamp(6), NAME, b"new")


def test_a_mark_that_is_a_link_is_refused(inside: Path, outside: Path) -> None:
    FileGuard(inside).write(stamp(5), NAME, b"old")
    (mark,) = (inside / ".fenced/marks").rglob("*daily*.mark")
    mark.rename(inside / "kept")
    os.symlink(outside / "x", mark)
    with pytest.raises(Misconfigured):
        FileGuard(inside).write(stamp(6), NAME, b"new")


@pytest.mark.parametrize("size", [None, 0, -1], ids=["replaced", "cut off", "removed"])
def test_a_mark_that_leads_elsewhere_is_refused(tmp_path: Path, size: int | None) -> None:
    """Forged, or copied from another folder."""
    inside, outside, operation = tmp_path / "inside", tmp_path / "outside", "0" * 32
    for folder in (inside, outside):
        folder.mkdir()
    (outside / "x").write_bytes(b"precious")
    guard = FileGuard(inside)
    guard.write(stamp(5), NAME, b"old")
    configured, key = (inside / ".fenced/config").read_bytes(), guard._target(NAME).key
    mark = inside / f".fenced/marks/{file_of(key)}.mark"
    for path in ("../outside/x", f"{outside}/x", "sub/../../outside/x", ".fenced/config", "", "."):
        forged = Page(9, Marked(b"[]", key, operation, path, size).packed()).packed()
        mark.write_bytes(bytes(SIZE) + forged.ljust(SIZE, b"\0"))
        (inside / f".fenced/new/{file_of(key)}/{operation}").write_bytes(b"forged")
        with pytest.raises(Misconfigured, match="restore it"):
            FileGuard(inside).write(stamp(6), NAME, b"new")
        assert (outside / "x").read_bytes() == b"precious"
        assert (inside / ".fenced/config").read_bytes() == configured


def test_only_the_owner_can_use_the_private_folder(inside: Path) -> None:
    """Others may pass through to the folders that replace_folder() has made, as links lead there."""
    before = os.umask(0)
    try:
        guard = FileGuard(inside)
        write(guard, stamp(5), NAME)
        append(guard, stamp(6), NAME)
        replace_folder(guard, stamp(5, name="site"), "site")
    finally:
        os.umask(before)
    private = inside / ".fenced"
    passable = {private, private / "trees", *(private / "trees").iterdir()}
    for path in (private, *private.rglob("*")):
        mode = stat.S_IMODE(path.lstat().st_mode)
        if path in passable:
            assert mode == 0o711, path
        elif not path.is_symlink() and not path.is_relative_to(private / "trees"):
            assert mode == (0o700 if path.is_dir() else 0o600), path


def test_a_set_user_id_is_not_copied(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(b"old")
    (tmp_path / NAME).chmod(0o6755)
    FileGuard(tmp_path).write(stamp(5), NAME, b"new")
    assert stat.S_IMODE((tmp_path / NAME).stat().st_mode) == 0o755


def test_stale_holders_change_nothing_in_any_of_these(tmp_path: Path) -> None:
    guard = FileGuard(tmp_path)
    for operation in OPERATIONS:
        operation(guard, stamp(6, name=operation.__name__), operation.__name__)
    before = contents(tmp_path)
    for operation in OPERATIONS:
        with pytest.raises(StaleToken):
            operation(guard, stamp(5, name=operation.__name__), operation.__name__)
    assert contents(tmp_path) == before


def test_a_name_of_the_guard_is_no_target(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for path in (".fenced", ".fenced/config", "sub/.fenced", "sub/.fenced/x"):
        with pytest.raises(Misuse):
            FileGuard(tmp_path).write(stamp(5, name=path), path, b"")
