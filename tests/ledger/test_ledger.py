"""What the ledger promises beyond the kit: shared syncs, one owner, crashes, full disks, and a bound on its memory."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fenced.errors import Indeterminate, Misconfigured, Misuse, Unavailable
from fenced.runtime.aio import AioRuntime
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.stores.ledger.authority import authority as module
from fenced.stores.ledger.authority import journal as journals
from fenced.stores.ledger.authority import segments
from fenced.stores.ledger.authority.authority import LedgerAuthority
from fenced.stores.ledger.authority.changes import IDLE_EVERY_COUNTS
from fenced.stores.ledger.authority.journal import Batch, FileJournal
from fenced.stores.ledger.authority.ledger import Ledger
from fenced.testing.kit import asking, granted
from fenced.values.model import (
    Ask,
    Busy,
    Ended,
    Gone,
    Granted,
    Kept,
    Release,
    Released,
    Renewal,
    Waiting,
    Withdrawal,
    series_id,
)
from tests.conformance.authorities.test_ledger import picture
from tests.forking import said_by_child
from tests.sqlite.test_filesystem import mounted

RUNTIME = BlockingRuntime()
SOON = 60.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "leases.db"


def opened(path: Path, **options: Any) -> LedgerAuthority:
    authority = LedgerAuthority(path, RUNTIME, **options)
    step(authority.open())
    return authority


def token_of(authority: LedgerAuthority, ask: Ask) -> int:
    return step(granted(authority, ask)).token


def lease(name: str) -> Ask:
    return asking(RUNTIME, name, ttl=300.0)


@pytest.fixture
def ledger(path: Path) -> Iterator[LedgerAuthority]:
    authority = opened(path)
    yield authority
    authority.abandon()


def batches(path: Path) -> int:
    """How many batches the files have, without those in a snapshot."""
    return sum(entry.number > 0 for file in path.parent.glob("*.journal-*") for entry in segments.read(file))


class Gate:
    """Makes every write to a journal wait, so that a test decides what happens meanwhile."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.arrived = threading.Semaphore(0)
        self.go = threading.Semaphore(0)
        append = FileJournal.append

        def gated(journal: FileJournal, batch: Batch, sync: bool) -> None:
            self.arrived.release()
            assert self.go.acquire(timeout=SOON)
            append(journal, batch, sync)

        monkeypatch.setattr(FileJournal, "append", gated)


# proves authority ledger: shared-syncs
async def test_requests_during_a_sync_share_the_next(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One caller is written at once; 64 that come meanwhile share one batch, and none is answered before its own."""
    runtime = AioRuntime()
    ledger = LedgerAuthority(path, runtime)
    await asyncio.gather(ledger.open(), ledger.open())  # as the first two callers of a client do
    gate = Gate(monkeypatch)
    first = asyncio.create_task(ledger.ask(lease("first")))
    assert await asyncio.to_thread(gate.arrived.acquire, timeout=SOON)
    others = [asyncio.create_task(ledger.ask(lease(f"name/{n}"))) for n in range(64)]
    # The same name: it changes nothing, but its answer shows a grant that is not on the disk yet.
    busy = asyncio.create_task(ledger.ask(lease("first")))
    await asyncio.sleep(0)
    cancelled = asyncio.create_task(ledger.ask(lease("cancelled")))
    await asyncio.sleep(0)
    cancelled.cancel()
    assert not first.done()
    gate.go.release()
    await first
    assert await asyncio.to_thread(gate.arrived.acquire, timeout=SOON)
    assert not any(task.done() for task in (*others, busy))
    gate.go.release()
    answers = await asyncio.gather(*others)
    assert isinstance(await busy, Busy)
    assert len({answer.token for answer in answers if isinstance(answer, Granted)}) == 64
    await ledger.close()
    runtime.close()
    assert not module._ledgers
    assert batches(path) == 3  # the namespace, the first, the others


async def test_a_slow_disk_does_not_stop_the_loop(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop waits for a disk that has been quick, but not for long: also the first slow write does not stop it."""
    writers: list[int] = []
    began, goes_on = threading.Event(), threading.Event()
    append = FileJournal.append

    def slow(self: FileJournal, batch: Batch, sync: bool) -> None:
        writers.append(threading.get_ident())
        if len(writers) > 2:
            began.set()
            assert goes_on.wait(SOON)
        append(self, batch, sync)

    runtime = AioRuntime()
    authority = LedgerAuthority(path, runtime)
    await authority.open()
    ledger = authority._ledger
    assert ledger is not None
    monkeypatch.setattr(FileJournal, "append", slow)
    for number in range(2):
        await authority.many([lease(f"quick/{number}")])
    ledger._write_ns = 0.0  # as on a machine with nothing else to do
    late = asyncio.create_task(authority.many([lease("slow")]))
    while not began.is_set():
        await asyncio.sleep(0.001)  # which it could not do if the loop waited for the disk
    goes_on.set()
    assert isinstance((await late)[0], Granted)
    await authority.close()
    runtime.close()
    assert len(writers) == 3 and threading.get_ident() not in writers


def test_all_but_endings_are_synced(ledger: LedgerAuthority, monkeypatch: pytest.MonkeyPatch) -> None:
    """A grant, a place in a queue, a renewal, a floor, a tombstone: synced. An ending: with the next sync.

    A release that keeps its names taken is synced, too: it may keep them for longer than the lease would have.
    """
    syncs: list[int] = []
    monkeypatch.setattr(os, "fdatasync", syncs.append)
    held, waits, kept = lease("a"), asking(RUNTIME, "a", ttl=300.0, wait=True), lease("b")
    done: list[Callable[[], Any]] = [
        lambda: ledger.ask(held),
        lambda: ledger.ask(waits),
        lambda: ledger.withdraw(waits.secret),
        lambda: ledger.renew([held.secret]),
        lambda: ledger.release(held.secret),
        lambda: ledger.ask(kept),
        lambda: ledger.release(kept.secret, keep=600.0),
        lambda: ledger.withdraw(RUNTIME.secret()),
        lambda: ledger.raise_floor(100),
    ]
    synced = []
    for each in done:
        step(each())
        synced.append(bool(syncs))
        syncs.clear()
    assert synced == [True, True, False, True, False, True, True, True, True]


def test_threads_share_a_sync(path: Path, ledger: LedgerAuthority, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    tokens: list[int] = []
    threads = [
        threading.Thread(target=lambda n=n: tokens.append(token_of(ledger, lease(f"n/{n}"))))
        for n in range(8)
    ]
    threads[0].start()
    assert gate.arrived.acquire(timeout=SOON)
    for thread in threads[1:]:
        thread.start()
    rows = ledger._rows
    assert rows is not None
    while len(rows) < 8:  # all of them have asked, and wait for the first one's sync
        threading.Event().wait(0.001)
    assert not tokens
    for _ in range(2):
        gate.go.release()
    for thread in threads:
        thread.join(SOON)
    assert sorted(tokens) == list(range(1, 9))
    assert ledger._ledger is not None and ledger._ledger.written == 3


# proves authority ledger: one-owner
def test_a_second_process_is_refused(path: Path, ledger: LedgerAuthority) -> None:
    """Another client of the process shares the ledger; a forked child and other processes get a typed error."""
    token = token_of(ledger, lease("a"))
    other = opened(path)
    assert token_of(other, lease("b")) == token + 1
    other.abandon()

    def child() -> list[str]:
        said = []
        for again in (ledger, LedgerAuthority(path, RUNTIME)):
            try:
                step(again.open())
                step(again.ask(lease("c")))
            except Misconfigured as error:
                said.append(str(error))
            again.abandon()
        return said

    forked, second = said_by_child(child)
    assert "forked child" in forked
    assert "used by another process" in second
    ended = mounted('exec "$1" -c "$2" "$3"', OPEN, path)
    assert "used by another process" in ended.stdout, ended
    assert token_of(ledger, lease("c")) == token + 2


OPEN = """
import sys, fenced
try:
    fenced.Client('ledger:///' + sys.argv[1]).acquire('a', wait=0)
except fenced.Misconfigured as error:
    print(error)
"""


# proves authority ledger: failed-write-refuses
def test_after_a_failed_write_nothing_is_answered(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = opened(path)
    kept = lease("kept")
    token = token_of(ledger, kept)
    append = FileJournal.append

    def fail(journal: FileJournal, batch: Batch, sync: bool) -> None:
        raise Unavailable("the disk is full")

    monkeypatch.setattr(FileJournal, "append", fail)
    lost = lease("lost")
    with pytest.raises(Indeterminate, match="full"):
        step(ledger.ask(lost))
    monkeypatch.setattr(FileJournal, "append", append)
    calls: list[Callable[[], Any]] = [
        lambda: ledger.ask(lost),
        lambda: ledger.renew([kept.secret]),
        lambda: ledger.release(kept.secret),
        lambda: ledger.withdraw(kept.secret),
        ledger.survey,
        lambda: ledger.observe("kept"),
        lambda: ledger.raise_floor(7),
        ledger.open,
    ]
    for call in calls:
        with pytest.raises(Unavailable, match="restart"):
            step(call())
    ledger.abandon()
    again = opened(path)
    assert step(again.renew([kept.secret])) == [Kept(300.0)]
    assert token_of(again, lost) > token
    again.abandon()


# proves authority ledger: reboot-keeps
def test_a_reboot_counts_as_no_time(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of the new boot starts at another value: what was left of a lease is left."""
    clock = 10**15
    before = opened(path, clock=lambda: clock)
    held, waiter = lease("a"), asking(RUNTIME, "a", ttl=300.0, wait=True)
    token = token_of(before, held)
    clock += 200 * 10**9
    assert isinstance(step(before.ask(waiter)), Waiting)
    before.abandon()
    monkeypatch.setattr(journals, "boot_id", lambda: "the next boot")
    clock = 10**9
    after = opened(path, clock=lambda: clock)
    view = step(after.observe("a"))
    assert view.held_by is not None and view.held_by.remaining == 100.0
    after.abandon()
    clock += 50 * 10**9
    again = opened(path, clock=lambda: clock)  # the same boot
    view = step(again.observe("a"))
    assert view.held_by is not None and view.held_by.remaining == 50.0
    assert step(again.renew([held.secret])) == [Kept(300.0)]
    assert isinstance(step(again.ask(lease("a"))), Busy)
    step(again.release(held.secret))
    assert token_of(again, lease("a")) == token + 1  # the waiter's place expired after ten seconds
    again.abandon()


# proves authority ledger: settled-forgotten
def test_memory_is_bounded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a client has settled is forgotten at once, and a late copy of it is refused; the rest after ten minutes."""
    monkeypatch.setattr(Ledger, "snapshot_changes", 500)
    clock = 10**15
    ledger = opened(path, clock=lambda: clock)
    rows = ledger._rows
    assert rows is not None
    # Long leases at the front must not keep the sweep from the rows behind them.
    forever = [asking(RUNTIME, f"held/{n}", ttl=86_400.0) for n in range(300)]
    step(ledger.many(forever))
    holder = forever[0].holder
    asks = [
        Ask(RUNTIME.secret(), (f"n/{n}",), 30.0, holder, series="a" * 32, number=n, settled=max(0, n - 3))
        for n in range(1, 31)
    ]
    for ask in asks:
        token_of(ledger, ask)
        step(ledger.release(ask.secret))
    assert len(rows) == 300 + 3
    assert step(ledger.ask(asks[20])) == Ended("settled")
    assert step(ledger.renew([asks[20].secret])) == [Gone()]
    assert step(ledger.release(asks[29].secret)) == Released()
    once = [asking(RUNTIME, f"once/{n}", ttl=30.0) for n in range(400)]
    step(ledger.many([*once, *(Release(ask.secret) for ask in once)]))
    assert len(rows) == 300 + 3 + 400
    clock += 601 * 10**9
    step(ledger.many([asking(RUNTIME, f"later/{n}", ttl=30.0) for n in range(640)]))
    assert len(rows) == 300 + 640
    other = asking(RUNTIME).holder
    for number in range(1, IDLE_EVERY_COUNTS + 1):
        ask = Ask(RUNTIME.secret(), (f"count/{number}",), 30.0, other, series="b" * 32, number=number)
        token_of(ledger, ask)
    assert list(rows.series) == [series_id("b" * 32)]
    before = ledger._ledger
    ledger.abandon()
    assert before is not None
    again = Ledger(path, FileJournal(path), lambda: clock)
    again.open()
    assert picture(again) == picture(before)
    again.close()


def test_a_batch_is_one_write(path: Path, ledger: LedgerAuthority) -> None:
    assert ledger._ledger is not None
    before = ledger._ledger.written
    answered_as_if_alone(ledger)
    assert ledger._ledger.written == before + 1


def answered_as_if_alone(authority: Any) -> None:
    """`many` answers each operation as if it came alone; an error of one is its answer."""
    one, two = lease("a"), asking(RUNTIME, "a", ttl=300.0, wait=True)
    reused = Ask(one.secret, ("b",), 300.0, one.holder)
    gone = lease("gone")
    answers = step(
        authority.many(
            [one, two, reused, Renewal(one.secret), Release(one.secret), Withdrawal(gone.secret), gone, two]
        )
    )
    kinds = [type(answer) for answer in answers]
    assert kinds == [Granted, Waiting, Misuse, Kept, Released, Released, Ended, Granted]
    assert step(authority.next_wakeups(RUNTIME.now() + SOON)) != []


def load(path: Path, writer: int) -> None:
    """In a child, until it is killed: four threads acquire, release every other lease, and report each grant."""
    Ledger.snapshot_changes = 50
    ledger = opened(path)

    def work(thread: int) -> None:
        for number in itertools.count():
            kept, released = (
                lease(f"{what}/{os.getpid()}/{thread}/{number}") for what in ("kept", "released")
            )
            token, other = token_of(ledger, kept), token_of(ledger, released)
            os.write(writer, f"{token} {kept.secret}\n{other} -\n".encode())
            assert step(ledger.release(released.secret)) == Released()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def killed(path: Path, enough: int) -> tuple[list[int], list[str]]:
    """Kill a loaded process after `enough` lines; the tokens and the leases that it was granted."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            load(path, writer)
        finally:
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader, "rb") as lines:
        said = [next(lines) for _ in range(enough)]
        os.kill(child, signal.SIGKILL)
        said += list(lines)  # what was acknowledged before the signal arrived
    os.waitpid(child, 0)
    grants = [line.decode().split() for line in said]
    return [int(token) for token, _ in grants], [secret for _, secret in grants if secret != "-"]


def test_twenty_kills_under_load(path: Path) -> None:
    """No token twice, and no acknowledged grant lost, whenever the process is killed."""
    tokens: list[int] = []
    held: list[str] = []
    for number in range(20):
        more, leases = killed(path, 20 + 3 * number)
        tokens += more
        held += leases
        again = opened(path)
        assert step(again.renew(held)) == [Kept(300.0)] * len(held)
        assert max(tokens) <= step(again.open()).last_token
        again.abandon()
    assert len(tokens) == len(set(tokens)) >= 970
    assert path.with_name("leases.db.snapshot").exists()


FILL = """
import os, sys
import fenced
folder = sys.argv[1]
url = 'ledger:///' + folder + '/leases.db'
client = fenced.Client(url, guarantee='best-effort')
first = client.acquire('first', ttl=300, wait=0)
ballast = os.open(folder + '/ballast', os.O_CREAT | os.O_WRONLY)
try:
    while True:
        os.write(ballast, bytes(4096))
except OSError:
    os.close(ballast)
tokens = []
try:
    for number in range(10000):
        tokens.append(client.acquire(f'name/{number}', ttl=300, wait=0).token)
    print('never full')
except fenced.Indeterminate as error:
    assert 'full' in str(error), error
os.unlink(folder + '/ballast')
try:
    client.acquire('after', wait=0)
    print('answered')
except fenced.Unavailable as error:
    assert 'restart' in str(error), error
client.close()
again = fenced.Client(url, guarantee='best-effort')
assert again.acquire('after', wait=0).token > max([first.token, *tokens])
print('ok')
"""


def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    result = mounted('mount -t tmpfs -o size=1m none "$3"; exec "$1" -c "$2" "$3"', FILL, tmp_path)
    assert (result.stdout, result.stderr) == ("ok\n", "")


IN_MEMORY = """
import sys
import fenced
url = 'ledger:///' + sys.argv[1] + '/leases.db'
for guarantee in ('strict', 'best-effort'):
    with fenced.Client(url, guarantee=guarantee) as client:
        try:
            print(client.acquire('a', wait=0).token)
        except fenced.Misconfigured as error:
            print(error)
"""


def test_a_ledger_in_memory_is_best_effort(tmp_path: Path) -> None:
    result = mounted('mount -t tmpfs none "$3"; exec "$1" -c "$2" "$3"', IN_MEMORY, tmp_path)
    says, token = result.stdout.splitlines()
    assert "kept in memory (tmpfs)" in says and "put it on a disk" in says and "best-effort" in says
    assert token == "1", result.stderr


def test_no_secret_is_written(path: Path, ledger: LedgerAuthority) -> None:
    ask = lease("a")
    token_of(ledger, ask)
    assert ledger._ledger is not None
    ledger._ledger.snapshot()
    step(ledger.release(ask.secret))
    for file in path.parent.iterdir():
        assert ask.secret.encode() not in file.read_bytes()


def test_the_collector_drops_a_client_in_a_thread_that_holds_a_lock(path: Path) -> None:
    """It may run at any allocation: here while the same thread opens a ledger, and while it writes a snapshot."""
    dropped, other = opened(path), opened(path)
    with module._opening:
        dropped.abandon()
    assert token_of(other, lease("a")) == 1
    ledger = other._ledger
    assert ledger is not None
    with ledger._snapshotting:
        other.abandon()
    opened(path).abandon()
    for closing in [thread for thread in threading.enumerate() if thread.name == "fenced-ledger-close"]:
        closing.join()
    assert not module._ledgers


def test_a_journal_whose_sync_failed_is_not_finished(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = opened(path)
    token_of(ledger, lease("a"))
    assert ledger._ledger is not None
    ledger._ledger._journal._broken = Unavailable("a sync failed")  # type: ignore[attr-defined]
    ledger.abandon()
    assert json.loads(path.read_bytes())["end"] is None
