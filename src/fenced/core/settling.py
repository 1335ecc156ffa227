"""The settler: ends at the authority what was given up here, until the authority has heard of it.

A release or a withdrawal can fail, or be cancelled or interrupted, while the authority still counts the attempt as
held or waiting. The attempt is remembered before the authority is told. If its owner does not get it ended, a loop
of its own repeats the withdrawal, separately from the keeper: a withdrawal that hangs delays no renewal.
"""

from __future__ import annotations

import math

from fenced import timing
from fenced.contracts import Authority, Runtime, Task
from fenced.errors import FencedError, Indeterminate, Unavailable

OWN_TRY_SECONDS = timing.CALL_SECONDS + 1.0
"""How long an owner that ends an attempt itself is left alone with it."""


class GivenUp:
    """An attempt that its owner wants to end, and of which the authority may not know that yet."""

    __slots__ = ("forget_at", "retry_at", "secret", "ttl")

    def __init__(self, secret: str, ttl: float, now: float) -> None:
        self.secret = secret
        self.ttl = ttl
        self.retry_at = now + OWN_TRY_SECONDS
        self.forget_at = self.retry_at + timing.repeat_for(ttl)


class Settler:
    """Remembers what was given up. Its loop runs only while something has to be repeated."""

    def __init__(self, authority: Authority, runtime: Runtime) -> None:
        self._authority = authority
        self._runtime = runtime
        self._given_up: dict[str, GivenUp] = {}
        self._kick = runtime.wakeup()
        self._task: Task | None = None
        self._starting = runtime.lock()
        self._closed = False

    def give_up(self, secret: str, ttl: float) -> GivenUp:
        """Remember that this attempt has to end; its owner tries that itself now."""
        given_up = self._given_up[secret] = GivenUp(secret, ttl, self._runtime.now())
        return given_up

    def settled(self, given_up: GivenUp) -> None:
        """The authority has answered."""
        self._given_up.pop(given_up.secret, None)

    def hurry(self, given_up: GivenUp) -> None:
        """Its owner could not end it: the loop tries now, and again until it is settled or would have expired."""
        given_up.retry_at = self._runtime.now()
        self._start()

    def look(self) -> None:
        """Start the loop for an attempt whose owner was interrupted before it could say `hurry`."""
        if self._given_up and self._task is None and self._next_due() <= self._runtime.now():
            self._start()

    def _start(self) -> None:
        if self._closed:
            return
        # The loop ends under the same lock and only if nothing is left, so an attempt that is given up at that
        # moment is either seen by it or starts the next one.
        with self._starting:
            if self._task is None:
                self._task = self._runtime.spawn(self._run, "fenced-settler")
        self._kick.set()

    async def close(self, until: float) -> None:
        """End the loop. What is not settled yet is tried once more, until then."""
        self.stop()
        if (task := self._task) is not None:
            await task.join(until)
        for given_up in list(self._given_up.values()):
            if not await self._try(given_up, until):
                return

    def stop(self) -> None:
        """End the loop, and try nothing more."""
        self._closed = True
        self._kick.set()

    async def _run(self) -> None:
        try:
            while True:
                with self._starting:
                    if self._closed or not self._given_up:
                        self._task = None
                        return
                await self._runtime.wait(
                    self._kick, min(self._next_due(), self._runtime.now() + OWN_TRY_SECONDS)
                )
                self._kick.clear()
                await self._round()
        except BaseException:  # the loop of the program ends, for one
            self._task = None
            raise

    def _next_due(self) -> float:
        return min((given_up.retry_at for given_up in list(self._given_up.values())), default=math.inf)

    async def _round(self) -> None:
        """The first that gets no answer ends the round: the others would wait for the same silent server."""
        for given_up in list(self._given_up.values()):
            now = self._runtime.now()
            if now >= given_up.forget_at:
                self.settled(given_up)  # it has ended by itself
            elif self._closed or given_up.retry_at > now:
                continue
            elif not await self._try(given_up, now + timing.CALL_SECONDS):
                return

    async def _try(self, given_up: GivenUp, until: float) -> bool:
        """Withdraw it, whatever became of it; whether the authority has answered."""
        try:
            await self._authority.withdraw(given_up.secret, until)
        except FencedError as error:
            given_up.retry_at = self._runtime.now() + timing.retry_after(given_up.ttl)
            return not isinstance(error, Unavailable | Indeterminate)
        self.settled(given_up)
        return True
