"""The authority kit, operators' part: take a name by force, raise the floor, look at names, separate namespaces."""

from __future__ import annotations

from fenced.errors import Misuse
from fenced.testing.inputs import BAD_FLOORS
from fenced.testing.kit import AuthorityHarness, Checks, asking, ensure, granted, raises
from fenced.values.model import Busy, Ended, Gone, Kept, Waiting

check: Checks[AuthorityHarness] = Checks()
CHECKS = check


@check()
async def force_release_revokes(h: AuthorityHarness) -> None:
    """The holder gets `revoked`; the next grant is above the minted token; without a holder nothing happens."""
    a, b = await h.authority(), await h.authority()
    ask = asking(h.runtime, "orders")
    token = (await granted(a, ask)).token
    minted = await b.force_release("orders", token)
    ensure(minted is not None and minted > token, "a token above the holder's")
    ensure(await a.renew([ask.secret]) == [Ended("revoked")], "the holder gets `revoked`")
    ensure(await a.release(ask.secret) == Ended("revoked"), "its release changes nothing")
    ensure((await granted(b, asking(h.runtime, "orders"))).token > (minted or 0), "and the tokens go on")
    ensure(await b.force_release("nobody", token) is None, "a free name: None")


@check()
async def force_release_spares_a_holder_that_the_operator_has_not_seen(h: AuthorityHarness) -> None:
    """With the token of an earlier holder, or of a grant of another name, nobody is revoked and nothing is minted."""
    a, b = await h.authority(), await h.authority()
    old, new, other = asking(h.runtime, "orders"), asking(h.runtime, "orders"), asking(h.runtime, "other")
    seen = (await granted(a, old)).token
    await a.release(old.secret)
    token, elsewhere = (await granted(a, new)).token, (await granted(a, other)).token
    waiter = asking(h.runtime, "orders", wait=True)
    ensure(isinstance(await a.ask(waiter), Waiting), "somebody waits")
    for wrong in (seen, elsewhere, token + 1, 0):
        for client in (a, b):
            ensure(await client.force_release("orders", wrong) is None, f"{wrong} does not hold it: None")
    kept = await a.renew([new.secret, other.secret])
    ensure(all(isinstance(answer, Kept) for answer in kept), f"nobody lost anything: {kept}")
    ensure(isinstance(await b.ask(waiter), Waiting), "and nobody was let in")
    await a.release(new.secret)
    await granted(b, waiter)
    ensure(await b.force_release("orders", token) is None, "the waiter that came after it is spared, too")


@check()
async def raising_the_floor(h: AuthorityHarness) -> None:
    """Every later token is above it, including those of waiters queued before; lowering it does nothing."""
    a = await h.authority()
    holder, waiter = asking(h.runtime, "orders"), asking(h.runtime, "orders", wait=True)
    await granted(a, holder)
    await a.ask(waiter)
    ensure(await a.raise_floor(5_000_000) >= 5_000_000, "the floor that holds now")
    ensure(await a.raise_floor(10) >= 5_000_000, "never lowered")
    await a.release(holder.secret)
    ensure((await granted(a, waiter)).token > 5_000_000, "a waiter of before is granted above it")
    for bad in BAD_FLOORS:
        await raises(Misuse, a.raise_floor(bad))


@check()
async def surveying(h: AuthorityHarness) -> None:
    """What is held or waited for, in order and in pages, and nothing else."""
    a = await h.authority()
    for name in ("c", "a", "b"):
        await granted(a, asking(h.runtime, name))
    await a.ask(asking(h.runtime, "b", wait=True))
    gone = asking(h.runtime, "gone")
    await granted(a, gone)
    await a.release(gone.secret)
    await granted(a, asking(h.runtime, "lapsed", ttl=0.2))
    await h.pass_time(0.3)
    views = await a.survey()
    ensure([view.name for view in views] == ["a", "b", "c"], f"{[view.name for view in views]}")
    ensure([len(view.waiters) for view in views] == [0, 1, 0], "with its waiter")
    page = await a.survey(after="a", limit=1)
    ensure([view.name for view in page] == ["b"], "a page")
    free = await a.observe("gone")
    ensure(free.held_by is None and free.waiters == () and free.free_in == 0, "observing a free name")


@check()
async def namespaces_are_unrelated(h: AuthorityHarness) -> None:
    """Each namespace is a realm with its own tokens and names."""
    a, b = await h.authority(), await h.authority("other")
    ensure((await a.open()).realm != (await b.open()).realm, "a realm each")
    ensure(
        (await a.open()).realm == (await (await h.authority()).open()).realm, "the same realm for all clients"
    )
    ask = asking(h.runtime, "orders")
    await granted(a, ask)
    await granted(b, asking(h.runtime, "orders"))
    ensure(await b.release(ask.secret) in (Gone(), Ended("gone")), "no release across namespaces")
    ensure(isinstance(await a.ask(asking(h.runtime, "orders")), Busy), "still held")
