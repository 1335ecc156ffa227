"""Client and AsyncClient: the same thin interface twice, over `fenced.core`, which makes every decision."""

from __future__ import annotations

import functools
import os
import socket
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal

from fenced.client import registry
from fenced.client.announcing import Announces, announcers
from fenced.client.contexts import AsyncLeaseContext, LeaseContext
from fenced.client.decorating import AsyncHeld, Held, HeldFunction, templated
from fenced.client.leases import AsyncLease, Lease
from fenced.core.acquiring import LeaseEngine, LeaseRequest
from fenced.core.renewing import Renewer
from fenced.errors import Misuse, shown
from fenced.events import Event
from fenced.runtime import forking
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.runtime.machine import program
from fenced.values import timing
from fenced.values.contracts import Authority, Colour, Runtime
from fenced.values.model import HeldBy, Holder, check_name
from fenced.values.timing import Seconds

if TYPE_CHECKING:
    from fenced.client.guarding import Fence
    from fenced.client.looking import SeenHolders
    from fenced.client.once import AsyncOnce, Once
    from fenced.client.values import AsyncValues, Values
    from fenced.runtime.aio import AioRuntime

Guarantee = Literal["strict", "best-effort"]


class ClientBase:
    """What both clients share: their address, and the engine that is made at first use.

    Client is generated from AsyncClient. So what the colours do differently is here, by `self._runtime.colour`.
    """

    _marks: Any = None
    """What `once` has opened."""
    _looked: SeenHolders | None = None
    """What `verify` has learned."""

    def __init__(
        self,
        url: str,
        *,
        namespace: str = "default",
        label: str | None = None,
        guarantee: Guarantee = "strict",
        patience: Seconds = timing.PATIENCE_SECONDS,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        """`patience`: how long after its `wait` a call still waits for the answer to a request that it has sent."""
        if guarantee not in ("strict", "best-effort"):
            raise Misuse(f"guarantee is 'strict' or 'best-effort', not {shown(guarantee)}")
        if label is not None and not (isinstance(label, str) and len(label) <= 200):
            raise Misuse(f"a label is a str of at most 200 characters, not {shown(label)}")
        self._namespace = check_name(namespace)
        self._label = label
        self._guarantee = guarantee
        self._patience = timing.check_patience(patience)
        self._on_event = on_event
        self._runtime = self._make_runtime()
        self._lock = threading.Lock()
        self._made_engine: LeaseEngine | None = None
        self._finalizer: weakref.finalize[..., Any] | None = None
        self._authority: Authority = registry.authority(url, self._runtime, self._namespace)
        self._given_url = url
        forking.register(self)

    def _make_runtime(self) -> Runtime:
        raise Misuse("use Client or AsyncClient")

    @property
    def url(self) -> str:
        """Where the authority is, without secrets."""
        return self._authority.url

    @property
    def colour(self) -> Colour:
        """`blocking` or `asyncio`."""
        return self._runtime.colour

    @property
    def _engine(self) -> LeaseEngine:
        engine = self._made_engine
        if engine is None:
            with self._lock:  # two threads that use the client first must not make two engines
                if self._made_engine is None:
                    self._made_engine = self._make_engine()
                engine = self._made_engine
        return engine

    @property
    def _seen(self) -> SeenHolders:
        from fenced.client.looking import SeenHolders

        with self._lock:  # two threads that verify first must not make two
            self._looked = self._looked or SeenHolders()
            return self._looked

    def _make_renewer(self) -> Renewer | None:
        """Threads, so that a body that blocks the event loop keeps its lease. None: the runtime's loops are threads."""
        if self._runtime.colour == "blocking":
            return None
        threads = BlockingRuntime()
        renews = registry.renewer(self._authority, self._given_url, threads, self._namespace)
        return Renewer(renews, threads, self._runtime, shared=renews is self._authority)

    def _make_engine(self) -> LeaseEngine:
        label = self._label if self._label is not None else program()
        holder = Holder(self._runtime.secret(), label, socket.gethostname(), os.getpid())
        engine = LeaseEngine(
            self._authority,
            self._runtime,
            holder,
            guarantee=self._guarantee,
            patience=self._patience,
            emit=self._on_event,
            renewer=self._make_renewer(),
        )
        # Threads and connections refer to the engine and never to the client, so the collector can free a client
        # that the program has dropped while they still run. Each lease refers to its client and keeps it alive.
        self._finalizer = weakref.finalize(self, _end_dropped_client, engine, repr(self))
        self._finalizer.atexit = False  # at exit nothing is sent; leases expire
        return engine

    def _detach_finalizer(self) -> None:
        """Do not warn: the client was closed, or belongs to the parent process."""
        if self._finalizer is not None:
            self._finalizer.detach()

    def _before_fork(self) -> None:
        self._authority.before_fork()
        if self._made_engine is not None:
            self._made_engine.renewer.before_fork()

    def _forked(self) -> None:
        """In a forked child: forget the parent's leases, threads and connections."""
        self._lock = threading.Lock()  # a thread of the parent may hold the inherited one
        self._looked = None  # and that of this one
        self._detach_finalizer()  # open connections belong to the parent
        if self._made_engine is not None:
            self._made_engine.forked()
            self._made_engine = None
        self._marks = None  # the parent's connections
        self._authority.forked()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r}, namespace={self._namespace!r})"


def _end_dropped_client(engine: LeaseEngine, who: str) -> None:
    """A client was collected without close(): stop its threads, close its connections, release no lease."""
    if engine.abandon():
        warnings.warn(
            f"unclosed {who}: its leases are no longer renewed; call close(), or use the client in a `with` block",
            ResourceWarning,
            stacklevel=2,
        )


class AsyncClient(ClientBase):
    """Takes leases from one authority, for asyncio. Belongs to the loop that first uses it."""

    _runtime: AioRuntime
    _marks: AsyncValues | None

    def _make_runtime(self) -> AioRuntime:
        from fenced.runtime.aio import AioRuntime

        return AioRuntime()

    async def acquire(
        self,
        *names: str,
        ttl: Seconds = timing.TTL_DEFAULT,
        wait: Seconds | None = None,
        max_hold: Seconds | None = None,
        lock_delay: Seconds = 0.0,
        at_least_for: Seconds = 0.0,
    ) -> AsyncLease:
        """Take one lease over all `names`; the caller releases it. NotGranted after `wait` seconds."""
        request = LeaseRequest.checked(names, ttl, wait, max_hold, lock_delay, at_least_for)
        return AsyncLease(await self._engine.acquire(request), self)

    def hold(
        self,
        name: str,
        *,
        ttl: Seconds = timing.TTL_DEFAULT,
        wait: Seconds | None = None,
        max_hold: Seconds | None = None,
        lock_delay: Seconds = 0.0,
        at_least_for: Seconds = 0.0,
        guards: Iterable[Announces] = (),
    ) -> AsyncLeaseContext[AsyncLease]:
        """`async with client.hold(name) as lease:` waits in a fair queue; the lease is renewed in the background.

        Raises NotGranted after `wait` seconds. Leaving the block releases the lease; LeaseLost if it was lost before.
        If the lease is lost, the body is cancelled.
        After a block that did not raise, nobody is granted the name until `at_least_for` seconds after the grant.
        """
        request = LeaseRequest.checked([name], ttl, wait, max_hold, lock_delay, at_least_for)
        return AsyncLeaseContext(self, request, announcers(guards))

    def hold_all(
        self,
        names: Iterable[str],
        *,
        ttl: Seconds = timing.TTL_DEFAULT,
        wait: Seconds | None = None,
        max_hold: Seconds | None = None,
        lock_delay: Seconds = 0.0,
        at_least_for: Seconds = 0.0,
        guards: Iterable[Announces] = (),
    ) -> AsyncLeaseContext[AsyncLease]:
        """Hold several names under one token: all or none, without deadlock or starvation."""
        request = LeaseRequest.checked(names, ttl, wait, max_hold, lock_delay, at_least_for)
        return AsyncLeaseContext(self, request, announcers(guards))

    def try_hold(
        self,
        name: str,
        *,
        ttl: Seconds = timing.TTL_DEFAULT,
        wait: Seconds | None = 0.0,
        max_hold: Seconds | None = None,
        lock_delay: Seconds = 0.0,
        at_least_for: Seconds = 0.0,
        guards: Iterable[Announces] = (),
    ) -> AsyncLeaseContext[AsyncLease | None]:
        """`async with client.try_hold(name) as lease:` where lease is None when it was not granted."""
        request = LeaseRequest.checked([name], ttl, wait, max_hold, lock_delay, at_least_for)
        return AsyncLeaseContext(self, request, announcers(guards), optional=True)

    def held(
        self,
        name: str,
        *,
        ttl: Seconds = timing.TTL_DEFAULT,
        wait: Seconds | None = None,
        max_hold: Seconds | None = None,
        lock_delay: Seconds = 0.0,
        at_least_for: Seconds = 0.0,
        guards: Iterable[Announces] = (),
    ) -> AsyncHeld[AsyncLease]:
        """A decorator: every call holds `name` and gets the lease as its first argument, a method after `self`.

        `held("stock/{sku}")` fills the field by the argument `sku` of each call.
        """
        template, request = templated(name, ttl, wait, max_hold, lock_delay, at_least_for)
        announced = announcers(guards)

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            held = HeldFunction(function, template, request, self._runtime.colour)

            @functools.wraps(function)
            async def call(*args: Any, **kwargs: Any) -> Any:
                asked = held.request(args, kwargs)
                context: AsyncLeaseContext[AsyncLease] = AsyncLeaseContext(self, asked, announced)
                async with context as lease:
                    return await function(*held.arguments(lease, args), **kwargs)

            call.__signature__ = held.signature  # type: ignore[attr-defined]
            return call

        return decorate

    def once(
        self,
        name: str,
        version: int,
        *,
        marks: AsyncValues | None = None,
        keep: Seconds | None = None,
        ttl: Seconds = timing.TTL_DEFAULT,
        wait: Seconds | None = None,
        covers: Iterable[str] = (),
    ) -> AsyncOnce:
        """`async with client.once("schema", version=7) as turn:` work that is done once, in the order of versions.

        `turn` is None if this version or a later one is done, else a lease that also `covers` what the work writes.
        Others wait, then skip. A block that raises leaves no mark. Marks are values in the authority's store (in SQLite
        a file beside it), or in `marks`. `keep`: forget the mark after so many seconds, for ids without end."""
        from fenced.client.once import AsyncOnce, marks_beside

        if marks is None:
            with self._lock:  # two threads that use the marks first must not open them twice
                if self._marks is None:
                    from fenced.client.values import AsyncValues

                    self._marks = AsyncValues(marks_beside(self._given_url))
                marks = self._marks
        return AsyncOnce(self, marks, name, version, keep, ttl, wait, covers)

    async def holder(self, name: str) -> HeldBy | None:
        """Who holds this name now, as the authority sees it; None: nobody. For people and programs that only look."""
        from fenced.client.looking import holder

        return await holder(self._engine, name)

    async def verify(self, fence: Fence | str, *names: str, max_age: Seconds = 0.0) -> None:
        """Ask whether the lease of this stamp, or of its text, still holds these names; none given: all of its own.

        For a receiver that keeps no marks. StaleToken if another lease holds one, LeaseLost if none does. When it
        returns, the lease was held a moment ago, and may end before you act: a guard is better. `max_age`: for so many
        seconds an answer is used again. A token lower than one that was seen is refused without asking.
        """
        from fenced.client.looking import current

        await current(self._engine, self._seen, fence, names, timing.check_need(max_age))

    def _forked(self) -> None:
        super()._forked()
        self._runtime.forked()

    async def close(self) -> None:
        """Stop renewing and disconnect. Leases still held are lost to this client and expire."""
        await self._engine.close()
        if self._marks is not None:
            await self._marks.close()
        self._runtime.close()
        self._detach_finalizer()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


# generated: the blocking twins of the asyncio classes above, by `python -m release.twins`


class Client(ClientBase):
    """Takes leases from one authority. Connects at first use; safe to share between threads."""

    _runtime: BlockingRuntime
    _marks: Values | None

    def _make_runtime(self) -> BlockingRuntime:
        from fenced.runtime.blocking import BlockingRuntime

        return BlockingRuntime()

    def acquire(
        self,
        *names: str,
        ttl: Seconds = timing.TTL_DEFAULT,
        wait: Seconds | None = None,
        max_hold: Seconds | None = None,
        lock_delay: Seconds = 0.0,
        at_least_for: Seconds = 0.0,
    ) -> Lease:
        """Take one lease over all `names`; the caller releases it. NotGranted after `wait` seconds."""
        request = LeaseRequest.checked(names, ttl, wait, max_hold, lock_delay, at_least_for)
        return Lease(step(self._engine.acquire(request)), self)

    def hold(
        self,
        name: str,
        *,
        ttl: Seconds = timing.TTL_DEFAULT,
        wait: Seconds | None = None,
        max_hold: Seconds | None = None,
        lock_delay: Seconds = 0.0,
        at_least_for: Seconds = 0.0,
        guards: Iterable[Announces] = (),
    ) -> LeaseContext[Lease]:
        """`with client.hold(name) as lease:` waits in a fair queue; the lease is renewed in the background.

        Raises NotGranted after `wait` seconds. Leaving the block releases the lease; LeaseLost if it was lost before.
        After a block that did not raise, nobody is granted the name until `at_least_for` seconds after the grant.
        """
        request = LeaseRequest.checked([name], ttl, wait, max_hold, lock_delay, at_least_for)
        return LeaseContext(self, request, announcers(guards))

    def hold_all(
        self,
        names: Iterable[str],
        *,
        ttl: Seconds = timing.TTL_DEFAULT,
        wait: Seconds | None = None,
        max_hold: Seconds | None = None,
        lock_delay: Seconds = 0.0,
        at_least_for: Seconds = 0.0,
        guards: Iterable[Announces] = (),
    ) -> LeaseContext[Lease]:
        """Hold several names under one token: all or none, without deadlock or starvation."""
        request = LeaseRequest.checked(names, ttl, wait, max_hold, lock_delay, at_least_for)
        return LeaseContext(self, request, announcers(guards))

    def try_hold(
        self,
        name: str,
        *,
        ttl: Seconds = timing.TTL_DEFAULT,
        wait: Seconds | None = 0.0,
        max_hold: Seconds | None = None,
        lock_delay: Seconds = 0.0,
        at_least_for: Seconds = 0.0,
        guards: Iterable[Announces] = (),
    ) -> LeaseContext[Lease | None]:
        """`with client.try_hold(name) as lease:` where lease is None when it was not granted."""
        request = LeaseRequest.checked([name], ttl, wait, max_hold, lock_delay, at_least_for)
        return LeaseContext(self, request, announcers(guards), optional=True)

    def held(
        self,
        name: str,
        *,
        ttl: Seconds = timing.TTL_DEFAULT,
        wait: Seconds | None = None,
        max_hold: Seconds | None = None,
        lock_delay: Seconds = 0.0,
        at_least_for: Seconds = 0.0,
        guards: Iterable[Announces] = (),
    ) -> Held[Lease]:
        """A decorator: every call holds `name` and gets the lease as its first argument, a method after `self`.

        `held("stock/{sku}")` fills the field by the argument `sku` of each call.
        """
        template, request = templated(name, ttl, wait, max_hold, lock_delay, at_least_for)
        announced = announcers(guards)

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            held = HeldFunction(function, template, request, self._runtime.colour)

            @functools.wraps(function)
            def call(*args: Any, **kwargs: Any) -> Any:
                asked = held.request(args, kwargs)
                context: LeaseContext[Lease] = LeaseContext(self, asked, announced)
                with context as lease:
                    return function(*held.arguments(lease, args), **kwargs)

            call.__signature__ = held.signature  # type: ignore[attr-defined]
            return call

        return decorate

    def once(
        self,
        name: str,
        version: int,
        *,
        marks: Values | None = None,
        keep: Seconds | None = None,
        ttl: Seconds = timing.TTL_DEFAULT,
        wait: Seconds | None = None,
        covers: Iterable[str] = (),
    ) -> Once:
        """`with client.once("schema", version=7) as turn:` work that is done once, in the order of versions.

        `turn` is None if this version or a later one is done, else a lease that also `covers` what the work writes.
        Others wait, then skip. A block that raises leaves no mark. Marks are values in the authority's store (in SQLite
        a file beside it), or in `marks`. `keep`: forget the mark after so many seconds, for ids without end."""
        from fenced.client.once import Once, marks_beside

        if marks is None:
            with self._lock:  # two threads that use the marks first must not open them twice
                if self._marks is None:
                    from fenced.client.values import Values

                    self._marks = Values(marks_beside(self._given_url))
                marks = self._marks
        return Once(self, marks, name, version, keep, ttl, wait, covers)

    def holder(self, name: str) -> HeldBy | None:
        """Who holds this name now, as the authority sees it; None: nobody. For people and programs that only look."""
        from fenced.client.looking import holder

        return step(holder(self._engine, name))

    def verify(self, fence: Fence | str, *names: str, max_age: Seconds = 0.0) -> None:
        """Ask whether the lease of this stamp, or of its text, still holds these names; none given: all of its own.

        For a receiver that keeps no marks. StaleToken if another lease holds one, LeaseLost if none does. When it
        returns, the lease was held a moment ago, and may end before you act: a guard is better. `max_age`: for so many
        seconds an answer is used again. A token lower than one that was seen is refused without asking.
        """
        from fenced.client.looking import current

        step(current(self._engine, self._seen, fence, names, timing.check_need(max_age)))

    def _forked(self) -> None:
        super()._forked()
        self._runtime.forked()

    def close(self) -> None:
        """Stop renewing and disconnect. Leases still held are lost to this client and expire."""
        step(self._engine.close())
        if self._marks is not None:
            self._marks.close()
        self._runtime.close()
        self._detach_finalizer()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


# end
