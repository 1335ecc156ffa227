"""The authority kit, counting part: clients that count their attempts, and say which of them are settled.

An authority may forget those, and most do not care. Nothing else may depend on a client's word.
"""

from __future__ import annotations

from typing import Any

from fenced.testing.kit import AuthorityHarness, Checks, asking, ensure, granted
from fenced.values.contracts import Runtime
from fenced.values.model import TOKEN_MAX, Ask, Busy, Ended, Gone, Granted, Holder, Kept, Released, Waiting

check: Checks[AuthorityHarness] = Checks()
CHECKS = check


def _counted(runtime: Runtime, series: str, number: int, settled: int, name: str, **options: Any) -> Ask:
    """The attempt with this number of a client that counts. All of them name the same holder, which is public."""
    holder = Holder("0" * 32, "counts", "host", 1)
    return asking(runtime, name, **options)._replace(
        holder=holder, series=series, number=number, settled=settled
    )


@check()
async def what_keeps_a_name_taken_outlives_settled(h: AuthorityHarness) -> None:
    """A client calls an attempt settled: its `keep`, or its `lock_delay` after an expiry, keeps the name taken."""
    a, series = await h.authority(), h.runtime.secret()
    kept = _counted(h.runtime, series, 1, 0, "kept")
    lost = _counted(h.runtime, series, 2, 0, "lost", ttl=0.2, lock_delay=30.0)
    await granted(a, kept)
    await granted(a, lost)
    ensure(await a.release(kept.secret, keep=60.0) == Released(), "released, and its name stays taken")
    await h.pass_time(0.3)
    for number in (3, 4):
        other = _counted(h.runtime, series, number, number - 1, f"another/{number}")
        await granted(a, other)
        ensure(await a.release(other.secret) == Released(), "released")
        for name in ("kept", "lost"):
            answer = await a.ask(asking(h.runtime, name))
            ensure(isinstance(answer, Busy), f"{name} is still taken, not {answer}")
    await h.pass_time(61.0)
    for name in ("kept", "lost"):
        await granted(a, asking(h.runtime, name))
    await granted(a, _counted(h.runtime, series, 5, 4, "another/5"))


@check()
async def settled_binds_nobody_else(h: AuthorityHarness) -> None:
    """Holders are public. Whoever names another client's, and calls its attempts settled, changes nothing for it."""
    a, series = await h.authority(), h.runtime.secret()
    held = _counted(h.runtime, series, 1, 0, "held")
    await granted(a, held)
    stranger = _counted(h.runtime, h.runtime.secret(), TOKEN_MAX - 1, TOKEN_MAX - 2, "strange")
    await granted(a, stranger)
    await granted(a, stranger._replace(secret=h.runtime.secret(), names=("strange/2",), series=""))
    ensure(await a.renew([held.secret]) == [Kept(10.0)], "its lease is renewed")
    for number in (2, 3):
        await granted(a, _counted(h.runtime, series, number, 0, f"held/{number}"))


@check()
async def a_late_copy_of_a_settled_attempt_is_harmless(h: AuthorityHarness) -> None:
    """Copies of its ask, renewal, release and withdrawal arrive when it is settled; names are swept much later."""
    a, series = await h.authority(), h.runtime.secret()
    over = _counted(h.runtime, series, 1, 0, "orders")
    await granted(a, over)
    ensure(await a.release(over.secret) == Released(), "released")
    await granted(a, _counted(h.runtime, series, 2, 1, "another"))
    answer = await a.ask(over)
    ensure(isinstance(answer, Ended), f"a late copy of its ask is not granted: {answer}")
    (renewed,) = await a.renew([over.secret])
    ensure(isinstance(renewed, Ended | Gone), f"nor renewed: {renewed}")
    for _ in range(2):
        ensure(
            isinstance(await a.withdraw(over.secret), Released | Ended | Gone), "it is withdrawn, or unknown"
        )
        ensure(isinstance(await a.release(over.secret), Released | Ended | Gone), "or released")
    held = asking(h.runtime, "orders", ttl=3600.0)
    await granted(a, held)
    await h.pass_time(601.0)
    for number in range(66):  # more than the grants between two sweeps
        once = asking(h.runtime, f"once/{number % 3}")
        await granted(a, once)
        ensure(await a.release(once.secret) == Released(), "released")
    waiter = asking(h.runtime, "orders", wait=True)
    ensure(isinstance(await a.ask(waiter), Waiting), "the name is held: it waits")
    ensure(await a.withdraw(waiter.secret) == Released(), "and leaves")
    await h.restart()
    a = await h.authority()
    ensure(isinstance(await a.ask(asking(h.runtime, "orders")), Busy), "the name is still held")
    ensure(await a.release(held.secret) == Released(), "released")
    await granted(a, asking(h.runtime, "orders"))


@check()
async def what_was_settled_while_it_was_open_is_remembered(h: AuthorityHarness) -> None:
    """A client calls a lease settled that it holds for long. A copy of its release is answered as the first one."""
    a, series = await h.authority(), h.runtime.secret()
    long, waiter = (_counted(h.runtime, series, number, 0, "orders", wait=True) for number in (1, 2))
    await granted(a, long)
    ensure(isinstance(await a.ask(waiter), Waiting), "the name is held: it waits")
    for number in (3, 4):
        other = _counted(h.runtime, series, number, number - 1, f"another/{number}")
        await granted(a, other)
        ensure(await a.release(other.secret) == Released(), "released")
    for _ in range(2):
        ensure(await a.release(long.secret) == Released(), "released, and again")
        await granted(a, _counted(h.runtime, series, 5, 4, f"once/{h.runtime.secret()}"))
    await granted(a, waiter)


@check()
async def an_attempt_that_was_forgotten_may_come_again(h: AuthorityHarness) -> None:
    """A client uses the id of an attempt again that was forgotten by its age: under two numbers it is one attempt."""
    a, series = await h.authority(), h.runtime.secret()
    again = _counted(h.runtime, series, 1, 0, "orders")
    await granted(a, again)
    ensure(await a.release(again.secret) == Released(), "released")
    for number in (2, 3):
        await h.pass_time(400.0)
        await granted(a, _counted(h.runtime, series, number, 0, f"another/{number}"))
    await a.tidy()
    answer = await a.ask(again._replace(number=4))
    if isinstance(answer, Granted):
        ensure(await a.release(again.secret) == Released(), "released")
    for number in (5, 6):
        await granted(a, _counted(h.runtime, series, number, number - 1, f"more/{number}"))
    await granted(a, asking(h.runtime, "orders"))
