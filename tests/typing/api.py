"""The public API as programs write it. Nothing here runs: `mypy --strict` reads it, as `make lint` does."""

from __future__ import annotations

import sqlite3
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Literal, assert_type

import aiosqlite
from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session

import fenced
import fenced.django
from fenced import errors, events, sql
from fenced.values.contracts import Versioned
from fenced.values.decision import Mark


def leases(client: fenced.Client, other: fenced.Values) -> None:
    with client.hold("orders/42", ttl=15, wait=timedelta(seconds=5), guards=[other]) as lease:
        assert_type(lease, fenced.Lease)
        assert_type(lease.name, str)
        assert_type(lease.names, tuple[str, ...])
        assert_type(lease.token, int)
        assert_type(lease.grant, str)
        assert_type(lease.ttl, float)
        assert_type(lease.state, fenced.State)
        assert_type(lease.lost_reason, str | None)
        assert_type(lease.remaining(), float)
        assert_type(lease.next_stamp(), fenced.Stamp)
        assert_type(lease.announcement(), fenced.Stamp)
        assert_type(lease.bare_stamp(), fenced.Stamp)
        assert_type(lease.wait_lost(timeout=0.5), bool)
        lease.check(need=timedelta(seconds=1))
        lease.on_lost(lambda reason: print(reason.upper()))

    with client.try_hold("orders/42") as maybe:
        assert_type(maybe, fenced.Lease | None)

    with client.hold_all(["orders/42", "stock/7"], max_hold=60, lock_delay=1) as several:
        assert_type(several, fenced.Lease)

    with fenced.Client("sqlite:///leases.db", namespace="shop", guarantee="best-effort") as own:
        taken = own.acquire("orders/42", "stock/7", ttl=30)
        assert_type(taken, fenced.Lease)
        taken.release()
        assert_type(own.url, str)


def observed(seen: list[str]) -> fenced.Client:
    def observe(event: events.Event) -> None:
        if isinstance(event, events.LeaseEnded):
            seen.append(event.reason)

    return fenced.Client("memory:", on_event=observe, label="worker 3")


def decorated(client: fenced.Client) -> None:
    @client.held("orders/42", ttl=15)
    def ship(lease: fenced.Lease, order: int, *, express: bool = False) -> str:
        return f"{lease.token} {order} {express}"

    assert_type(ship(42, express=True), str)
    ship("42")  # type: ignore[arg-type]
    ship()  # type: ignore[call-arg]


def decorated_method(client: fenced.Client) -> None:
    class Orders:
        @client.held("orders/{order}", ttl=15)
        def ship(self, lease: fenced.Lease, order: int, *, express: bool = False) -> str:
            return f"{lease.token} {order} {express}"

    assert_type(Orders().ship(42, express=True), str)
    Orders().ship("42")  # type: ignore[arg-type]
    Orders().ship()  # type: ignore[call-arg]


def guards(lease: fenced.Lease, stamp: fenced.Stamp) -> None:
    values = fenced.Values("sqlite:///values.db")
    values.announce(lease, "orders/42")
    assert_type(values.read(lease, "orders/42"), Versioned)
    assert_type(values.peek("orders/42", at_least=7), Versioned)
    assert_type(values.write(stamp, "orders/42", b"shipped", expect=3), int)
    values.write_many(lease, {"orders/42": b"shipped", "stock/7": b"0"})
    values.write("orders/42", "orders/42", b"shipped")  # type: ignore[arg-type]
    values.set_mode("enforce", "orders/*")
    values.close()


def sql_guards(connection: sqlite3.Connection, lease: fenced.Lease) -> None:
    orders = sql.Guard(table="orders", name="orders/{id}")
    orders.install(connection, mode="enforce")
    assert_type(orders.script(connection), str)
    with orders.transaction(connection, lease) as tx:
        assert_type(tx, sqlite3.Connection)
    with orders.announce_within(connection, lease, "orders/42") as within:
        assert_type(within, sqlite3.Connection)
    orders.announce(connection, lease)
    assert_type(orders.name_for(id=42), str)
    assert_type(orders.peek(connection, "orders/42"), Mark | None)
    clause = orders.clause(connection, lease)
    done = connection.execute(f"UPDATE orders SET qty = 1, {clause.assign} WHERE id = 42 AND {clause.where}")
    assert_type(clause.admitted(done.rowcount, "id = ?", (42,)), bool)
    sql.Guard(table="orders", name="orders", rule="sometimes")  # type: ignore[arg-type]


def frameworks(session: Session, connection: Connection, lease: fenced.Lease) -> None:
    orders = sql.Guard(table="orders", name="orders/{id}")
    with orders.transaction(session, lease) as tx:
        assert_type(tx, Session)
    with orders.transaction(connection, lease, "orders/42", still_held=True) as within:
        assert_type(within, Connection)
    with orders.announce_within(session, lease) as announced:
        assert_type(announced, Session)
    with fenced.django.atomic(orders, lease, "orders/42", using="shop", still_held=True) as nothing:
        assert_type(nothing, None)

    @fenced.django.atomic(orders, lease)
    def ship(order: int) -> str:
        return str(order)

    assert_type(ship(42), str)
    fenced.django.InstallGuard(table="orders", name="orders/{id}", mode="observe", rule="once", epoch="epoch")


async def async_frameworks(
    session: AsyncSession, connection: AsyncConnection, lease: fenced.AsyncLease
) -> None:
    orders = sql.AsyncGuard(table="orders", name="orders/{id}")
    async with orders.transaction(session, lease) as tx:
        assert_type(tx, AsyncSession)
    async with orders.transaction(connection, lease) as within:
        assert_type(within, AsyncConnection)


def failures(client: fenced.Client) -> None:
    try:
        client.acquire("orders/42", wait=0)
    except fenced.NotGranted as error:
        assert_type(error.ahead, int)
        assert_type(error.held_by.token if error.held_by else None, int | None)
    except fenced.LeaseLost as error:
        assert_type(error.reason, str)
    except fenced.StaleToken as error:
        assert_type(error.mark, int | None)
        assert_type(error.stamp, fenced.Stamp | None)
    except fenced.FencedError as error:
        assert_type(error.retry, Literal["no", "same-attempt", "later", "transaction"])
    assert_type(sql.refusal(ValueError()), errors.Refused | errors.AlreadyApplied | None)
    assert_type(fenced.Stamp.parse("1:..."), fenced.Stamp)


async def async_leases(client: fenced.AsyncClient, other: fenced.AsyncValues) -> None:
    async with client.hold("orders/42", ttl=15, wait=5, guards=[other]) as lease:
        assert_type(lease, fenced.AsyncLease)
        assert_type(lease.token, int)
        assert_type(await lease.wait_lost(timeout=0.5), bool)
        lease.check()

    async with client.try_hold("orders/42") as maybe:
        assert_type(maybe, fenced.AsyncLease | None)

    async with client.hold_all(["orders/42", "stock/7"]) as several:
        assert_type(several, fenced.AsyncLease)

    async with fenced.AsyncClient("sqlite:///leases.db") as own:
        taken = await own.acquire("orders/42", ttl=30)
        assert_type(taken, fenced.AsyncLease)
        await taken.release()


async def async_decorated(client: fenced.AsyncClient) -> None:
    @client.held("orders/42", ttl=15)
    async def ship(lease: fenced.AsyncLease, order: int, *, express: bool = False) -> str:
        return f"{lease.token} {order} {express}"

    plain: Callable[..., Awaitable[str]] = ship
    assert_type(await ship(42, express=True), str)
    assert_type(await plain(42), str)
    await ship("42")  # type: ignore[arg-type]


async def async_guards(connection: aiosqlite.Connection, lease: fenced.AsyncLease) -> None:
    values = fenced.AsyncValues("sqlite:///values.db")
    await values.announce(lease)
    assert_type(await values.read(lease, "orders/42"), Versioned)
    assert_type(await values.write(lease, "orders/42", b"shipped"), int)
    await values.close()

    orders = sql.AsyncGuard(table="orders", name="orders/{id}")
    await orders.install(connection, mode="enforce")
    async with orders.transaction(connection, lease) as tx:
        assert_type(tx, aiosqlite.Connection)
    await orders.announce(connection, lease)
    assert_type(await orders.peek(connection, "orders/42"), Mark | None)
    clause = orders.clause(connection, lease)
    assert_type(await clause.admitted(1, "id = ?", (42,)), bool)
