"""The loop kit: what an AsyncClient must do at an address while the program blocks its event loop.

Its checks are coroutine functions over an `Address`. Run each of them in an event loop of its own.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fenced.client import registry
from fenced.client.faces import AsyncClient, Client
from fenced.core.holding import State
from fenced.errors import LeaseLost
from fenced.events import Event, LeaseEnded, LoopBlocked
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.testing.kit import Checks, ensure, raises
from fenced.values.contracts import Authority

T = TypeVar("T")


@dataclass
class Address:
    """Where an authority is, and the shortest ttl that it grants, or that a busy machine can keep."""

    url: str
    ttl: float
    prefix: str = "loops"
    """The checks use names below this one."""
    client_type: type[AsyncClient] = AsyncClient
    called_in: set[int] = field(default_factory=set)
    """The threads in which callbacks ran."""

    def client(self, events: list[Event]) -> AsyncClient:
        def on_event(event: Event) -> None:
            self.called_in.add(threading.get_ident())
            events.append(event)

        # Long, because a busy machine may answer slowly.
        return self.client_type(
            self.url, guarantee="best-effort", label="under test", patience=5.0, on_event=on_event
        )

    def other(self) -> Client:
        return Client(self.url, guarantee="best-effort", patience=5.0)

    def look(self, work: Callable[[Authority], Coroutine[Any, Any, T]]) -> T:
        """What `work` finds with an authority of its own, which blocks."""
        authority = registry.authority(self.url, BlockingRuntime())
        try:
            step(authority.open())
            return step(work(authority))
        finally:
            step(authority.close())

    def waiters(self, name: str) -> int:
        return len(self.look(lambda authority: authority.observe(name)).waiters)

    async def close(self) -> None:
        return


def block_the_loop(seconds: float) -> None:
    time.sleep(seconds)


check: Checks[Address] = Checks()
CHECKS = check


@check()
async def a_blocked_loop_keeps_leases_and_places(h: Address) -> None:
    """A body that blocks the event loop for twice its ttl keeps its lease, and its waiters their places in queues."""
    held, waited = f"{h.prefix}/held", f"{h.prefix}/waited"
    events: list[Event] = []
    with h.other() as other:
        taken = other.acquire(waited, ttl=h.ttl)
        async with h.client(events) as client:
            lease = await client.acquire(held, ttl=h.ttl)
            waiter = asyncio.create_task(client.acquire(waited, ttl=h.ttl))
            seen = 0
            while seen < 10:  # once the authority has it queued, the client gets to know of it meanwhile
                await asyncio.sleep(0.02)
                seen += await asyncio.to_thread(h.waiters, waited)
            block_the_loop(2 * lease.ttl)
            ensure(lease.state is not State.LOST, f"still held, not lost: {lease.lost_reason}")
            ensure(h.waiters(waited) == 1, "the waiter has its place")
            await asyncio.sleep(0)
            await asyncio.sleep(0.05)
            blocks = [event for event in events if isinstance(event, LoopBlocked)]
            ensure(blocks and blocks[-1].where, f"the line that blocks is named: {blocks}")
            lease.check()
            await asyncio.to_thread(taken.release)
            await (await waiter).release()
            await lease.release()
    ensure(h.called_in == {threading.get_ident()}, "callbacks run in the thread of the event loop")


@check()
async def callbacks_run_in_the_event_loop(h: Address) -> None:
    """`on_lost` and `on_event` are called in the event loop, whichever thread finds out that the lease is lost."""
    name, events = f"{h.prefix}/callbacks", list[Event]()
    lost_in: list[int] = []
    async with h.client(events) as client:
        lease = await client.acquire(name, ttl=h.ttl)
        lease.on_lost(lambda _: lost_in.append(threading.get_ident()))
        await asyncio.to_thread(h.look, lambda authority: authority.force_release(name, lease.token))
        ensure(await lease.wait_lost(60.0), "a renewal finds out")
        limit = time.monotonic() + 60
        while not (lost_in and any(isinstance(event, LeaseEnded) for event in events)):
            ensure(time.monotonic() < limit, "both callbacks are called")
            await asyncio.sleep(0.01)
        await raises(LeaseLost, lease.release())
    ensure({*lost_in, *h.called_in} == {threading.get_ident()}, "in the thread of the event loop")


@check()
async def a_closed_client_renews_nothing(h: Address) -> None:
    """What a client held when it was closed expires, and somebody else gets it."""
    name, events = f"{h.prefix}/closed", list[Event]()
    client = h.client(events)
    lease = await client.acquire(name, ttl=h.ttl)
    await asyncio.sleep(lease.ttl / 2)  # renewed once
    await client.close()
    ensure(lease.lost_reason == "closed", f"lost: {lease.lost_reason}")
    with h.other() as other:
        next_one = await asyncio.to_thread(other.acquire, name, ttl=h.ttl, wait=10 * lease.ttl)
        ensure(next_one.token > lease.token, "a greater token")
        next_one.release()
