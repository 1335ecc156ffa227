"""Leases from a service: any authority, through `fenced serve` in front of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar
from urllib.parse import quote, urlencode

from fenced.errors import Misconfigured
from fenced.leases.rules import made_final
from fenced.net.pool import ConnectionBroken, Pool, Wires
from fenced.stores.service.address import ServiceAddress, service_address
from fenced.stores.service.authority import messages
from fenced.stores.service.authority.listening import ServicePool, ServiceWakeups
from fenced.stores.service.authority.messages import Fields, packed
from fenced.stores.service.wire.connection import HttpReply, HttpWire, InstanceRoute
from fenced.values import timing
from fenced.values.contracts import Runtime, Trait
from fenced.values.model import (
    Ask,
    AskAnswer,
    NameView,
    ReleaseAnswer,
    RenewAnswer,
    Standing,
    Waiting,
    check_floor,
    check_name,
    grant_id,
)

T = TypeVar("T")
CONNECTIONS_MAX = 8
PAGE_MAX = 1000
"""How many names the service lists in one answer."""
HELD_SECONDS = 30.0
"""How long the service holds back the notification of a waiter, which then asks again."""


class ServiceAuthority:
    """One client of a service: connections for requests, one for renewals, one for each waiter."""

    route_type: type[InstanceRoute] = InstanceRoute

    def __init__(self, address: ServiceAddress, runtime: Runtime, namespace: str = "default") -> None:
        self.url = address.url
        self._traits: tuple[Trait, ...] = ()
        self._address = address
        self._runtime = runtime
        self._namespace = check_name(namespace)
        self._route = self.route_type(address, runtime)
        self._realm = ""
        self._query = urlencode({"namespace": namespace})
        self._wires: Wires[HttpWire] = Wires()
        self._pool = ServicePool(runtime, self._connect, limit=CONNECTIONS_MAX, where=self.url)
        self._renewals = Pool(runtime, self._connect, limit=1, where=self.url)
        self._wakeups = ServiceWakeups(runtime, self._pool.adopt)

    @classmethod
    def at(cls, url: str, runtime: Runtime, namespace: str) -> ServiceAuthority:
        return cls(service_address(url), runtime, namespace)

    @property
    def traits(self) -> tuple[Trait, ...]:
        """Those of the store behind the service; none before `open`."""
        return self._traits

    async def _connect(self, until: float) -> HttpWire:
        made = HttpWire(self._address, self._route, self._runtime)
        self._wires.add(made)
        await made.connect(until)
        return made

    # Requests.

    async def _call(
        self,
        method: str,
        path: str,
        understand: Callable[[Fields], T],
        body: bytes = b"",
        *,
        until: float | None,
        pool: Pool[HttpWire] | None = None,
        parked: Callable[[HttpReply], None] | None = None,
        once: bool = False,
        query: str = "",
    ) -> T:
        until = timing.call_until(self._runtime.now(), until)
        target = f"{path}?{self._query}{query}"

        async def work(wire: HttpWire) -> T:
            held = HELD_SECONDS if parked is not None else 0.0
            reply = await wire.exchange(method, target, body, until, held=held, once=once)
            if parked is not None:
                parked(reply)
            fields = messages.read(reply, self.url)
            try:
                return understand(fields)
            except (KeyError, TypeError, ValueError) as error:
                raise ConnectionBroken(f"{self.url}: an answer that is none: {error}") from error

        return await (pool or self._pool).request(work, until, repeatable=not once)

    # Opening.

    async def open(self, *, create: bool = True, until: float | None = None) -> Standing:
        def opened(fields: Fields) -> tuple[Standing, tuple[Trait, ...]]:
            return messages.standing(fields), messages.traits(fields)

        if create:
            body = packed({"namespace": self._namespace})
            standing, traits = await self._call("POST", "/v1/namespaces", opened, body, until=until)
        else:
            standing, traits = await self._call("GET", "/v1", opened, until=until)
        if self._realm not in ("", standing.realm):
            raise Misconfigured(
                f"{self.url}: its store is another one than before (realm {standing.realm}, not {self._realm}); "
                "make a new client if that is wanted"
            )
        if not self._realm:
            # From now on every request says which realm it means, so an instance before another store refuses it.
            self._realm = standing.realm
            self._query = urlencode({"namespace": self._namespace, "realm": standing.realm})
        self._traits = traits
        return standing

    # The operations.

    async def ask(self, ask: Ask, until: float | None = None) -> AskAnswer:
        public, broken = grant_id(ask.secret), self._pool.broken
        until = timing.call_until(self._runtime.now(), until)

        def parked(reply: HttpReply) -> None:
            if reply.parked is not None:
                self._wires.add(reply.parked)
                self._wakeups.park(public, reply.parked)

        answer = await self._call(
            "POST",
            "/v1/leases",
            messages.asked,
            messages.ask_body(ask),
            until=until,
            parked=parked if ask.wait else None,
        )
        if ask.wait and not isinstance(answer, Waiting):
            self._wakeups.forget(public)
        return answer if broken == self._pool.broken else await made_final(answer, ask, self, until)

    async def renew(self, secrets: Sequence[str], until: float | None = None) -> list[RenewAnswer]:
        if not secrets:
            return []
        now = self._runtime.now()
        seconds = max(0.0, timing.call_until(now, until) - now)

        def renewed(fields: Fields) -> list[RenewAnswer]:
            answers = [messages.renewed(each) for each in fields["answers"]]
            if len(answers) != len(secrets):
                raise ValueError("another number of answers")
            return answers

        body = packed({"attempts": list(secrets), "timeout": seconds})
        return await self._call("POST", "/v1/leases/renew", renewed, body, until=until, pool=self._renewals)

    async def release(self, secret: str, until: float | None = None, *, keep: float = 0.0) -> ReleaseAnswer:
        return await self._end("release", {"attempt": secret, "keep": keep}, until)

    async def withdraw(self, secret: str, until: float | None = None) -> ReleaseAnswer:
        return await self._end("withdraw", {"attempt": secret}, until)

    async def _end(self, how: str, body: dict[str, object], until: float | None) -> ReleaseAnswer:
        self._wakeups.forget(grant_id(str(body["attempt"])))
        return await self._call("POST", f"/v1/leases/{how}", messages.released, packed(body), until=until)

    async def next_wakeups(self, until: float) -> list[str]:
        return await self._wakeups.next_wakeups(until)

    def interrupt(self) -> None:
        self._wakeups.interrupt()

    # Operating.

    async def hot(self, until: float | None = None) -> list[tuple[str, int]]:
        """The names that were most often waited for at this instance in the last minutes, and how often."""

        def found(fields: Fields) -> list[tuple[str, int]]:
            return [(str(each["name"]), int(each["count"])) for each in fields["hot"]]

        return await self._call("GET", "/v1/hot", found, until=until)

    async def survey(
        self, *, after: str = "", limit: int = 1000, until: float | None = None
    ) -> list[NameView]:
        until = timing.call_until(self._runtime.now(), until)
        views: list[NameView] = []

        def found(fields: Fields) -> list[NameView]:
            return [messages.view(each) for each in fields["names"]]

        while len(views) < limit:
            page = min(limit - len(views), PAGE_MAX)
            query = "&" + urlencode({"after": views[-1].name if views else after, "limit": page})
            more = await self._call("GET", "/v1/names", found, until=until, query=query)
            views += more
            if len(more) < page:
                break
        return views

    async def observe(self, name: str, until: float | None = None) -> NameView:
        return await self._call("GET", _path(name), messages.view, until=until)

    async def force_release(self, name: str, token: int, until: float | None = None) -> int | None:
        def minted(fields: Fields) -> int | None:
            found: int | None = fields["token"]
            return found

        return await self._call(
            "POST", f"{_path(name)}/force-release", minted, packed({"token": token}), until=until, once=True
        )

    async def raise_floor(self, above: int, until: float | None = None) -> int:
        def floor(fields: Fields) -> int:
            return int(fields["floor"])

        body = packed({"above": check_floor(above)})
        return await self._call("POST", "/v1/floor", floor, body, until=until)

    async def tidy(self, until: float | None = None) -> int:
        def forgotten(fields: Fields) -> int:
            return int(fields["forgotten"])

        return await self._call("POST", "/v1/tidy", forgotten, packed({}), until=until)

    async def close(self) -> None:
        self.abandon()

    def abandon(self) -> None:
        self._wires.interrupt()
        self._pool.abandon()
        self._renewals.abandon()
        self._wakeups.close()

    def before_fork(self) -> None:
        return

    def forked(self) -> None:
        self._wires.forked()
        self._pool.forked()
        self._renewals.forked()
        self._wakeups.forked()


def _path(name: str) -> str:
    """A name in a path: encoded, with its slashes kept. No segment of a name is empty, `.` or `..`."""
    return f"/v1/names/{quote(check_name(name), safe='/')}"
