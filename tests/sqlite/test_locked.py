"""A file that another process keeps locked, or a disk that does not answer: deadlines are kept, nothing is left behind.

What the outage kit shows of servers, as far as it makes sense for a file.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from fenced.core.acquiring import LeaseRequest
from fenced.core.holding import State
from fenced.errors import FencedError, Indeterminate, Unavailable
from fenced.leases.rowauthority import Kind
from fenced.net.filesystem import machine_clock
from fenced.stores.sqlite.authority import connecting
from fenced.stores.sqlite.authority.authority import SqliteAuthority
from fenced.stores.sqlite.authority.store import Store
from fenced.testing.kit import asking, granted, lease_engine
from fenced.values import timing
from fenced.values.contracts import Runtime
from fenced.values.model import Granted, Waiting
from tests.colours import play

DEADLINE = 0.3
LONG = 60.0
"""A ttl that nobody waits for."""
SOON = 20.0

LOCK = """
import os, signal, sqlite3, sys
db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.execute("BEGIN IMMEDIATE")
print("locked", flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""


class Stopped:
    """A process that was stopped inside its transaction; it is killed in the end."""

    def __init__(self, path: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", LOCK, path], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "locked\n"
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)

    def end(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.communicate()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    stopped = Stopped(path)
    try:
        yield
    finally:
        stopped.end()


async def overdue(runtime: Runtime, call: Callable[[float], Coroutine[Any, Any, object]]) -> float:
    """How long a call takes beyond its deadline that must end in nothing, or in nobody knows."""
    until = runtime.now() + DEADLINE
    with pytest.raises((Unavailable, Indeterminate)):
        await call(until)
    return runtime.now() - until


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "leases.db"


def authority(path: Path, runtime: Runtime) -> SqliteAuthority:
    return SqliteAuthority(path, runtime)


# proves authority sqlite: stopped-writer-blocks
async def test_a_locked_file_keeps_no_call_beyond_its_deadline(path: Path, runtime: Runtime) -> None:
    one, other = authority(path, runtime), authority(path, runtime)
    await one.open()
    ask = asking(runtime, "orders")
    token = (await granted(one, ask)).token
    calls: tuple[Callable[[float], Coroutine[Any, Any, object]], ...] = (
        lambda until: one.ask(asking(runtime, "more"), until),
        lambda until: one.renew([ask.secret], until),
        lambda until: one.release(ask.secret, until),
        lambda until: one.withdraw(ask.secret, until),
        lambda until: other.open(until=until),
        lambda until: one.force_release("orders", token, until),
        lambda until: one.raise_floor(10, until),
        one.tidy,
    )
    with locked(path):
        for call in calls:
            assert await overdue(runtime, call) < timing.CALL_SECONDS / 2
    assert isinstance(await one.ask(ask), Granted), "nothing has happened"
    for each in (one, other):
        await each.close()


def test_a_limit_of_sqlites_own_would_be_noticed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: a wait for the lock that has a length of its own, whatever the caller's deadline is."""
    retry_while_locked = connecting.retry_while_locked

    def stubborn(work: Any, deadline: connecting.Deadline) -> Any:
        return retry_while_locked(work, connecting.Deadline.of(5 * DEADLINE))

    async def story(runtime: Runtime) -> None:
        one = authority(path, runtime)
        await one.open()
        monkeypatch.setattr(connecting, "retry_while_locked", stubborn)
        with locked(path):
            assert await overdue(runtime, lambda until: one.release("0" * 32, until)) > 3 * DEADLINE
        await one.close()

    play(story, "blocking")


def test_a_cancelled_call_leaves_no_thread_waiting(path: Path) -> None:
    """asyncio: the call ends at once, the thread stops waiting for the lock, and a later grant is not made."""

    async def story(runtime: Runtime) -> None:
        one = authority(path, runtime)
        await one.open()
        ask = asking(runtime, "orders", ttl=LONG)
        stopped = Stopped(path)
        try:
            began = runtime.now()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(DEADLINE):
                    await one.ask(ask, began + LONG)
            assert runtime.now() - began < SOON
            # Behind it in the same thread: it has its turn, and not only when the first one's deadline is over.
            assert await overdue(runtime, lambda until: one.ask(asking(runtime, "more"), until)) < SOON
        finally:
            stopped.end()
        assert (await one.observe("orders")).held_by is None
        await one.close()

    play(story, "asyncio")


async def test_a_locked_file_keeps_nobody_past_its_wait(path: Path, runtime: Runtime) -> None:
    client = lease_engine(authority(path, runtime), runtime, patience=timing.PATIENCE_SECONDS)
    await client.release(await client.acquire(LeaseRequest.checked(["orders"])))
    with locked(path):
        for wait in (0.0, 0.5):
            began = runtime.now()
            with pytest.raises((Unavailable, Indeterminate)):
                await client.acquire(LeaseRequest.checked(["orders"], wait=wait))
            assert runtime.now() - began - wait < timing.CALL_SECONDS / 2
    await client.acquire(LeaseRequest.checked(["orders"], wait=SOON))
    await client.close()


async def test_a_failed_release_is_repeated(
    path: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is locked while a lease is given back: its name is free soon after, and not when its ttl is over."""
    client = lease_engine(authority(path, runtime), runtime)
    other = await client.acquire(LeaseRequest.checked(["other"], ttl=LONG))
    hold = await client.acquire(LeaseRequest.checked(["orders"], ttl=LONG))
    with locked(path):
        monkeypatch.setattr(timing, "CALL_SECONDS", DEADLINE)
        with pytest.raises((Unavailable, Indeterminate)):
            await client.release(hold)
        assert hold.state is State.RELEASED
    monkeypatch.undo()
    again = await client.acquire(LeaseRequest.checked(["orders"], ttl=LONG, wait=SOON))
    assert again.token > hold.token
    assert other.state is State.HELD
    await client.close()


def test_a_grant_that_nobody_waits_for_any_more_is_withdrawn(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """asyncio: the disk answers a commit late. For its caller the grant is unknown; it does not stay as a ghost."""
    answered, transact, late = threading.Event(), Store.transact, threading.Event()

    def slow(store: Store, work: Any, kind: Kind, deadline: Any = None) -> Any:
        answer = transact(store, work, kind, deadline)
        if kind is Kind.MINTS and not late.is_set():
            late.set()
            answered.wait(SOON)
        return answer

    async def story(runtime: Runtime) -> None:
        client = lease_engine(authority(path, runtime), runtime, patience=timing.PATIENCE_SECONDS)
        other = await client.acquire(LeaseRequest.checked(["other"], ttl=LONG))
        monkeypatch.setattr(Store, "transact", slow)
        began = runtime.now()
        with pytest.raises(FencedError):
            await client.acquire(LeaseRequest.checked(["orders"], ttl=LONG, wait=DEADLINE))
        assert runtime.now() - began < timing.CALL_SECONDS / 2
        assert late.is_set()
        answered.set()
        while (await client.authority.observe("orders")).held_by is not None:
            assert runtime.now() - began < SOON
            await asyncio.sleep(0.01)
        assert other.state is State.HELD
        await client.close()

    play(story, "asyncio")


async def test_a_dead_waiter_keeps_its_place_for_ten_seconds(path: Path, runtime: Runtime) -> None:
    """However long its ttl. That they have passed is what the second one's clock says."""
    ahead = 0
    clock = machine_clock()
    first = authority(path, runtime)
    second = SqliteAuthority(path, runtime, clock=lambda: clock() + ahead)
    await first.open()
    await second.open()
    held = asking(runtime, "orders", ttl=LONG)
    await granted(first, held)
    assert isinstance(await first.ask(asking(runtime, "orders", ttl=LONG, wait=True)), Waiting)
    await first.release(held.secret)
    ask = asking(runtime, "orders", ttl=LONG, wait=True)
    waiting = await second.ask(ask)
    assert isinstance(waiting, Waiting) and waiting.check_in <= timing.WAITER_TTL_MAX
    ahead = int(timing.WAITER_TTL_MAX / 2 * 1e9)
    assert isinstance((await second.renew([ask.secret]))[0], Waiting)
    ahead *= 2
    await granted(second, ask)
    for each in (first, second):
        await each.close()


@pytest.mark.parametrize("thread", [False, True], ids=["here", "another thread"])
async def test_abandoning_closes_descriptors_and_nothing_else(
    path: Path, runtime: Runtime, thread: bool
) -> None:
    before = set(os.listdir("/proc/self/fd"))
    one = authority(path, runtime)
    await one.open()
    await granted(one, asking(runtime, "orders", ttl=LONG))
    await one.next_wakeups(runtime.now() + 0.01)
    for _ in range(2):
        if thread:
            elsewhere = threading.Thread(target=one.abandon)
            elsewhere.start()
            elsewhere.join()
        else:
            one.abandon()
    assert set(os.listdir("/proc/self/fd")) <= before
    # A listener in another thread calls it again before it learns that the client was closed.
    with pytest.raises(Unavailable, match="was closed"):
        await one.next_wakeups(runtime.now() + 0.01)
    assert set(os.listdir("/proc/self/fd")) <= before
    db = sqlite3.connect(path)
    assert db.execute("SELECT state FROM attempt").fetchall() == [("granted",)]
    db.close()
