"""Client: what threads, blocks and errors do. The checks that both colours share are in the kit."""

import gc
import os
import sqlite3
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import fenced
from fenced import events
from fenced.leases.rowauthority import Kind
from fenced.metrics import Recorder
from fenced.runtime.blocking import step
from fenced.stores.sqlite.authority.store import Store


def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/leases.db"


def test_no_thread_hop_for_an_uncontended_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The statements of acquire and release run in the calling thread."""
    threads: dict[Kind, set[int]] = {}
    transact = Store.transact

    def watched(store: Store, work: Any, kind: Kind, deadline: Any = None) -> Any:
        threads.setdefault(kind, set()).add(threading.get_ident())
        return transact(store, work, kind, deadline)

    monkeypatch.setattr(Store, "transact", watched)
    with fenced.Client(url(tmp_path)) as client:
        for _ in range(3):
            client.acquire("a").release()
    assert threads == {Kind.MINTS: {threading.get_ident()}, Kind.ENDS: {threading.get_ident()}}


def test_holding(tmp_path: Path) -> None:
    with fenced.Client(url(tmp_path)) as client, fenced.Client(url(tmp_path)) as other:
        with client.hold("orders/42", ttl=timedelta(seconds=5)) as lease:
            assert lease.name == "orders/42"
            assert lease.ttl == 5
            assert lease.state == "held"
            assert lease.lost_reason is None
            with other.try_hold("orders/42") as refused:
                assert refused is None
            with pytest.raises(fenced.Misuse, match="not re-entrant"), client.hold("orders/42"):
                pass
        with other.try_hold("orders/42") as taken:
            assert taken is not None
            assert taken.token > lease.token
        assert repr(lease) == f"<Lease 'orders/42' token={lease.token} released>"
        held = client.hold("once")
        with held:
            pass
        with pytest.raises(fenced.Misuse, match="entered before"), held:
            pass

        @client.held("job")
        def job(lease: fenced.Lease, factor: int) -> int:
            return factor * (lease.name == "job")

        assert job(42) == 42


def test_the_end_of_the_block_raises_when_the_lease_did_not_last(tmp_path: Path) -> None:
    seen: list[object] = []
    with fenced.Client(url(tmp_path), on_event=seen.append) as client:
        with pytest.raises(fenced.LeaseLost) as caught, client.hold("a") as lease:
            step(client._authority.force_release("a", lease.token))
        assert caught.value.reason == "revoked"
        with pytest.raises(ZeroDivisionError), client.hold("a") as lease:
            step(client._authority.force_release("a", lease.token))
            1 / 0  # noqa: B018
    assert [type(event) for event in seen].count(events.LeaseEnded) == 2
    assert sum(isinstance(event, events.LeaseGranted) for event in seen) == 2


def test_a_release_that_cannot_be_told_is_an_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The section is over either way; the client goes on telling the authority."""
    monkeypatch.setattr("fenced.values.timing.CALL_SECONDS", 0.2)
    recorder, seen = Recorder(), list[object]()

    def hear(event: events.Event) -> None:
        recorder(event)
        seen.append(event)

    client = fenced.Client(url(tmp_path), on_event=hear)
    client.acquire("warm").release()
    blocker = sqlite3.connect(tmp_path / "leases.db", isolation_level=None)
    lease = client.acquire("a", ttl=30)
    with client.hold("b"):
        blocker.execute("BEGIN IMMEDIATE")
    with pytest.raises(fenced.Unavailable):
        lease.release()
    failed = [event for event in seen if isinstance(event, events.ReleaseFailed)]
    assert [event.names for event in failed] == [("b",), ("a",)]
    assert "\nfenced_held 0\n" in recorder.text(), (
        "neither is held any more, as far as the program is concerned"
    )
    monkeypatch.undo()
    blocker.execute("ROLLBACK")
    lease.release()  # repeating it is harmless
    blocker.close()
    client.acquire("a", "b", wait=30).release()
    client.close()


def open_files(name: str) -> list[str]:
    """The files of this name that this process has open."""
    links = (os.path.join("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd"))
    return [target for link in links if os.path.lexists(link) and name in (target := os.readlink(link))]


def test_a_client_that_is_dropped_keeps_nothing_open(tmp_path: Path) -> None:
    """Threads and connections end, with a warning; its lease is not released, and a lease in use keeps its client."""
    before = set(threading.enumerate())
    lease = fenced.Client(url(tmp_path)).acquire("a", ttl=30)
    started = set(threading.enumerate()) - before
    gc.collect()
    lease.check()
    assert started
    assert open_files("leases.db")
    lost: list[str] = []
    lease.on_lost(lost.append)
    with pytest.warns(ResourceWarning, match="unclosed Client"):  # noqa: PT031 - both are one step
        del lease
        gc.collect()
    for thread in started:
        thread.join(30)
        assert not thread.is_alive()
    assert lost == ["closed"]
    assert open_files("leases.db") == []
    with fenced.Client(url(tmp_path)) as other, pytest.raises(fenced.NotGranted):
        other.acquire("a", wait=0)  # nothing is released by a finalizer


def test_closing_wakes_waiters_and_ends_leases(tmp_path: Path) -> None:
    one, two = fenced.Client(url(tmp_path)), fenced.Client(url(tmp_path))
    lease = one.acquire("a")
    mine = two.acquire("b")
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            two.acquire("a")
        except fenced.FencedError as error:
            errors.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    while not step(one._authority.observe("a")).waiters:
        pass
    two.close()
    waiter.join(90)
    assert [type(error) for error in errors] == [fenced.Misuse]
    assert mine.lost_reason == "closed"
    with pytest.raises(fenced.Misuse, match="closed"):
        two.acquire("c")
    two.close()
    lease.release()
    one.close()


def test_a_keeper_that_dies_takes_its_leases_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody renews any more: every lease says so, instead of trusting on."""
    failed, raised = threading.Event(), threading.Event()

    def observe(event: events.Event) -> None:
        if isinstance(event, events.KeeperFailed):
            failed.set()

    monkeypatch.setattr(threading, "excepthook", lambda _: raised.set())
    client = fenced.Client(url(tmp_path), on_event=observe)
    lease = client.acquire("a", ttl=0.3)

    def broken(self: object, *args: object) -> None:
        raise RuntimeError("out of memory, say")

    monkeypatch.setattr(Store, "transact", broken)
    assert lease.wait_lost(60)
    assert lease.lost_reason == "keeper"
    assert failed.wait(60)  # the keeper says so after it has marked its leases, and then ends
    assert raised.wait(60)
    client.close()


def test_errors_in_callbacks_are_the_programs_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They go to sys.excepthook; no keeper dies of them, and no lease is left without one."""
    hooked: list[type[BaseException]] = []
    monkeypatch.setattr("sys.excepthook", lambda kind, error, trace: hooked.append(kind))

    def broken(event: object) -> None:
        raise ZeroDivisionError

    with fenced.Client(url(tmp_path), on_event=broken) as client:
        first, second = client.acquire("a", ttl=0.4), client.acquire("b", ttl=0.4)
        first.on_lost(broken)
        step(client._authority.force_release("a", first.token))
        assert first.wait_lost(5)
        third = client.acquire("c", ttl=0.4)
        assert not third.wait_lost(1.0)
        second.check()
        third.check()
    assert set(hooked) == {ZeroDivisionError}


def test_a_body_that_would_run_without_its_lease_is_refused(tmp_path: Path) -> None:
    guard = fenced.AsyncValues(f"sqlite:///{tmp_path}/values.db")
    with fenced.Client(url(tmp_path)) as client:
        with pytest.raises(fenced.Misuse, match="other kind of client"), client.hold("a", guards=[guard]):
            raise AssertionError("not reached")
        with client.try_hold("a") as free:
            assert free is not None

        def later(lease: fenced.Lease):  # type: ignore[no-untyped-def]
            yield lease

        async def later_still(lease: fenced.Lease) -> None: ...

        for function in (later, later_still):
            with pytest.raises(fenced.Misuse):
                client.held("a")(function)


def test_a_guard_that_cannot_announce_is_refused(tmp_path: Path) -> None:
    with fenced.Client(url(tmp_path)) as client:
        for wrong in ([object()], 5):
            with pytest.raises(fenced.Misuse, match="guards is a list of guards"):
                client.hold("a", guards=wrong)  # type: ignore[arg-type]


def test_a_failed_try_leaves_nothing_behind(tmp_path: Path) -> None:
    """A definite no needs no withdrawal: polling does not fill the database."""
    with fenced.Client(url(tmp_path)) as one, fenced.Client(url(tmp_path)) as two, one.hold("a"):
        for _ in range(20):
            with two.try_hold("a") as refused:
                assert refused is None
        with sqlite3.connect(tmp_path / "leases.db") as db:
            assert db.execute("SELECT count(*) FROM attempt").fetchone() == (1,)
        db.close()


def test_strict_refuses_a_store_with_doubts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Store.open

    def doubtful(self: Store, create: bool, patience: object):  # type: ignore[no-untyped-def]
        standing = opened(self, create)
        return type(standing)(standing.realm, standing.last_token, ("its disk is a rumour",))

    monkeypatch.setattr(Store, "open", doubtful)
    with pytest.raises(fenced.Misconfigured, match="rumour"):
        fenced.Client(url(tmp_path)).acquire("a")
    fenced.Client(url(tmp_path), guarantee="best-effort").acquire("a").release()
    with pytest.raises(fenced.Misuse):
        fenced.Client(url(tmp_path), guarantee="perfect")  # type: ignore[arg-type]


def test_coroutines_of_another_runtime_are_noticed() -> None:
    """A suspension under the blocking runtime is an error, also under -O."""
    import asyncio

    with pytest.raises(fenced.InvariantBroken):
        step(asyncio.sleep(0))


def test_named_values_behind_a_guard(tmp_path: Path) -> None:
    guard = fenced.Values(f"sqlite:///{tmp_path}/values.db")
    with fenced.Client(url(tmp_path)) as client, client.hold_all(["a", "b"], guards=[guard]) as lease:
        version = guard.write(lease, "a", b"1")
        with pytest.raises(fenced.Conflict):
            guard.write(lease, "a", b"2", expect=version + 1)
        guard.write_many(lease, {"a": b"3", "b": b"3"})
        assert guard.read(lease, "b").value == guard.peek("a", at_least=lease.token).value == b"3"
        guard.set_mode("require")
        with pytest.raises(fenced.Misuse):
            guard.write("not a fence", "a", b"4")  # type: ignore[arg-type]
    guard.close()
