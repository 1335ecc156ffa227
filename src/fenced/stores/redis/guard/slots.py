"""The marks of a guard: all in one slot, or those of each name in the slot of a cluster that the name is in.

A script runs in one slot, so each slot has marks, records and a copy of the configuration. The guard's own slot, that
of its tag, has the original, and the list of the slots in use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from functools import cache
from typing import Any

from fenced.errors import Contended
from fenced.guards.cells import Config
from fenced.stores.redis.guard.marks import TRIES, MarkOptions, RedisChannel, RedisMarks, Word, version_in
from fenced.stores.redis.guard.scripts import COPY, REGISTER, GuardScript
from fenced.stores.redis.guard.strays import strays
from fenced.stores.redis.wire.finding import SLOTS, slot_of
from fenced.stores.redis.wire.resp import ErrorReply
from fenced.values.decision import Verdict, judge
from fenced.values.model import Stamp

Record = tuple[datetime, dict[str, str]]


@cache
def _tags() -> list[str]:
    """For each slot the lowest number whose digits are in it."""
    found: dict[int, str] = {}
    number = 0
    while len(found) < SLOTS:
        found.setdefault(slot_of(str(number)), str(number))
        number += 1
    return [found[slot] for slot in range(SLOTS)]


class RedisMarksBySlot:
    """The marks of a guard on one client or address. Threads and tasks may share it."""

    def __init__(self, channel: RedisChannel, options: MarkOptions) -> None:
        self.home = RedisMarks(channel, options, options.prefix, options.header)
        """The marks of the guard's own slot, which has the configuration; without `name` it has all marks, too."""
        self.channel = channel
        self._options = options
        self._opened: dict[str, RedisMarks] = {}
        """By the beginning of their keys."""

    async def open(self) -> RedisMarks:
        """Check the server and create the configuration, unless that was done before."""
        prefix = self._options.prefix
        if prefix not in self._opened:
            await self.home.open()
            self._opened[prefix] = self.home
        return self.home

    def has_announced(self, grant: str, names: Sequence[str]) -> bool:
        """Whether the marks of these names were raised for this lease before, on this client."""
        seen = self.home.seen  # which all slots share
        return all(name in seen and seen[name][2] == grant for name in names)

    def groups(self, names: Sequence[str]) -> list[list[str]]:
        """The names, those of one slot together."""
        if self._options.name is None:
            return [list(names)]
        found: dict[str, list[str]] = {}
        for name in names:
            found.setdefault(self.prefix_of([name]), []).append(name)
        return list(found.values())

    def prefix_of(self, names: Sequence[str]) -> str:
        """With which the keys of these names begin. Unsupported if they are in several slots."""
        if self._options.name is None:
            return self._options.prefix
        return self._slot_prefix(self._options.slot_of_names(names))

    def _slot_prefix(self, slot: int) -> str:
        return f"fenced:{{{_tags()[slot]}}}/{self._options.tag}:"

    def at(self, names: Sequence[str]) -> RedisMarks:
        """The marks of these names, for looking: it is not opened."""
        return self.home if self._options.name is None else self._slot(self.prefix_of(names))

    async def of(self, names: Sequence[str], stamp: Stamp | None) -> RedisMarks:
        """The marks of these names, opened."""
        if self._options.name is None:
            return self._opened.get(self._options.prefix) or await self.open()
        prefix = self.prefix_of(names)
        marks = self._opened.get(prefix)
        if marks is None or (stamp is not None and _trusts_nobody(marks)):
            marks = await self._open_slot(prefix, names, stamp)
        return marks

    async def _open_slot(self, prefix: str, names: Sequence[str], stamp: Stamp | None) -> RedisMarks:
        home = await self.open()
        marks = self._slot(prefix)
        marks.seen = home.seen  # one limit for all slots
        await marks.check_server()
        blob = await self._registered(home, slot_of(prefix))
        if stamp is not None and home.unpacked(blob).realm is None and _is_sound(stamp, names):
            # All slots trust the same authority: the guard's own slot decides which.
            await home.reconfigure(lambda config: replace(config, realm=config.realm or stamp.realm))
            blob, _ = await home.config()
        await self._copy(blob, marks)
        await marks.config()
        self._opened[prefix] = marks
        return marks

    async def _registered(self, home: RedisMarks, slot: int) -> bytes:
        """Note that the slot is in use; returns the configuration."""
        keys, confirm = [home.key("config"), home.key("slots")], home.replicated
        reply = await self._run(REGISTER, keys, [slot, int(confirm)], confirm=confirm)
        return reply if isinstance(reply, bytes) else str(reply).encode()

    async def _copy(self, blob: bytes, marks: RedisMarks) -> bool:
        """Give a slot this configuration of the guard; False if it has this version or a later one."""
        keys, own = [marks.key("config"), marks.key("tokens")], blob.partition(b"\n")[2]
        return bool(await self._run(COPY, keys, [own, marks.key("mark:")]))

    async def _run(
        self, script: GuardScript, keys: Sequence[bytes], arguments: Sequence[Word], confirm: bool = False
    ) -> Any:
        reply = await self.channel.run(script, keys, arguments, again=True, confirm=confirm)
        if isinstance(reply, ErrorReply):
            raise self.channel.refused(reply)
        return reply

    def _slot(self, prefix: str) -> RedisMarks:
        return self._opened.get(prefix) or RedisMarks(self.channel, self._options, prefix, None)

    # What operators do.

    async def slots(self) -> list[RedisMarks]:
        """The slots that have marks."""
        home = self.home
        if self._options.name is None:
            return [home]
        return [self._slot(self._slot_prefix(slot)) for slot in sorted(await home.slots())]

    async def reconfigure(self, change: Callable[[Config], Config]) -> Config:
        """Change the configuration in every slot; returns the previous one. Repeating it completes one that failed."""
        home = self.home
        before = await home.reconfigure(change)
        if self._options.name is None:
            return before
        for _ in range(TRIES):
            blob, _ = await home.config()
            ahead = max([await self._ahead_of(blob, marks) for marks in await self.slots()], default=0)
            if not ahead:
                return before
            # A promotion has lost changes here that slots have. (If another operator was faster, nothing happens.)
            await home.renumber(blob, ahead + 1)
        raise Contended(f"{self.channel.where}: others changed the configuration {TRIES} times; try again")

    async def _ahead_of(self, blob: bytes, marks: RedisMarks) -> int:
        """Give a slot this configuration; returns the version of its own, if that is another one and not earlier."""
        if await self._copy(blob, marks):
            return 0
        stored, _ = await marks.stored_config()
        return 0 if stored == blob.partition(b"\n")[2] else version_in(stored)

    async def tokens(self) -> tuple[int, int]:
        """How many names have a mark, and the highest token among them."""
        await self.home.config()  # Misconfigured where there is no guard
        found = [await marks.tokens() for marks in await self.slots()]
        return sum(count for count, _ in found), max((highest for _, highest in found), default=0)

    async def counts(self) -> dict[str, tuple[int, datetime]]:
        """How many decisions there were of each "verdict ruling mode", and when the last one was."""
        found: dict[str, tuple[int, datetime]] = {}
        for marks in await self.slots():
            for kind, (number, last) in (await marks.counts()).items():
                before, earlier = found.get(kind, (0, last))
                found[kind] = before + number, max(last, earlier)
        return found

    async def records(self, limit: int) -> list[Record]:
        """The newest records, oldest first."""
        await self.home.config()  # Misconfigured where there is no guard
        found: list[Record] = []
        for marks in await self.slots():
            found += await marks.records(limit)
        return sorted(found, key=lambda record: record[0])[-limit:]

    async def doubts(self) -> tuple[str, ...]:
        """How marks could be lost by the server's settings, as they are now."""
        return await self.home.doubts()

    async def strays(self) -> tuple[str, ...]:
        """What was written without the guard, one sentence each."""
        return tuple([says for marks in await self.slots() for says in await strays(marks)])

    async def late(self) -> tuple[str, ...]:
        """Slots that missed a change, counted in one sentence."""
        if self._options.name is None:
            return ()
        _, wanted = await self.home.config()
        late = 0
        for marks in await self.slots():
            _, config = await marks.stored_config()
            # A slot that no lease has used yet may trust nobody.
            late += config is not None and replace(config, realm=config.realm or wanted.realm) != wanted
        return (f"slots that have not got the last change: {late}; repeat it",) if late else ()


def _trusts_nobody(marks: RedisMarks) -> bool:
    return marks.known is not None and marks.known[1].realm is None


def _is_sound(stamp: Stamp, names: Sequence[str]) -> bool:
    """Whether nothing is wrong with the stamp itself, for one of the names at least."""
    verdicts = (judge(None, stamp, name=name, rule="retry", realm=None).verdict for name in names)
    return any(verdict is Verdict.ADMIT for verdict in verdicts)
