"""Each system call of each operation fails in turn, and the process dies at each in turn.

Every time the operation has happened completely or not at all. If it returned, it has happened; if it raised an error
other than Indeterminate, it has not, and its mark has not risen. The next process can use the guard: it refuses older
tokens, admits newer ones, and leaves nothing behind.
"""

from __future__ import annotations

import ast
import contextlib
import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import pytest

from fenced.client.guarding import credential
from fenced.errors import FencedError, Indeterminate, StaleToken
from fenced.files import FileGuard
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.stores.files.guard import disk, locked, pages
from fenced.stores.files.guard import folder as folders
from fenced.stores.files.guard.disk import PRIVATE
from fenced.stores.files.guard.locked import LockedName, Marked, Room
from fenced.stores.files.guard.values import FileCells, FileValues
from fenced.values.decision import Rule
from tests.files.faults import Died, Fault, Kind, injected
from tests.files.support import NAME, contents, forked, stamp, unfinished
from tests.files.test_files import test_tokens_of_eight_processes_never_fall as eight_processes
from tests.files.test_places import test_a_mark_that_leads_elsewhere_is_refused as a_forged_mark
from tests.files.test_places import test_contents_that_vanished_are_not_acknowledged as vanished_contents
from tests.files.test_places import test_new_contents_of_a_live_writer_stay as a_live_writer

LINE = b"a new line, too long for one write"
SITE = "site/index.html"
VALUE = ".fenced/values/n%2Fvalue"
State = tuple[tuple[int, int] | None, bytes | None]
"""Token and seq of the mark, and the contents."""


Act = Callable[[FileGuard], object]


@dataclass(frozen=True)
class Scenario:
    """An operation, and the states of a name before and after it."""

    title: str
    act: Act
    before: set[State]
    after: set[State]
    name: str = NAME
    shown: str = NAME
    """The file that has the contents."""
    rule: Rule = "retry"
    dead: Act | None = None
    """What a writer has begun that died before the system call `dies_at`."""
    dies_at: str = ""
    used: bool = True
    """Somebody has used the folder before."""
    opened: bool = True
    """The guard object has been used before."""


def writes(token: int, seq: int = 1, path: str = NAME, body: bytes = LINE) -> Act:
    return lambda guard: guard.write(stamp(token, seq, path), path, body)


def appends(token: int, path: str = NAME) -> Act:
    return lambda guard: guard.append(stamp(token, name=path), path, LINE)


def replaces_folder(token: int, path: str = "site", body: bytes = LINE) -> Act:
    def act(guard: FileGuard) -> None:
        with guard.replace_folder(stamp(token, name=path), path) as tree:
            (tree / "index.html").write_bytes(body)

    return act


def announces(token: int) -> Act:
    return lambda guard: guard.announce(stamp(token), NAME)


def reads(token: int) -> Act:
    def act(guard: FileGuard) -> None:
        assert guard.read(stamp(token), NAME) == b"old"

    return act


def writes_value(token: int, body: bytes = LINE) -> Act:
    def act(guard: FileGuard) -> None:
        runtime = BlockingRuntime()
        values = FileValues(FileCells(guard._folder, runtime), runtime, "file:")
        step(values.write(credential(stamp(token, name="value")), "value", body))

    return act


OLD: State = (5, 1), b"old"
NONE: State = None, None
SCENARIOS = [
    Scenario("replace, same token", writes(5), {OLD}, {((5, 1), LINE)}),
    Scenario("replace, new token", writes(6), {OLD}, {((6, 1), LINE)}),
    Scenario("replace, new seq", writes(5, 2), {OLD}, {((5, 2), LINE)}, rule="sequenced"),
    Scenario("replace, first", writes(6, 1, "x"), {NONE}, {((6, 1), LINE)}, "x", "x"),
    Scenario("append, same token", appends(5), {OLD}, {((5, 1), b"old" + LINE)}),
    Scenario("append, new token", appends(6), {OLD}, {((6, 1), b"old" + LINE)}),
    Scenario("append, first", appends(6, "x"), {NONE}, {((6, 1), LINE)}, "x", "x"),
    Scenario("folder, same token", replaces_folder(5), {OLD}, {((5, 1), LINE)}, "site", SITE),
    Scenario("folder, new token", replaces_folder(6), {OLD}, {((6, 1), LINE)}, "site", SITE),
    Scenario("folder, first", replaces_folder(6, "x"), {NONE}, {((6, 1), LINE)}, "x", "x/index.html"),
    Scenario("announce", announces(6), {OLD}, {((6, 0), b"old")}),
    Scenario("read", reads(6), {OLD, ((6, 0), b"old")}, {((6, 0), b"old")}),
    Scenario("value", writes_value(6), {OLD}, {((6, 1), LINE)}, "value", VALUE),
    Scenario(
        "in an empty folder", writes(6, 1, "x"), {NONE}, {((6, 1), LINE)}, "x", "x", used=False, opened=False
    ),
    Scenario("with a new guard", writes(6), {OLD}, {((6, 1), LINE)}, opened=False),
    Scenario(
        "announce, after a replacement",
        announces(7),
        {OLD, ((6, 1), b"dead")},
        {((7, 0), b"old"), ((7, 0), b"dead")},
        dead=writes(6, body=b"dead"),
        dies_at="rename",
    ),
    Scenario(
        "replace, with a new guard after a replacement",
        writes(7),
        {OLD, ((6, 1), b"dead")},
        {((7, 1), LINE)},
        dead=writes(6, body=b"dead"),
        dies_at="rename",
        opened=False,
    ),
    Scenario(
        "announce, after an append", announces(7), {OLD}, {((7, 0), b"old")}, dead=appends(6), dies_at="fsync"
    ),
    Scenario(
        "folder, after a folder",
        replaces_folder(7),
        {OLD, ((6, 1), b"dead")},
        {((7, 1), LINE)},
        "site",
        SITE,
        dead=replaces_folder(6, body=b"dead"),
        dies_at="rename",
    ),
]


def opened(folder: Path, rule: Rule = "retry") -> FileGuard:
    """A guard as a new process has it, after its first operation."""
    guard = FileGuard(folder, rule=rule)
    guard.name_for(NAME)
    return guard


def prepared(folder: Path, scenario: Scenario) -> FileGuard:
    """A used guard, and perhaps what a dead writer has left there."""
    folder.mkdir()
    if scenario.used:
        guard = opened(folder, scenario.rule)
        for_another_name = scenario.before == {NONE}
        (writes(5) if for_another_name else again(scenario, 5, b"old"))(guard)
        if scenario.dead is not None:
            assert ends(guard, scenario.dead, Fault("dies", scenario.dies_at)) is None
    return guard if scenario.opened else FileGuard(folder, rule=scenario.rule)


def ends(guard: FileGuard, act: Act, fault: Fault) -> bool | None:
    """How an operation with a fault ends: it returns, it says that nothing has happened, or (None) nobody knows."""
    before = descriptors()
    with injected(fault):
        try:
            act(guard)
            ended = True
        except (KeyboardInterrupt, Indeterminate):
            ended = None
        except FencedError:
            ended = False
        except Died:
            for descriptor in descriptors() - before:
                os.close(descriptor)  # as the kernel does, and with it the locks end
            return None
    assert descriptors() == before
    return ended


def descriptors() -> set[int]:
    listed = {int(name) for name in os.listdir("/proc/self/fd")}
    return {descriptor for descriptor in listed if os.path.exists(f"/proc/self/fd/{descriptor}")}


def state(guard: FileGuard, scenario: Scenario) -> State:
    """As the next process finds it. It completes or undoes what was begun."""
    mark = step(guard._marks.mark(scenario.name))
    return (mark.token, mark.seq) if mark else None, seen(guard, scenario)


def seen(guard: FileGuard, scenario: Scenario) -> bytes | None:
    path = Path(guard._folder.top, scenario.shown)
    return path.read_bytes() if path.exists() else None


def again(scenario: Scenario, token: int, body: bytes = b"last") -> Act:
    """Another write to the name of a scenario."""
    if scenario.shown == VALUE:
        return writes_value(token, body)
    if scenario.shown.endswith("index.html"):
        return replaces_folder(token, scenario.name, body)
    return writes(token, 1, scenario.name, body)


def check(folder: Path, scenario: Scenario, ended: bool | None) -> bool:
    """What must be true whatever has happened; returns whether the operation has."""
    allowed = {True: scenario.after, False: scenario.before, None: scenario.after | scenario.before}[ended]
    if ended is not None and scenario.dead is None:
        at_once = seen(FileGuard(folder), scenario)
        assert at_once in {body for _, body in allowed}, "before anybody repairs anything"
    guard = opened(folder, scenario.rule)
    found = state(guard, scenario)
    assert found in allowed
    assert unfinished(folder) == []
    if found[0] is not None:
        with pytest.raises(StaleToken):
            again(scenario, found[0][0] - 1)(guard)
    again(scenario, 9)(guard)
    assert state(guard, scenario) == ((9, 1), b"last")
    for trees in (folder / PRIVATE / "trees").iterdir():
        assert len([*trees.iterdir()]) <= 2, "the newest folder, and the one before it"
    return found in scenario.after


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory, if there is one: these tests make thousands of files."""
    with tempfile.TemporaryDirectory(
        dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else tmp_path
    ) as folder:
        yield Path(folder)


MORE = ("replace, new token", "append, same token", "append, new token", "folder, new token", "value")
"""Scenarios for which the rarer kinds of faults are tried, too."""


@pytest.mark.parametrize(
    ("scenario", "kind"),
    [
        pytest.param(scenario, kind, id=f"{scenario.title} {kind}")
        for scenario in SCENARIOS
        for kind in get_args(Kind)
        if kind in ("dies", "fails") or scenario.title in MORE
    ],
)
def test_every_call(scenario: Scenario, kind: Kind, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Nobody else uses the folder: a lock that is not free was not released.
    monkeypatch.setattr(folders, "LOCK_SECONDS", 0.0)
    fault_at_every_call(scenario, kind, memory)


def fault_at_every_call(scenario: Scenario, kind: Kind, memory: Path) -> None:
    outcomes = set()
    with injected(Fault("fails")):  # nothing fails, and nothing waits for the disk
        for number in itertools.count(1):
            folder = memory / str(number)
            guard, fault = prepared(folder, scenario), Fault(kind, number)
            outcomes.add(check(folder, scenario, ends(guard, scenario.act, fault)))
            if not fault.reached:
                break
    assert number > 10, "so many calls every operation makes"
    assert True in outcomes and (False in outcomes or scenario.before <= scenario.after)


def test_a_real_process_that_dies_at_every_call(memory: Path) -> None:
    """It leaves the same as one that is played."""
    scenario = SCENARIOS[1]
    for number in itertools.count(1):
        guards = [prepared(memory / f"{number} {how}", scenario) for how in ("real", "played")]
        fault = Fault("dies", number)
        played = ends(guards[1], scenario.act, fault)

        def real(guard: FileGuard = guards[0], number: int = number) -> None:
            with injected(Fault("dies", number)):
                try:
                    scenario.act(guard)
                except Died:
                    os._exit(9)

        assert forked(real) == (0 if played else 9)
        real_left, played_left = (contents(Path(guard._folder.top)).items() for guard in guards)
        # The ids of operations are random, and have the same length.
        assert [(len(path), len(found)) for path, found in real_left] == [
            (len(path), len(found)) for path, found in played_left
        ]
        if not fault.reached:
            break


def test_no_other_module_makes_system_calls() -> None:
    """So that no call of the guard escapes these tests."""
    sources = Path(disk.__file__).parent.glob("*.py")
    found = {
        f"{source.name}: {name}"
        for source in sources
        if source.name != "disk.py"
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module])
        if name in ("os", "fcntl", "shutil", "io", "tempfile", "glob")
    }
    assert found == {"own.py: os"}  # two types


# proves guard file: synced-writes
def test_the_order_of_what_is_synced(memory: Path) -> None:
    """After a power cut the mark file says what was under way only if it was on the disk before that began."""
    trace: list[str] = []

    class Traced(Fault):
        def __call__(self, name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if name == "open":
                descriptor = call(*args, **kwargs)
                opened_as[descriptor] = ("mark " if args[1] & os.O_DSYNC else "") + args[0].rpartition("/")[2]
                return descriptor
            if name == "dup":
                descriptor = call(*args)
                opened_as[descriptor] = "folder"
                return descriptor
            if name in ("pwrite", "fsync", "rename"):
                what = opened_as.get(args[0], "folder") if name != "rename" else "new contents"
                trace.append(f"{name} {'mark' if what.startswith('mark ') else what}")
            return call(*args, **kwargs)

    opened_as: dict[int, str] = {}
    guard = opened(memory)
    guard.write(stamp(5), NAME, b"old")
    with injected(Traced("fails")):
        guard.append(stamp(6), NAME, LINE)
        assert trace == ["pwrite mark", f"pwrite {NAME}", f"fsync {NAME}", "pwrite mark"]
        trace.clear()
        guard.write(stamp(7), NAME, LINE)
    written, synced, *rest = trace
    assert written.replace("pwrite", "fsync") == synced
    assert rest == ["pwrite mark", "rename new contents", "fsync folder"]


# The checks can fail.

REPLACING = FileGuard._replacing


def _recovers_nothing(self: LockedName, mine: str) -> None:
    """Whoever locks next does not look at what a dead writer has begun."""


def _cuts_nothing(path: str, at: int, size: int | None) -> None:
    """An append that was not complete stays."""


def _takes_nothing_back(self: LockedName, cause: OSError | None = None) -> None:
    """A mark that has risen stays, although its contents could not be put in place."""


def _marks_first(self: LockedName, marked: Marked, body: bytes) -> None:
    """The mark says that an append has happened before its contents are on the disk."""
    self.raise_mark(marked)
    disk.append_at(marked.path, self._room.top, body, disk.size_of(marked.path, self._room.top) or 0)


def _always_knows(error: OSError, path: str) -> FencedError:
    """After an error that leaves the outcome open, the guard says that nothing has happened."""
    return disk.translated(error, path)


def _one_page(self: pages.Page) -> int:
    """A mark is written over the mark before it, which is lost if the writer dies."""
    return pages.SIZE


def _no_checksum(body: bytes, number: int) -> int:
    """A mark that was written in part counts."""
    return 0


@contextlib.contextmanager
def _removes_what_is_committed(self: FileGuard, fence: Any, target: Any) -> Iterator[int]:
    """An interrupted writer cleans up, although its mark has risen."""
    try:
        with REPLACING(self, fence, target) as descriptor:
            yield descriptor
    except KeyboardInterrupt:
        shutil.rmtree(f"{self._folder.private}/new", ignore_errors=True)
        raise


def _sweeps_or_fails(self: FileGuard, room: Room, trees: str, kept: set[str]) -> None:
    """A folder is replaced, and then an error says that nothing has happened."""
    for name in disk.listed(trees, room.private):
        if name not in kept:
            disk.remove_if_dead(f"{trees}/{name}", room.private)


def _renames_what_is_there(self: LockedName, operation: str, parent: int, path: str) -> None:
    """Contents that have vanished count as renamed."""
    with contextlib.suppress(FileNotFoundError):
        disk.rename(f"new/{self._file}/{operation}", self._room.private, path, parent)


def _not_locked(descriptor: int) -> bool:
    """Neither names nor new contents are locked."""
    return True


def _created_unlocked(path: str, at: int, mode: int) -> int:
    """New contents are not locked by their writer."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode, dir_fd=at)


def _sound(marked: Marked, file: str) -> bool:
    """A mark may name any file of the machine."""
    return True


def _mark_without_sync(path: str, at: int) -> int:
    """After a power cut the note of an append that has returned may be there, and cut it off."""
    return os.open(path, os.O_RDWR | os.O_CREAT, 0o600, dir_fd=at)


def every_call(title: str, kind: Kind) -> Callable[[Path], None]:
    (scenario,) = [scenario for scenario in SCENARIOS if scenario.title == title]
    return lambda path: fault_at_every_call(scenario, kind, path)


@pytest.mark.parametrize(
    ("owner", "function", "bug", "found_by"),
    [
        (LockedName, "recover", _recovers_nothing, every_call("replace, new token", "dies")),
        (disk, "cut", _cuts_nothing, every_call("append, same token", "dies")),
        (disk, "cut", _cuts_nothing, every_call("append, new token", "fails")),
        (LockedName, "_take_back", _takes_nothing_back, every_call("replace, new token", "fails")),
        (LockedName, "append", _marks_first, every_call("append, new token", "dies")),
        (disk, "unknown", _always_knows, every_call("replace, same token", "fails")),
        (pages.Page, "offset", property(_one_page), every_call("replace, new token", "dies")),
        (pages, "crc32", _no_checksum, every_call("replace, new token", "dies")),
        (
            FileGuard,
            "_replacing",
            _removes_what_is_committed,
            every_call("replace, new token", "is interrupted"),
        ),
        (FileGuard, "_sweep", _sweeps_or_fails, every_call("folder, new token", "fails from then on")),
        (LockedName, "_rename", _renames_what_is_there, lambda path: vanished_contents(path, 5)),
        (disk, "try_lock", _not_locked, eight_processes),
        (disk, "create", _created_unlocked, a_live_writer),
        (locked, "_is_sound", _sound, lambda path: a_forged_mark(path, None)),
        (disk, "open_mark", _mark_without_sync, test_the_order_of_what_is_synced),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_checks_can_fail(
    owner: object,
    function: str,
    bug: Any,
    found_by: Callable[..., None],
    memory: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(owner, function, bug)
    locked.parsed.cache_clear()
    with pytest.raises((AssertionError, OSError, ValueError, FencedError, pytest.fail.Exception)):
        found_by(memory)
    locked.parsed.cache_clear()  # of what the bug has believed
