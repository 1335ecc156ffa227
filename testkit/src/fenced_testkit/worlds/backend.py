"""The authority of a world: its servers and their faults, the shipped client code, and the reports to the judge.

A backend is made once for each world and starts its servers there. `authority` makes a client's authority exactly as a
program would. The site puts a `WatchedAuthority` around it, which reports every answer to the judge.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from fenced.errors import FencedError, Indeterminate, Misconfigured, Unavailable
from fenced.testing.lives import TracedCall
from fenced.testing.trace import Trace, answered
from fenced.values import timing
from fenced.values.contracts import Authority, Trait
from fenced.values.model import (
    Ask,
    AskAnswer,
    Granted,
    Release,
    ReleaseAnswer,
    Renewal,
    Standing,
    Withdrawal,
)
from fenced_testkit.runtime.simulated import SimulatedRuntime
from fenced_testkit.runtime.world import Process

if TYPE_CHECKING:
    from fenced_testkit.worlds.site import Site

T = TypeVar("T")


class AuthorityBackend(abc.ABC):
    """The authority of one world. Everything random comes from `site.world.rng`, every time from `site.world.now`."""

    name: ClassVar[str]
    """Its name for `--authority`."""

    guarantee: str = "strict"
    """The guarantee that the clients ask for. A backend whose servers replicate asynchronously uses `best-effort`."""

    traits: ClassVar[tuple[Trait, ...]]
    """What its authority promises: the parameters of the automaton that checks the traces."""

    decisions: Trace | None = None
    """The decisions of its store at the moments at which they are made, if they can be seen."""

    tokens_per_name: ClassVar[bool] = False
    """Tokens are unique and rise per name, not in the whole namespace."""

    ttls: ClassVar[tuple[float, ...]] = (0.5, 1.0, 2.0)
    """The ttls that a world may draw."""

    lateness: ClassVar[float] = 0.0
    """How many seconds later than its ttl a lease may expire here. L2 allows that much more."""

    fifo: ClassVar[bool] = True
    """Waiters are granted in the order in which they were queued."""

    keep_lateness: ClassVar[float] = 0.0
    """How many seconds longer than its at_least_for a released name may stay taken. L6 allows that much more."""

    delay_noticed: ClassVar[bool] = False
    """A lock_delay counts only from when somebody asks for the name. L6 allows for that."""

    workers = 1
    """How many tasks of each client acquire leases at the same time."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.world = site.world

    @abc.abstractmethod
    def authority(self, process: Process, runtime: SimulatedRuntime) -> Authority:
        """A new client's authority. A planted bug replaces the class that is made here."""

    def renewer(self, own: Authority, process: Process, runtime: SimulatedRuntime) -> Authority:
        """What renews in a client's keeper, as `registry.renewer` makes it."""
        make: Callable[[SimulatedRuntime], Authority] | None = getattr(own, "renewer", None)
        return self.authority(process, runtime) if make is None else make(runtime)

    def cut_off(self, client: Process, seconds: float) -> None:
        """Lose what passes between the servers and a client for a while, other than over streams."""
        return

    def processes(self) -> Sequence[Process]:
        """The servers to which clients have streams now; the site breaks those. Empty: there are no streams."""
        return ()

    def faults(self) -> Sequence[Callable[[], None]]:
        """The faults of the servers. The site calls one of them now and then, and none after `heal`.

        Every fault must end by itself within `2 * site.pace` seconds, or in `heal`.
        """
        return ()

    def heal(self) -> None:
        """End every fault. From here on all servers answer promptly."""
        return

    def holds(self, grant: str, names: tuple[str, ...]) -> bool | None:
        """Whether the servers count this grant as held now. None: this backend does not know."""
        return None

    def place_seconds(self, ttl: float) -> float:
        """How long at least a waiter that was queued or renewed now keeps its place."""
        return timing.waiter_ttl(ttl)

    def excuses(self, error: Misconfigured) -> bool:
        """Whether this refusal is allowed here, for example after a promotion."""
        return False

    def left(self, authority: Authority) -> None:
        """The client with this authority has crashed."""
        return

    def jumped(self) -> None:
        """Everything has stood still for longer than ended attempts are remembered. Make the store forget them."""
        return


class WatchedAuthority:
    """The real authority, with every call and answer reported to the judge in virtual time."""

    def __init__(self, real: Authority, site: Site, process: Process, runtime: SimulatedRuntime) -> None:
        self._real = real
        self._site = site
        self._judge = site.judge
        self._world = site.world
        self._process = process
        self._runtime = runtime

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    async def _call(self, what: str, call: Coroutine[Any, Any, T], until: float | None) -> T:
        """Judge how a call ends: by its deadline, and with an error of the contract."""
        now = self._runtime.now()
        due = max(now, timing.call_until(now, until))
        under_way = self._judge.begun(self._process, what, due)
        try:
            result = await call
        except Exception as error:
            self._judge.ended(under_way)
            self._judge.say(self._process.name, what, "->", repr(error))
            known = isinstance(error, Unavailable | Indeterminate)
            if not known and not (isinstance(error, Misconfigured) and self._site.backend.excuses(error)):
                self._judge.broken("I12", f"{what} raised {error!r}", error)
            raise
        except BaseException:
            # Cancelled or interrupted: nobody waits for it any more.
            self._judge.dropped(under_way)
            raise
        self._judge.ended(under_way)
        return result

    async def open(self, *, create: bool = True, until: float | None = None) -> Standing:
        self._judge.observed.opens(self._process)
        standing = await self._call("open", self._real.open(create=create, until=until), until)
        self._judge.opened(standing)
        return standing

    async def ask(self, ask: Ask, until: float | None = None) -> AskAnswer:
        observed, sent = self._judge.observed, self._world.now
        mine = observed.asks(ask, self._runtime.whoami(), self._process)
        call = self._site.trace.begin(ask, sent)
        try:
            answer = await self._call("ask", self._real.ask(ask, until), until)
        except (Unavailable, Misconfigured):
            self._site.trace.calls.remove(call)
            raise  # nothing has happened
        except BaseException:
            observed.doubted(mine)
            raise
        self._judge.say(self._process.name, "ask", mine.public[:6], ask.names, "->", answer)
        answered(call, answer, self._world.now)
        if isinstance(answer, Granted):
            self._judge.minted(mine.public, ask.names, answer.token)
        observed.answered(mine, answer, sent)
        return answer

    async def renew(self, secrets: Sequence[str], until: float | None = None) -> Any:
        observed, sent = self._judge.observed, self._world.now
        for secret in secrets:
            observed.renews(secret)
        calls = [self._site.trace.begin(Renewal(secret), sent) for secret in secrets]
        try:
            answers = await self._call("renew", self._real.renew(secrets, until), until)
        except FencedError:
            for secret in secrets:
                observed.renewed(secret, None, sent)
            raise
        if len(answers) != len(secrets):
            self._judge.broken("I12", f"{len(secrets)} renewals got {len(answers)} answers")
        for call, secret, answer in zip(calls, secrets, answers, strict=True):
            answered(call, answer, self._world.now)
            observed.renewed(secret, answer, sent)
        return answers

    async def release(self, secret: str, until: float | None = None, *, keep: float = 0.0) -> ReleaseAnswer:
        call = self._site.trace.begin(Release(secret, keep), self._world.now)
        return await self._leave(call, secret, self._real.release(secret, until, keep=keep), until)

    async def withdraw(self, secret: str, until: float | None = None) -> ReleaseAnswer:
        call = self._site.trace.begin(Withdrawal(secret), self._world.now)
        return await self._leave(call, secret, self._real.withdraw(secret, until), until)

    async def _leave(
        self, call: TracedCall, secret: str, leaving: Coroutine[Any, Any, ReleaseAnswer], until: float | None
    ) -> ReleaseAnswer:
        mine = self._judge.observed.leaves(secret)
        answer = await self._call(call.op, leaving, until)
        self._judge.say(self._process.name, call.op, mine.public[:6], "->", answer)
        answered(call, answer, self._world.now)
        self._judge.observed.left(mine, answer)
        self._judge.given_back(mine, answer)
        return answer

    async def next_wakeups(self, until: float) -> list[str]:
        # It may connect, subscribe and check all waiters first, each within CALL_SECONDS.
        return await self._call(
            "next_wakeups", self._real.next_wakeups(until), until + 2 * timing.CALL_SECONDS
        )
