"""Leases in etcd: one transaction per operation, wake-ups by watches, and an etcd lease for each attempt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from fenced.leases.rules import NAMESPACE_ORDER, made_final
from fenced.stores.etcd.address import EtcdAddress
from fenced.stores.etcd.authority import probe
from fenced.stores.etcd.authority.asking import Asking
from fenced.stores.etcd.authority.attempts import Attempts
from fenced.stores.etcd.authority.ending import Ending
from fenced.stores.etcd.authority.handing import HandingOver
from fenced.stores.etcd.authority.keys import Phase
from fenced.stores.etcd.authority.leases import LeasePool, Leases
from fenced.stores.etcd.authority.looking import QueueReader
from fenced.stores.etcd.authority.namespace import Namespace
from fenced.stores.etcd.authority.renewing import Renewing
from fenced.stores.etcd.authority.watching import EtcdWakeups
from fenced.stores.etcd.wire import messages
from fenced.stores.etcd.wire.cluster import CONNECTIONS_MAX, EtcdWire
from fenced.values import timing
from fenced.values.contracts import Runtime, Trait
from fenced.values.model import (
    Ask,
    AskAnswer,
    NameView,
    ReleaseAnswer,
    RenewAnswer,
    Standing,
    check_floor,
    check_name,
    grant_id,
)
from fenced.values.schema import check_readable, parsed_schema

SCHEMA = 1


class EtcdAuthority:
    """One client's access to one cluster."""

    connections: ClassVar[int] = CONNECTIONS_MAX
    traits: ClassVar[tuple[Trait, ...]] = (
        NAMESPACE_ORDER,
        Trait("quorum", "A token is on the disks of a majority before it is handed out."),
        Trait(
            "sessions",
            "Each attempt has an etcd lease, which any client can renew. After a release the next attempt uses it.",
        ),
        Trait(
            "ttl",
            "A name that is no longer renewed ends by its own ttl, although other names of its client are renewed.",
        ),
        Trait(
            "whole-seconds",
            "A ttl is rounded up to whole seconds and to the server's minimum; the lease says what it is.",
        ),
        Trait("pushed", "A release wakes the head of the queue at once; idle waiters send no requests."),
        Trait(
            "restart-prolongs",
            "A new leader restarts every ttl: after a leader's death a lease may last one ttl longer.",
        ),
        Trait(
            "lineage-noticed",
            "A cluster with another id, or whose revision fell, grants nothing until the floor is raised.",
        ),
        Trait(
            "version-floor",
            "A version with a known bug that can repeat tokens is best-effort; one with other lease bugs is warned of.",
        ),
    )

    def __init__(self, address: EtcdAddress, runtime: Runtime, namespace: str = "default") -> None:
        self.url = address.url
        self._runtime = runtime
        self._wire = EtcdWire(address, runtime)
        self._space = Namespace(self._wire, check_name(namespace), runtime.secret)
        self._pool = LeasePool(Leases(self._wire, runtime), runtime)
        self._reader = QueueReader(self._space, self._pool)
        self._wakeups = EtcdWakeups(self._wire, runtime)
        self._attempts = Attempts(self._space, self._wakeups)
        handing = HandingOver(self._space, self._pool, self._attempts, self._wakeups)
        self._ending = Ending(self._space, self._pool, self._attempts, handing, self._reader, runtime.now)
        self._asking = Asking(
            self._space, self._pool, self._attempts, self._ending, self._reader, self._wakeups, runtime.now
        )
        self._renewing = Renewing(
            self._space, self._pool, self._attempts, self._asking, self._wakeups, runtime.now
        )

    @classmethod
    def at(cls, url: str, runtime: Runtime, namespace: str) -> EtcdAuthority:
        return cls(EtcdAddress(url), runtime, namespace)

    def _until(self, until: float | None) -> float:
        return timing.call_until(self._runtime.now(), until)

    async def open(self, *, create: bool = True, until: float | None = None) -> Standing:
        until = self._until(until)
        version = messages.text_of(await self._wire.call(messages.STATUS, b"", until), 2)
        header = await self._space.open(create, until)
        meta = self._space.meta
        schema = parsed_schema({**meta.more, "schema": meta.schema})
        check_readable(self.url, schema, SCHEMA)
        doubts = probe.known_bugs(version, probe.REPEATS_TOKENS)
        return Standing(
            meta.realm, header.revision + meta.offset, doubts, probe.warnings(version), schema=schema
        )

    # The operations.

    async def ask(self, ask: Ask, until: float | None = None) -> AskAnswer:
        doubts, until = self._space.doubts, self._until(until)
        answer = await self._asking.ask(ask, until)
        return answer if doubts == self._space.doubts else await made_final(answer, ask, self, until)

    async def renew(self, secrets: Sequence[str], until: float | None = None) -> list[RenewAnswer]:
        return await self._renewing.renew([grant_id(secret) for secret in secrets], self._until(until))

    async def release(self, secret: str, until: float | None = None, *, keep: float = 0.0) -> ReleaseAnswer:
        return await self._ending.finish(grant_id(secret), Phase.RELEASED, self._until(until), keep)

    async def withdraw(self, secret: str, until: float | None = None) -> ReleaseAnswer:
        return await self._ending.finish(grant_id(secret), Phase.WITHDRAWN, self._until(until))

    async def next_wakeups(self, until: float) -> list[str]:
        return await self._wakeups.next_wakeups(until)

    def interrupt(self) -> None:
        self._wakeups.interrupt()

    # Operating.

    async def survey(
        self, *, after: str = "", limit: int = 1000, until: float | None = None
    ) -> list[NameView]:
        return await self._reader.survey(after, limit, self._until(until))

    async def observe(self, name: str, until: float | None = None) -> NameView:
        return await self._reader.observe(check_name(name), self._until(until))

    async def force_release(self, name: str, token: int, until: float | None = None) -> int | None:
        return await self._ending.force(check_name(name), token, self._until(until))

    async def raise_floor(self, above: int, until: float | None = None) -> int:
        return await self._space.raise_floor(check_floor(above), self._until(until))

    async def tidy(self, until: float | None = None) -> int:
        """Nothing to do: etcd deletes all records with their leases."""
        return 0

    async def close(self) -> None:
        self._wakeups.close()
        self._wire.close()

    def abandon(self) -> None:
        self._wakeups.close()
        self._wire.abandon()

    def before_fork(self) -> None:
        return

    def forked(self) -> None:
        self._wire.forked()
        self._wakeups.forked()
        self._pool.clear()  # the parent goes on with these leases, and with its attempts
        self._attempts.clear()
