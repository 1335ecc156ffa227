"""A candidate of an election, for both colours: it campaigns, yields to better ones, resigns, and says who leads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

from fenced.core.acquiring import LeaseEngine, LeaseRequest
from fenced.core.holding import GrantState, State
from fenced.errors import FencedError, Misuse, shown
from fenced.values import timing
from fenced.values.contracts import Wakeup
from fenced.values.model import check_name
from fenced.values.timing import Seconds

YIELDS_MAX = 64
"""After so many yields in a row a candidate leads, whoever else waits."""
LEAD_AGAIN_SECONDS = 0.5
"""How long `run` waits after `lead` has returned, before the candidate queues again."""


@dataclass(frozen=True)
class Leader:
    """Who leads, as the authority sees it."""

    candidate: str | None
    """None: nobody."""
    term: int
    waiting: tuple[str, ...] = field(default=(), compare=False)
    """The other candidates, in the order of the queue."""


@dataclass(frozen=True)
class Health:
    """Leadership as this process sees it, by its own clock: so a silent authority shows, too."""

    leads: bool
    term: int | None
    left: float
    """Seconds until it must step down, unless its lease is renewed."""
    jeopardy: bool


class Candidate:
    """One candidate, for both colours. It awaits nothing but its engine."""

    def __init__(
        self, engine: Callable[[], LeaseEngine], name: str, candidate: str | None, priority: int, ttl: Seconds
    ) -> None:
        if not isinstance(priority, int) or isinstance(priority, bool):
            raise Misuse(f"a priority is a whole number, not {shown(priority)}")
        self.name, self.priority, self._ttl = check_name(name), priority, timing.check_ttl(ttl)
        self._given = None if candidate is None else check_name(candidate)
        self._engine = engine
        self._candidates, self._wish = f"{name}/candidates/", f"{name}/next"
        self.seat: GrantState | None = None
        self._over: Wakeup | None = None

    @property
    def candidate(self) -> str:
        holder = self._engine().holder
        return self._given or f"{holder.label}@{holder.host}:{holder.pid}:{holder.id[:8]}"

    def _who(self, names: tuple[str, ...]) -> tuple[int, str]:
        """Priority and candidate, by the names that an attempt covers."""
        for name in names:
            priority, _, candidate = name.removeprefix(self._candidates).partition("/")
            if name.startswith(self._candidates) and candidate and priority.lstrip("-").isdigit():
                return int(priority), candidate
        return 0, ""

    async def campaign(self) -> GrantState:
        """Wait for the seat. Returns once nobody waits who should have it before us."""
        engine = self._engine()
        names = [self.name, f"{self._candidates}{self.priority}/{self.candidate}"]
        request = LeaseRequest.checked(names, self._ttl)
        for turn in range(YIELDS_MAX):
            seat = await engine.acquire(request)
            try:
                if turn == YIELDS_MAX - 1 or not await self._yields(engine):
                    break
            except FencedError:
                break  # a wish: nobody is left without a leader because of it
            except GeneratorExit:
                engine.let_expire(seat)
                raise
            except BaseException:
                await engine.release_at_exit(seat, raised=True)
                raise
            await engine.release_at_exit(seat, raised=True)
        self.seat = seat
        return seat

    async def _yields(self, engine: LeaseEngine) -> bool:
        waiting = [self._who(waiter.names) for waiter in (await engine.authority.observe(self.name)).waiters]
        if not waiting:
            return False
        wish = await engine.authority.observe(self._wish)
        wanted = {each.removeprefix(f"{self._wish}/") for each in wish.names} if wish.held_by else set()
        if wanted:
            wanted.discard(self._wish)
            return self.candidate not in wanted and any(who in wanted for _, who in waiting)
        return max(waiting)[0] > self.priority

    async def wish(self, candidate: str, within: Seconds) -> None:
        """Say who shall lead next. A wish is a lease that nobody renews, so it needs no store, and ends by itself."""
        names = [self._wish, f"{self._wish}/{check_name(candidate)}"]
        engine = self._engine()
        engine.let_expire(await engine.acquire(LeaseRequest.checked(names, within, within)), "resigned")

    async def resign(self) -> None:
        """End this term: its body is told that it has lost the seat, and when it has ended the seat is given back."""
        seat, engine = self.seat, self._engine()
        if seat is None:
            return
        # The flag exists before the body is told, and `leave` reads it after the body has ended: so none waits in vain.
        over = self._over = self._over or engine.runtime.wakeup()
        until = seat.deadline  # by then the authority gives the seat to the next one anyway
        seat.lose("resigned")
        if seat.owner != engine.runtime.whoami() and not over.is_set():
            await engine.runtime.wait(over, until)

    async def leave(self, seat: GrantState, *, raised: bool) -> None:
        """The body has ended. Raises LeaseLost if the term ended before."""
        try:
            await self._engine().release_at_exit(seat, raised=raised)
        finally:
            if self.seat is seat:
                self.seat = None
            over, self._over = self._over, None
            if over is not None:
                over.set()

    async def leader(self) -> Leader:
        engine = self._engine()
        await engine.standing()  # opens it
        view = await engine.authority.observe(self.name)
        waiting = tuple(self._who(waiter.names)[1] for waiter in view.waiters)
        if view.held_by is None:
            return Leader(None, 0, waiting)
        return Leader(self._who(view.names)[1] or view.held_by.holder.label, view.held_by.token, waiting)

    async def next_leader(self, last: Leader | None, every: Seconds) -> Leader:
        """Wait until another leader leads. A failed look is repeated."""
        while True:
            with contextlib.suppress(FencedError):
                if (now := await self.leader()) != last:
                    return now
            await self._sleep(timing.check_need(every))

    async def rest(self, seat: GrantState) -> None:
        """After `lead` has returned by itself: others may have their turn first."""
        if seat.lost_reason is None:
            await self._sleep(LEAD_AGAIN_SECONDS)

    async def _sleep(self, seconds: float) -> None:
        runtime = self._engine().runtime
        await runtime.wait(runtime.wakeup(), runtime.now() + seconds)

    def health(self) -> Health:
        seat = self.seat
        if seat is None or seat.state in (State.LOST, State.RELEASED):
            return Health(leads=False, term=None, left=0.0, jeopardy=False)
        return Health(True, seat.token, seat.remaining(), seat.state is State.JEOPARDY)
