"""What a program is told without asking for it: names that are not filled, long waits, lost leases in the log."""

from __future__ import annotations

import functools
import logging
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fenced
from fenced import events
from fenced.core import acquiring
from fenced.core.acquiring import LeaseRequest
from fenced.core.callbacks import Reporter
from fenced.errors import Unavailable
from fenced.runtime import clocks
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.stores.memory.authority import MemoryAuthority, MemoryStore
from fenced.testing.kit import lease_engine


def test_a_forgotten_f_is_misuse() -> None:
    """All orders would share one lock."""
    with fenced.Client("memory:braces") as client:
        calls: list[Callable[[], Any]] = [
            lambda: client.acquire("orders/{id}"),
            lambda: client.hold("orders/{id}"),
            lambda: client.try_hold("orders/{"),
            lambda: client.hold_all(["a", "orders/{id}"]),
            lambda: client.held("orders/{}"),
        ]
        for call in calls:
            with pytest.raises(fenced.Misuse):
                call()
        with pytest.raises(fenced.Misuse, match="did you forget the f"):
            client.hold("orders/{id}")


def test_held_fills_its_name_from_the_arguments() -> None:
    client = fenced.Client("memory:filled")

    class Stock:
        @client.held("stock/{sku}")
        def sell(self, lease: fenced.Lease, sku: str, count: int = 1) -> tuple[object, str, int]:
            return self, lease.name, count

        @classmethod
        @client.held("stock/{sku}")
        def buy(cls, lease: fenced.Lease, sku: str) -> tuple[object, str]:
            return cls, lease.name

    @client.held("stock/{sku}/{size}", wait=0)
    def move(lease: fenced.Lease, sku: int, *, size: str = "xl") -> str:
        return lease.name

    @client.held("one")
    def one(lease: fenced.Lease) -> str:
        return lease.name

    stock = Stock()
    assert stock.sell("apple", count=3) == (stock, "stock/apple", 3)
    assert Stock.buy("pear") == (Stock, "stock/pear")
    assert (move(7), move(7, size="s"), one()) == ("stock/7/xl", "stock/7/s", "one")
    with pytest.raises(fenced.Misuse, match="slash"):
        stock.sell("a/b")
    with pytest.raises(TypeError):
        stock.sell()  # type: ignore[call-arg]
    with pytest.raises(fenced.Misuse, match="no such parameter"):
        client.held("stock/{typo}")(one.__wrapped__)  # type: ignore[attr-defined]
    with pytest.raises(fenced.Misuse, match="None"):
        move(None)  # type: ignore[arg-type]
    with pytest.raises(fenced.Misuse, match="braces"):
        stock.sell("{x}")
    with pytest.raises(fenced.Misuse, match="without a value"):
        client.held("stock/{count:05d}")(lambda lease, count: lease.name)("many")  # type: ignore[no-untyped-call]
    client.close()


def test_held_twice_and_below_another_decorator() -> None:
    """A decorator that adds arguments shows other parameters than the function that it wraps."""
    client = fenced.Client("memory:stacked")

    @client.held("from/{source}")
    @client.held("to/{target}")
    def move(
        target_lease: fenced.Lease, source_lease: fenced.Lease, source: str, target: str = "t0"
    ) -> list[str]:
        return [source_lease.name, target_lease.name]

    assert move("s1", "t1") == ["from/s1", "to/t1"]
    assert move("s1") == ["from/s1", "to/t0"]

    def logged(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        return call

    class Job:
        @client.held("job")
        @logged
        def run(self, lease: fenced.Lease) -> str:
            return lease.name

    assert Job().run() == "job"  # type: ignore[no-untyped-call]
    with pytest.raises(fenced.Misuse, match="no such parameter"):
        client.held("stock/{sku}")(logged(lambda lease, sku: lease.name))
    client.close()


async def test_async_held_fills_its_name() -> None:
    async with fenced.AsyncClient("memory:async-filled") as client:

        class Stock:
            @client.held("stock/{sku}")
            async def sell(self, lease: fenced.AsyncLease, sku: str) -> str:
                return lease.name

        assert await Stock().sell(sku="apple") == "stock/apple"


def test_a_wait_without_a_limit_is_told_after_a_minute(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while the holder renews, and nothing but the keeper's renewals reaches the waiter."""
    monkeypatch.setattr(acquiring, "LONG_WAIT", 0.3)
    runtime = BlockingRuntime()
    store = MemoryStore(clocks.now)
    holder = lease_engine(MemoryAuthority(store, runtime), runtime)
    held = step(holder.acquire(LeaseRequest(("orders/42",), 600.0)))
    seen: list[events.Event] = []
    told = threading.Event()

    def observe(event: events.Event) -> None:
        seen.append(event)
        if isinstance(event, events.StillWaiting):
            told.set()

    waits = lease_engine(MemoryAuthority(store, runtime), runtime, emit=observe)
    thread = threading.Thread(target=lambda: step(waits.acquire(LeaseRequest(("orders/42",), 600.0))))
    thread.start()
    while not step(MemoryAuthority(store, runtime).observe("orders/42")).waiters:
        threading.Event().wait(0.001)
    assert told.wait(60.0)
    (event,) = [each for each in seen if isinstance(each, events.StillWaiting)]
    assert event.names == ("orders/42",) and event.waited_seconds >= 0.3 and "held by engine" in event.why
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "without a limit" in caplog.text and "held by engine" in caplog.text
    step(holder.release(held))
    thread.join(60.0)
    for engine in (holder, waits):
        step(engine.close())


class Silent(MemoryAuthority):
    """Renews and releases nothing once `away`."""

    away = False

    async def renew(self, *args: Any, **options: Any) -> Any:
        if self.away:
            raise Unavailable("the store is gone")
        return await super().renew(*args, **options)

    async def release(self, *args: Any, **options: Any) -> Any:
        if self.away:
            raise Unavailable("the store is gone")
        return await super().release(*args, **options)


def test_a_lost_lease_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Jeopardy, a lost lease and a failed release: at WARNING, with names and tokens. A healthy program: nothing."""
    caplog.set_level(logging.DEBUG, logger="fenced")
    runtime = BlockingRuntime()
    authority = Silent(MemoryStore(clocks.now), runtime)
    engine = lease_engine(authority, runtime, patience=0.1)
    healthy = step(engine.acquire(LeaseRequest(("healthy",), 30.0)))
    step(engine.release(healthy))
    assert not caplog.records
    authority.away = True
    lost = step(engine.acquire(LeaseRequest(("lost",), 0.3)))
    kept = step(engine.acquire(LeaseRequest(("kept",), 30.0)))
    assert step(lost.wait_lost(runtime.now() + 60.0))
    step(engine.release_at_exit(kept, raised=False))
    said = [record.getMessage() for record in caplog.records]
    assert {record.levelname for record in caplog.records} == {"WARNING"}
    for part in (
        f"the lease of lost (token {lost.token}) cannot be renewed",
        f"the lease of lost (token {lost.token}) was lost: expired",
        f"the lease of kept (token {kept.token}) is not released yet",
    ):
        assert any(line.startswith(part) for line in said), said
    assert lost.secret not in caplog.text and kept.secret not in caplog.text
    authority.away = False
    step(engine.close())


LABEL = """
import fenced
with fenced.Client("memory:") as one, fenced.Client("memory:") as two, one.hold("a"):
    try:
        two.acquire("a", wait=0)
    except fenced.NotGranted as error:
        print(error)
"""


def test_the_default_label_names_the_program(tmp_path: Path) -> None:
    (tmp_path / "report.py").write_text(LABEL)
    for arguments, label in (
        (["report.py"], "report.py"),
        (["-m", "report"], "report"),
        (["-c", LABEL], "python"),
    ):
        ended = subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        assert f"held by {label} (pid " in ended.stdout, ended


def test_an_error_says_that_the_lease_was_lost_as_well() -> None:
    with fenced.Client("memory:lost-too") as client:
        with pytest.raises(RuntimeError) as raised, client.hold("a", ttl=30) as lease:
            lease._grant.lose("expired")
            raise RuntimeError("something else")
        assert raised.value.__notes__ == [f"the lease of a (token {lease.token}) was lost: expired"]


def test_one_outage_of_many_leases_is_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    runtime = BlockingRuntime()
    runtime.now = lambda: now[0]
    report = Reporter(None, runtime)
    for token in range(1, 101):
        report(events.LeaseEnded(("n",), token, "g", "expired"))
        report(events.LeaseGranted(("n",), token, "g", 0.0))
    report(events.KeeperFailed("another kind"))
    assert len(caplog.records) == 11
    now[0] = 61.0
    report(events.LeaseEnded(("n",), 101, "g", "expired"))
    assert caplog.records[-1].getMessage().endswith("(90 more like this before it)")
