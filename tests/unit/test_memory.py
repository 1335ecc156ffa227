"""Addresses in memory: one address is one store for the clients of a process."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

import fenced
from fenced.runtime.blocking import step
from tests.forking import said_by_child


def test_clients_with_one_address_share_a_store() -> None:
    with fenced.Client("memory:shared") as first, fenced.Client("memory:shared") as second:
        lease = first.acquire("orders/42")
        with second.try_hold("orders/42") as busy:
            assert busy is None
        with ThreadPoolExecutor() as threads:
            waiter = threads.submit(second.acquire, "orders/42")
            while not step(first._authority.observe("orders/42")).waiters:
                assert not waiter.done()
            lease.release()
            assert waiter.result().token == lease.token + 1

        async def ask() -> None:
            async with fenced.AsyncClient("memory:shared") as third:
                with pytest.raises(fenced.NotGranted):
                    await third.acquire("orders/42", wait=0)

        asyncio.run(ask())


def test_another_name_or_namespace_is_another_store() -> None:
    with (
        fenced.Client("memory:one") as one,
        fenced.Client("memory:two") as two,
        fenced.Client("memory:one", namespace="other") as three,
    ):
        leases = [client.acquire("orders/42", wait=0) for client in (one, two, three)]
        assert len({lease.realm for lease in leases}) == 3
    with pytest.raises(fenced.Misuse):
        fenced.Client("memory:one?ttl=3")


def test_values_with_one_address_share_their_cells() -> None:
    with fenced.Client("memory:cells") as client, client.hold("config") as lease:
        fenced.Values("memory:cells").write(lease, "config", b"v1")
        assert fenced.Values("memory:cells").peek("config").value == b"v1"
        assert fenced.Values("memory:others").peek("config").value is None


def test_a_forked_child_starts_with_an_empty_store() -> None:
    with fenced.Client("memory:forked") as client:
        lease = client.acquire("orders/42")

        def child() -> bool:
            with (
                fenced.Client("memory:forked") as new,
                client.hold("orders/42", wait=0) as inherited,
                new.try_hold("orders/42") as busy,
            ):
                return busy is None and inherited.realm != lease.realm

        assert said_by_child(child) is True
        lease.check()
