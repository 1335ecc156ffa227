"""`client.once`: each version once, in order, whatever the number of programs, and whatever happens to them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import fenced
from evidence import once as ticking
from fenced.client.once import Once, done, marks_beside
from fenced.errors import LeaseLost, Misuse, StaleToken
from fenced.values import ticks

STORES = ["sqlite", "memory", "redis", "postgresql", "etcd", "zookeeper"]


@pytest.fixture(params=STORES)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/leases.db"
    if request.param == "memory":
        return f"memory:{tmp_path.name}"
    found: str = request.getfixturevalue(f"{request.param}_url")
    return found


@pytest.fixture
def name() -> str:
    """New in each test: some of them share a server."""
    return f"schema/{os.urandom(4).hex()}"


def client_of(url: str) -> fenced.Client:
    return fenced.Client(url, guarantee="best-effort")


@pytest.fixture(autouse=True)
def own_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Marks in a place of their own: guards of other tests on the same server trust other authorities."""
    place = f"once{os.urandom(4).hex()}"

    def beside(url: str) -> str:
        scheme = url.partition(":")[0]
        apart = {
            "redis": f"{url}?tag={place}",
            "etcd": f"{url}?prefix={place}",
            "zookeeper": f"{url}/{place}",
        }
        return apart.get(scheme, marks_beside(url))

    monkeypatch.setattr("fenced.client.once.marks_beside", beside)


def test_a_version_runs_once_and_later_ones_in_order(url: str, name: str) -> None:
    ran = []
    with client_of(url) as client:
        for version in (7, 7, 6, 8):
            with client.once(name, version) as turn:
                if turn:
                    ran.append((version, turn.token))
    assert [version for version, _ in ran] == [7, 8]
    assert ran == sorted(ran, key=lambda each: each[1])


def test_in_asyncio(url: str, name: str) -> None:
    async def story() -> list[int]:
        ran = []
        async with fenced.AsyncClient(url, guarantee="best-effort") as client:
            for version in (7, 7, 6, 8):
                async with client.once(name, version) as turn:
                    if turn:
                        ran.append(version)
            with pytest.raises(RuntimeError):
                async with client.once(name, 9):
                    raise RuntimeError("the migration failed")
            async with client.once(name, 9) as turn:
                ran += [9] if turn else []
        return ran

    assert asyncio.run(story()) == [7, 8, 9]


def test_a_turn_covers_what_the_work_writes(url: str, name: str, tmp_path: Path) -> None:
    """One lease for the mark and for the data: a late runner's writes are refused at the guard of the data."""
    place = f"orders/{os.urandom(4).hex()}"
    orders = fenced.Values(f"sqlite:///{tmp_path}/orders.db")
    with client_of(url) as late, client_of(url) as next_one, orders:
        with pytest.raises((StaleToken, LeaseLost)), late.once(name, 7, covers=[place]) as turn:
            assert turn
            stamp = turn.next_stamp()
            overtake(next_one, turn)
            with next_one.once(name, 7, covers=[place]) as again:
                assert again
                orders.write(again, place, b"right")
            with pytest.raises(StaleToken):
                orders.write(stamp, place, b"late")
        assert orders.peek(place).value == b"right"
        with pytest.raises(Misuse, match="a list of names"):
            late.once(name, 8, covers=place)


def test_a_runner_that_was_overtaken_cannot_mark(url: str, name: str) -> None:
    """Its successor has announced itself: the late mark is refused, and the successor's own stands."""
    with client_of(url) as late, client_of(url) as next_one:
        with pytest.raises((StaleToken, LeaseLost)), late.once(name, 7) as turn:
            assert turn
            stamp = turn.next_stamp()
            overtake(next_one, turn)
            with next_one.once(name, 7) as again:
                assert again and again.token > stamp.token
        with next_one.once(name, 7) as turn:
            assert turn is None


class _Unannounced(Once):
    """A planted bug: the mark is read under the lease without announcing, so an earlier runner can still write it."""

    def __enter__(self) -> fenced.Lease | None:
        if self._is_done(self._marks.peek(self._place.name)):
            return None
        lease = self._hold.__enter__()
        self._turn = None if self._is_done(self._marks.peek(self._place.name)) else lease
        return self._turn


def overtaken(kind: Callable[..., Once], url: str) -> bool:
    """Whether a runner that was overtaken, and knows nothing of it, could write its mark while its successor runs."""
    with client_of(url) as late, client_of(url) as next_one, fenced.Values(marks_beside(url)) as marks:
        first = kind(late, marks, "schema", 7, None, 30.0, None)
        turn = first.__enter__()
        assert turn is not None
        stamp = turn.next_stamp()
        overtake(next_one, turn)
        second = kind(next_one, marks, "schema", 7, None, 30.0, None)
        assert second.__enter__() is not None
        try:
            marks.write(stamp, "once/schema", b"{}")
        except StaleToken:
            return False
        finally:
            second.__exit__(ValueError, ValueError(), None)
        return True


def test_the_planted_bug_lets_a_late_mark_through(tmp_path: Path) -> None:
    assert overtaken(_Unannounced, f"sqlite:///{tmp_path}/planted.db")
    assert not overtaken(Once, f"sqlite:///{tmp_path}/right.db")


def overtake(client: fenced.Client, lease: fenced.Lease) -> None:
    """Take a lease from its holder, who does not know it yet."""
    from fenced.runtime.blocking import step

    with client.try_hold("once/warm-up"):
        pass
    assert step(client._authority.force_release(lease.names[0], lease.token)) is not None


# Machines.

RUNNER = """
import os, sys, fenced
url, folder, dies_at = sys.argv[1:]
from fenced.client import once, contexts
def die(*_, **__): os._exit(9)
def dying(kind, name, after):
    real = getattr(kind, name)
    def call(*args, **kwargs):
        if after:
            real(*args, **kwargs)
        die()
    setattr(kind, name, call)
PLACES = {
    "before the lease": (contexts.LeaseContext, "__enter__", False),
    "with the lease": (contexts.LeaseContext, "__enter__", True),
    "after the read": (fenced.Values, "read", True), "before the mark": (fenced.Values, "write", False),
    "after the mark": (fenced.Values, "write", True), "in the work": None, "": None,
}
if PLACES[dies_at]:
    dying(*PLACES[dies_at])
with fenced.Client(url, guarantee="best-effort") as client, client.once("schema", 7, ttl=1.0) as turn:
    if turn:
        open(f"{folder}/ran", "a").write("x")
        if dies_at == "in the work":
            die()
"""


@pytest.mark.parametrize(
    "place, marked",
    [
        ("before the lease", False),
        ("with the lease", False),
        ("after the read", False),
        ("in the work", False),
        ("before the mark", False),
        ("after the mark", True),
    ],
)
def test_killed_at_each_step(place: str, marked: bool, tmp_path: Path) -> None:
    """The next one runs the work, unless its mark was written."""
    runner = [sys.executable, "-c", RUNNER, f"sqlite:///{tmp_path}/leases.db", str(tmp_path)]
    assert subprocess.run([*runner, place]).returncode == 9
    before = (tmp_path / "ran").read_text() if (tmp_path / "ran").exists() else ""
    assert subprocess.run([*runner, ""], timeout=100).returncode == 0
    assert (tmp_path / "ran").read_text() == before + ("" if marked else "x")
    with fenced.Values(f"sqlite:///{tmp_path}/leases.db.once") as marks:
        found = done(marks, "schema")
    assert found is not None and found.version == 7


def test_of_many_machines_one_runs_and_the_others_skip(tmp_path: Path) -> None:
    """`make evidence ARGS=once` does it with 64 processes, and measures when the last one returns."""
    url, ran = f"sqlite:///{tmp_path}/leases.db", []
    together = threading.Barrier(16)

    def machine() -> None:
        with client_of(url) as client:
            together.wait()
            with client.once("schema", 7) as turn:
                if turn:
                    ran.append(turn.token)

    machines = [threading.Thread(target=machine) for _ in range(16)]
    for each in machines:
        each.start()
    for each in machines:
        each.join()
    assert len(ran) == 1


def test_each_tick_once_with_clocks_that_disagree_and_machines_that_stop(tmp_path: Path) -> None:
    """A machine that is stopped in its turn leaves no mark, and its successor runs that tick under a higher token."""
    found = ticking.measure(f"sqlite:///{tmp_path}/leases.db", tmp_path, count=20, processes=3, work=0.1)
    assert found["each marked once, none left out"], found
    assert found["in the order of tokens"] and found["exit statuses"] == [0], found


# Marks that end, and bad input.


def test_marks_of_ids_without_end_share_slots_and_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ticks, "SLOTS", 1)
    now = [1000.0]
    monkeypatch.setattr("fenced.client.once.wall_time", lambda: now[0])
    with client_of(f"sqlite:///{tmp_path}/leases.db") as client:
        ran = []
        for each in ("a", "b", "a", "b", "c"):
            with client.once(f"task/{each}", 1, keep=60) as turn:
                ran += [each] if turn else []
        assert ran == ["a", "b", "c"]
        now[0] += 61
        with client.once("task/d", 1, keep=60) as turn:
            assert turn
        assert client._marks is not None
        value = client._marks.peek("once/slot/0").value
        assert ticks.read(value).keys() == {"task/d"}


def test_bad_input_is_misuse(tmp_path: Path) -> None:
    with client_of(f"sqlite:///{tmp_path}/leases.db") as client:
        for version in (-1, 1.5, "7", True, 2**53):
            with pytest.raises(Misuse, match="a version is"):
                client.once("schema", version)  # type: ignore[arg-type]
        with pytest.raises(Misuse, match="keep"):
            client.once("schema", 1, keep=0)
        with (
            fenced.Values(f"sqlite:///{tmp_path}/leases.db.once") as marks,
            client.hold("once/other") as lease,
        ):
            marks.write(lease, "once/other", b"not a mark")
        with pytest.raises(Misuse, match="another program writes under once/"):
            client.once("other", 1).__enter__()
    with pytest.raises(Misuse, match="say where the marks are"):
        marks_beside("https://leases.internal")


@pytest.mark.parametrize(
    "now, last, missed, expected",
    [
        (7205, None, "last", [7200]),
        (7205, 7200, "last", []),
        (7205, 9999, "last", []),
        (7205, 0, "last", [7200]),
        (7205, 0, "all", [3600, 7200]),
        (7205, None, "all", [7200]),
        (7205, 3600, "none", [7200]),
        (9000, 3600, "none", []),
    ],
)
def test_which_ticks_are_due(now: float, last: int | None, missed: Any, expected: list[int]) -> None:
    assert ticks.due(now, 3600, 0, last, missed) == expected


def test_a_grid_begins_where_it_is_told() -> None:
    day, two = 86_400, 7_200
    assert ticks.tick_of(5 * day + two - 1, day, two) == 4 * day + two
    assert ticks.tick_of(5 * day + two, day, two) == 5 * day + two
    with pytest.raises(Misuse, match="whole number of seconds"):
        ticks.tick_of(1.0, 0.5)


# The command.


def fenced_once(folder: Path, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fenced", "once", *words]
    environment = {**os.environ, "FENCED_AUTHORITY": f"sqlite:///{folder}/leases.db"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=100, **options)


def test_the_command_runs_once_and_a_failure_leaves_no_mark(tmp_path: Path) -> None:
    failed = fenced_once(tmp_path, "schema", "--version", "7", "--", "sh", "-c", "exit 3")
    assert failed.returncode == 3
    ran = fenced_once(tmp_path, "schema", "--version", "7", "--", "sh", "-c", "echo $FENCED_VERSION")
    assert (ran.returncode, ran.stdout) == (0, "7\n")
    skipped = fenced_once(tmp_path, "schema", "--version", "7", "--", "echo", "again")
    assert (skipped.returncode, skipped.stdout, skipped.stderr) == (0, "", "")
    shown = fenced_once(tmp_path, "schema", "--show")
    assert shown.stdout.startswith("schema: version 7 is done, under token ")
    assert fenced_once(tmp_path, "schema", "--", "true").returncode == 64


def test_the_command_waits_or_says_who_is_at_it(tmp_path: Path) -> None:
    with ExitStack() as stack:
        client = stack.enter_context(client_of(f"sqlite:///{tmp_path}/leases.db"))
        assert stack.enter_context(client.once("schema", 7))
        busy = fenced_once(tmp_path, "schema", "--version", "7", "--wait", "0", "--", "true")
        assert busy.returncode == 75


def test_a_signal_ends_the_command_without_a_mark(tmp_path: Path) -> None:
    script = f"touch {tmp_path}/began; sleep 60"
    command = [sys.executable, "-m", "fenced", "once", "schema", "--version", "7", "--", "sh", "-c", script]
    environment = {**os.environ, "FENCED_AUTHORITY": f"sqlite:///{tmp_path}/leases.db"}
    with subprocess.Popen(command, env=environment) as process:
        while not (tmp_path / "began").exists():
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(100) == 128 + signal.SIGTERM
    assert fenced_once(tmp_path, "schema", "--show").stdout == "schema: no version is done\n"
