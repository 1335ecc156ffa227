"""`client.once(name, version)`: a piece of work that is done once, whatever the number of machines.

A lease, and a mark behind a guard. The mark is read without a lease, so skipping costs one read; then under the lease,
which announces it: from then on no earlier runner can write the mark. It is written when the block ends without an
exception, and only then the lease is released. A runner that dies leaves no mark, and the next one runs the work. One
that was stopped for too long is refused when it writes its mark.

So the work is done at least once, and marked at most once. Stamp what it writes with `turn`, to refuse late writes: its
lease covers the names of that, too (`covers`).
"""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from fenced.client import registry
from fenced.client.contexts import AsyncLeaseContext, LeaseContext
from fenced.client.faces import AsyncClient, Client
from fenced.client.leases import AsyncLease, Lease
from fenced.client.values import AsyncValues, Values
from fenced.core.acquiring import LeaseRequest
from fenced.errors import Misuse, shown
from fenced.runtime.clocks import wall_time
from fenced.runtime.machine import program
from fenced.values import ticks
from fenced.values.ticks import DoneWork
from fenced.values.timing import Seconds

if TYPE_CHECKING:
    from fenced.values.contracts import Versioned


def marks_beside(url: str) -> str:
    """Where the marks of a client of this authority are by default: in the same store; beside an SQLite file."""
    scheme = url.partition(":")[0]
    scheme = registry.ALIASES.get(scheme, scheme)
    if scheme == "sqlite":
        return f"{url}.once"  # leases and values may not share a file
    if scheme in registry.BUILT_IN["fenced.guards"]:
        return url
    raise Misuse(f"{shown(scheme)} has no values; say where the marks are: marks='postgresql://...'")


class _Once:
    """What both colours share."""

    def __init__(
        self,
        name: str,
        version: int,
        keep: Seconds | None,
        ttl: Seconds,
        wait: Seconds | None,
        covers: Iterable[str] = (),
    ) -> None:
        self._version = ticks.check_version(version)
        self._keep = ticks.check_keep(keep)
        self._place = ticks.marked(name, self._keep)
        if isinstance(covers, str):
            raise Misuse(f"covers is a list of names: covers=[{shown(covers)}]")
        self._request = LeaseRequest.checked([self._place.name, *covers], ttl, wait)
        self._found: dict[str, DoneWork] = {}

    def _is_done(self, value: Versioned) -> bool:
        """Whether this version or a later one is done: a program that was rolled back does not run an older one."""
        self._found = ticks.read(value.value)
        done = self._found.get(self._place.key)
        return done is not None and done.version >= self._version

    def _mark(self, token: int) -> bytes:
        now = wall_time()  # for people, and for the end of a mark that ends; it orders nothing
        until = 0.0 if self._keep is None else now + self._keep
        return ticks.written(
            self._found, self._place.key, DoneWork(self._version, token, now, program(), until)
        )


class AsyncOnce(_Once):
    """Returned by `AsyncClient.once`; can be entered once. Entering returns the lease to work under, or None."""

    _turn: AsyncLease | None = None

    def __init__(self, client: AsyncClient, marks: AsyncValues, *options: Any) -> None:
        super().__init__(*options)
        self._marks: AsyncValues = marks
        self._hold: AsyncLeaseContext[AsyncLease] = AsyncLeaseContext(client, self._request, ())

    async def __aenter__(self) -> AsyncLease | None:
        if self._is_done(await self._marks.peek(self._place.name)):
            return None
        lease = await self._hold.__aenter__()
        try:
            # Whoever has waited finds the mark as a rule, and a mark only rises: a look without a stamp is enough. Else
            # it announces before it reads: after that no earlier runner can write the mark that is read here.
            name = self._place.name
            if not self._is_done(await self._marks.peek(name)) and not self._is_done(
                await self._marks.read(lease, name)
            ):
                self._turn = lease
                return lease
        except BaseException as error:
            await self._hold.__aexit__(type(error), error, error.__traceback__)
            raise
        await self._hold.__aexit__(None, None, None)
        return None

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        lease = self._turn
        if lease is None:
            return
        try:
            if exc is None:  # before the release: the next runner must find it
                await self._marks.write(lease, self._place.name, self._mark(lease.token))
        except BaseException as error:
            await self._hold.__aexit__(type(error), error, error.__traceback__)
            raise
        await self._hold.__aexit__(kind, exc, trace)


# generated: the blocking twins of the asyncio classes above, by `python -m release.twins`


class Once(_Once):
    """Returned by `Client.once`; can be entered once. Entering returns the lease to work under, or None."""

    _turn: Lease | None = None

    def __init__(self, client: Client, marks: Values, *options: Any) -> None:
        super().__init__(*options)
        self._marks: Values = marks
        self._hold: LeaseContext[Lease] = LeaseContext(client, self._request, ())

    def __enter__(self) -> Lease | None:
        if self._is_done(self._marks.peek(self._place.name)):
            return None
        lease = self._hold.__enter__()
        try:
            # Whoever has waited finds the mark as a rule, and a mark only rises: a look without a stamp is enough. Else
            # it announces before it reads: after that no earlier runner can write the mark that is read here.
            name = self._place.name
            if not self._is_done(self._marks.peek(name)) and not self._is_done(self._marks.read(lease, name)):
                self._turn = lease
                return lease
        except BaseException as error:
            self._hold.__exit__(type(error), error, error.__traceback__)
            raise
        self._hold.__exit__(None, None, None)
        return None

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        lease = self._turn
        if lease is None:
            return
        try:
            if exc is None:  # before the release: the next runner must find it
                self._marks.write(lease, self._place.name, self._mark(lease.token))
        except BaseException as error:
            self._hold.__exit__(type(error), error, error.__traceback__)
            raise
        self._hold.__exit__(kind, exc, trace)


# end


def done(marks: Values, name: str, keep: Seconds | None = None) -> DoneWork | None:
    """The newest version of this work that is done; None: none is."""
    place = ticks.marked(name, ticks.check_keep(keep))
    return ticks.read(marks.peek(place.name).value).get(place.key)
