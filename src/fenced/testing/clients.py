"""The client kit: the real client core over an authority, in either colour."""

from __future__ import annotations

from fenced.core.acquiring import LeaseEngine, LeaseRequest
from fenced.core.holding import GrantState, State
from fenced.errors import LeaseLost, Misuse, NotEnoughTime, NotGranted
from fenced.testing.inputs import BAD_NAMES, BAD_TTLS, BAD_WAITS
from fenced.testing.kit import AuthorityHarness, Checks, ensure, lease_engine, raises, until

check: Checks[AuthorityHarness] = Checks()
CHECKS = check


@check()
async def a_client_holds_and_gives_back(h: AuthorityHarness) -> None:
    """Acquire, check, stamp, release; a released lease can neither be checked nor make stamps."""
    client = lease_engine(await h.authority(), h.runtime)
    lease = await client.acquire(LeaseRequest.checked(["orders/42"], ttl=60))
    ensure(lease.state is State.HELD and 1 < lease.remaining() < 60, f"held for {lease.remaining()}")
    lease.check(need=1.0)
    await raises(NotEnoughTime, _later(lease.check, 60.0))
    stamps = [lease.next_stamp(), lease.next_stamp(), lease.announcement()]
    ensure([s.seq for s in stamps] == [1, 2, 0], "the lease counts its operations")
    ensure({s.token for s in stamps} == {lease.token}, "under one token")
    await raises(Misuse, client.acquire(LeaseRequest.checked(["orders/42"], wait=0)))  # not re-entrant
    await client.release(lease)
    await client.release(lease)
    await raises(Misuse, _later(lease.next_stamp))
    await raises(Misuse, _later(lease.check))
    await client.close()


async def _later(call: object, *args: object) -> object:
    assert callable(call)
    return call(*args)


@check()
async def a_client_refuses_bad_numbers(h: AuthorityHarness) -> None:
    """Bad names, ttls, waits and delays raise Misuse before anything is sent."""
    for bad in BAD_NAMES:
        await raises(Misuse, _later(LeaseRequest.checked, [bad]))
    for bad in BAD_TTLS:
        await raises(Misuse, _later(lambda bad=bad: LeaseRequest.checked(["a"], ttl=bad)))
    for bad in BAD_WAITS:
        await raises(Misuse, _later(lambda bad=bad: LeaseRequest.checked(["a"], wait=bad)))
        await raises(Misuse, _later(lambda bad=bad: LeaseRequest.checked(["a"], lock_delay=bad)))
    for names in ([], ["a", "a"], [f"n{i}" for i in range(65)], "abc", b"abc"):
        await raises(Misuse, _later(LeaseRequest.checked, names))


@check()
async def a_client_learns_who_holds(h: AuthorityHarness) -> None:
    """NotGranted after `wait`, with the holder's label; the attempt leaves nothing behind."""
    one, two = lease_engine(await h.authority(), h.runtime), lease_engine(await h.authority(), h.runtime)
    lease = await one.acquire(LeaseRequest.checked(["orders"], ttl=5))
    for wait in (0, 0.15):
        error = await raises(NotGranted, two.acquire(LeaseRequest.checked(["orders"], wait=wait)))
        ensure(error.held_by is not None and one.holder.label in str(error), f"{error}")
        ensure(isinstance(error, TimeoutError), "a TimeoutError too")
    view = await two.authority.observe("orders")
    ensure(view.waiters == (), "nobody waits any more")
    await one.release(lease)
    await one.close()
    await two.close()


@check()
async def a_client_keeps_its_lease(h: AuthorityHarness) -> None:
    """The keeper renews leases and places in the queue beyond their ttl."""
    one, two = lease_engine(await h.authority(), h.runtime), lease_engine(await h.authority(), h.runtime)
    lease = await one.acquire(LeaseRequest.checked(["orders"], ttl=1.8))
    waiting = _Waiting(h, two, LeaseRequest.checked(["orders"], ttl=1.8))
    first = lease.deadline
    await until(h.runtime, lambda: lease.deadline > first + 0.9, 10.0, "two renewals have prolonged it")
    lease.check()
    await one.release(lease)
    await waiting.done()
    await one.close()
    await two.close()


class _Waiting:
    """An acquire in a separate thread or task."""

    def __init__(self, h: AuthorityHarness, client: LeaseEngine, request: LeaseRequest) -> None:
        self._h, self._client, self._request = h, client, request
        self.lease: GrantState | None = None
        self.error: BaseException | None = None
        self._task = h.runtime.spawn(self._run, "waiting")

    async def _run(self) -> None:
        try:
            self.lease = await self._client.acquire(self._request)
        except BaseException as error:  # noqa: BLE001 - handed to `done`, which raises it
            self.error = error

    async def done(self) -> None:
        await until(self._h.runtime, lambda: bool(self.lease or self.error), 5.0, "granted")
        await self._task.join()
        ensure(self.error is None, f"granted, not {self.error!r}")


@check()
async def a_client_learns_that_it_was_revoked(h: AuthorityHarness) -> None:
    """After a force-release the keeper marks the lease lost: state, reason, callback, check and release show it."""
    client = lease_engine(await h.authority(), h.runtime)
    # Long enough for a renewal on a busy machine: otherwise it would have expired before.
    lease = await client.acquire(LeaseRequest.checked(["orders"], ttl=2.0))
    reasons: list[str] = []
    lease.on_lost(reasons.append)
    await client.authority.force_release("orders", lease.token)
    ensure(await lease.wait_lost(h.runtime.now() + 60.0), "lost within a renewal")
    ensure(lease.state is State.LOST and lease.lost_reason == "revoked", f"{lease.lost_reason}")
    await until(
        h.runtime, lambda: reasons == ["revoked"], 60.0, "the callback is called once, with the reason"
    )
    ensure((await raises(LeaseLost, _later(lease.check))).reason == "revoked", "check raises")
    await raises(LeaseLost, client.release(lease))
    lease.on_lost(reasons.append)
    ensure(reasons == ["revoked", "revoked"], "a late callback is called at once")
    await client.close()


@check()
async def a_client_gives_up_at_max_hold(h: AuthorityHarness) -> None:
    """A lease with `max_hold` is not renewed for ever, even if the body hangs."""
    client = lease_engine(await h.authority(), h.runtime)
    # Renewed once, after 1 s.
    lease = await client.acquire(LeaseRequest.checked(["orders"], ttl=3, max_hold=1.2))
    lost = await lease.wait_lost(h.runtime.now() + 30.0)
    ensure(lost and lease.lost_reason == "max_hold", f"lost: {lease.lost_reason}")
    await client.close()


@check()
async def no_update_is_lost_under_contention(h: AuthorityHarness) -> None:
    """Several clients increment an unprotected number under the lease: a lost update would make the sum wrong."""
    box = {"count": 0}
    tokens: list[int] = []
    clients = [lease_engine(await h.authority(), h.runtime) for _ in range(4)]
    finished: list[int] = []

    async def count(client: LeaseEngine) -> None:
        for _ in range(8):
            lease = await client.acquire(LeaseRequest.checked(["sum"], ttl=5))
            seen = box["count"]
            await h.runtime.wait(h.runtime.wakeup(), h.runtime.now() + 0.0005)
            box["count"] = seen + 1
            tokens.append(lease.token)
            await client.release(lease)
        finished.append(1)

    tasks = [h.runtime.spawn(lambda client=client: count(client), "count") for client in clients]  # type: ignore[misc]
    await until(h.runtime, lambda: len(finished) == len(clients), 30.0, "all have counted")
    for task in tasks:
        await task.join()
    ensure(box["count"] == 32, f"32 updates, not {box['count']}")
    ensure(tokens == sorted(set(tokens)), "tokens rise in the order of the holds")
    for client in clients:
        await client.close()
