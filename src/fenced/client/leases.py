"""Lease and AsyncLease: what a program holds, over the state of its grant."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fenced.core.acquiring import LeaseEngine
from fenced.core.holding import GrantState, State
from fenced.errors import Misuse
from fenced.runtime.blocking import step
from fenced.values import timing
from fenced.values.model import Stamp
from fenced.values.timing import Seconds

if TYPE_CHECKING:
    from fenced.client.faces import ClientBase


class LeaseBase:
    """What both leases share: methods that take no lock and do no I/O."""

    def __init__(self, grant: GrantState, client: ClientBase) -> None:
        self._grant = grant
        self._client = client  # keeps the client alive: it is not collected while one of its leases is in use
        self._engine = client._engine

    @property
    def name(self) -> str:
        """The one name of this lease; Misuse when it has several."""
        if len(self._grant.names) != 1:
            raise Misuse(f"this lease covers {len(self._grant.names)} names; use `names`")
        return self._grant.names[0]

    @property
    def names(self) -> tuple[str, ...]:
        """The names that it covers, sorted."""
        return self._grant.names

    @property
    def token(self) -> int:
        """The fencing token: greater than that of every earlier grant of each of its names.

        Most authorities also order the grants of different names: their trait is `namespace-order`.
        """
        return self._grant.token

    @property
    def grant(self) -> str:
        """The public id of this grant."""
        return self._grant.grant

    @property
    def realm(self) -> str:
        """The id of the authority's namespace; a guard trusts one realm at a time."""
        return self._grant.realm

    @property
    def ttl(self) -> float:
        """The seconds that the authority granted; may differ from the `ttl` that was asked for."""
        return self._grant.ttl

    @property
    def state(self) -> State:
        """A `State`: `held`, `jeopardy`, `lost` or `released`."""
        return self._grant.state

    @property
    def lost_reason(self) -> str | None:
        """Why the lease was lost; None while it is not."""
        return self._grant.lost_reason if self._grant.state is State.LOST else None

    def check(self, need: Seconds = 0.0) -> None:
        """Raise LeaseLost if the lease is lost, NotEnoughTime if less than `need` seconds remain.

        If it returns, the holder may go on, but is not safe: a pause can follow. Only a guard makes it safe.
        """
        self._grant.check(timing.check_need(need))

    def remaining(self) -> float:
        """Seconds until this holder must treat the lease as lost, unless it is renewed."""
        return self._grant.remaining()

    def serving(self) -> bool:
        """Whether this holder may still believe in its lease: for request handlers, without an exception or I/O.

        A pause can follow, so it is best-effort: it keeps most late answers away. A guard refuses late writes.
        """
        grant = self._grant
        return grant.lost_reason is None and not grant.released and grant.runtime.now() < grant.deadline

    def next_stamp(self) -> Stamp:
        """The stamp of the next operation. To retry that operation, send the same stamp again."""
        return self._grant.next_stamp()

    def announcement(self) -> Stamp:
        """The stamp that announces this lease to a guard (seq 0)."""
        return self._grant.announcement()

    def bare_stamp(self) -> Stamp:
        """A stamp without seq, for a child process or another service; rule `retry` alone accepts it."""
        return self._grant.bare_stamp()

    def on_lost(self, call: Callable[[str], Any]) -> None:
        """Call `call(reason)` once when the lease is lost; at once if it is lost already."""
        self._grant.on_lost(call)

    def __repr__(self) -> str:
        names = ", ".join(repr(name) for name in self._grant.names)
        return f"<{type(self).__name__} {names} token={self.token} {self.state}>"


def _until(engine: LeaseEngine, timeout: Seconds | None) -> float | None:
    seconds = timing.check_wait(timeout)
    return None if seconds is None else engine.runtime.now() + seconds


class AsyncLease(LeaseBase):
    """An exclusive, expiring right to act under a name."""

    async def wait_lost(self, timeout: Seconds | None = None) -> bool:
        """Wait until the lease is lost (True), released, or `timeout` seconds are over (False)."""
        return await self._grant.wait_lost(_until(self._engine, timeout))

    async def wait_out(self, *, pause: Seconds, delivery: Seconds) -> float:
        """Before a resource that cannot refuse: wait until no earlier holder can act there, *if* both bounds hold.

        A holder stops at its deadline, which is before this grant. After its last check it may be paused for at most
        `pause`, and what it sent arrives within `delivery`. Best effort: a longer pause breaks it, and so does a holder
        whose lease an operator has taken away. Returns the sum of both; LeaseLost if this lease ends meanwhile.
        """
        bound = timing.check_bound(pause, "pause") + timing.check_bound(delivery, "delivery")
        # From now on, and not from the request: the authority may have granted it only just before its answer.
        if await self._grant.wait_lost(self._engine.runtime.now() + bound):
            raise self._grant.lost_error()
        self.check()
        return bound

    async def release(self, *, at_once: bool = False) -> None:
        """Give the lease back; LeaseLost if it was lost before. `at_once`: whatever `at_least_for` is."""
        await self._engine.release(self._grant, at_once=at_once)


# generated: the blocking twins of the asyncio classes above, by `python -m release.twins`


class Lease(LeaseBase):
    """An exclusive, expiring right to act under a name."""

    def wait_lost(self, timeout: Seconds | None = None) -> bool:
        """Wait until the lease is lost (True), released, or `timeout` seconds are over (False)."""
        return step(self._grant.wait_lost(_until(self._engine, timeout)))

    def wait_out(self, *, pause: Seconds, delivery: Seconds) -> float:
        """Before a resource that cannot refuse: wait until no earlier holder can act there, *if* both bounds hold.

        A holder stops at its deadline, which is before this grant. After its last check it may be paused for at most
        `pause`, and what it sent arrives within `delivery`. Best effort: a longer pause breaks it, and so does a holder
        whose lease an operator has taken away. Returns the sum of both; LeaseLost if this lease ends meanwhile.
        """
        bound = timing.check_bound(pause, "pause") + timing.check_bound(delivery, "delivery")
        # From now on, and not from the request: the authority may have granted it only just before its answer.
        if step(self._grant.wait_lost(self._engine.runtime.now() + bound)):
            raise self._grant.lost_error()
        self.check()
        return bound

    def release(self, *, at_once: bool = False) -> None:
        """Give the lease back; LeaseLost if it was lost before. `at_once`: whatever `at_least_for` is."""
        step(self._engine.release(self._grant, at_once=at_once))


# end
