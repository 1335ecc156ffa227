"""An AsyncClient while its event loop is blocked, stopped, closed or forked: what needs no check of each store."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

import fenced
from fenced.core.renewing import Renewer
from fenced.events import Event, LoopBlocked
from fenced.runtime.pulse import LoopPulse
from tests.forking import said_by_child


def keepers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "fenced-keeper"]


def build_report(seconds: float) -> None:
    subprocess.run([sys.executable, "-c", f"import time; time.sleep({seconds})"], check=True)


async def blocked(client: fenced.AsyncClient, events: list[Event], seconds: float = 0.6) -> LoopBlocked:
    async with client.hold("report", ttl=0.9):
        build_report(seconds)
        await asyncio.sleep(0.05)
    found = [event for event in events if isinstance(event, LoopBlocked)]
    assert found
    return found[-1]


def test_the_line_of_the_program_is_named_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Not that of the library which waits; once a minute, however often it is blocked."""
    caplog.set_level(logging.WARNING, "fenced")

    async def story() -> None:
        events: list[Event] = []
        async with fenced.AsyncClient("memory:line", on_event=events.append) as client:
            for _ in range(2):
                block = await blocked(client, events)
                assert block.where.startswith("test_blocked_loop.py:") and block.where.endswith(
                    " build_report()"
                )
                assert block.seconds >= 0.1

    asyncio.run(story())
    (line,) = [record.getMessage() for record in caplog.records if "event loop" in record.getMessage()]
    assert "the event loop is blocked for " in line and "build_report()" in line


def test_an_installed_program_is_named_too() -> None:
    """It has no other code than packages, and these are better than nothing; the standard library is not."""
    source = "def work(make, seen):\n    seen.append(make().where())\n"
    compiled: dict[str, Any] = {}
    exec(compile(source, "/somewhere/site-packages/app/main.py", "exec"), compiled)
    loop, seen = asyncio.new_event_loop(), list[str]()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    loop.call_soon_threadsafe(compiled["work"], lambda: LoopPulse(loop), seen)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    assert seen == ["main.py:2 work()"]
    pulse = LoopPulse(loop)  # of this thread
    assert "test_blocked_loop.py" in pulse.where() and not pulse.over()
    loop.close()
    assert pulse.over()


def test_a_lease_that_is_lost_says_that_the_loop_was_blocked() -> None:
    async def story() -> None:
        async with fenced.AsyncClient("memory:noted") as client:
            lease = await client.acquire("a", ttl=0.9, max_hold=1.0)
            build_report(1.5)
            with pytest.raises(fenced.LeaseLost) as caught:
                lease.check()
            assert caught.value.reason == "max_hold"
            (note,) = [note for note in caught.value.__notes__ if "event loop" in note]
            assert note.startswith("the event loop was blocked for ") and note.endswith(" build_report()")

    asyncio.run(story())


STOPPED = """
import asyncio, sys, fenced

async def main():
    async with fenced.AsyncClient("memory:") as client:
        lease = await client.acquire("a", ttl=0.9)
        print("held", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        try:
            lease.check()
        except fenced.LeaseLost as error:
            print(error.reason, *error.__notes__, sep=";", flush=True)

asyncio.run(main())
"""


def test_a_process_that_stood_still_says_so() -> None:
    """It is not the event loop that is to blame."""
    with subprocess.Popen(
        [sys.executable, "-c", STOPPED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "held\n"
        process.send_signal(signal.SIGSTOP)
        time.sleep(2.0)  # more than the ttl
        process.stdin.write("\n")
        process.stdin.flush()
        process.send_signal(signal.SIGCONT)
        reason, *notes = process.stdout.readline().strip().split(";")
    assert reason == "expired"
    assert any(note.startswith("this process did not run for ") for note in notes)


def test_no_thread_before_the_first_lease_and_none_after_the_end() -> None:
    async def story() -> None:
        before = len(keepers())
        async with fenced.AsyncClient("memory:threads") as client, client.hold("a"):
            assert len(keepers()) == before + 1
        assert len(keepers()) == before

    asyncio.run(story())


def test_a_client_that_is_dropped_takes_its_thread_along(tmp_path: Path) -> None:
    async def story() -> None:
        before = len(keepers())
        client = fenced.AsyncClient(f"sqlite:///{tmp_path}/leases.db")
        lease = await client.acquire("a", ttl=0.6)
        await asyncio.sleep(0.4)  # renewed once
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            del lease, client
            gc.collect()
        assert any("unclosed AsyncClient" in str(each.message) for each in seen)
        limit = time.monotonic() + 30
        while len(keepers()) > before:
            assert time.monotonic() < limit, "the thread ends"
            await asyncio.sleep(0.01)

    asyncio.run(story())


def test_a_loop_that_has_ended_keeps_nothing() -> None:
    """`asyncio.run` is over, nobody acts under the lease, and the client still exists: somebody else gets the name."""
    client = fenced.AsyncClient("memory:ended")

    async def hold() -> fenced.AsyncLease:
        return await client.acquire("a", ttl=0.9)

    lease = asyncio.run(hold())
    with fenced.Client("memory:ended") as other:
        other.acquire("a", ttl=0.9, wait=30).release()
    assert lease.lost_reason == "abandoned"

    async def again() -> None:
        async with client.hold("a", ttl=0.9) as second:
            time.sleep(1.8)
            second.check()
        await client.close()

    asyncio.run(again())


def inherited(folder: Path) -> list[str]:
    """What a forked child has open below a folder."""

    def child() -> list[str]:
        targets = []
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                targets.append(os.readlink(f"/proc/self/fd/{name}"))
        return [each for each in targets if str(folder) in each]

    found: list[str] = said_by_child(child)
    return found


@pytest.mark.parametrize("told", [True, False], ids=["told", "planted: not told"])
def test_nothing_of_the_renewer_crosses_a_fork(
    told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An inherited connection to SQLite's file would take no real lock (record 0012)."""
    if not told:
        monkeypatch.setattr(Renewer, "before_fork", lambda renewer: None)

    async def story() -> None:
        async with fenced.AsyncClient(f"sqlite:///{tmp_path}/leases.db") as client:
            lease = await client.acquire("a", ttl=0.9)
            time.sleep(0.7)  # the renewer is open
            found = inherited(tmp_path)
            assert bool([path for path in found if path.endswith("leases.db")]) is not told
            time.sleep(1.5)
            lease.check()
            await lease.release()

    asyncio.run(story())


def test_the_renewer_refuses_another_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """At its address is another realm by now: no lease is renewed there."""

    async def story() -> None:
        async with fenced.AsyncClient("memory:realm") as client:
            lease = await client.acquire("a", ttl=0.9)
            monkeypatch.setattr(client._engine.renewer, "realm", "0" * 16)
            assert await lease.wait_lost(30)
            assert lease.lost_reason == "keeper"

    raised: queue.Queue[threading.ExceptHookArgs] = queue.Queue()
    monkeypatch.setattr(threading, "excepthook", raised.put)
    asyncio.run(story())
    assert "and was 0000000000000000" in str(raised.get(timeout=60).exc_value)
