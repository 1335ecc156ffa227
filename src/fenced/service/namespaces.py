"""The namespaces of one instance: for each of them the authority objects, and the requests that are held."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from fenced.errors import FencedError, Misconfigured, Unavailable
from fenced.runtime.aio import AioRuntime
from fenced.runtime.logs import OutageLog
from fenced.service.access import EVERYBODY, Principal
from fenced.service.limits import Limits
from fenced.service.operations import GroupedWork
from fenced.service.replies import NotAdmitted, plain
from fenced.values.contracts import Authority, Runtime
from fenced.values.model import BatchAnswer, BatchOperation, NameView, Standing, check_name

NAMESPACES_MAX = 256
SURVEY_PAGE = 250
LISTEN_SECONDS = 30.0
RETRY_SECONDS = 1.0
CLOSE_SECONDS = 5.0

OWN_MEMORY = (
    "over this store only the instance of the service that ended an attempt remembers its end: a late copy of an ask "
    "that reaches another instance, or the same one after a restart, is granted again, above every earlier token, "
    "until its ttl. Let each client stay with one instance, or take a store without the trait own-memory"
)
"""What a client should know about a service before an authority with that trait, which is ZooKeeper."""

log = logging.getLogger("fenced.service")

MakeAuthority = Callable[[Runtime, str], Authority]
"""An authority object of the store, for a runtime and a namespace, not yet opened."""
NamespaceAnswered = Callable[[str, Sequence[BatchOperation], Sequence[BatchAnswer], float], None]
"""Called with the name of a namespace, operations, their results, and how many seconds they took."""


class AnotherStore(Misconfigured):
    """This instance serves another store than the one that the client means."""


class HeldRequest:
    """A request that is answered later."""

    __slots__ = ("_held", "_public", "_then", "_turn", "by")

    def __init__(self, held: HeldRequests, public: str, by: str) -> None:
        self.by = by
        self._held = held
        self._public = public
        self._turn: bool | None = None
        self._then: Callable[[bool], None] | None = None

    def wake(self, turn: bool) -> None:
        """It should be answered now. `turn`: because it may be the client's turn."""
        # Kept if nobody waits for it yet: `then`, which comes after the ask was answered, finds it.
        if self._turn is None:
            self._turn = turn
            if self._then is not None:
                self._then(turn)

    def then(self, answer: Callable[[bool], None]) -> None:
        """Call `answer` when it should be answered, at once if that is so already."""
        self._then = answer
        if self._turn is not None:
            answer(self._turn)

    def close(self) -> None:
        self._then = None
        self._held.remove(self._public, self)


class HeldRequests:
    """The held requests of a namespace by the public id of their attempt. Used in the loop's thread only."""

    def __init__(self) -> None:
        self._requests: dict[str, dict[HeldRequest, None]] = {}
        self.count = 0
        self.by: Counter[str] = Counter()
        """How many each client has."""

    def add(self, public: str, by: str = "") -> HeldRequest:
        """To be called before the attempt asks, so that no wake-up is missed."""
        made = HeldRequest(self, public, by)
        self._requests.setdefault(public, {})[made] = None
        self.count += 1
        self.by[by] += 1
        return made

    def remove(self, public: str, request: HeldRequest) -> None:
        requests = self._requests.get(public, {})
        if request in requests:
            del requests[request]
            self.count -= 1
            self.by[request.by] -= 1
            if not requests:
                del self._requests[public]

    def wake(self, public: str) -> None:
        for request in list(self._requests.get(public, ())):  # those that are answered leave it
            request.wake(True)

    def send_on(self) -> None:
        """Answer all of them: this instance stops, and their clients ask another one."""
        for requests in list(self._requests.values()):
            for request in list(requests):
                request.wake(False)


class ServedNamespace:
    """One namespace. Two authority objects, because a survey would delay the grants that share its thread."""

    def __init__(
        self, make: MakeAuthority, name: str, answered: NamespaceAnswered, outages: OutageLog
    ) -> None:
        self.name = name
        self._outages = outages
        self.realm = ""
        self.held = HeldRequests()
        self._runtimes = (AioRuntime(), AioRuntime())
        self.leases, self.looking = (make(runtime, name) for runtime in self._runtimes)
        self.worker = GroupedWork(
            self.leases, lambda: self.held.count > 0, partial(answered, name), outages.note
        )
        self._opening = asyncio.Lock()
        self._looks = False
        self._listener: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()

    async def open(self, *, create: bool) -> Standing:
        async with self._opening:  # an authority object is opened by one caller at a time
            standing = await self.leases.open(create=create)
        self.realm = standing.realm
        if any(trait.key == "own-memory" for trait in self.leases.traits):
            return replace(standing, warnings=(*standing.warnings, OWN_MEMORY))
        return standing

    async def looker(self) -> Authority:
        """The authority object for surveys."""
        if not self._looks:
            async with self._opening:
                await self.looking.open(create=False)
            self._looks = True
        return self.looking

    async def survey(self, by: Principal, after: str, limit: int) -> list[NameView]:
        """The names that this client may see. Those of others take no place among them."""
        looker = await self.looker()
        if by.names is None:
            return await looker.survey(after=after, limit=limit)
        found: list[NameView] = []
        while len(found) < limit:
            views = await looker.survey(after=after, limit=SURVEY_PAGE)
            found += [by.seen(view) for view in views if by.owns(view.name)]
            if len(views) < SURVEY_PAGE:
                break
            after = views[-1].name
            await asyncio.sleep(0)  # requests of others come in between
        return found[:limit]

    def listen(self) -> None:
        """Receive wake-ups from now on. Called before the first attempt waits."""
        if self._listener is None:
            self._listener = asyncio.create_task(self._listen(), name=f"wake-ups of {self.name}")

    async def _listen(self) -> None:
        """Always listens, also while nothing is held: some authorities collect wake-ups until somebody takes them."""
        runtime = self._runtimes[0]
        while not self._closing.is_set():
            try:
                for public in await self.leases.next_wakeups(runtime.now() + LISTEN_SECONDS):
                    self.held.wake(public)
            except FencedError as error:
                if not self._closing.is_set():
                    self._outages.note([error])
                # A wake-up is a hint: without it the waiters ask when `check_in` has passed. `close` interrupts the
                # authority, which is such an error too, and must not wait.
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._closing.wait(), RETRY_SECONDS)

    async def close(self) -> None:
        # Set first: the listener, which the interrupt below wakes with an error, then ends instead of waiting.
        self._closing.set()
        self.held.send_on()
        if self._listener is not None:
            self.leases.interrupt()
            await asyncio.wait([self._listener], timeout=CLOSE_SECONDS)
            self._listener.cancel()
        for authority, runtime in zip((self.leases, self.looking), self._runtimes, strict=True):
            with contextlib.suppress(FencedError):
                await authority.close()
            runtime.close()


class ServedNamespaces:
    """The namespaces that clients have used. Each is opened by its first request."""

    def __init__(
        self, make: MakeAuthority, answered: NamespaceAnswered, each_max: int = Limits().namespaces_each
    ) -> None:
        """`each_max`: how many namespaces one client may open before every other one."""
        self._make = make
        self._answered = answered
        self._each_max = each_max
        self._open: dict[str, ServedNamespace] = {}
        self._making = asyncio.Lock()
        self.outages = OutageLog(log, "the store")
        self.first: Counter[str] = Counter()
        """How many namespaces each client has opened before every other one."""

    @property
    def refusal(self) -> FencedError | None:
        """Why the store refuses everything until it is opened again, as the ledger does after a failed write."""
        found = (getattr(each.leases, "refusal", None) for each in self._open.values())
        return next((each for each in found if each is not None), None)

    @property
    def held(self) -> int:
        return sum(namespace.held.count for namespace in self._open.values())

    def held_by(self, client: str) -> int:
        return sum(namespace.held.by[client] for namespace in self._open.values())

    @property
    def names(self) -> list[str]:
        return sorted(self._open)

    async def get(self, name: str, realm: str = "", by: Principal = EVERYBODY) -> ServedNamespace:
        """A namespace that exists. `realm` is the one that the client began with; "": it does not say."""
        if name not in self._open:
            await self.opened(name, create=False, by=by)
        return self.known(name, realm)

    def has(self, name: str) -> bool:
        """Whether it is open."""
        return name in self._open

    def known(self, name: str, realm: str) -> ServedNamespace:
        """The same for one that is open."""
        found = self._open[name]
        if realm and realm != found.realm:
            raise AnotherStore(
                f"this instance has another store than the one that the client began with (realm {found.realm}, "
                f"not {realm}): all instances behind one address must have the same store"
            )
        return found

    async def opened(
        self, name: str, *, create: bool, by: Principal = EVERYBODY
    ) -> tuple[ServedNamespace, Standing]:
        """A namespace, and what its store says about itself now."""
        check_name(name)
        if (found := self._open.get(name)) is not None:
            return found, await found.open(create=create)
        async with self._making:  # two first requests must not make two sets of authority objects
            if name not in self._open:
                self._check_room(by)
            found = self._open.get(name) or ServedNamespace(self._make, name, self._answered, self.outages)
            try:
                standing = await found.open(create=create)
            except BaseException:
                if name not in self._open:
                    await found.close()
                raise
            if name not in self._open:
                self._open[name] = found
                self.first[by.id] += 1
        return found, standing

    def _check_room(self, by: Principal) -> None:
        if len(self._open) >= NAMESPACES_MAX:
            raise Unavailable(f"this instance serves {NAMESPACES_MAX} namespaces already; use another one")
        if by is not EVERYBODY and self.first[by.id] >= self._each_max:
            more = f"it has opened {self._each_max} that nobody had used; nothing happened"
            raise NotAdmitted(plain(403, "This token has too many namespaces", more))

    def send_on(self) -> None:
        for namespace in self._open.values():
            namespace.held.send_on()

    async def close(self) -> None:
        closing, self._open = list(self._open.values()), {}
        await asyncio.gather(*(namespace.close() for namespace in closing))
