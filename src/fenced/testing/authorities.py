"""The authority kit: what every authority must do, whatever its store."""

from __future__ import annotations

import itertools

from fenced.errors import Misconfigured, Misuse
from fenced.testing.inputs import BAD_NAMES, ODD_NAMES
from fenced.testing.kit import AuthorityHarness, Checks, asking, ensure, granted, raises
from fenced.values.contracts import Authority
from fenced.values.model import TOKEN_MAX, Ask, Busy, Ended, Gone, Granted, Kept, Released, Waiting, grant_id

check: Checks[AuthorityHarness] = Checks()
CHECKS = check


async def _token(harness: AuthorityHarness, authority: Authority, name: str = "orders") -> int:
    """Grant and release once; the token."""
    ask = asking(harness.runtime, name)
    token = (await granted(authority, ask)).token
    ensure(await authority.release(ask.secret) == Released(), "the holder releases")
    return token


# Granting.


@check()
async def one_holder_at_a_time(h: AuthorityHarness) -> None:
    """A held name is busy for everyone else, and the answer says who holds it; other names are unrelated."""
    one, two = await h.authority(), await h.authority()
    first = asking(h.runtime, "orders/42")
    grant = await granted(one, first)
    ensure(0 < grant.remaining <= 10 and grant.ttl == 10, f"remaining and ttl: {grant}")
    answer = await two.ask(asking(h.runtime, "orders/42"))
    ensure(isinstance(answer, Busy) and answer.held_by is not None, f"busy, not {answer}")
    assert isinstance(answer, Busy) and answer.held_by is not None
    ensure(answer.held_by.token == grant.token, "busy has the holder's token")
    ensure(answer.held_by.holder == first.holder, "busy names the holder")
    ensure(answer.held_by.grant == grant_id(first.secret), "busy has the public id, not the secret")
    for other in ("orders", "orders/4", "orders/42/1", "Orders/42"):
        await granted(two, asking(h.runtime, other))


@check()
async def tokens_rise_whatever_happens(h: AuthorityHarness) -> None:
    """Release, expiry, force-release, withdrawal, clean-up and another name: the token only goes up."""
    a = await h.authority()
    tokens = [await _token(h, a), await _token(h, a, "another")]
    expired = asking(h.runtime, "orders", ttl=0.2)
    tokens.append((await granted(a, expired)).token)
    await h.pass_time(0.3)
    forced = asking(h.runtime, "orders")
    tokens.append((await granted(a, forced)).token)
    minted = await a.force_release("orders", tokens[-1])
    ensure(minted is not None, "force-release mints a token")
    tokens.append(minted or 0)
    withdrawn = asking(h.runtime, "orders")
    tokens.append((await granted(a, withdrawn)).token)
    await a.withdraw(withdrawn.secret)
    await a.tidy()
    tokens.append(await _token(h, a))
    ensure(all(x < y for x, y in itertools.pairwise(tokens)), f"strictly rising: {tokens}")


@check()
async def a_waiters_token_is_ordered_as_declared(h: AuthorityHarness) -> None:
    """Above every token granted before it asked; with `namespace-order` also above those granted while it waited."""
    a = await h.authority()
    order = {trait.key for trait in a.traits} & {"namespace-order", "per-name-order"}
    ensure(len(order) == 1, f"one of the two traits is declared: {order}")
    before = await _token(h, a, "another")
    first, waiter = asking(h.runtime, "orders"), asking(h.runtime, "orders", wait=True)
    held = (await granted(a, first)).token
    ensure(isinstance(await a.ask(waiter), Waiting), "the name is held: it waits")
    meanwhile = await _token(h, a, "another")
    await a.release(first.secret)
    token = (await granted(a, waiter)).token
    ensure(
        token > max(before, held), f"{token} is above {before} and {held}, which were granted before it asked"
    )
    if "namespace-order" in order:
        ensure(
            token > meanwhile, f"{token} is minted at the grant: above {meanwhile}, granted while it waited"
        )


@check()
async def opening_again_disturbs_nothing(h: AuthorityHarness) -> None:
    """`open` may be repeated: the realm is the same, the last token covers every grant, leases and waiters stay."""
    a = await h.authority()
    first = await a.open()
    held, waiter = asking(h.runtime, "orders"), asking(h.runtime, "orders", wait=True)
    token = (await granted(a, held)).token
    ensure(isinstance(await a.ask(waiter), Waiting), "the name is held: it waits")
    for create in (True, False):
        standing = await a.open(create=create)
        ensure(standing.realm == first.realm, "the same realm")
        ensure(standing.schema == first.schema, "the same schema")
        ensure(standing.last_token >= token, f"{standing.last_token} covers the grant of {token}")
    ensure(await a.renew([held.secret]) == [Kept(10.0)], "the lease stays")
    await a.release(held.secret)
    ensure((await granted(a, waiter)).token > token, "the waiter kept its place")


@check()
async def tokens_rise_over_a_restart(h: AuthorityHarness) -> None:
    """Stopping and starting the store neither repeats a token nor frees a live lease."""
    a = await h.authority()
    before = await _token(h, a)
    held = asking(h.runtime, "held")
    token = (await granted(a, held)).token
    await h.restart()
    b = await h.authority()
    ensure(await b.renew([held.secret]) == [Kept(10.0)], "the lease outlives the restart")
    ensure(isinstance(await b.ask(asking(h.runtime, "held")), Busy), "and still excludes others")
    ensure(before < token < await _token(h, b), "the token rises over the restart")


@check()
async def tokens_rise_when_idle_names_are_forgotten(h: AuthorityHarness) -> None:
    """Deleting names that nobody has used for long changes no counter (counters per name would leak or restart)."""
    a = await h.authority()
    before = [await _token(h, a, f"once/{i}") for i in range(5)]
    await granted(a, asking(h.runtime, "crashed", ttl=0.2))
    await h.pass_time(3600)
    await a.tidy()
    ensure(not await a.survey(), "nothing is left of them")
    ensure(await _token(h, a, "once/0") > max(before), "the token goes on")


@check()
async def the_same_attempt_gets_the_same_grant(h: AuthorityHarness) -> None:
    """Repeating an ask whose reply was lost is not a second grant; with other arguments it is Misuse."""
    a, b = await h.authority(), await h.authority()
    ask = asking(h.runtime, "orders")
    first = await granted(a, ask)
    await h.pass_time(1.0)
    again = await granted(b, ask)
    ensure(again.token == first.token, "the same token")
    if all(trait.key != "own-memory" for trait in a.traits):
        # There, the client that answers has taken it over.
        ensure(again.remaining <= first.remaining - 1.0, "an ask renews nothing")
    other = Ask(ask.secret, ("another",), ask.ttl, ask.holder)
    await raises(Misuse, a.ask(other))
    await a.release(ask.secret)
    ensure(await a.ask(ask) == Ended("released"), "an attempt that is over is not granted again")


@check()
async def a_waiter_that_asks_for_something_else_keeps_its_place(h: AuthorityHarness) -> None:
    """The same attempt with other names is Misuse, and changes nothing: it waits as before."""
    a, b = await h.authority(), await h.authority()
    holder, waiter = asking(h.runtime, "orders"), asking(h.runtime, "orders", wait=True)
    await granted(a, holder)
    ensure(isinstance(await b.ask(waiter), Waiting), "it waits")
    await raises(Misuse, b.ask(waiter._replace(names=("more", "orders"))))
    (kept,) = await b.renew([waiter.secret])
    ensure(isinstance(kept, Waiting) and kept.check_in > 0, f"it still waits, and for the holder: {kept}")
    await a.release(holder.secret)
    await granted(b, waiter)


@check()
async def a_withdrawn_attempt_stays_withdrawn(h: AuthorityHarness) -> None:
    """An ask that arrives after its own withdrawal is not granted."""
    a = await h.authority()
    ask = asking(h.runtime, "orders", wait=True)
    ensure(await a.withdraw(ask.secret) == Released(), "withdrawn before it arrived")
    ensure(await a.ask(ask) == Ended("withdrawn"), "the delayed ask finds the tombstone")
    ensure(await a.withdraw(ask.secret) == Released(), "again is the same")
    taken = asking(h.runtime, "orders")
    await granted(a, taken)
    ensure(await a.withdraw(taken.secret) == Released(), "a granted attempt is given back")
    await granted(a, asking(h.runtime, "orders"))
    for wait in (True, False):
        late = asking(h.runtime, "orders", wait=wait)
        ensure(await a.withdraw(late.secret) == Released(), "withdrawn before it arrived")
        ensure(await a.ask(late) == Ended("withdrawn"), "also where the name is held")


@check()
async def the_token_space_ends_loudly(h: AuthorityHarness) -> None:
    """The last token is 2**53 - 1; after it the authority raises an error and does not wrap around."""
    a = await h.authority()
    await a.raise_floor(TOKEN_MAX - 1)
    ensure(await _token(h, a) == TOKEN_MAX, "the last token is exact")
    await raises(Misconfigured, a.ask(asking(h.runtime, "orders")))


# Renewing and releasing.


@check()
async def a_renewal_extends_and_never_revives(h: AuthorityHarness) -> None:
    """A renewal in time extends by the ttl; a late one is answered `Ended`, even if nobody else asked meanwhile."""
    a = await h.authority()
    ask = asking(h.runtime, "orders", ttl=2.0)
    await granted(a, ask)
    await h.pass_time(1.5)
    (kept,) = await a.renew([ask.secret])
    ensure(isinstance(kept, Kept) and 1.9 < kept.remaining <= 2.0, f"a full ttl again, not {kept}")
    await h.pass_time(1.5)
    ensure(isinstance(await a.ask(asking(h.runtime, "orders")), Busy), "held past the first ttl")
    await h.pass_time(1.0)
    ensure(await a.renew([ask.secret]) == [Ended("expired")], "late is late")
    ensure(await a.renew([ask.secret]) == [Ended("expired")], "and stays so")
    ensure(await a.ask(ask) == Ended("expired"), "its own ask revives nothing either")
    await granted(a, asking(h.runtime, "orders"))


@check()
async def a_lease_ends_by_its_own_ttl(h: AuthorityHarness) -> None:
    """A lease or a place that is renewed too late or never ends, although the client renews its other leases."""
    a, b = await h.authority(), await h.authority()
    mine = asking(h.runtime).holder

    def of_mine(name: str, *, wait: bool = False) -> Ask:
        return asking(h.runtime, name, ttl=10.0, wait=wait)._replace(holder=mine)

    blocks, behind = asking(h.runtime, "queue", ttl=60.0), asking(h.runtime, "queue", ttl=60.0, wait=True)
    await granted(b, blocks)
    await granted(b, asking(h.runtime, "another queue", ttl=60.0))
    kept, silent, late = (of_mine(name) for name in ("kept", "silent", "late"))
    for ask in (kept, silent, late):
        await granted(a, ask)
    gone, waits = of_mine("queue", wait=True), of_mine("another queue", wait=True)
    for authority, ask in ((a, gone), (a, waits), (b, behind)):
        ensure(isinstance(await authority.ask(ask), Waiting), "it waits")
    for _ in range(2):
        await h.pass_time(4.0)
        (still, waiting) = await a.renew([kept.secret, waits.secret])
        ensure(isinstance(still, Kept) and isinstance(waiting, Waiting), f"kept alive: {still}, {waiting}")
        await b.renew([behind.secret])
        ensure(isinstance(await b.ask(asking(h.runtime, "silent")), Busy), "its ttl is not over")
    await h.pass_time(4.0)
    answers = await a.renew([kept.secret, late.secret, waits.secret])
    ensure(isinstance(answers[0], Kept) and isinstance(answers[2], Waiting), f"kept alive: {answers}")
    ensure(answers[1] == Ended("expired"), f"a late renewal fails, although others are live: {answers[1]}")
    for name in ("silent", "late"):
        await granted(b, asking(h.runtime, name))
    ensure(await a.ask(silent) == Ended("expired"), "repeating its ask does not revive it")
    ensure(await b.release(blocks.secret) == Released(), "the queue moves on")
    await granted(b, behind)
    ensure(await a.ask(gone) == Ended("expired"), "the silent waiter was skipped")


@check()
async def a_late_renewal_does_not_touch_the_new_holder(h: AuthorityHarness) -> None:
    """The T=0 to T=12 story: expiry, a new holder, then the old renewal and the old release arrive."""
    a, b = await h.authority(), await h.authority()
    old = asking(h.runtime, "orders", ttl=1.0)
    first = await granted(a, old)
    await h.pass_time(1.0)
    new = asking(h.runtime, "orders", ttl=5.0)
    second = await granted(b, new)
    ensure(second.token > first.token, "the new token is greater")
    ensure(await a.renew([old.secret]) == [Ended("expired")], "the old renewal fails")
    ensure(await a.release(old.secret) == Ended("expired"), "so does the old release")
    ensure(await a.withdraw(old.secret) == Ended("expired"), "and the old withdrawal")
    (kept,) = await b.renew([new.secret])
    ensure(isinstance(kept, Kept), "the new holder is undisturbed")
    ensure(isinstance(await a.ask(asking(h.runtime, "orders")), Busy), "and the name is still its own")


@check()
async def only_the_secret_renews_and_releases(h: AuthorityHarness) -> None:
    """Neither the public id, nor another secret of the same holder, nor a renewal of nothing does anything."""
    a = await h.authority()
    ask = asking(h.runtime, "orders")
    await granted(a, ask)
    stranger = h.runtime.secret()
    for wrong in (stranger, grant_id(ask.secret)):
        ensure(await a.renew([wrong]) == [Gone()], "a renewal never creates")
        ensure(await a.release(wrong) == Gone(), "a foreign release changes nothing")
    ensure(isinstance(await a.ask(asking(h.runtime, "orders")), Busy), "still held")


@check()
async def a_release_may_be_repeated(h: AuthorityHarness) -> None:
    """The second release is answered `Released`, even if somebody else holds the name by then."""
    a = await h.authority()
    ask = asking(h.runtime, "orders")
    await granted(a, ask)
    ensure(await a.release(ask.secret) == Released(), "released")
    ensure(await a.release(ask.secret) == Released(), "released again")
    new = asking(h.runtime, "orders")
    await granted(a, new)
    ensure(await a.release(ask.secret) == Released(), "and again")
    ensure(await a.renew([ask.secret, new.secret]) == [Ended("released"), Kept(10.0)], "the new one is held")


@check()
async def a_batch_is_answered_one_by_one(h: AuthorityHarness) -> None:
    """One renewal call for many attempts: each gets the answer that it would get alone, in order."""
    a = await h.authority()
    live, expired, released, waiting = (
        asking(h.runtime, "live"),
        asking(h.runtime, "short", ttl=0.2),
        asking(h.runtime, "released"),
        asking(h.runtime, "live", wait=True),
    )
    for ask in (live, expired, released):
        await granted(a, ask)
    await a.release(released.secret)
    ensure(isinstance(await a.ask(waiting), Waiting), "queued")
    await h.pass_time(0.3)
    answers = await a.renew(
        [expired.secret, live.secret, h.runtime.secret(), released.secret, waiting.secret]
    )
    kinds = [type(answer) for answer in answers]
    ensure(kinds == [Ended, Kept, Gone, Ended, Waiting], f"in order: {answers}")
    ensure(await a.renew([]) == [], "an empty batch is answered emptily")


# Waiting.


@check()
async def first_come_first_served(h: AuthorityHarness) -> None:
    """Waiters are granted in the order they came; nobody overtakes, not even while the name is free."""
    a, b = await h.authority(), await h.authority()
    holder = asking(h.runtime, "orders")
    await granted(a, holder)
    waiters = [asking(h.runtime, "orders", wait=True) for _ in range(4)]
    for index, ask in enumerate(waiters):
        answer = await (a, b)[index % 2].ask(ask)
        ensure(isinstance(answer, Waiting) and answer.ahead == index, f"{index} ahead: {answer}")
        assert isinstance(answer, Waiting)
        ensure(answer.check_in > 0, "no need to look at once")
    await a.release(holder.secret)
    ensure(isinstance(await b.ask(asking(h.runtime, "orders")), Busy), "a newcomer does not overtake")
    ensure(isinstance(await b.ask(waiters[1]), Waiting), "nor does the second")
    tokens = []
    for ask in waiters:
        tokens.append((await granted(b, ask)).token)
        await b.release(ask.secret)
    ensure(tokens == sorted(tokens), f"tokens in the order of the grants: {tokens}")


@check()
async def a_release_wakes_the_head(h: AuthorityHarness) -> None:
    """The head of the queue is notified of the release, through its own connection."""
    a, b = await h.authority(), await h.authority()
    holder, head = asking(h.runtime, "orders"), asking(h.runtime, "orders", wait=True)
    await granted(a, holder)
    ensure(isinstance(await b.ask(head), Waiting), "queued")
    await a.release(holder.secret)
    woken: list[str] = []
    limit = h.runtime.now() + 5.0
    while grant_id(head.secret) not in woken:
        ensure(h.runtime.now() < limit, "the wake-up comes")
        woken += await b.next_wakeups(h.runtime.now() + 0.5)
    await granted(b, head)


@check()
async def a_client_that_listens_first_is_notified(h: AuthorityHarness) -> None:
    """The client listens before any attempt waits, as a service does: it receives the wake-up all the same."""
    a, b = await h.authority(), await h.authority()
    holder, head = asking(h.runtime, "orders"), asking(h.runtime, "orders", wait=True)
    woken: list[str] = []
    arrived = h.runtime.wakeup()

    async def listen() -> None:
        until = h.runtime.now() + 90.0
        while not woken and h.runtime.now() < until:
            woken.extend(await b.next_wakeups(until))
        arrived.set()

    listener = h.runtime.spawn(listen, "listener")
    await h.runtime.wait(h.runtime.wakeup(), h.runtime.now() + 0.05)  # it listens by now, or a little later
    await granted(a, holder)
    ensure(isinstance(await b.ask(head), Waiting), "queued")
    await a.release(holder.secret)
    in_time = await h.runtime.wait(arrived, h.runtime.now() + 60.0)
    b.interrupt()
    ensure(in_time and grant_id(head.secret) in woken, f"the wake-up comes: {woken}")
    await listener.join()
    await granted(b, head)


@check()
async def a_waiter_that_leaves_makes_room(h: AuthorityHarness) -> None:
    """The head withdraws while the name is free: the next is woken and granted."""
    a, b = await h.authority(), await h.authority()
    holder, head, second = (asking(h.runtime, "orders", wait=True) for _ in range(3))
    await granted(a, holder)
    await a.ask(head)
    await b.ask(second)
    await a.release(holder.secret)
    ensure(await a.withdraw(head.secret) == Released(), "the head leaves")
    woken: list[str] = []
    limit = h.runtime.now() + 5.0
    while grant_id(second.secret) not in woken:
        ensure(h.runtime.now() < limit, "the next is woken")
        woken += await b.next_wakeups(h.runtime.now() + 0.5)
    await granted(b, second)
    ensure(await a.ask(head) == Ended("withdrawn"), "who left is out")


@check()
async def dead_waiters_are_skipped_however_many(h: AuthorityHarness) -> None:
    """Waiters that stopped renewing do not delay live ones, and are never granted (etcd #11456)."""
    a = await h.authority()
    holder = asking(h.runtime, "orders", ttl=2.0)
    await granted(a, holder)
    dead = [asking(h.runtime, "orders", ttl=2.0, wait=True) for _ in range(20)]
    for ask in dead:
        await a.ask(ask)
    alive = asking(h.runtime, "orders", ttl=2.0, wait=True)
    await a.ask(alive)
    await h.pass_time(1.5)
    (kept,) = await a.renew([alive.secret])
    ensure(isinstance(kept, Waiting), f"the living one keeps its place: {kept}")
    await h.pass_time(0.6)  # holder and dead waiters are past their ttl now, the living one is not
    (ready,) = await a.renew([alive.secret])
    ensure(isinstance(ready, Waiting) and ready.check_in <= 0, f"it is due to ask now: {ready}")
    await granted(a, alive)
    for ask in dead:
        ensure(await a.ask(ask) == Ended("expired"), "a waiter whose place expired is not granted")


@check()
async def an_expiry_lets_the_head_in(h: AuthorityHarness) -> None:
    """After the holder has crashed, the head is granted by its own ask after `check_in`."""
    a = await h.authority()
    await granted(a, asking(h.runtime, "orders", ttl=0.5))
    head = asking(h.runtime, "orders", ttl=5.0, wait=True)
    answer = await a.ask(head)
    ensure(isinstance(answer, Waiting) and 0 < answer.check_in <= 0.5, f"until the expiry: {answer}")
    await h.pass_time(0.5)
    await granted(a, head)


@check()
async def several_names_all_or_none(h: AuthorityHarness) -> None:
    """One ask for several names: one token, no partial hold, no deadlock between crossing asks."""
    a, b = await h.authority(), await h.authority()
    one = asking(h.runtime, "b")
    await granted(a, one)
    both = asking(h.runtime, "a", "b", "c", wait=True)
    ensure(isinstance(await a.ask(both), Waiting), "b is held")
    ensure(isinstance(await b.ask(asking(h.runtime, "x")), Granted), "unrelated names go on")
    crossing = asking(h.runtime, "c", "b", wait=True)
    ensure(isinstance(await b.ask(crossing), Waiting), "queued behind")
    ensure(isinstance(await b.ask(asking(h.runtime, "a")), Busy), "who came first keeps its place on a, too")
    await a.release(one.secret)
    grant = await granted(a, both)
    for name in ("a", "b", "c"):
        view = await b.observe(name)
        ensure(view.held_by is not None and view.held_by.token == grant.token, f"{name} under one token")
    await a.release(both.secret)
    await granted(b, crossing)
    await granted(a, asking(h.runtime, "a"))


@check()
async def lock_delay_follows_an_expiry_only(h: AuthorityHarness) -> None:
    """Nobody is granted the name for a while after an expiry, but at once after a release."""
    a = await h.authority()
    released = asking(h.runtime, "orders", ttl=0.5, lock_delay=2.0)
    await granted(a, released)
    await a.release(released.secret)
    await granted(a, asking(h.runtime, "orders", ttl=0.5, lock_delay=2.0))
    await h.pass_time(1.0)
    ensure(isinstance(await a.ask(asking(h.runtime, "orders")), Busy), "expired, and delayed")
    view = await a.observe("orders")
    ensure(view.held_by is None and 0 < view.free_in <= 2.0, f"nobody holds it, free later: {view}")
    head = asking(h.runtime, "orders", wait=True)
    answer = await a.ask(head)
    ensure(isinstance(answer, Waiting) and 0 < answer.check_in <= 2.0, f"{answer}")
    await h.pass_time(1.6)
    await granted(a, head)


@check()
async def a_release_may_keep_its_names_taken(h: AuthorityHarness) -> None:
    """`keep` ends the lease, and nobody is granted its names for that long, whatever its lock_delay is."""
    a, b = await h.authority(), await h.authority()
    for delay in (0.0, 3600.0):
        job = asking(h.runtime, "orders", "stock", ttl=30.0, lock_delay=delay)
        token = (await granted(a, job)).token
        waiter = asking(h.runtime, "orders", ttl=60.0, wait=True)
        ensure(isinstance(await b.ask(waiter), Waiting), "somebody waits")
        for end in (a.release(job.secret, keep=60.0), a.release(job.secret), a.withdraw(job.secret)):
            ensure(await end == Released(), "released; repeating that does not free the names")
        ensure(await a.renew([job.secret]) == [Ended("released")], "the lease has ended")
        for name in ("orders", "stock"):
            answer, view = await b.ask(asking(h.runtime, name)), await b.observe(name)
            ensure(isinstance(answer, Busy) and answer.held_by is None, f"busy, held by nobody: {answer}")
            ensure(view.held_by is None and 0 < view.free_in <= 60, f"free later: {view}")
        await h.pass_time(3.0)
        await a.tidy()
        for waits in (*await b.renew([waiter.secret]), await b.ask(waiter)):
            ensure(isinstance(waits, Waiting) and waits.check_in > 0, f"not even the first waiter: {waits}")
        await b.withdraw(waiter.secret)
        await h.pass_time(60.0)
        after = asking(h.runtime, "orders", "stock")
        ensure((await granted(b, after)).token > token, "free again, and the token is greater")
        await b.release(after.secret)


@check()
async def lock_delay_outlives_the_memory_of_its_attempt(h: AuthorityHarness) -> None:
    """A late release and a clean-up do not shorten a long delay."""
    a = await h.authority()
    ask = asking(h.runtime, "orders", ttl=1.0, lock_delay=3600.0)
    await granted(a, ask)
    await h.pass_time(1.5)
    ensure(await a.release(ask.secret) == Ended("expired"), "too late to be a release")
    await h.pass_time(1800)
    await a.tidy()
    ensure(isinstance(await a.ask(asking(h.runtime, "orders")), Busy), "still delayed")
    await h.pass_time(1800)
    await granted(a, asking(h.runtime, "orders"))


# Names, and the end.


@check()
async def odd_names_are_names(h: AuthorityHarness) -> None:
    """Names that look alike or dangerous can be held at the same time, and are returned unchanged."""
    a = await h.authority()
    for name in ODD_NAMES:
        await granted(a, asking(h.runtime, name))
    for name in ODD_NAMES:
        ensure(isinstance(await a.ask(asking(h.runtime, name)), Busy), f"{name!r} is held")
    found = [view.name for view in await a.survey()]
    ensure(found == sorted(ODD_NAMES, key=str.encode), "all of them, sorted by their bytes")


@check()
async def bad_names_are_misuse(h: AuthorityHarness) -> None:
    """An invalid name raises Misuse before anything is sent."""
    a = await h.authority()
    for bad in BAD_NAMES:
        await raises(Misuse, a.observe(bad))
        await raises(Misuse, a.force_release(bad, 1))
    ensure(not await a.survey(), "nothing happened")


@check()
async def closing_twice_is_harmless(h: AuthorityHarness) -> None:
    """`close` may be repeated; leases that were held stay held for others until they expire."""
    a, b = await h.authority(), await h.authority()
    await granted(a, asking(h.runtime, "orders"))
    await a.close()
    await a.close()
    ensure(isinstance(await b.ask(asking(h.runtime, "orders")), Busy), "nothing is released by closing")
