"""Waiters: their places in queues, and the loop that receives wake-ups for them."""

from __future__ import annotations

import math

from fenced.errors import FencedError
from fenced.values import timing
from fenced.values.contracts import Authority, Runtime, Task
from fenced.values.model import grant_id

EARLY_MAX = 1024
"""How many wake-ups are kept for attempts whose `Waiting` answer has not arrived yet."""
_ABSENT = object()


class QueueEntry:
    """One waiter's place in a queue. The keeper renews it; the keeper and the listener wake its waiter."""

    def __init__(self, runtime: Runtime, secret: str, ttl: float, jitter: float) -> None:
        self.secret = secret
        self.ttl = timing.waiter_ttl(ttl)
        self.wakeup = runtime.wakeup()
        self.renew_at = runtime.now() + timing.renew_after(self.ttl, jitter)
        self.check_at = math.inf
        self.last_reply = runtime.now()
        self.since = runtime.now()
        self.say_at = math.inf
        """When the program is told that it waits for long."""
        self.why = ""
        """Why it was not granted when it asked last."""
        self.woken = False

    @property
    def due(self) -> float:
        """When the keeper has to renew it."""
        return self.renew_at

    def asking(self) -> None:
        """Clear the wake-up before an ask is sent: one that arrives from now on means to ask again."""
        # One that arrives between these two lines leaves `woken` set, which the waiter reads before it waits.
        self.woken = False
        self.wakeup.clear()

    def wake(self) -> None:
        # `woken` first: a waiter that the flag wakes finds it.
        self.woken = True
        self.wakeup.set()


class Listener:
    """Receives wake-ups for this client's waiters. Its loop waits while there are none."""

    def __init__(self, authority: Authority, runtime: Runtime) -> None:
        self._authority = authority
        self._runtime = runtime
        self._entries: dict[str, QueueEntry] = {}
        self._early: dict[str, object] = {}
        self._kick = runtime.wakeup()
        self._task: Task | None = None
        self._starting = runtime.lock()
        self._closed = False

    def expect(self, entry: QueueEntry) -> None:
        """Pass wake-ups on to `entry`, including one that arrived before the answer to its ask."""
        public = grant_id(entry.secret)
        # Stored first, then `_early` is looked up; the loop does the reverse. So one of the two sees a wake-up that
        # arrives in between.
        self._entries[public] = entry
        if self._early.pop(public, _ABSENT) is not _ABSENT:
            entry.wake()
        if self._task is None:
            with self._starting:  # two first waiters at the same time must not start two loops
                if self._task is None:
                    self._task = self._runtime.spawn(self._run, "fenced-listener")
        self._kick.set()

    def forget(self, entry: QueueEntry) -> None:
        # A wake-up that comes later is kept as an early one, for nobody, until EARLY_MAX others have come.
        self._entries.pop(grant_id(entry.secret), None)

    def stop(self) -> None:
        self._closed = True
        self._kick.set()

    async def close(self, until: float) -> None:
        self.stop()
        if (task := self._task) is not None:
            await task.join(until)

    async def _run(self) -> None:
        try:
            await self._listen()
        finally:
            # An entry that is expected while the loop ends by an error may get no listener: its waiter polls.
            self._task = None

    async def _listen(self) -> None:
        while not self._closed:
            if not self._entries:
                self._kick.clear()
                # Looked at again after the flag was cleared: `expect` and `stop` set the flag after their change, so
                # a change that is not seen here leaves the flag set, and the wait returns at once.
                if not self._entries and not self._closed:
                    await self._runtime.wait(self._kick, None)
                continue
            try:
                woken = await self._authority.next_wakeups(self._runtime.now() + 0.5)
            except FencedError:
                # A wake-up is a hint: without one the waiters poll, at the latest when the keeper wakes them.
                self._kick.clear()
                await self._runtime.wait(self._kick, self._runtime.now() + 0.5)
                continue
            for public in woken:
                if entry := self._entries.get(public):
                    entry.wake()
                elif public:
                    self._early[public] = None
                    if entry := self._entries.get(public):  # `expect` ran in between
                        entry.wake()
            while len(self._early) > EARLY_MAX:
                del self._early[next(iter(self._early))]
