"""The judge of a simulated world: it sees all events in their true order, and checks them against the invariants.

The names of the invariants: I1 tokens are unique, I2 they rise in real time, I3 and I4 the guard admits no
older token and no second grant of one, I5 nothing acknowledged is lost, I6 a refused write leaves no trace,
I9 the decision is the pure function's, I10 one holder at a time, until its owner ends it, I11 no grant to
a waiter that has expired, I12 an authority raises only the errors of its contract, and nothing else raises anything,
I13 a name stays taken for `lock_delay` or `at_least_for`, I14 first come, first served, L2 every client makes progress
once the faults end, however long leases are, L3 a client that believes that it holds a lease does hold it, and no two
clients believe it of one name, L4 no name stays blocked, L5 a call ends by its caller's deadline, L6 after the faults
have ended, a release lets the next waiter in at once, L7 no lease outlives its max_hold, L8 a renewal that failed is
tried again while there is time, L9 a client ends every attempt that it gives up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from fenced.core.holding import GrantState, State
from fenced.values import timing
from fenced.values.contracts import Versioned
from fenced.values.decision import Mark, Rule, Verdict, judge
from fenced.values.model import (
    Ask,
    AskAnswer,
    Ended,
    Granted,
    Kept,
    ReleaseAnswer,
    Released,
    RenewAnswer,
    Stamp,
    Standing,
    Waiting,
    grant_id,
)
from fenced_testkit.runtime.world import Process, World
from fenced_testkit.worlds.observed import Observed, ObservedAttempt

PATIENCE_MAX = 0.25
"""How many seconds past its deadline a call may take."""


HAND_OVER_MAX = 0.6
"""How many seconds a waiter may need to be granted what another client has released."""


class PromiseBroken(AssertionError):
    """A promise was broken in a world."""


@dataclass(eq=False, slots=True)
class CallUnderWay:
    """A call of an authority that has not ended yet."""

    process: Process
    what: str
    due: float
    began: float


@dataclass
class Judge:
    """Sees all events in their true order, and raises PromiseBroken if one breaks an invariant."""

    world: World
    rule: Rule
    log: list[str] = field(default_factory=list)
    keep_log: bool = False
    expires: dict[str, float] = field(default_factory=dict)  # live attempts, by the authority's answers
    places: dict[str, float] = field(default_factory=dict)  # waiters, likewise
    over: set[str] = field(default_factory=set)
    names: dict[str, tuple[str, ...]] = field(default_factory=dict)
    tokens: dict[tuple[str, int], str] = field(default_factory=dict)  # (scope, token) -> grant
    token_of: dict[str, int] = field(default_factory=dict)
    tokens_per_name: bool = False
    highest: int = 0
    realm: str = ""
    best_effort_upto: int = 0
    holds: Callable[[str, tuple[str, ...]], bool | None] = lambda grant, names: None
    believers: dict[str, tuple[GrantState, Process]] = field(default_factory=dict)
    under_way: dict[CallUnderWay, None] = field(default_factory=dict)
    freed: dict[str, float] = field(default_factory=dict)
    """By name, when its last release or withdrawal was answered."""
    holder: dict[str, str] = field(default_factory=dict)  # the grant that was acquired and not yet given back
    prompt_from: float = math.inf
    """From when on every hand-over must be prompt (L6)."""
    place_seconds: Callable[[float], float] = timing.waiter_ttl
    keep_lateness: float = 0.0
    delay_noticed: bool = False
    """Whether a lock_delay counts only from when somebody asks for the name."""
    # By name: that of the last holder that has expired.
    delays: dict[str, float] = field(default_factory=dict)
    fifo: bool = True
    """Whether waiters are granted in the order in which they were queued."""
    _returned: dict[str, int] = field(default_factory=dict)
    marks: dict[str, Mark] = field(default_factory=dict)
    acknowledged: dict[str, list[str]] = field(default_factory=dict)
    # By worker: when, and where it runs.
    progress: dict[str, tuple[float, Process]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.observed = Observed(self)

    def say(self, *words: object) -> None:
        """Note an event. Its words become text only if the log is kept: that took a tenth of every world."""
        if self.keep_log:
            self.log.append(f"{self.world.now:8.4f} {' '.join(map(str, words))}")

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def broken(self, invariant: str, why: str, cause: Exception | None = None) -> NoReturn:
        raise PromiseBroken(f"{invariant} at {self.world.now:.4f}: {why}") from cause

    # The authority's answers, at the time they are made.

    def asked(self, ask: Ask, answer: AskAnswer, now: float) -> None:
        public = grant_id(ask.secret)
        self.say("authority: ask", public[:6], ask.names, "->", answer)
        if isinstance(answer, Granted):
            self._granted(public, ask, answer, now)
        elif isinstance(answer, Waiting):
            self.places[public] = now + timing.waiter_ttl(ask.ttl)

    def _granted(self, public: str, ask: Ask, answer: Granted, now: float) -> None:
        self.minted(public, ask.names, answer.token)
        if public in self.over:
            self.broken("I10", f"an attempt that was over was granted: {public[:6]}")
        # A place that lapsed so long ago that it is forgotten: to the authority, this is the ask of a new attempt.
        # (A renewal does not say for how long it prolongs a place: the end in `places` may be later than the true one.)
        forgotten = now - timing.remember_for(ask.ttl) + timing.WAITER_TTL_MAX
        if forgotten < self.places.pop(public, now) < now:
            self.broken("I11", "a waiter whose place had lapsed was granted")
        for other, expires in self.expires.items():
            if other != public and expires > now and set(self.names[other]) & set(ask.names):
                self.broken("I10", f"{ask.names} granted to {public[:6]} while {other[:6]} holds it")
        self.names[public] = ask.names
        self.expires[public] = now + answer.remaining

    def renewed(self, secret: str, answer: RenewAnswer, now: float) -> None:
        public = grant_id(secret)
        if isinstance(answer, Kept):
            if self.expires.get(public, 0.0) <= now:
                self.broken("I10", f"a renewal revived {public[:6]}, which had expired")
            self.expires[public] = now + answer.remaining
        elif isinstance(answer, Waiting):
            self.places[public] = now + timing.WAITER_TTL_MAX

    def finished(self, secret: str, answer: ReleaseAnswer) -> None:
        public = grant_id(secret)
        self.say("authority: release", public[:6], "->", answer)
        if isinstance(answer, Released | Ended):
            self.expires.pop(public, None)
            self.over.add(public)

    # What a client believes.

    def waited(self, who: str, late: float) -> None:
        """L5: an acquire returned `late` seconds after its `wait` was over."""
        if late > PATIENCE_MAX:
            self.broken("L5", f"{who} waited {late:.3f} s longer than its wait")

    def begun(self, process: Process, what: str, due: float) -> CallUnderWay:
        """A call of the authority has begun. It must end by `due` on its process's clock."""
        call = CallUnderWay(process, what, due, self.world.now)
        self.under_way[call] = None
        return call

    def is_in_a_call(self, process: Process, what: Sequence[str], before: float) -> bool:
        """Whether one of these calls of a process began before then, and is still under way."""
        calls = (call for call in self.under_way if call.process is process and call.what in what)
        return any(call.began <= before for call in calls)

    def dropped(self, call: CallUnderWay) -> None:
        """Its caller was cancelled or interrupted."""
        self.under_way.pop(call, None)

    def ended(self, call: CallUnderWay) -> None:
        """L5: a call ends by its deadline, unless its process was paused meanwhile."""
        self.under_way.pop(call, None)
        late = call.process.now() - call.due
        if late > PATIENCE_MAX and call.process.alive and not call.process.paused_since(call.began):
            self.broken("L5", f"{call.process.name}: {call.what} took {late:.3f} s longer than its deadline")

    def opened(self, standing: Standing) -> None:
        self.realm = self.realm or standing.realm
        if standing.realm != self.realm:
            self.broken("I1", f"realm {self.realm} became {standing.realm}")

    def _scopes(self, names: Sequence[str]) -> Sequence[str]:
        return names if self.tokens_per_name else ("",)

    def minted(self, public: str, names: Sequence[str], token: int) -> None:
        """I1: one attempt, one token; one token, one attempt."""
        if self.token_of.setdefault(public, token) != token:
            self.broken("I1", f"one attempt, two tokens: {self.token_of[public]} and {token}")
        for scope in self._scopes(names):
            if self.tokens.setdefault((scope, token), public) != public:
                self.broken("I1", f"token {token} was granted twice")
        self.highest = max(self.highest, token)

    def given_back(self, mine: ObservedAttempt, answer: ReleaseAnswer) -> None:
        """The owner of an attempt got the answer that it has ended."""
        free = mine.kept_until if isinstance(answer, Released) else self.world.now + mine.lock_delay
        free += self.keep_lateness
        for name in mine.names:
            # Else it was a waiter, and another client holds the name.
            if self.holder.get(name, mine.public) == mine.public:
                self.holder.pop(name, None)
                self.freed[name] = max(self.world.now, free, self.freed.get(name, 0.0))
                if not isinstance(answer, Released):
                    self.delays[name] = mine.lock_delay

    def _prompt(self, hold: GrantState, process: Process) -> None:
        """L6: once all faults are over, the next waiter is granted soon after a release: its wake-up was not lost."""
        # Still held, as far as we know: the answer to the holder's release is under way, so it is free just now.
        under_way = any(name in self.holder for name in hold.names)
        self.holder |= dict.fromkeys(hold.names, hold.grant)
        free = max(self.freed.get(name, 0.0) for name in hold.names)
        since = max(free, self.prompt_from)
        late = self.world.now - since
        waited = self.observed[hold.grant].queued < free
        delayed = [self.delays.pop(name, 0.0) for name in hold.names]
        if self.delay_noticed and any(delayed):
            return  # nobody but the store knows when the delay began
        if waited and not under_way and late > HAND_OVER_MAX and not process.paused_since(since):
            self.broken("L6", f"{process.name} waited {late:.3f} s for {hold} after it was free")

    def returned(self, names: Sequence[str]) -> int:
        """The highest token that a grant of these names must exceed if it is asked for from now on."""
        return max(self._returned.get(scope, 0) for scope in self._scopes(names))

    def acquired(self, hold: GrantState, process: Process, returned: int) -> None:
        """I2: a grant that was asked for after another had returned has a greater token. L3: no other believes."""
        if hold.token <= returned:
            self.broken("I2", f"token {hold.token} after {returned} had been returned")
        for scope in self._scopes(hold.names):
            self._returned[scope] = max(self._returned.get(scope, 0), hold.token)
        self.count("grants")
        for grant, (other, owner) in list(self.believers.items()):
            if (
                self.observed[grant].leaves
                or not owner.alive
                or other.remaining() <= 0
                or self._pardoned(other)
            ):
                del self.believers[grant]
            elif not set(other.names).isdisjoint(hold.names):
                self.broken("L3", f"{process.name} acquired {hold} while {owner.name} believes in {other}")
        self.believers[hold.grant] = (hold, process)
        self._prompt(hold, process)

    def pardon(self, upto: int) -> None:
        """Leases with tokens up to this one are best-effort: a promoted replica may lack their last renewals."""
        self.best_effort_upto = upto
        self.observed.forgive()

    def _pardoned(self, hold: GrantState) -> bool:
        return hold.token <= self.best_effort_upto

    def believes(self, hold: GrantState) -> None:
        """L3: a client that believes it holds does hold: the local deadline comes before the authority's."""
        if self.observed[hold.grant].leaves or self._pardoned(hold):
            return
        if hold.state in (State.HELD, State.JEOPARDY) and self.holds(hold.grant, hold.names) is False:
            self.broken("L3", f"{hold} is believed held, but ended at the authority")
        if (
            hold.state in (State.HELD, State.JEOPARDY)
            and self.observed[hold.grant].renew_until < self.world.now
        ):
            self.broken("L7", f"{hold} is believed held after its max_hold")

    def progressed(self, worker: str, process: Process) -> None:
        self.progress[worker] = (self.world.now, process)

    def judge_progress(self, since: float) -> None:
        """L2: every worker got somewhere since then, unless its process was paused after the faults had ended."""
        for worker, (when, process) in self.progress.items():
            if when < since and not process.paused_since(since):
                self.broken("L2", f"{worker} got nowhere since {when:.2f}")

    def jumped(self) -> None:
        """So much time has passed that the authority may have forgotten every attempt that had ended or lapsed."""
        self.places.clear()
        self.over.clear()
        self.token_of.clear()  # an ask that is tried again makes its attempt anew
        self.observed.jumped()

    # The guard's decisions, at the time they are made.

    def decided(
        self, stamp: Stamp, name: str, announce: bool, admitted: bool, applied: bool, operation: str
    ) -> None:
        before = self.marks.get(name)
        expected = judge(
            before, stamp, name=name, rule=self.rule, realm=self.realm, announce=announce, operation=operation
        )
        verb = "announce" if announce else "write"
        self.say("guard:", verb, name, "token", stamp.token, "seq", stamp.seq, "->", admitted)
        if admitted and before is not None and stamp.token < before.token:
            self.broken("I3", f"{name}: token {stamp.token} admitted after {before.token}")
        if admitted and before is not None and stamp.token == before.token and stamp.grant != before.grant:
            self.broken("I4", f"{name}: token {stamp.token} of two grants")
        if admitted and not applied and expected.verdict is not Verdict.ADMIT:
            self.broken("I9", f"{name}: {expected.verdict} was admitted")
        if not admitted and expected.verdict is Verdict.ADMIT:
            self.broken("L4", f"{name}: an honest holder was refused, {stamp.token} over {before}")
        if admitted and not applied:
            self.marks[name] = expected.mark or Mark(stamp.token, stamp.grant)
        self.count("admitted" if admitted else "refused")

    def acknowledge(self, name: str, item: str) -> None:
        self.acknowledged.setdefault(name, []).append(item)
        self.count("acknowledged")

    def settle(self, values: dict[str, Versioned]) -> None:
        """I5: every acknowledged update is in the final value."""
        for name, items in self.acknowledged.items():
            final = set((values[name].value or b"").decode().split(","))
            lost = [item for item in items if item not in final]
            if lost:
                self.broken("I5", f"{name}: acknowledged and lost: {', '.join(lost)}")
