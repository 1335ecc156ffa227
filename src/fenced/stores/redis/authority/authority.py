"""Leases in Redis or Valkey: one script per operation, wake-ups by publish and subscribe."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, ClassVar

from fenced.errors import FencedError, Misconfigured
from fenced.leases.pooled import WaitingAttempts
from fenced.leases.rules import NAMESPACE_ORDER, no_namespace, reused_attempt
from fenced.net.pool import Pool, Wires
from fenced.stores.redis.address import RedisAddress, redis_address
from fenced.stores.redis.authority import answers, settings
from fenced.stores.redis.authority.listening import RedisWakeups
from fenced.stores.redis.authority.scripts import RedisScript, scripts_of, tag, us
from fenced.stores.redis.wire.connection import RedisWire
from fenced.stores.redis.wire.finding import route_to
from fenced.stores.redis.wire.resp import ErrorReply, bulks, command
from fenced.stores.redis.wire.settings import REQUESTS, group_doubts
from fenced.values import timing
from fenced.values.contracts import Runtime, Trait
from fenced.values.model import (
    Ask,
    AskAnswer,
    Granted,
    Holder,
    NameView,
    ReleaseAnswer,
    RenewAnswer,
    Standing,
    Waiting,
    check_floor,
    check_name,
    grant_id,
)
from fenced.values.schema import Schema, check_readable

WAIT_SECONDS = 1.0
"""How long a replica may take to confirm a grant."""

ANSWER_SECONDS = 0.05
"""How long before the caller's deadline WAIT ends, so that the server's reply still arrives in time."""

CONNECTIONS_MAX = 8
SCHEMA = 1
LOOK_AT = 200
TIDY_AT = 1000

_RELEASE, _WITHDRAW = bulks(("r", 0)), bulks(("d", 0))


@lru_cache(maxsize=1024)
def _asking(
    opening: bytes,
    realm: str,
    names: tuple[str, ...],
    ttl: float,
    delay: float,
    wait: bool,
    address: str,
    holder: Holder,
) -> bytes:
    """A packed ask, up to the public id of its attempt."""
    words = (realm, us(ttl), us(delay), "1" if wait else "0", answers.about(names, address, holder))
    return opening + bulks(words) + b"$32\r\n"


class RedisAuthority:
    """One client's access to one server: connections for requests, one for renewals, one for wake-ups."""

    connections: ClassVar[int] = CONNECTIONS_MAX
    traits: ClassVar[tuple[Trait, ...]] = (
        NAMESPACE_ORDER,
        Trait(
            "synced-grants",
            "With appendfsync always a token is on the disk before it is handed out; other settings are best-effort.",
        ),
        Trait(
            "settings-watched",
            "Each new connection reads the settings again: if they are worse than at opening, nothing is granted.",
        ),
        Trait(
            "wall-clock",
            "The server's wall clock expires leases: a jump ends or prolongs them, tokens only rise.",
        ),
        Trait("pushed", "A release wakes the head of the queue at once; idle waiters send no requests."),
        Trait(
            "promotion-noticed",
            "A promoted replica has another replication id: it grants nothing until the floor is raised.",
        ),
        Trait(
            "replicas",
            "With replicas a grant is handed out when one of them has it, and the guarantee is best-effort.",
        ),
        Trait(
            "groups",
            "Sentinels and clusters name the primary: leases outlive a promotion, and every grant needs a replica.",
        ),
        Trait(
            "one-slot",
            "All keys of a namespace are in one cluster slot, in which every operation is one script.",
        ),
        Trait(
            "restore-unnoticed",
            "A restart with restored append-only files looks like any other restart: raise the floor.",
        ),
    )

    def __init__(self, address: RedisAddress, runtime: Runtime, namespace: str = "default") -> None:
        self.url = address.url
        self._address = address
        self._runtime = runtime
        self._namespace = check_name(namespace)
        self._route = route_to(address, runtime, f"{{{tag(self._namespace)}}}")
        self._scripts = scripts_of(self._namespace)
        self._realm = ""
        self._promise = settings.SettingsPromise(self.url)
        self._wires: Wires[RedisWire] = Wires()
        self._pool = Pool(runtime, self._connect, limit=CONNECTIONS_MAX, where=self.url)
        self._renewals = Pool(runtime, self._connect, limit=1, where=self.url)
        self._waiting = WaitingAttempts()
        self._wakeups = RedisWakeups(self._make, runtime, self._namespace, self.url)
        self._ask, self._release = self._scripts["ask"], self._scripts["release"]
        self._ask_opening, self._release_opening = self._ask.opening(6), self._release.opening(3) + b"$32\r\n"

    @classmethod
    def at(cls, url: str, runtime: Runtime, namespace: str) -> RedisAuthority:
        return cls(redis_address(url), runtime, namespace)

    def _make(self) -> RedisWire:
        made = RedisWire(self._address, self._route, self._runtime, self._promise)
        self._wires.add(made)
        return made

    async def _connect(self, until: float) -> RedisWire:
        made = self._make()
        await made.connect(until)
        return made

    # Requests.

    async def _reply(self, wire: RedisWire, request: bytes, until: float) -> Any:
        """The reply. An error reply is raised as an exception."""
        reply = await wire.exchange(request, until)
        if isinstance(reply, ErrorReply):
            wire.close()  # a new connection may lead to another server, which does not refuse
            raise answers.refused(reply, self.url)
        return reply

    async def _run(
        self, wire: RedisWire, script: RedisScript, request: bytes, until: float, *, mints: bool = False
    ) -> Any:
        reply = await wire.exchange(request, until, mints=mints)
        reply = await self._heeded(wire, script, request, reply, until)
        if type(reply) is list and reply[:1] == [b"replica"]:
            wire.misrouted()
        return reply

    async def _heeded(
        self, wire: RedisWire, script: RedisScript, request: bytes, reply: Any, until: float
    ) -> Any:
        """A script's reply. If the server does not have the script, the request is sent again with the script's text.

        SCRIPT LOAD first would not be enough: the server may lose its scripts between the two requests.
        """
        if type(reply) is ErrorReply:
            if reply.code != "NOSCRIPT":
                wire.close()
                raise answers.refused(reply, self.url)
            reply = await self._reply(wire, script.with_source(request), until)
        return reply

    async def _call(
        self, name: str, *arguments: str | int, mints: bool = False, until: float | None = None
    ) -> Any:
        """Run one of the less frequent scripts. One that mints is not repeated: no attempt id makes that safe."""
        until = timing.call_until(self._runtime.now(), until)
        script = self._scripts[name]
        request = script.request(*arguments)

        async def work(wire: RedisWire) -> Any:
            return await self._run(wire, script, request, until, mints=mints)

        return await self._pool.request(work, until, repeatable=not mints)

    async def _look(self, wire: RedisWire, until: float) -> tuple[str, ...]:
        """How tokens could repeat on this server, by its current settings."""
        found = await wire.pipeline(REQUESTS, until)
        wire.objection = None  # the caller judges these settings; the next connection reads them again
        return settings.doubts(found, self.url)

    async def _confirmed(self, wire: RedisWire, until: float) -> None:
        """Wait until a replica has this connection's last write. Indeterminate if none confirms it in time."""
        patience = min(WAIT_SECONDS, until - self._runtime.now() - ANSWER_SECONDS)
        confirmed = await wire.exchange(command("WAIT", 1, max(1, int(patience * 1000))), until)
        if isinstance(confirmed, ErrorReply):
            wire.misrouted()  # it became a replica after it had granted
        if isinstance(confirmed, ErrorReply) or confirmed < 1:
            raise answers.unconfirmed(self.url)

    # Opening.

    async def open(self, *, create: bool = True, until: float | None = None) -> Standing:
        until = timing.call_until(self._runtime.now(), until)
        reply = await self._call("open", self._runtime.secret()[:16], int(create), SCHEMA, until=until)
        match reply[0]:
            case b"absent":
                raise no_namespace(self.url, self._namespace)
            case b"torn":
                raise Misconfigured(
                    f"{self.url}: the counting state of namespace {self._namespace!r} is gone, but not its leases: "
                    "restore it, or delete the other keys that begin with the same braces"
                )
            case b"type":
                key, kind = reply[1].decode(), reply[2].decode()
                raise Misconfigured(
                    f"{self.url}: another program uses {key} as a {kind}; take another database"
                )
            case b"open":
                _, realm, token, schema, version, release = reply
            case _:
                raise answers.denied(reply, self.url)
        stored = Schema(int(version), int(schema), release.decode())
        check_readable(self.url, stored, SCHEMA)
        self._realm = realm.decode()
        doubts = await self._pool.request(lambda wire: self._look(wire, until), until)
        doubts += group_doubts(self._address, "tokens")
        self._promise.given = not doubts
        return Standing(self._realm, token, doubts, schema=stored)

    # The operations.

    async def ask(self, ask: Ask, until: float | None = None) -> AskAnswer:
        until = timing.call_until(self._runtime.now(), until)
        return await self._waiting.asked(ask, self._asked, self, self._pool, until)

    async def _asked(self, ask: Ask, public: str, until: float) -> AskAnswer:
        request = b"%b%b\r\n" % (
            _asking(
                self._ask_opening,
                self._realm,
                ask.names,
                ask.ttl,
                ask.lock_delay,
                ask.wait,
                self._wakeups.address,
                ask.holder,
            ),
            public.encode(),
        )

        async def work(wire: RedisWire) -> Any:
            reply = await self._run(wire, self._ask, request, until, mints=True)
            granted = type(reply) is int or reply[0] == b"granted"
            # On the connection that wrote: WAIT counts the replicas that have this connection's writes.
            # A primary that was replaced while it was cut off has no replica left, so it confirms nothing.
            if granted and (self._route.found or (type(reply) is not int and reply[3] > 0)):
                await self._confirmed(wire, until)
            return reply

        reply = await self._pool.request(work, until)
        if type(reply) is int:
            return Granted(reply, ask.ttl, ask.ttl)
        if reply[0] == b"other":
            raise reused_attempt()
        answer = answers.asked(reply, ask.ttl)
        if answer is None:
            raise answers.denied(reply, self.url)
        return answer

    async def renew(self, secrets: Sequence[str], until: float | None = None) -> list[RenewAnswer]:
        return await self._renew(self._renewals, [grant_id(secret) for secret in secrets], until)

    async def _renew(
        self, pool: Pool[RedisWire], publics: list[str], until: float | None
    ) -> list[RenewAnswer]:
        if not publics:
            return []
        until = timing.call_until(self._runtime.now(), until)
        script = self._scripts["renew"]
        request = script.batch(self._realm, publics)

        async def work(wire: RedisWire) -> Any:
            return await self._run(wire, script, request, until)

        return [answers.renewed(reply) for reply in await pool.request(work, until)]

    async def release(self, secret: str, until: float | None = None, *, keep: float = 0.0) -> ReleaseAnswer:
        return await self._finish(secret, bulks(("r", us(keep))) if keep else _RELEASE, until)

    async def withdraw(self, secret: str, until: float | None = None) -> ReleaseAnswer:
        return await self._finish(secret, _WITHDRAW, until)

    async def _finish(self, secret: str, end: bytes, until: float | None) -> ReleaseAnswer:
        until = timing.call_until(self._runtime.now(), until)
        public = grant_id(secret)
        self._waiting.pop(public, None)
        request = b"%b%b\r\n%b" % (self._release_opening, public.encode(), end)

        async def work(wire: RedisWire) -> Any:
            reply = await wire.exchange(request, until)
            return reply if reply == 1 else await self._heeded(wire, self._release, request, reply, until)

        return answers.released(await self._pool.request(work, until))

    async def next_wakeups(self, until: float) -> list[str]:
        if self._wakeups.open:
            return await self._wakeups.next_wakeups(until)
        await self._wakeups.listen(timing.call_until(self._runtime.now(), None))
        # Messages that were published before we subscribed were lost: check all waiters once.
        waiting = list(self._waiting)
        try:
            found = await self._renew(self._pool, waiting, None)
        except FencedError:
            self._wakeups.close()  # so that the next call checks again
            raise
        return [
            public
            for public, answer in zip(waiting, found, strict=True)
            if isinstance(answer, Waiting) and answer.check_in <= 0
        ]

    def interrupt(self) -> None:
        self._wakeups.interrupt()

    # Operating.

    async def survey(
        self, *, after: str = "", limit: int = 1000, until: float | None = None
    ) -> list[NameView]:
        until = timing.call_until(self._runtime.now(), until)
        views: list[NameView] = []
        while len(views) < limit:
            behind, page = await self._call("survey", after, min(limit - len(views), LOOK_AT), until=until)
            views += map(answers.view, page)
            if not behind:
                break
            after = behind.decode()
        return views

    async def observe(self, name: str, until: float | None = None) -> NameView:
        _, (found,) = await self._call("survey", "", 0, check_name(name), until=until)
        return answers.view(found)

    async def force_release(self, name: str, token: int, until: float | None = None) -> int | None:
        reply = await self._call(
            "force_release", self._realm, check_name(name), token, mints=True, until=until
        )
        if reply is not None and type(reply) is not int:
            raise answers.denied(reply, self.url)
        minted: int | None = reply
        return minted

    async def raise_floor(self, above: int, until: float | None = None) -> int:
        reply = await self._call("raise_floor", self._realm, check_floor(above), until=until)
        if type(reply) is not int:
            raise answers.denied(reply, self.url)
        floor: int = reply
        return floor

    async def tidy(self, until: float | None = None) -> int:
        forgotten: int = 0
        while True:
            over, seen = await self._call("tidy", TIDY_AT, until=until)
            forgotten += over
            if seen < TIDY_AT:
                return forgotten

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
        self._waiting = WaitingAttempts()
        self._wakeups.forked()
