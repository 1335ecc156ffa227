"""The memory authority in a world: its store is a server, and its clients reach it by single messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar, TypeVar, cast

from fenced.errors import Indeterminate
from fenced.leases.rows import SWEEP_EVERY_TOKENS
from fenced.stores.memory.authority import MemoryAuthority, MemoryStore
from fenced.testing.lives import Promises
from fenced.testing.trace import Trace, answered, begun
from fenced.values.contracts import Authority, Trait
from fenced.values.model import (
    Ask,
    AskAnswer,
    BatchOperation,
    Busy,
    NameView,
    Release,
    ReleaseAnswer,
    Renewal,
    RenewAnswer,
    Standing,
    Withdrawal,
    grant_id,
)
from fenced_testkit.runtime.simulated import SimulatedRuntime
from fenced_testkit.runtime.world import Process
from fenced_testkit.stepped import Stepped
from fenced_testkit.worlds.backend import AuthorityBackend
from fenced_testkit.worlds.faults import MessageServer

if TYPE_CHECKING:
    from fenced_testkit.worlds.site import Site

T = TypeVar("T")

REALM = "00000000000000aa"


class MemoryBackend(AuthorityBackend):
    """The reference model. The judge sees each decision of the store at the moment it is made."""

    name = "memory"
    traits = MemoryAuthority.traits
    decisions: Trace
    store_type: type[MemoryStore] = MemoryStore

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.server = MessageServer(self.world, site.network, "authority")
        self.decisions = Trace(Promises.of(self.traits, exact=True))
        self.clients: list[MessageAuthority] = []
        self._answered_busy: set[str] = set()
        self.start()

    def start(self) -> None:
        self.store = self.store_type(lambda: self.world.now, realm=REALM)
        self.decides = Stepped.over(self.store)
        self.store.listeners.append(self._woken)

    def authority(self, process: Process, runtime: SimulatedRuntime) -> Authority:
        made = MessageAuthority(self, process, runtime)
        self.clients.append(made)
        return cast("Authority", made)

    def renewer(self, own: Authority, process: Process, runtime: SimulatedRuntime) -> Authority:
        return cast("Authority", MessageAuthority(self, process, runtime))  # it waits for no wake-up

    def cut_off(self, client: Process, seconds: float) -> None:
        self.server.cut_off(client, seconds)

    def left(self, authority: Authority) -> None:
        self.clients.remove(cast("MessageAuthority", authority))

    def faults(self) -> Sequence[Callable[[], None]]:
        return (self._restart,)

    def _restart(self) -> None:
        if self.server.process.alive:
            self.site.judge.say("the authority restarts")
            self.server.restart(self.world.rng.uniform(0.05, 2 * self.site.pace))

    def holds(self, grant: str, names: tuple[str, ...]) -> bool | None:
        return self.site.judge.expires.get(grant, 0.0) > self.world.now

    def jumped(self) -> None:
        """The next grant sweeps: an operator has raised the floor to just before such a token."""
        tokens = self.site.judge.highest // SWEEP_EVERY_TOKENS + 1
        self.raise_floor(tokens * SWEEP_EVERY_TOKENS - 1)

    def raise_floor(self, above: int) -> None:
        self.store.rows.raise_floor(above)

    def _woken(self, public: str) -> None:
        for client in self.clients:
            client.wake(public)

    # The store's decisions, watched.

    def decided(self, report: Callable[[], None]) -> None:
        """Report a decision to the judge: here at once, elsewhere as soon as no crash can undo it."""
        report()

    def copies_end(self, public: str) -> None:
        """From now on no copy of this ask arrives: its client never doubted it, and it was answered Busy.

        Busy leaves nothing behind at the store, so a later copy would be granted to nobody. A network that doubles by
        itself what nobody has repeated is this world's alone: TCP delivers once, and a client that repeats is in doubt.
        """
        self._answered_busy.add(public)

    def _note(self, operation: BatchOperation, answer: object) -> None:
        """Into the trace: made now. The judge comes second, which may end the world."""
        call = begun(operation, self.world.now)
        answered(call, answer, self.world.now)
        self.decided(partial(self.decisions.calls.append, call))

    def ask(self, ask: Ask) -> AskAnswer:
        if grant_id(ask.secret) in self._answered_busy:
            return Busy(0, None)
        answer: AskAnswer = self.decides.ask(ask)
        self._note(ask, answer)
        self.decided(partial(self.site.judge.asked, ask, answer, self.world.now))
        return answer

    def renew(self, secrets: Sequence[str]) -> list[RenewAnswer]:
        answers: list[RenewAnswer] = self.decides.renew(secrets)
        for secret, answer in zip(secrets, answers, strict=True):
            self._note(Renewal(secret), answer)
            self.decided(partial(self.site.judge.renewed, secret, answer, self.world.now))
        return answers

    def release(self, secret: str, keep: float) -> ReleaseAnswer:
        answer: ReleaseAnswer = self.decides.release(secret, keep=keep)
        self._note(Release(secret, keep), answer)
        self.decided(partial(self.site.judge.finished, secret, answer))
        return answer

    def withdraw(self, secret: str) -> ReleaseAnswer:
        answer: ReleaseAnswer = self.decides.withdraw(secret)
        self._note(Withdrawal(secret), answer)
        self.decided(partial(self.site.judge.finished, secret, answer))
        return answer


class MessageAuthority:
    """A client's access to the store over the network: only the calls that the core makes."""

    traits: ClassVar[tuple[Trait, ...]] = ()
    url = "simulated:"

    def __init__(self, backend: MemoryBackend, process: Process, runtime: SimulatedRuntime) -> None:
        self._backend = backend
        self._process = process
        self._runtime = runtime
        self._doubted: set[str] = set()
        self._woken: dict[str, None] = {}
        self._wakeup = runtime.wakeup()

    def wake(self, public: str) -> None:
        def receive() -> None:
            self._woken[public] = None
            self._wakeup.set()

        self._backend.site.network.send(self._process, receive)

    async def _call(self, handle: Callable[[], T], until: float | None = None) -> T:
        latest = self._runtime.now() + 1.0
        until = latest if until is None else min(until, latest)
        return await self._backend.server.ask(self._process, self._runtime, handle, until)

    async def open(self, *, create: bool = True, until: float | None = None) -> Standing:
        return Standing(REALM, 0)

    async def ask(self, ask: Ask, until: float | None = None) -> AskAnswer:
        public = grant_id(ask.secret)
        try:
            answer = await self._call(partial(self._backend.ask, ask), until)
        except Indeterminate:
            self._doubted.add(public)
            raise
        if isinstance(answer, Busy) and public not in self._doubted:
            self._backend.copies_end(public)
        return answer

    async def renew(self, secrets: Sequence[str], until: float | None = None) -> list[RenewAnswer]:
        return await self._call(partial(self._backend.renew, tuple(secrets)), until)

    async def release(self, secret: str, until: float | None = None, *, keep: float = 0.0) -> ReleaseAnswer:
        return await self._call(partial(self._backend.release, secret, keep), until)

    async def withdraw(self, secret: str, until: float | None = None) -> ReleaseAnswer:
        return await self._call(partial(self._backend.withdraw, secret), until)

    async def observe(self, name: str, until: float | None = None) -> NameView:
        found: NameView = await self._call(partial(self._backend.decides.observe, name), until)
        return found

    async def next_wakeups(self, until: float) -> list[str]:
        if not self._woken:
            await self._runtime.wait(self._wakeup, until)
        self._wakeup.clear()
        woken, self._woken = list(self._woken), {}
        return woken
