"""Election with terms: one leader at a time, and followers that obey no earlier term.

    for term in Election(client, "scheduler"):          # waits for the seat
        with term:                                      # stepping down is leaving this block
            lead(term)                                  # term.check(); guards take term.lease

The seat is a lease, and the number of a term is its token. A lease alone lets a paused leader go on, so whatever obeys
a leader compares terms: `Follower`, or any guard. Who waits for the seat is seen in its queue: each candidate asks for
the seat together with a name of its own, which says who it is and how much it is wanted. A candidate that is granted
the seat while a better one waits gives it back before it leads, and queues again. So priorities and hand-overs are
wishes: if the queue cannot be read, whoever has the seat leads.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from types import TracebackType
from typing import Any

from fenced.client.faces import AsyncClient, Client
from fenced.client.guarding import Fence, stamp_of
from fenced.client.leases import AsyncLease, Lease, LeaseBase
from fenced.client.looking import fence_in
from fenced.client.scope import BodyScope
from fenced.client.values import AsyncValues, Values
from fenced.core.holding import GrantState
from fenced.errors import LeaseLost, Misuse
from fenced.guards.answers import error_for
from fenced.recipes.candidates import Candidate, Health, Leader
from fenced.runtime.blocking import step
from fenced.values import timing
from fenced.values.decision import Mark, Verdict, judge
from fenced.values.model import Stamp, check_name
from fenced.values.timing import Seconds

__all__ = [
    "AsyncElection",
    "AsyncFollower",
    "AsyncTerm",
    "Election",
    "Follower",
    "Health",
    "Leader",
    "Term",
    "leading",
]


def __dir__() -> list[str]:
    return __all__


class TermBase:
    """One term of leadership."""

    lease: LeaseBase

    def __init__(self, candidate: Candidate, seat: GrantState) -> None:
        self._candidate, self.seat = candidate, seat
        self.number = seat.token
        """Greater than that of every earlier term."""

    def stamp(self) -> Stamp:
        """For a message to followers, or a guard: the newest stamp of this term."""
        return self.seat.next_stamp()

    def check(self, need: Seconds = 0.0) -> None:
        """LeaseLost if the term has ended, or `resign` was called. A pause can follow: followers compare terms."""
        self.lease.check(need)

    def _ours(self, exc: BaseException | None) -> bool:
        """Whether this exception says nothing but that the term has ended."""
        return isinstance(exc, LeaseLost) and self.seat.lost_reason is not None


class Term(TermBase):
    """`with term:` is left when the leader steps down. That its term has ended is no error of the block."""

    def __init__(self, candidate: Candidate, seat: GrantState, client: Client) -> None:
        super().__init__(candidate, seat)
        self.lease: Lease = Lease(seat, client)

    def __enter__(self) -> Term:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> bool:
        with contextlib.suppress(LeaseLost):
            step(self._candidate.leave(self.seat, raised=exc is not None))
        return self._ours(exc)


class AsyncTerm(TermBase):
    """`async with term:` is cancelled when the term ends, and swallows that cancellation alone."""

    def __init__(self, candidate: Candidate, seat: GrantState, client: AsyncClient) -> None:
        super().__init__(candidate, seat)
        self.lease: AsyncLease = AsyncLease(seat, client)
        self._scope = BodyScope()

    async def __aenter__(self) -> AsyncTerm:
        self._scope.enter(self.seat)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> bool:
        ours = self._scope.leave(exc)
        with contextlib.suppress(LeaseLost):
            await self._candidate.leave(self.seat, raised=exc is not None)
        return ours or self._ours(exc)


class ElectionBase:
    """What both colours share."""

    def __init__(
        self,
        client: Client | AsyncClient,
        name: str,
        *,
        candidate: str | None = None,
        priority: int = 0,
        ttl: Seconds = timing.TTL_DEFAULT,
    ) -> None:
        """`candidate`: this process's own name, by default the client's label with host, pid and part of its id."""
        self._candidate = Candidate(lambda: client._engine, name, candidate, priority, ttl)
        self._stopped = False

    @property
    def candidate(self) -> str:
        return self._candidate.candidate

    def health(self) -> Health:
        """For a readiness probe or a status line: whether this process leads, by its own clock."""
        return self._candidate.health()

    def stop(self) -> None:
        """Campaign no more after this term."""
        self._stopped = True


class Election(ElectionBase):
    """A candidate, in a program that blocks."""

    def __init__(self, client: Client, name: str, **options: Any) -> None:
        super().__init__(client, name, **options)
        self._client = client

    def __iter__(self) -> Iterator[Term]:
        while not self._stopped:
            term = Term(self._candidate, step(self._candidate.campaign()), self._client)
            try:
                yield term
            finally:
                if self._candidate.seat is term.seat:  # its block was not entered
                    step(self._candidate.leave(term.seat, raised=True))

    def run(self, lead: Callable[[Term], object]) -> None:
        """Lead again and again. An error of `lead` ends the term, and is raised."""
        for term in self:
            with term:
                lead(term)
            step(self._candidate.rest(term.seat))

    def resign(self) -> None:
        """Step down in place, from any thread; returns when the block of the term has ended, or its lease is over."""
        step(self._candidate.resign())

    def hand_over(self, candidate: str, within: Seconds = 10.0) -> None:
        """Step down in favour of this candidate, if it waits for the seat within so many seconds."""
        step(self._candidate.wish(candidate, within))
        self.resign()

    def leader(self) -> Leader:
        """Who leads now, as the authority sees it."""
        return step(self._candidate.leader())

    def changes(self, every: Seconds = 1.0) -> Iterator[Leader]:
        """Each new leader once. Asks every so many seconds: a term shorter than that may be missed."""
        last: Leader | None = None
        while True:
            yield (last := step(self._candidate.next_leader(last, every)))


class AsyncElection(ElectionBase):
    """A candidate, in asyncio."""

    def __init__(self, client: AsyncClient, name: str, **options: Any) -> None:
        super().__init__(client, name, **options)
        self._client = client

    async def __aiter__(self) -> AsyncIterator[AsyncTerm]:
        while not self._stopped:
            term = AsyncTerm(self._candidate, await self._candidate.campaign(), self._client)
            try:
                yield term
            finally:
                if self._candidate.seat is term.seat:  # its block was not entered
                    await self._candidate.leave(term.seat, raised=True)

    async def run(self, lead: Callable[[AsyncTerm], Awaitable[object]]) -> None:
        """Lead again and again. An error of `lead` ends the term, and is raised."""
        async for term in self:
            async with term:
                await lead(term)
            await self._candidate.rest(term.seat)

    async def resign(self) -> None:
        """Step down in place, from any task; returns when the block of the term has ended, or its lease is over."""
        await self._candidate.resign()
        await asyncio.sleep(0)  # in the block itself the cancellation arrives here

    async def hand_over(self, candidate: str, within: Seconds = 10.0) -> None:
        """Step down in favour of this candidate, if it waits for the seat within so many seconds."""
        await self._candidate.wish(candidate, within)
        await self.resign()

    async def leader(self) -> Leader:
        """Who leads now, as the authority sees it."""
        return await self._candidate.leader()

    async def changes(self, every: Seconds = 1.0) -> AsyncIterator[Leader]:
        """Each new leader once. Asks every so many seconds: a term shorter than that may be missed."""
        last: Leader | None = None
        while True:
            yield (last := await self._candidate.next_leader(last, every))


@contextlib.asynccontextmanager
async def leading(
    client: AsyncClient, name: str, lead: Callable[[AsyncTerm], Awaitable[object]], **options: Any
) -> AsyncIterator[AsyncElection]:
    """Be a candidate while an application runs: of all workers of all machines, one leads.

    app = FastAPI(lifespan=lambda app: leading(client, "scheduler", run_the_schedule))
    """
    election = AsyncElection(client, name, **options)
    task = asyncio.create_task(election.run(lead))
    try:
        yield election
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


class Follower:
    """Obeys no term older than one that it has seen; as a receiver of other messages, no older lease of a name.

    It remembers in memory, one mark for each name, or in `marks`, which may be durable. It compares, and nothing else:
    what it does after that may still be overtaken. A guard compares in the same step as the effect.
    """

    def __init__(self, name: str | None = None, marks: Values | None = None) -> None:
        """`name`: of the election, or of what is received; else give it with each message."""
        self.name = None if name is None else check_name(name)
        self._marks = marks
        self._lock = threading.Lock()
        self._seen: dict[str, Mark] = {}
        self._realm: str | None = None

    def accept(self, term: Fence | str, name: str | None = None) -> None:
        """Remember this term; StaleToken if a newer one was seen. `term`: a stamp, its text, or a lease."""
        fence, name = fence_in(term), _about(name or self.name)
        if self._marks is not None:
            self._marks.announce(fence, name)
            return
        stamp = stamp_of(fence, "a follower", announcing=True)
        with self._lock:  # two threads that compare at once must not lower the mark
            mark = self._seen.get(name)
            judged = judge(mark, stamp, name=name, rule="retry", realm=self._realm, announce=True)
            if judged.verdict is not Verdict.ADMIT or judged.mark is None:
                raise error_for(judged.verdict, name=name, stamp=stamp, mark=mark, realm=self._realm)
            self._seen[name], self._realm = judged.mark, stamp.realm


class AsyncFollower:
    """The same, over marks in asyncio."""

    def __init__(self, name: str | None = None, marks: AsyncValues | None = None) -> None:
        self._memory = Follower(name)
        self._marks = marks

    async def accept(self, term: Fence | str, name: str | None = None) -> None:
        """Remember this term; StaleToken if a newer one was seen. `term`: a stamp, its text, or a lease."""
        if self._marks is None:
            self._memory.accept(term, name)
        else:
            await self._marks.announce(fence_in(term), _about(name or self._memory.name))


def _about(name: str | None) -> str:
    if name is None:
        raise Misuse("say what the message is about: Follower(name), or accept(stamp, name)")
    return check_name(name)
