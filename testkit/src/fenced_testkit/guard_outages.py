"""The outage kit for guards: what a guard behind a network must do when the network or the server fails.

A harness gives each check a real server that may be broken, and a proxy in front of it. An outcome is applied, refused
or unknown (Indeterminate); never is a stale write applied, and under rule `sequenced` no write is applied twice.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Protocol, TypeVar

from fenced.drills.relay import Fault, Proxy
from fenced.errors import AlreadyApplied, FencedError, Indeterminate, StaleToken, Unavailable
from fenced.testing.kit import NAME, Checks, by, ensure, is_at, raises
from fenced.values.contracts import NamedValues, Runtime
from fenced.values.decision import Rule
from fenced.values.model import Credential
from fenced_testkit.servers import Server

T = TypeVar("T")
CUTS = (Fault.CUT_BEFORE, Fault.CUT_AFTER, Fault.LOSE_REPLY)
TRIES = 20
"""How often an unknown write is repeated; each try may find the server still starting."""


class GuardOutageHarness(Protocol):
    """A server that may be broken, and guards that reach it through a proxy or directly."""

    runtime: Runtime
    server: Server
    proxy: Proxy
    word: bytes
    """Bytes that every request contains by which a guard writes."""

    async def guard(self, rule: Rule = "retry") -> NamedValues:
        """A guard that goes through the proxy, opened. Guards of one rule share their names."""

    async def direct(self, rule: Rule = "retry") -> NamedValues:
        """A guard on the same names that connects directly, opened."""

    async def close(self) -> None: ...


class GuardFailoverHarness(Protocol):
    """A group of servers of which one takes the place of another that fails."""

    runtime: Runtime

    async def guard(self) -> NamedValues:
        """A guard with the rule `sequenced`, opened. All guards of a harness share their names."""

    async def fail_over(self) -> None:
        """Kill the server that the guards use. Another one takes its place, now or later."""

    async def close(self) -> None: ...


check: Checks[GuardOutageHarness] = Checks()
CHECKS = check
failover_check: Checks[GuardFailoverHarness] = Checks()
FAILOVER_CHECKS = failover_check
FAILOVER_SECONDS = 120.0
OVERTAKEN = "overtaken"


async def _settled(guard: NamedValues, carried: Credential, name: str, value: bytes) -> None:
    """Repeat a write whose outcome is unknown, with the same stamp, until it is known."""
    for _ in range(TRIES):
        try:
            await guard.write(carried, name, value)
            return
        except AlreadyApplied:
            return
        except (Indeterminate, Unavailable):
            continue
    ensure(False, f"{name}: {TRIES} repetitions had no clear answer")


@check()
async def a_lost_reply_is_settled_by_the_same_stamp(h: GuardOutageHarness) -> None:
    """Cut before or after the server acts: the write is reported as done or as unknown, and happens once."""
    guard, onlooker = await h.guard("sequenced"), await h.direct("sequenced")
    version = await guard.write(by(5, 1), NAME, b"warm")
    for seq, fault in enumerate(CUTS, 2):
        value = fault.name.encode()
        trigger = h.proxy.on(h.word, fault)
        try:
            await guard.write(by(5, seq), NAME, value)
        except (Indeterminate, Unavailable):
            await _settled(guard, by(5, seq), NAME, value)
        ensure(trigger.fired, f"{fault.name} hit the write")
        found = await onlooker.peek(NAME)
        ensure(found.value == value and found.version == version + 1, f"{fault.name}: once, not {found}")
        version = found.version


@check()
async def a_stale_write_is_never_applied(h: GuardOutageHarness) -> None:
    """Whatever happens to the replies, an overtaken holder is refused or gets no answer."""
    guard, newer = await h.guard(), await h.direct()
    await guard.write(by(5), NAME, b"old")
    await newer.write(by(6), NAME, b"new")
    for seq, fault in enumerate(CUTS, 2):
        trigger = h.proxy.on(h.word, fault)
        await raises((StaleToken, Indeterminate, Unavailable), guard.write(by(5, seq), NAME, b"late"))
        trigger.disarm()
        await is_at(newer, NAME, b"new", 6)
        await raises(StaleToken, guard.write(by(5, seq), NAME, b"late"))


@check()
async def an_announcement_survives_a_lost_reply(h: GuardOutageHarness) -> None:
    """Announcing may be repeated: once it is reported, the older holder is refused."""
    guard, older = await h.guard(), await h.direct()
    await older.write(by(5), NAME, b"old")
    for token, fault in enumerate(CUTS, 6):
        trigger = h.proxy.on(h.word, fault)
        for _ in range(TRIES):
            try:
                await guard.announce(by(token, 0))
                break
            except (Indeterminate, Unavailable):
                continue
        ensure(trigger.fired, f"{fault.name} hit the announcement")
        await raises(StaleToken, older.write(by(token - 1, 9), NAME, b"late"))
        await is_at(older, NAME, b"old", token)


@check()
async def a_frozen_server(h: GuardOutageHarness) -> None:
    """No answer is an unknown outcome, not a refusal; afterwards the same stamp settles it, once."""
    guard = await h.guard("sequenced")
    version = await guard.write(by(5, 1), NAME, b"before")
    h.server.freeze()
    try:
        await raises((Indeterminate, Unavailable), guard.write(by(5, 2), NAME, b"meanwhile"))
    finally:
        h.server.thaw()
    await _settled(guard, by(5, 2), NAME, b"meanwhile")
    found = await guard.peek(NAME)
    ensure((found.value, found.version) == (b"meanwhile", version + 1), f"applied once: {found}")


@check()
async def a_killed_server(h: GuardOutageHarness) -> None:
    """What was acknowledged is there after the restart, marks included, and the guard goes on by itself."""
    guard = await h.guard()
    await guard.write(by(5), NAME, b"old")
    await guard.announce(by(6, 0))
    h.server.kill()
    await raises((Indeterminate, Unavailable), guard.write(by(6), NAME, b"nowhere"))
    h.server.start()
    await _settled(guard, by(6), NAME, b"new")
    await is_at(guard, NAME, b"new", 6)
    error: FencedError = await raises(StaleToken, guard.write(by(5, 2), NAME, b"late"))
    ensure(error.retry == "no", "a refusal is not to be repeated")


@failover_check()
async def a_successor_knows_every_mark(h: GuardFailoverHarness) -> None:
    """A holder that was overtaken before the failover or after it is refused; acknowledged writes happened once."""
    one, other = await h.guard(), await h.guard()
    with suppress(AlreadyApplied):
        await _answered(h, lambda: one.write(by(5, 1), NAME, b"first"))
    await _answered(h, lambda: other.announce(by(7, 0, OVERTAKEN)))
    await _answered(h, lambda: one.announce(by(8, 0, OVERTAKEN)))
    await h.fail_over()
    await raises(
        StaleToken, _answered(h, lambda: other.write(by(7, 1, OVERTAKEN), OVERTAKEN, b"overtaken before"))
    )
    with suppress(AlreadyApplied):
        await _answered(h, lambda: one.write(by(5, 2), NAME, b"second"))
    await _answered(h, lambda: other.announce(by(6, 0)))
    await raises(StaleToken, _answered(h, lambda: one.write(by(5, 3), NAME, b"overtaken after")))
    found = await _answered(h, lambda: other.read(by(6, 0), NAME))
    ensure((found.value, found.version) == (b"second", 2), f"each write was applied once: {found}")


async def _answered(h: GuardFailoverHarness, work: Callable[[], Awaitable[T]]) -> T:
    """Repeat the same operation until its outcome is known, as a program does under rule `sequenced`."""
    limit = h.runtime.now() + FAILOVER_SECONDS
    while True:
        try:
            return await work()
        except (Unavailable, Indeterminate):
            ensure(h.runtime.now() < limit, f"an answer within {FAILOVER_SECONDS:g} s")
            await h.runtime.wait(h.runtime.wakeup(), h.runtime.now() + 0.05)
