"""Values under names in Redis, over our own connections."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, TypeVar

from fenced.errors import Conflict, FencedError
from fenced.guards.answers import check_pattern, check_value, one_stamp
from fenced.guards.configoperator import ConfigOperator
from fenced.guards.options import split_options
from fenced.net.pool import Pool, Wires
from fenced.runtime import forking
from fenced.stores.redis.address import ClusterAddress, RedisAddress, redis_address
from fenced.stores.redis.guard.marks import (
    KIND,
    RIGHTS,
    WAIT,
    Compared,
    MarkOptions,
    Word,
    mark_in,
    unconfirmed,
)
from fenced.stores.redis.guard.scripts import GuardScript
from fenced.stores.redis.guard.slots import RedisMarksBySlot
from fenced.stores.redis.wire import refusals
from fenced.stores.redis.wire.connection import RedisWire
from fenced.stores.redis.wire.finding import route_to
from fenced.stores.redis.wire.resp import ErrorReply, command
from fenced.stores.redis.wire.settings import group_doubts
from fenced.values import timing
from fenced.values.contracts import MANY_NAMES, Operator, Runtime, Trait, Versioned
from fenced.values.decision import Mark, Mode, Ruling, Verdict
from fenced.values.model import Credential, check_name, check_realm
from fenced.values.rollout import (
    QUIET_SECONDS,
    DatabaseStatus,
    Decision,
    DecisionCount,
    GuardStatus,
    Stage,
    advised,
)

T = TypeVar("T")

TRAITS = (
    MANY_NAMES,
    Trait("one-step", "The check and the commands are one script on the server; nobody can come between."),
    Trait("exact-modes", "A new mode and a newly adopted realm bind every later operation of every process."),
    Trait("kept-records", "Refusals are recorded and counted on the server; the newest 10,000 are kept."),
    Trait(
        "synced-marks",
        "With appendfsync always a mark is on the disk before a write returns; other settings are best-effort.",
    ),
    Trait(
        "failover-loses",
        "One replica confirms every mark that is raised; another one that is promoted may lack it: best-effort.",
    ),
    Trait("no-eviction", "A server that may evict any key is refused: marks must stay."),
    Trait("deleted-marks", "Tokens are stored twice: a name whose mark was deleted admits no older token."),
    Trait("not-undone", "A command that fails (a wrong type) does not undo the commands before it."),
    Trait(
        "one-slot",
        "In a cluster a guard's marks and data are in the slot of its tag; with `name`, in a slot for each name.",
    ),
    Trait("cooperative", "Anyone who may write to the keys can do it without the guard."),
)
SLOT_TRAITS = tuple(trait for trait in TRAITS if trait is not MANY_NAMES)
"""Of a guard with a slot for each name: several names are written together only if they are in one slot."""
CONNECTIONS_MAX = 8
_WAIT = command(*WAIT)


class WireChannel:
    """The server over our own connections."""

    def __init__(self, address: RedisAddress, runtime: Runtime, key: str) -> None:
        self.where = address.url
        self.in_cluster = isinstance(address, ClusterAddress)
        self.doubts = group_doubts(address, "marks")
        self._address = address
        self._runtime = runtime
        self._route = route_to(address, runtime, key)
        self._wires: Wires[RedisWire] = Wires()
        self._pool = Pool(runtime, self._connect, limit=CONNECTIONS_MAX, where=self.where)
        forking.register(self)

    async def _connect(self, until: float) -> RedisWire:
        wire = RedisWire(self._address, self._route, self._runtime)
        self._wires.add(wire)
        await wire.connect(until)
        return wire

    def _before_fork(self) -> None:
        return

    def _forked(self) -> None:
        self._wires.forked()
        self._pool.forked()

    async def ask(self, questions: Sequence[tuple[Word, ...]], key: bytes) -> list[Any]:
        until = timing.call_until(self._runtime.now(), None)
        requests = [command(*words) for words in questions]
        if not self._route.found:
            return await self._pool.request(lambda wire: wire.pipeline(requests, until), until)
        # One by one: `exchange` follows a cluster that sends us to another node.
        return await self._pool.request(lambda wire: _one_by_one(wire, requests, until), until)

    @property
    def promotes(self) -> bool:
        return self._route.found

    async def run(
        self,
        script: GuardScript,
        keys: Sequence[str | bytes],
        arguments: Sequence[Word],
        *,
        again: bool,
        confirm: bool = False,
    ) -> Any:
        until = timing.call_until(self._runtime.now(), None)
        tail = (len(keys), *keys, *arguments)

        async def work(wire: RedisWire) -> Any:
            if not again:
                wire.close_if_ended()
            reply = await wire.exchange(command(*script.words, *tail), until)
            if isinstance(reply, ErrorReply) and reply.code == "NOSCRIPT":
                reply = await wire.exchange(command("EVAL", script.source, *tail), until)
            if isinstance(reply, ErrorReply) and reply.code != "FENCED":
                wire.close()  # a new connection may lead to another server, which does not refuse
            elif confirm and (error := unconfirmed(self.where, reply, await wire.exchange(_WAIT, until))):
                raise error
            return reply

        return await self._pool.request(work, until, repeatable=again)

    def refused(self, error: ErrorReply) -> FencedError:
        return refusals.refused(error, self.where, RIGHTS)

    def close(self) -> None:
        self._wires.interrupt()
        self._pool.abandon()


async def _one_by_one(wire: RedisWire, requests: Sequence[bytes], until: float) -> list[Any]:
    return [await wire.exchange(request, until) for request in requests]


class RedisValues:
    """Values under names: each is a hash with the value and its version."""

    traits: tuple[Trait, ...] = TRAITS

    def __init__(self, url: str, runtime: Runtime, **options: Any) -> None:
        address, chosen = redis_address(url), MarkOptions(**options)
        if chosen.name is not None:
            self.traits = SLOT_TRAITS
        self.url = chosen.guard_at(address.url)
        self._channel = WireChannel(address, runtime, chosen.prefix)
        self.marks = RedisMarksBySlot(self._channel, chosen)

    @classmethod
    def at(cls, url: str, runtime: Runtime) -> RedisValues:
        plain, options = split_options(url, "tag", "guarantee", "name")
        return cls(plain, runtime, **options)

    async def open(self) -> None:
        await self.marks.open()

    async def announce(self, credential: Credential) -> None:
        stamp = one_stamp(credential, KIND)
        for names in self.marks.groups(credential.names or stamp.names):
            marks = await self.marks.of(names, stamp)
            await marks.step(stamp, names, announce=True, again=True)

    async def read(self, credential: Credential, name: str) -> Versioned:
        stamp = one_stamp(credential, KIND)
        marks = await self.marks.of([name], stamp)
        key = marks.key("value", check_name(name))
        commands = [("HMGET", key, "value", "version")]
        replies = await marks.step(stamp, [name], commands=commands, keys=[key], announce=True, again=True)
        return _versioned(self._checked(replies)[0])

    async def peek(self, name: str, at_least: int = 0) -> Versioned:
        marks = self.marks.at([name])
        key = marks.key("value", check_name(name))
        return _versioned(await marks.read(name, at_least, "HMGET", key, "value", "version"))

    async def write(
        self, credential: Credential | None, name: str, value: bytes, *, expect: int | None = None
    ) -> int:
        version = ("HGET", self.marks.at([name]).key("value", check_name(name)), "version")
        compared = [] if expect is None else [Compared(version, str(expect) if expect else None)]
        try:
            replies = await self._write(credential, {name: value}, compared)
        except Conflict:
            raise Conflict(f"{name}: not version {expect} any more") from None
        return int(replies[-1])

    async def write_many(self, credential: Credential | None, values: dict[str, bytes]) -> None:
        await self._write(credential, values)

    async def _write(
        self, credential: Credential | None, values: dict[str, bytes], compared: Sequence[Compared] = ()
    ) -> list[Any]:
        stamp = None if credential is None else one_stamp(credential, KIND)
        marks = await self.marks.of(list(values), stamp)
        commands: list[tuple[Word, ...]] = []
        for name, value in values.items():
            key = marks.key("value", check_name(name))
            commands.append(("HSET", key, "value", check_value(value)))
            commands.append(("HINCRBY", key, "version", 1))
        keys = [words[1] for words in commands[::2]]
        return self._checked(
            await marks.step(stamp, list(values), commands=commands, compared=compared, keys=keys)
        )

    def _checked(self, replies: list[Any]) -> list[Any]:
        if replies and isinstance(replies[-1], ErrorReply):
            raise self._channel.refused(replies[-1])
        return replies

    async def mark(self, name: str) -> Mark | None:
        return await self.marks.at([name]).mark(name)

    async def highest(self) -> int:
        return (await self.marks.tokens())[1]

    async def modes(self) -> dict[str, str]:
        return dict((await self.marks.home.config())[1].modes)

    async def set_mode(self, mode: str, pattern: str = "*") -> None:
        new = {check_pattern(pattern): str(Mode.parse(mode))}
        await self.marks.reconfigure(lambda config: replace(config, modes={**config.modes, **new}))

    async def unset_mode(self, pattern: str) -> bool:
        before = await self.marks.reconfigure(
            lambda config: replace(config, modes={p: m for p, m in config.modes.items() if p != pattern})
        )
        return pattern in before.modes

    async def adopt(self, realm: str) -> None:
        check_realm(realm)
        await self.marks.reconfigure(lambda config: replace(config, realm=realm))

    async def operate(self, work: Callable[[Operator], Awaitable[T]]) -> T:
        return await work(RedisOperator(self))

    async def close(self) -> None:
        self._channel.close()


def _versioned(fields: Sequence[Any]) -> Versioned:
    value, version = fields
    return Versioned(value, int(version or 0))


class RedisOperator(ConfigOperator):
    """What operators do with a guard in Redis."""

    def __init__(self, values: RedisValues) -> None:
        super().__init__(values, KIND)
        self._values = values
        self._marks = values.marks

    async def status(self, table: str | None = None, quiet_for: float = QUIET_SECONDS) -> DatabaseStatus:
        _, config = await self._marks.home.config()
        marks, highest = await self._marks.tokens()
        now = datetime.now(UTC)
        found = GuardStatus(
            self._values.url,
            "{name}",
            config.rule,
            mandatory=False,
            epoch=None,
            stages=tuple(Stage(pattern, mode) for pattern, mode in sorted(config.modes.items())),
            marks=marks,
            highest=highest,
            counts=tuple([count async for count in self._counts(now, quiet_for)]),
            wrong=(*await self._marks.late(), *await self._marks.strays()),
        )
        guards = (advised(found, now, quiet_for),)
        return DatabaseStatus(now, config.realm, guards, doubts=await self._marks.doubts())

    async def _counts(self, now: datetime, quiet_for: float) -> AsyncIterator[DecisionCount]:
        for kind, (count, last) in (await self._marks.counts()).items():
            verdict, ruling, mode = kind.split(" ")
            recent = count if (now - last).total_seconds() < quiet_for else 0
            yield DecisionCount(verdict, ruling, mode, count, recent, last)

    async def records(self, table: str | None = None, limit: int = 100) -> list[Decision]:
        found = []
        for at, record in await self._marks.records(limit):
            mark = mark_in(record["mark"]) if record["mark"] != "-" else None
            verdict, ruling = Verdict(record["verdict"]), Ruling(record["ruling"])
            made = Decision.about(
                at, self._values.url, record["name"], None, mark, verdict, ruling, record["mode"]
            )
            found.append(replace(made, stamp=record["stamp"] or None))
        return found
