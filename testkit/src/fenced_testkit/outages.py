"""The outage kit: what an authority behind a network must do when the network or the server fails.

A harness gives each check its own real server and a proxy in front of it. The checks are the same for every authority:
an answer is yes, no or unknown; an unknown ask is repeated and gets the same grant; nothing is granted twice; a holder
that is cut off stops believing in its lease in time.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import threading
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Protocol

from fenced.core.acquiring import LeaseEngine, LeaseRequest
from fenced.core.holding import State
from fenced.drills.relay import Fault, Proxy
from fenced.errors import FencedError, Indeterminate, LeaseLost, NotGranted, Unavailable
from fenced.testing.kit import Checks, asking, ensure, granted, lease_engine, raises, until
from fenced.values import timing
from fenced.values.contracts import Authority, Runtime
from fenced.values.model import (
    Ask,
    AskAnswer,
    Ended,
    Gone,
    Holder,
    Kept,
    NameView,
    Released,
    Unknown,
    Waiting,
    grant_id,
)
from fenced_testkit.servers import Server

CUTS = (Fault.CUT_BEFORE, Fault.CUT_AFTER, Fault.LOSE_REPLY)


class OutageHarness(Protocol):
    """A server that may be broken, and clients that reach it through a proxy or directly."""

    runtime: Runtime
    server: Server
    proxy: Proxy

    @property
    def words(self) -> Mapping[str, bytes]:
        """For `ask`, `renew` and `release`: bytes that only its request contains.

        Also for `withdraw`, if its request differs from a release.
        """

    async def authority(self) -> Authority:
        """A client that goes through the proxy, opened."""

    async def direct(self) -> Authority:
        """A client that connects directly, opened."""

    async def close(self) -> None: ...


check: Checks[OutageHarness] = Checks()
CHECKS = check


async def _warm(h: OutageHarness, authority: Authority) -> None:
    """Use each operation once, so that a fault hits an open connection and an ordinary request."""
    ask = asking(h.runtime, "warm")
    await granted(authority, ask)
    await authority.renew([ask.secret])
    await authority.release(ask.secret)


async def _holds(authority: Authority, ask: Ask, name: str = "orders") -> None:
    """Exactly this attempt holds the name."""
    views = [view for view in await authority.survey() if view.held_by is not None]
    ensure([view.name for view in views] == [name], f"one name is held: {views}")
    held_by = views[0].held_by
    ensure(held_by is not None and held_by.grant == grant_id(ask.secret), f"by this attempt: {held_by}")


@check()
async def a_cut_ask_is_one_grant(h: OutageHarness) -> None:
    """A cut or a lost reply on ask: the driver repeats the attempt, and there is one grant, under one token."""
    a, onlooker = await h.authority(), await h.direct()
    await _warm(h, a)
    for fault in CUTS:
        ask = asking(h.runtime, "orders")
        trigger = h.proxy.on(h.words["ask"], fault)
        token = (await granted(a, ask)).token
        trigger.wait()
        ensure((await granted(onlooker, ask)).token == token, f"{fault.name}: the same token for all who ask")
        await _holds(onlooker, ask)
        ensure(await a.release(ask.secret) == Released(), "and it is given back")


@check()
async def an_unknown_ask_stays_unknown_until_repeated(h: OutageHarness) -> None:
    """Every reply is lost: Indeterminate, never yes or no. The same attempt gets the grant that was made."""
    a, onlooker = await h.authority(), await h.direct()
    await _warm(h, a)
    ask = asking(h.runtime, "orders")
    trigger = h.proxy.on(h.words["ask"], Fault.LOSE_REPLY, times=2)
    await raises(Indeterminate, a.ask(ask))
    trigger.wait(times=2)
    await _holds(onlooker, ask)
    token = (await granted(a, ask)).token
    ensure((await granted(onlooker, ask)).token == token, "the same grant")


@check()
async def an_unknown_ask_can_be_withdrawn(h: OutageHarness) -> None:
    """An unknown attempt that is withdrawn leaves no grant behind."""
    a, b = await h.authority(), await h.direct()
    await _warm(h, a)
    ask = asking(h.runtime, "orders")
    h.proxy.on(h.words["ask"], Fault.LOSE_REPLY, times=2)
    await raises(Indeterminate, a.ask(ask))
    ensure(await a.withdraw(ask.secret) == Released(), "withdrawn")
    await granted(b, asking(h.runtime, "orders"))
    ensure(await a.ask(ask) == Ended("withdrawn"), "and it stays so")


@check()
async def a_late_ask_finds_its_tombstone(h: OutageHarness) -> None:
    """The request is still under way while its owner withdraws: when it arrives, nothing is granted."""
    a, b = await h.authority(), await h.direct()
    await _warm(h, a)
    ask = asking(h.runtime, "orders", wait=True)
    trigger = h.proxy.on(h.words["ask"], Fault.HOLD)
    answers: list[AskAnswer] = []

    async def late() -> None:
        answers.append(await a.ask(ask))

    task = h.runtime.spawn(late, "late-ask")
    await until(h.runtime, lambda: trigger.fired > 0, 60.0, "the request is on its way")
    ensure(await b.withdraw(ask.secret) == Released(), "withdrawn before it arrived")
    trigger.deliver()
    await until(h.runtime, lambda: bool(answers), 60.0, "the late request is answered")
    await task.join()
    ensure(answers == [Ended("withdrawn")], f"no ghost: {answers}")
    await granted(b, asking(h.runtime, "orders"))


@check()
async def a_cut_renewal_is_repeated(h: OutageHarness) -> None:
    """A cut or a lost reply on renew: a second request keeps the lease; it is never reported as ended."""
    a = await h.authority()
    await _warm(h, a)
    ask = asking(h.runtime, "orders")
    await granted(a, ask)
    for fault in CUTS:
        trigger = h.proxy.on(h.words["renew"], fault)
        (answer,) = await a.renew([ask.secret])
        trigger.wait()
        limit = h.runtime.now() + 20.0
        while isinstance(answer, Unknown) and h.runtime.now() < limit:
            # The first request may still be running.
            (answer,) = await a.renew([ask.secret])
        ensure(isinstance(answer, Kept), f"{fault.name}: kept, not {answer}")


@check()
async def a_silent_server_is_not_waited_for(h: OutageHarness) -> None:
    """No reply to a renewal, and the connection stays open: unknown within the call's own timeout."""
    a = await h.authority()
    await _warm(h, a)
    ask = asking(h.runtime, "orders")
    await granted(a, ask)
    for fault in (Fault.SWALLOW, Fault.SWALLOW_REPLY):
        h.proxy.on(h.words["renew"], fault)
        began = h.runtime.now()
        await raises(Indeterminate, a.renew([ask.secret], h.runtime.now() + 0.3))
        ensure(h.runtime.now() - began < 2.0, "it did not wait for ever")
        (answer,) = await a.renew([ask.secret])
        ensure(isinstance(answer, Kept), f"{fault.name}: the next one is kept, not {answer}")


@check()
async def a_late_reply_answers_nobody_else(h: OutageHarness) -> None:
    """The reply to a renewal arrives after its caller has given up: the next caller does not get it."""
    a = await h.authority()
    await _warm(h, a)
    ask = asking(h.runtime, "orders")
    await granted(a, ask)
    trigger = h.proxy.on(h.words["renew"], Fault.HOLD_REPLY)
    await raises(Indeterminate, a.renew([ask.secret], h.runtime.now() + 0.3))
    trigger.deliver()
    for _ in range(3):
        ensure(await a.renew([h.runtime.secret()]) == [Gone()], "its own answer")
    (answer,) = await a.renew([ask.secret])
    ensure(isinstance(answer, Kept), f"kept, not {answer}")


@check()
async def a_cut_release_is_repeated(h: OutageHarness) -> None:
    """A cut or a lost reply on release: released, and the name is free."""
    a, b = await h.authority(), await h.direct()
    await _warm(h, a)
    for fault in CUTS:
        ask = asking(h.runtime, "orders")
        await granted(a, ask)
        trigger = h.proxy.on(h.words["release"], fault)
        ensure(await a.release(ask.secret) == Released(), f"{fault.name}: released")
        trigger.wait()
        other = asking(h.runtime, "orders")
        await granted(b, other)
        await b.release(other.secret)


@check()
async def nobody_there_is_a_definite_no(h: OutageHarness) -> None:
    """Connections are refused: Unavailable at once, since nothing can have happened."""
    a, b = await h.authority(), await h.direct()
    await _warm(h, a)
    h.proxy.refuse()
    h.proxy.reset()
    await raises((Unavailable, Indeterminate), a.ask(asking(h.runtime, "orders")))  # its connection broke
    await raises(Unavailable, a.ask(asking(h.runtime, "orders")))  # and there is no other
    ensure(not await b.survey(), "nothing happened")
    h.proxy.heal()
    await granted(a, asking(h.runtime, "orders"))


@check()
async def a_later_no_does_not_undo_a_doubt(h: OutageHarness) -> None:
    """The reply is lost and the next try is refused: unknown, since the first may have been carried out."""
    a, onlooker = await h.authority(), await h.direct()
    await _warm(h, a)
    ask = asking(h.runtime, "orders")
    h.proxy.refuse()  # new connections only
    h.proxy.on(h.words["ask"], Fault.LOSE_REPLY)
    await raises(Indeterminate, a.ask(ask))
    await _holds(onlooker, ask)
    h.proxy.heal()
    ensure(await a.withdraw(ask.secret) == Released(), "it can be given back")


@check()
async def an_ask_that_has_written_is_not_answered_no(h: OutageHarness) -> None:
    """The connection ends with the reply to what an ask has written, and there is no other: not Unavailable."""
    a, b = await h.authority(), await h.direct()
    await _warm(h, a)
    await granted(b, asking(h.runtime, "held"))
    listening = [True]

    async def listen() -> None:  # as clients do while they ask: so that the end is noticed at once
        while listening:
            try:
                await a.next_wakeups(h.runtime.now() + 0.1)
            except FencedError:
                await h.runtime.wait(h.runtime.wakeup(), h.runtime.now() + 0.01)

    task = h.runtime.spawn(listen, "listens")
    try:
        for ask in (
            asking(h.runtime, "free", lock_delay=1.0),
            asking(h.runtime, "held", wait=True),
            asking(h.runtime, "held", "other", wait=True),
        ):
            h.proxy.refuse()  # new connections only
            trigger = h.proxy.on(ask.holder.label.encode(), Fault.CUT_AFTER_REPLY)
            with contextlib.suppress(Indeterminate):
                await _is_gone_if_unavailable(a.ask(ask), ask, b)
            trigger.wait()
            h.proxy.heal()
            ensure(await a.withdraw(ask.secret) == Released(), "it can be given back")
    finally:
        listening.clear()
        await task.join()


async def _is_gone_if_unavailable(answer: Awaitable[AskAnswer], ask: Ask, onlooker: Authority) -> None:
    try:
        await answer
    except Unavailable as error:
        views = [await onlooker.observe(name) for name in ask.names]
        ours = [view for view in views if ask.holder in _holders(view)]
        ensure(not ours, f"{error}, but it is there: {ours}")


def _holders(view: NameView) -> list[Holder]:
    """Those who hold a name, or wait for it."""
    return [each.holder for each in view.waiters] + ([view.held_by.holder] if view.held_by else [])


@check()
async def a_wake_up_lost_on_the_way_is_made_good(h: OutageHarness) -> None:
    """All connections of a waiter break while it waits: it is still granted soon after the release."""
    one, two = lease_engine(await h.direct(), h.runtime), lease_engine(await h.authority(), h.runtime)
    lease = await one.acquire(LeaseRequest.checked(["orders"], ttl=60))
    tokens: list[int] = []

    async def wait() -> None:
        tokens.append((await two.acquire(LeaseRequest.checked(["orders"], ttl=3, wait=60))).token)

    task = h.runtime.spawn(wait, "waiter")
    onlooker = await h.direct()
    limit = h.runtime.now() + 20.0
    while not (await onlooker.observe("orders")).waiters:
        ensure(h.runtime.now() < limit, "the waiter has a place")
        await h.runtime.wait(h.runtime.wakeup(), h.runtime.now() + 0.01)
    h.proxy.reset()
    await one.release(lease)
    await until(h.runtime, lambda: bool(tokens), 20.0, "the waiter is granted")
    await task.join()
    ensure(tokens[0] > lease.token, "under a greater token")
    await one.close()
    await two.close()


@check()
async def a_killed_server_keeps_what_it_said(h: OutageHarness) -> None:
    """SIGKILL and restart under a live holder: the lease continues, tokens rise, the queue is kept."""
    client = lease_engine(await h.direct(), h.runtime)
    tokens = []
    for _ in range(5):
        lease = await client.acquire(LeaseRequest.checked(["orders"], ttl=15))
        tokens.append(lease.token)
        if len(tokens) < 5:
            await client.release(lease)
    h.server.kill()
    before = lease.deadline
    h.server.start()
    await until(h.runtime, lambda: lease.deadline > before, 60.0, "the holder renews on the new server")
    other = await h.direct()
    waiting = await other.ask(asking(h.runtime, "orders", wait=True))
    ensure(isinstance(waiting, Waiting) and waiting.held_by is not None, f"still held: {waiting}")
    await client.release(lease)
    tokens.append((await granted(other, asking(h.runtime, "another"))).token)
    ensure(tokens == sorted(set(tokens)), f"strictly rising over the crash: {tokens}")
    await client.close()


@check()
async def a_frozen_server_frees_its_holders_in_time(h: OutageHarness) -> None:
    """SIGSTOP of the server for two ttls: the holder marks its lease lost before the ttl is over, for good."""
    ttl = 1.0
    client = lease_engine(await h.direct(), h.runtime)
    lease = await client.acquire(LeaseRequest.checked(["orders"], ttl=ttl))
    h.server.freeze()
    frozen = h.runtime.now()  # after it: until it stood still, the server answered renewals
    try:
        await until(h.runtime, lambda: lease.state is State.LOST, 30.0, "the holder knows")
        ensure(lease.deadline < frozen + ttl, "in time by its own clock")
        await h.runtime.wait(h.runtime.wakeup(), frozen + 2 * ttl)
    finally:
        h.server.thaw()
    other = lease_engine(await h.direct(), h.runtime)
    after = await other.acquire(LeaseRequest.checked(["orders"], ttl=5, wait=10))
    ensure(after.token > lease.token, "the next holder's token is greater")
    await raises(LeaseLost, client.release(lease))
    ensure(lease.state is State.LOST, "what was lost stays lost")
    await other.release(after)
    await other.close()
    await client.close()


# Releases and withdrawals that fail.

LONG = 60.0
"""A ttl longer than any check: a name that becomes free earlier was released and did not expire."""
SOON = 20.0


async def _waiters(h: OutageHarness, onlooker: Authority, name: str, count: int) -> None:
    """Wait until `count` waiters are in the queue."""
    limit = h.runtime.now() + SOON
    while len((await onlooker.observe(name)).waiters) < count:
        ensure(h.runtime.now() < limit, f"{count} wait for {name}")
        await h.runtime.wait(h.runtime.wakeup(), h.runtime.now() + 0.01)


@check()
async def a_failed_release_is_repeated(h: OutageHarness) -> None:
    """A release fails: it raises, the client keeps retrying, and the name is free long before its ttl is over.

    The client holds another lease of the same ttl meanwhile, and may ask for the name again at once.
    """
    client = lease_engine(await h.authority(), h.runtime)
    other = await client.acquire(LeaseRequest.checked(["other"], ttl=LONG))
    lease = await client.acquire(LeaseRequest.checked(["orders"], ttl=LONG))
    cut = h.proxy.on(h.words["release"], Fault.CUT_BEFORE, times=10_000)
    await raises((Indeterminate, Unavailable), client.release(lease))
    ensure(lease.state is State.RELEASED, "this program has released it")
    cut.disarm()
    again = await client.acquire(LeaseRequest.checked(["orders"], ttl=LONG, wait=SOON))
    ensure(again.token > lease.token, "a new grant")
    ensure(other.state is State.HELD, "the other lease goes on")
    await client.release(again)
    await client.close()


@check()
async def a_failed_withdrawal_is_repeated(h: OutageHarness) -> None:
    """The reply to an ask is lost and its withdrawal fails: the client retries, and the unknown grant is released."""
    client, second = lease_engine(await h.authority(), h.runtime), lease_engine(await h.direct(), h.runtime)
    other = await client.acquire(LeaseRequest.checked(["other"], ttl=LONG))
    cut = h.proxy.on(h.words.get("withdraw", h.words["release"]), Fault.CUT_BEFORE, times=10_000)
    lost = h.proxy.on(h.words["ask"], Fault.LOSE_REPLY, times=10_000)
    await raises(Indeterminate, client.acquire(LeaseRequest.checked(["orders"], ttl=LONG, wait=1)))
    lost.wait()
    lost.disarm()
    cut.disarm()
    await second.acquire(LeaseRequest.checked(["orders"], ttl=LONG, wait=SOON))
    ensure(other.state is State.HELD, "the other lease goes on")
    await second.close()
    await client.close()


@check()
async def a_late_copy_of_a_refused_ask_is_granted_to_nobody(h: OutageHarness) -> None:
    """An ask is cut off and its repetition is refused: the first copy, which arrives later, is no ghost's lease."""
    client, holder = lease_engine(await h.authority(), h.runtime), lease_engine(await h.direct(), h.runtime)
    await client.release(await client.acquire(LeaseRequest.checked(["warm"], ttl=LONG)))
    held = await holder.acquire(LeaseRequest.checked(["orders"], ttl=LONG))
    late = h.proxy.on(h.words["ask"], Fault.CUT_AND_HOLD)
    await raises(NotGranted, client.acquire(LeaseRequest.checked(["orders"], ttl=LONG, wait=0)))
    await holder.release(held)
    if late.left:
        # An authority that refuses after reading alone: the ask has sent nothing that could be granted.
        late.disarm()
    else:
        late.deliver()
        await until(h.runtime, lambda: late.fired > 0, SOON, "the late copy is answered")
    again = await holder.acquire(LeaseRequest.checked(["orders"], ttl=LONG, wait=SOON))
    ensure(again.token > held.token, "the name is free")
    for each in (client, holder):
        await each.close()


@check()
async def a_waiter_that_gives_up_while_cut_off_blocks_nobody(h: OutageHarness) -> None:
    """A waiter gives up and its withdrawal fails: the next waiter is granted soon nevertheless.

    The client that is cut off has another waiter, and keeps that one's place alive.
    """
    holder = lease_engine(await h.direct(), h.runtime)
    first, second = lease_engine(await h.authority(), h.runtime), lease_engine(await h.direct(), h.runtime)
    onlooker = await h.direct()
    held = await holder.acquire(LeaseRequest.checked(["orders"], ttl=LONG))
    await holder.acquire(LeaseRequest.checked(["more"], ttl=LONG))
    said: list[object] = []

    async def wait(client: LeaseEngine, name: str, seconds: float) -> None:
        try:
            said.append((await client.acquire(LeaseRequest.checked([name], ttl=LONG, wait=seconds))).token)
        except NotGranted:
            said.append("not granted")
        except FencedError as error:  # the client is closed in the end
            said.append(error)

    tasks = [h.runtime.spawn(lambda: wait(first, "more", 3 * SOON), "lasting")]
    await _waiters(h, onlooker, "more", 1)
    tasks.append(h.runtime.spawn(lambda: wait(first, "orders", 2.0), "first"))
    await _waiters(h, onlooker, "orders", 1)
    tasks.append(h.runtime.spawn(lambda: wait(second, "orders", 2 * SOON), "second"))
    await _waiters(h, onlooker, "orders", 2)
    cut = h.proxy.on(h.words.get("withdraw", h.words["release"]), Fault.CUT_BEFORE, times=10_000)
    await until(h.runtime, lambda: "not granted" in said, SOON, "the first gives up")
    await holder.release(held)
    cut.disarm()
    await until(h.runtime, lambda: len(said) == 2, SOON, f"the second is granted: {said}")
    ensure(isinstance(said[1], int) and said[1] > held.token, f"under a greater token: {said}")
    for client in (first, second, holder):
        await client.close()
    for task in tasks:
        await task.join()


@check()
async def a_dead_waiter_keeps_its_place_for_ten_seconds(h: OutageHarness) -> None:
    """A place expires min(ttl, 10 s) after its last renewal, however long the ttl; then the next waiter is granted.

    With the trait `places` it expires when a lease of its ttl would.
    """
    holder, second = lease_engine(await h.direct(), h.runtime), lease_engine(await h.direct(), h.runtime)
    held = await holder.acquire(LeaseRequest.checked(["orders"], ttl=LONG))
    dead = await h.authority()
    as_a_lease = any(trait.key == "places" for trait in dead.traits)
    ttl, limit = (5.0, 5.0 * 4 / 3) if as_a_lease else (LONG, timing.WAITER_TTL_MAX)
    waiting = await dead.ask(asking(h.runtime, "orders", ttl=ttl, wait=True))
    ensure(isinstance(waiting, Waiting), f"it waits: {waiting}")
    h.proxy.black_hole(drop=True)  # no renewal of it arrives any more
    cut_off = h.runtime.now()
    await holder.release(held)
    await second.acquire(LeaseRequest.checked(["orders"], ttl=LONG, wait=LONG))
    took = h.runtime.now() - cut_off
    ensure(took < limit + SOON, f"the second is granted after {took:.1f} s")
    for client in (second, holder):
        await client.close()


@check()
async def a_silent_server_keeps_nobody_past_its_wait(h: OutageHarness) -> None:
    """The server sends nothing, or single bytes: a call ends by its caller's deadline, and at once if cancelled."""
    client = lease_engine(await h.authority(), h.runtime, patience=timing.PATIENCE_SECONDS)
    await client.release(await client.acquire(LeaseRequest.checked(["orders"])))
    silences: list[Callable[[], None]] = [
        functools.partial(h.proxy.drip, 0.4),
        functools.partial(h.proxy.black_hole, drop=True),
    ]
    for silence in silences:
        silence()
        for wait in (0.0, 0.5):
            began = h.runtime.now()
            await raises(
                (Indeterminate, Unavailable), client.acquire(LeaseRequest.checked(["orders"], wait=wait))
            )
            took = h.runtime.now() - began - wait
            ensure(took < timing.CALL_SECONDS / 2, f"wait={wait:g} took {took:.2f} s more")
        if h.runtime.colour == "asyncio":
            began = h.runtime.now()
            await raises(
                TimeoutError, asyncio.wait_for(client.acquire(LeaseRequest.checked(["orders"])), 0.3)
            )
            took = h.runtime.now() - began - 0.3
            ensure(took < timing.CALL_SECONDS / 2, f"cancelling took {took:.2f} s")
    h.proxy.heal()
    h.proxy.reset()
    limit = h.runtime.now() + SOON
    while True:
        try:
            await client.acquire(LeaseRequest.checked(["orders"], wait=SOON))
            break
        except Unavailable:
            # The reset has also cut off a connection that was just being made: nothing happened.
            ensure(h.runtime.now() < limit, "the client finds the server again")
            await h.runtime.wait(h.runtime.wakeup(), h.runtime.now() + 0.05)
    await client.close()


@check()
async def every_call_ends_by_its_deadline(h: OutageHarness) -> None:
    """The server is silent, or sends a byte now and then, so that no single read takes long: every method, including
    those for operators, ends by its caller's deadline."""
    a = await h.authority()
    held = asking(h.runtime, "orders")
    grant = await granted(a, held)
    await a.renew([held.secret])
    calls: dict[str, Callable[[float], Awaitable[object]]] = {
        "open": lambda limit: a.open(until=limit),
        "ask": lambda limit: a.ask(asking(h.runtime, "another"), limit),
        "renew": lambda limit: a.renew([held.secret], limit),
        "release": lambda limit: a.release(held.secret, limit),
        "withdraw": lambda limit: a.withdraw(held.secret, limit),
        "survey": lambda limit: a.survey(until=limit),
        "observe": lambda limit: a.observe("orders", limit),
        "force_release": lambda limit: a.force_release("orders", grant.token, limit),
        "raise_floor": lambda limit: a.raise_floor(10, limit),
        "tidy": a.tidy,
    }
    faults = (functools.partial(h.proxy.black_hole, drop=True), functools.partial(h.proxy.drip, 0.5))
    for fault in faults:
        fault()
        for name, call in calls.items():
            limit = h.runtime.now() + 0.3
            with contextlib.suppress(Indeterminate, Unavailable):  # etcd's `tidy` has nothing to send
                await call(limit)
            late = h.runtime.now() - limit
            ensure(late < timing.CALL_SECONDS / 2, f"{name} ended {late:.1f} s late")
        h.proxy.heal()


@check()
async def abandoning_closes_connections_and_nothing_else(h: OutageHarness) -> None:
    """In any thread, also those on which somebody waits for a wake-up. What is held or waited for stays as it is."""
    other = await h.direct()
    await other.observe("orders")
    before = _connected()
    a = await h.authority()
    held, waits = asking(h.runtime, "orders", ttl=LONG), asking(h.runtime, "orders", ttl=LONG, wait=True)
    await granted(a, held)
    await a.renew([held.secret])
    ensure(isinstance(await a.ask(waits), Waiting), "it waits")

    async def next_wakeups() -> None:
        with contextlib.suppress(Unavailable):
            await a.next_wakeups(h.runtime.now() + LONG)

    await a.next_wakeups(h.runtime.now() + 0.05)  # from here on its connection is there
    listening = h.runtime.spawn(next_wakeups, "listening")
    await h.runtime.wait(h.runtime.wakeup(), h.runtime.now() + 0.05)
    ensure(bool(_connected() - before), "it is connected")
    for _ in range(2):
        leaving = threading.Thread(target=a.abandon)
        leaving.start()
        leaving.join()
    await until(h.runtime, lambda: _connected() <= before, SOON, "no connection is left")
    view = await other.observe("orders")
    ensure(view.held_by is not None and len(view.waiters) == 1, f"nothing was given back: {view}")
    await listening.join()


def _connected() -> set[str]:
    """The sockets of this process that are connected."""
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    connected = {f"socket:[{row[9]}]" for row in rows if row[3] != "0A"}  # all but those that listen
    mine = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # another thread has closed it
            mine.add(os.readlink(descriptor))
    return mine & connected
