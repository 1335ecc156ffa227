"""Receiving wake-ups: one watch stream per client, on which each waiter watches the one key directly ahead of it."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

from fenced.net.heartbeat import ANSWER_SECONDS
from fenced.stores.etcd.authority import keys
from fenced.stores.etcd.wire import messages
from fenced.stores.etcd.wire.cluster import EtcdWire
from fenced.stores.etcd.wire.connection import EtcdStream
from fenced.values.contracts import Runtime, Selector

OVER_MAX = 1000
"""After this many ended watches the stream is reopened: cancelling each of them would cost a message."""


OPEN_SECONDS = 1.5
REOPEN_SECONDS = 0.5
"""A stream is opened no more often: a member without a leader ends it at once. Meanwhile the waiters poll."""


class Target(NamedTuple):
    """The key whose deletion a waiter waits for, and the revision after the one in which it was seen."""

    key: bytes
    revision: int


class EtcdWakeups:
    """The first `next_wakeups` opens the stream. If it ends, the next one opens another and repeats every watch."""

    def __init__(self, wire: EtcdWire, runtime: Runtime) -> None:
        self._wire = wire
        self._runtime = runtime
        self.forked()

    def forked(self) -> None:
        """Start without a stream; a parent's stream is left as it is."""
        self._targets: dict[str, Target] = {}
        self._watches: dict[int, str] = {}
        self._watch_of: dict[str, int] = {}
        self._claims: set[int] = set()
        """Watches of claims: all claims of a name have one key, so it can be deleted more than once."""
        self._ids = itertools.count(1)
        self._over = 0
        self._woken: dict[str, None] = {}
        self._stream: EtcdStream | None = None
        self._selector: Selector | None = None
        self._interrupted = False
        self._closed = False
        self._waiting = False
        self._opens = 0.0

    @property
    def listening(self) -> bool:
        """True while a watch stream is open, so that a wake-up would be delivered."""
        return self._stream is not None

    def target(self, public: str) -> Target | None:
        return self._targets.get(public)

    async def watch(self, public: str, target: Target, until: float) -> None:
        """Wake this waiter when its target is deleted."""
        known = self._targets.get(public)
        if known is not None and known.key == target.key and public in self._watch_of:
            return
        self._targets[public] = target
        if (stream := self._stream) is not None:
            await self._begin(stream, public, target, until)
        elif self._waiting:
            # A `next_wakeups` may have begun without any target. It returns, and the next one opens a stream. It sets
            # `_waiting` before it reads the targets, so at least one of the two sees the other.
            self.interrupt()

    async def _begin(self, stream: EtcdStream, public: str, target: Target, until: float) -> None:
        watch = next(self._ids)
        self._watches.pop(self._watch_of.get(public, 0), None)
        self._watches[watch], self._watch_of[public] = public, watch
        if keys.is_claim(target.key):
            self._claims.add(watch)
        await stream.send(messages.watch_deletion(watch, target.key, target.revision), until)

    def forget(self, public: str) -> None:
        """This attempt waits no more: stop watching for it."""
        self._targets.pop(public, None)
        self._watches.pop(self._watch_of.pop(public, 0), None)

    async def next_wakeups(self, until: float) -> list[str]:
        # `next_wakeups` sets `_waiting` and then reads `_closed`; `close` sets `_closed` and then reads `_waiting`.
        # So at least one of the two sees the other, and the stream is closed.
        self._waiting = True
        try:
            return [] if self._closed else await self._wait(until)
        finally:
            self._waiting = False
            if self._closed:
                self._close_now()

    async def _wait(self, until: float) -> list[str]:
        # Made before the check below, so that a later `notify` finds a selector to wake.
        selector = self._selector = self._selector or self._runtime.selector()
        stream = self._stream
        if stream is not None and (stream.turn, stream.token) != (self._wire.turn, self._wire.token):
            self._drop()  # calls go to another member now; or the login token has changed, and no watch can be added
        if self._stream is not None:
            await self._beat(self._stream)
        now = self._runtime.now()
        if self._stream is None and self._targets and now >= self._opens:
            self._opens = now + REOPEN_SECONDS
            await self._open(selector, max(until, now + OPEN_SECONDS))
        while not self._woken and not self._interrupted:
            try:
                ready = await selector.wait(min(until, self._due()))
            except (OSError, ValueError):  # closed meanwhile
                break
            if ready is None:
                break
            for each in ready:
                assert isinstance(each, EtcdStream)
                await self._read(each, until)
        self._interrupted = False
        woken = list(self._woken)
        for public in woken:
            self._woken.pop(public, None)
        return woken

    def _due(self) -> float:
        """When the next call has something to do: send a heartbeat, or open a stream for those who wait."""
        if self._stream is not None:
            return self._stream.heartbeat.due
        return self._opens if self._targets else math.inf

    async def _beat(self, stream: EtcdStream) -> None:
        """Ping the stream if it has been silent for long, and drop it if no reply comes."""
        now = self._runtime.now()
        if now < stream.heartbeat.due:
            return
        if not stream.heartbeat.pinged:
            await stream.ping(now + ANSWER_SECONDS)
            return
        await self._read(stream, now)
        if self._stream is stream and stream.heartbeat.is_dead(now):
            self._drop()

    async def _open(self, selector: Selector, until: float) -> None:
        stream = await self._wire.stream(messages.WATCH, until)
        self._watches.clear()
        self._watch_of.clear()
        self._claims.clear()
        self._over = 0
        selector.add(stream.link, stream)
        # If `close` ran before this, it has woken the selector, and `next_wakeups` closes the stream.
        self._stream = stream
        for public, target in list(self._targets.items()):
            await self._begin(stream, public, target, until)

    async def _read(self, stream: EtcdStream, until: float) -> None:
        """Read replies from the stream. If it has ended, drop it; the next `next_wakeups` opens another."""
        for reply in await stream.receive(until):
            event = messages.watch_reply(reply)
            # A negative watch id means "create refused" and does not say which one: reopen the stream.
            if event.watch < 0 and event.canceled:
                self._wire.distrust(stream.token)
                stream.over = True
            if event.deleted and event.watch not in self._watches and event.watch in self._claims:
                self._claims.discard(event.watch)
                await stream.send(messages.watch_cancel(event.watch), until)
            self._dispatch(event)
        if stream.over or self._over >= OVER_MAX:
            self._drop()
            self._interrupted = True

    def _drop(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            if self._selector is not None:
                self._selector.remove(stream.link)
            stream.cancel()

    def _dispatch(self, reply: messages.WatchReply) -> None:
        if not reply.deleted and not reply.canceled:
            return
        # A watch that the server ends (its revision is compacted) sends no more: wake the waiter, so that it checks.
        public = self._watches.pop(reply.watch, None)
        self._over += 1
        if public is not None:
            self._watch_of.pop(public, None)
            self.notify(public)

    def notify(self, public: str) -> None:
        self._woken[public] = None
        self._wake()

    def interrupt(self) -> None:
        self._interrupted = True
        self._wake()

    def _wake(self) -> None:
        if self._selector is not None:
            self._selector.wake()

    def close(self) -> None:
        """Close the stream. If a `next_wakeups` is running, interrupt it: it uses the stream, so it closes it.

        Takes no lock; may be repeated.
        """
        self._closed = True
        if not self._waiting:
            self._close_now()
            return
        if (stream := self._stream) is not None:
            stream.interrupt()
        self.interrupt()

    def _close_now(self) -> None:
        """Called only while no `next_wakeups` is running."""
        stream, self._stream = self._stream, None
        selector, self._selector = self._selector, None
        if selector is not None:
            selector.close()
        if stream is not None:
            stream.cancel()
