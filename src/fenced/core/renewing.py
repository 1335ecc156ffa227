"""Where renewals run: an authority, and the runtime of the loops that use it.

A blocking client renews through its own authority, in threads. An asyncio client has a second object for it, its
renewer: the same authority under the blocking runtime. So the keeper and the settler are threads there, too, and a body
that blocks the event loop delays no renewal.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fenced.core.watching import LoopWatch
from fenced.values.contracts import Authority, Runtime, Task

JOIN_SECONDS = 10.0


class OtherStore(Exception):
    """The renewer has found another realm than its client: at this address there is another store by now."""


class Renewer:
    """The authority of the keeper and the settler, and the runtime in which their loops run."""

    def __init__(
        self,
        authority: Authority,
        runtime: Runtime,
        caller: Runtime | None = None,
        *,
        shared: bool = False,
    ) -> None:
        """`caller`: the runtime of the client, if it is another one.

        `shared`: the authority is the client's. Otherwise it is opened and closed here, if there is a caller.
        """
        self.authority = authority
        self.runtime = runtime
        self.realm = ""
        """The realm that the client has opened."""
        self._caller = caller
        self._owned = caller is not None and not shared
        self.ready = not self._owned
        """Whether it may be used: its authority is open."""
        self._used = False

    async def open(self, until: float) -> None:
        """Open the authority: at the first renewal, because most leases are released before."""
        # The keeper and the settler may both get here: an authority may be opened again.
        self._used = True
        standing = await self.authority.open(create=False, until=until)
        if standing.realm != self.realm:
            raise OtherStore(f"{self.authority.url} is realm {standing.realm}, and was {self.realm}")
        self.ready = True

    def watch(self) -> LoopWatch | None:
        """Called by the client's caller: a watch over its event loop. None: it has none, or the keeper runs in it."""
        pulse = None if self._caller is None else self._caller.pulse()
        return None if pulse is None else LoopWatch(pulse, self.runtime.now)

    def spawn(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> Task:
        """Start a loop. The client's caller can wait for its end."""
        return (
            self.runtime.spawn(work, name)
            if self._caller is None
            else _JoinedElsewhere(self.runtime, self._caller, work, name)
        )

    async def close(self, until: float) -> None:
        """Close the authority if it is the renewer's. The caller waits at most until `until`."""
        if self._owned and self._used:
            await self.spawn(self.authority.close, "fenced-close").join(until)

    def abandon(self) -> None:
        """As `Authority.abandon`, if the authority is the renewer's."""
        if self._owned:
            self.authority.abandon()

    def before_fork(self) -> None:
        if self._owned:
            self.authority.before_fork()

    def forked(self) -> None:
        if self._owned:
            self.authority.forked()


class _JoinedElsewhere:
    """A loop of one runtime whose end another runtime waits for: joining a thread would block an event loop."""

    def __init__(
        self, runtime: Runtime, caller: Runtime, work: Callable[[], Coroutine[Any, Any, None]], name: str
    ) -> None:
        self._caller = caller
        self._ended = ended = caller.wakeup()  # any thread may set it

        async def run() -> None:
            try:
                await work()
            finally:
                ended.set()

        runtime.spawn(run, name)

    async def join(self, until: float | None = None) -> None:
        limit = self._caller.now() + JOIN_SECONDS if until is None else until
        await self._caller.wait(self._ended, limit)
