"""Letting time go by for etcd, whose clock is nobody's to set.

What would have expired is revoked, as a leader does it with what expires; of what is left the rest is told shorter,
until it is kept alive again. The clock of its clients is moved on.

A second of the kit is twenty of the server's. It counts whole ones, and a cluster's leases last four at least.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from fenced.runtime.blocking import BlockingRuntime, step
from fenced.stores.etcd.address import EtcdAddress
from fenced.stores.etcd.authority.authority import EtcdAuthority
from fenced.stores.etcd.authority.leases import EtcdLease, Leases
from fenced.stores.etcd.wire import messages
from fenced.stores.etcd.wire.cluster import EtcdWire
from fenced.values.contracts import Authority, Runtime
from fenced.values.model import Ask, AskAnswer, Granted, HeldBy, NameView, ReleaseAnswer, RenewAnswer
from tests.shifted import Shifted

LEASE_REVOKE = "/etcdserverpb.Lease/LeaseRevoke"
SCALE = 20
CALL_SECONDS = 5.0


class AgingLeases(Leases):
    """Leases that have grown older than the server knows."""

    def __init__(self, wire: EtcdWire, runtime: Runtime, ages: dict[int, float]) -> None:
        super().__init__(wire, runtime)
        self._ages = ages

    async def grant(self, seconds: int, until: float) -> EtcdLease:
        lease = await super().grant(seconds, until)
        self._ages[lease.id] = 0.0
        return lease

    async def keep_alive(self, leases: Iterable[EtcdLease], until: float) -> set[int]:
        alive = await super().keep_alive(leases, until)
        self._ages.update(dict.fromkeys(alive, 0.0))
        return alive

    async def left(self, lease: int, until: float) -> int:
        return int(await super().left(lease, until) - self._ages.get(lease, 0))


class Time:
    """The time of all leases that its authorities have made."""

    def __init__(self, url: str, clock: Shifted) -> None:
        self.ages: dict[int, float] = {}
        self._clock = clock
        self._url = url

    def bind(self, authority: EtcdAuthority, runtime: Runtime) -> EtcdAuthority:
        leases = AgingLeases(authority._wire, runtime, self.ages)
        authority._pool.leases = leases
        return authority

    def pass_by(self, seconds: float) -> None:
        """On the server, and for its clients."""
        step(self._pass_by(seconds))
        self._clock.ahead += seconds

    async def _pass_by(self, seconds: float) -> None:
        runtime = BlockingRuntime()
        wire = EtcdWire(EtcdAddress(self._url), runtime)
        until = runtime.now() + 4 * CALL_SECONDS
        for lease in list(self.ages):
            reply = await wire.call(messages.LEASE_TIME_TO_LIVE, messages.time_to_live(lease), until)
            left = messages.lease_reply(reply)[1]
            self.ages[lease] += seconds
            if left < self.ages[lease]:  # the server rounds what is left down to whole seconds
                del self.ages[lease]
                if left >= 0:
                    await wire.call(LEASE_REVOKE, messages.lease_id(lease), until)
        wire.close()


class Scaled:
    """An authority whose seconds are as many times longer as the kit's must be."""

    def __init__(self, authority: Authority) -> None:
        self._authority = authority

    def __getattr__(self, name: str) -> Any:
        return getattr(self._authority, name)

    async def ask(self, ask: Ask, until: float | None = None) -> AskAnswer:
        longer = ask._replace(ttl=ask.ttl * SCALE, lock_delay=ask.lock_delay * SCALE)
        answer: AskAnswer = _shorter(await self._authority.ask(longer, until))
        return answer

    async def renew(self, secrets: Sequence[str], until: float | None = None) -> list[RenewAnswer]:
        return [_shorter(answer) for answer in await self._authority.renew(secrets, until)]

    async def release(self, secret: str, until: float | None = None, *, keep: float = 0.0) -> ReleaseAnswer:
        return await self._authority.release(secret, until, keep=keep * SCALE)

    async def observe(self, name: str, until: float | None = None) -> NameView:
        view: NameView = _shorter(await self._authority.observe(name, until))
        return view

    async def survey(
        self, *, after: str = "", limit: int = 1000, until: float | None = None
    ) -> list[NameView]:
        return [
            _shorter(view) for view in await self._authority.survey(after=after, limit=limit, until=until)
        ]


def _shorter(answer: Any) -> Any:
    if isinstance(answer, Granted):
        return Granted(answer.token, answer.remaining / SCALE, answer.ttl / SCALE)
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(answer):
        value = getattr(answer, field.name)
        if field.name in ("remaining", "ttl", "check_in", "free_in") and value is not None:
            changes[field.name] = value / SCALE
        elif isinstance(value, HeldBy):
            changes[field.name] = _shorter(value)
        elif field.name == "waiters":
            changes[field.name] = tuple(map(_shorter, value))
    return dataclasses.replace(answer, **changes)
