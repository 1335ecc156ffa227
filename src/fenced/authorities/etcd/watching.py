"""Hearing wake-ups: one watch stream per client, on which each waiter watches the one key that is directly ahead."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from fenced.authorities.etcd import keys, messages
from fenced.authorities.etcd.ends import Stream
from fenced.authorities.etcd.wire import Wire
from fenced.contracts import Runtime

OVER_MAX = 1000
"""After so many watches that are over a stream is opened anew: to end each of them costs a message."""


class Target(NamedTuple):
    """The key that a waiter waits for to go, and the revision after the one in which it was seen."""

    key: bytes
    revision: int


class Ears:
    """Opened by the first who hears. A stream that ends is opened again, and resumes where each watch began."""

    def __init__(self, wire: Wire, runtime: Runtime) -> None:
        self._wire = wire
        self._runtime = runtime
        self.forked()

    def forked(self) -> None:
        """Nobody listens yet; a parent's stream is left as it is."""
        self._targets: dict[str, Target] = {}
        self._watches: dict[int, str] = {}
        self._watch_of: dict[str, int] = {}
        self._claims: set[int] = set()
        """Watches of keys that go more than once."""
        self._ids = itertools.count(1)
        self._over = 0
        self._heard: dict[str, None] = {}
        self._stream: Stream | None = None
        self._wakeup = self._runtime.wakeup()
        self._closed = False

    @property
    def listening(self) -> bool:
        """Whether somebody hears what a waiter is told."""
        return self._stream is not None

    def target(self, public: str) -> Target | None:
        return self._targets.get(public)

    async def watch(self, public: str, target: Target) -> None:
        """Tell this waiter when its target goes."""
        known = self._targets.get(public)
        if known is not None and known.key == target.key and public in self._watch_of:
            return
        self._targets[public] = target
        if (stream := self._stream) is not None:
            await self._begin(stream, public, target)

    async def _begin(self, stream: Stream, public: str, target: Target) -> None:
        watch = next(self._ids)
        self._watches.pop(self._watch_of.get(public, 0), None)
        self._watches[watch], self._watch_of[public] = public, watch
        if keys.is_claim(target.key):
            self._claims.add(watch)
        await stream.send(messages.watch_deletion(watch, target.key, target.revision))

    def forget(self, public: str) -> None:
        """This one waits no more."""
        self._targets.pop(public, None)
        self._watches.pop(self._watch_of.pop(public, 0), None)

    async def hear(self, until: float) -> list[str]:
        if self._stream is None and self._targets and not self._closed:
            await self._open(until)
        if not self._heard:
            await self._runtime.wait(self._wakeup, until)
        self._wakeup.clear()
        heard = list(self._heard)
        for public in heard:
            self._heard.pop(public, None)
        return heard

    async def _open(self, until: float) -> None:
        stream = await self._wire.stream(messages.WATCH, until)
        self._watches.clear()
        self._watch_of.clear()
        self._claims.clear()
        self._over = 0
        self._stream = stream
        self._runtime.spawn(lambda: self._pump(stream), "fenced-watch")
        for public, target in list(self._targets.items()):
            await self._begin(stream, public, target)

    async def _pump(self, stream: Stream) -> None:
        """Read one stream to its end."""
        try:
            while self._over < OVER_MAX and (reply := await stream.read()) is not None:
                told = messages.watch_reply(reply)
                if told.deleted and told.watch not in self._watches and told.watch in self._claims:
                    self._claims.discard(told.watch)
                    await stream.send(messages.watch_cancel(told.watch))
                self._told(told)
        finally:
            stream.cancel()
            if self._stream is stream:
                self._stream = None
            self._wakeup.set()  # whoever hears opens another one

    def _told(self, reply: messages.WatchReply) -> None:
        if not reply.deleted and not reply.canceled:
            return
        # A watch that the server ends (its revision is compacted) tells no more: the waiter has to look.
        public = self._watches.pop(reply.watch, None)
        self._over += 1
        if public is not None:
            self._watch_of.pop(public, None)
            self.tell(public)

    def tell(self, public: str) -> None:
        self._heard[public] = None
        self._wakeup.set()

    def nudge(self) -> None:
        self._wakeup.set()

    def close(self) -> None:
        self._closed = True
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.cancel()
        self._wakeup.set()
