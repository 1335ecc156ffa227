"""The PostgreSQL authority under every interleaving of two or three sessions, and a judge of what comes out.

In production each call is one statement and one transaction. Here every call stands in a transaction of its
own whose COMMIT is a step, so that locks are held while others act. The clock of the schema stands still and is
moved by a step: a lease expires exactly where the story wants it, however slow the machine is, and the
reference model can be asked what every answer should have been.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from uuid import UUID

import psycopg
import pytest

from fenced.leases.rules import holder_text
from fenced.stores.memory.authority import MemoryStore
from fenced.stores.postgresql.authority import answers, schema
from fenced.stores.postgresql.authority.queries import SQL
from fenced.testing.kit import ensure
from fenced.values.model import Ask, Busy, Granted, Holder, Kept, NameView, Unknown, Waiting, grant_id
from fenced_testkit.interleaving import (
    COMMIT,
    ROLLBACK,
    Explorer,
    InterleavingScript,
    IsolationLevel,
    ScriptEvent,
    ScriptStep,
    StoryBroken,
    Trace,
    interleavings,
    sql,
)
from fenced_testkit.interleaving.postgresql import PostgresqlEngine
from fenced_testkit.servers import PostgresqlServer
from fenced_testkit.stepped import Stepped
from tests.postgresql.planted_sql import BUGS, Bug, clocked, function

pytestmark = pytest.mark.xdist_group("interleavings")

TTL = 10.0
NAMESPACE = "1"
SCHEMA = "\n".join([*schema.SCHEMA.tables(), schema.SCHEMA.functions])

# The calls, for the server and for the model alike.


@dataclass(frozen=True)
class Call:
    """One call of the authority: the statement that production sends, and the same thing for the model."""

    label: str
    query: str
    parameters: tuple[str, ...]
    model: Callable[[Stepped], object]
    attempt: str = ""
    names: tuple[str, ...] = ()
    ttl: float = TTL

    def step(self) -> ScriptStep:
        return sql(SQL[self.query].decode(), *self.parameters, label=self.label, about=self)

    def read(self, row: tuple[Any, ...]) -> object:
        """The server's answer in the model's words."""
        match self.query:
            case "ask":
                return answers.asked(row[0], self.ttl)
            case "renew":
                return answers.renewed(row[1])
            case "release":
                return answers.released(row[0])
            case _:
                return row[0]


def public(attempt: str) -> str:
    """A story's attempts are called by their secrets; in the server the id stands for the secret, too."""
    return grant_id(attempt)


def ask(attempt: str, *names: str, ttl: float = TTL) -> Call:
    wish = Ask(attempt, names, ttl, Holder(public(attempt), attempt, "host", 1), wait=True)
    parameters = (
        *(
            NAMESPACE,
            public(attempt),
            public(attempt),
            answers.names_text(names).decode(),
            f"{ttl} s",
            "0",
            "10 s",
            "600 s",
        ),
        *("t", "10000", "woken", holder_text(wish.holder)),
    )
    label = f"ask {attempt} {','.join(names)}"
    return Call(label, "ask", parameters, lambda model: model.ask(wish), attempt, names, ttl)


def renew(attempt: str) -> Call:
    parameters = (NAMESPACE, *[f"{{{public(attempt)}}}"] * 2, "10 s", "600 s")
    return Call(f"renew {attempt}", "renew", parameters, lambda model: model.renew([attempt])[0], attempt)


def release(attempt: str) -> Call:
    parameters = (NAMESPACE, public(attempt), public(attempt), "released", "600 s")
    return Call(f"release {attempt}", "release", parameters, lambda model: model.release(attempt), attempt)


def withdraw(attempt: str) -> Call:
    parameters = (NAMESPACE, public(attempt), public(attempt), "withdrawn", "600 s")
    return Call(f"withdraw {attempt}", "release", parameters, lambda model: model.withdraw(attempt), attempt)


def force(name: str, token: int) -> Call:
    parameters = (NAMESPACE, name, str(token), "600 s")
    label = f"force {name} {token}"
    return Call(
        label, "force_release", parameters, lambda model: model.force_release(name, token), "", (name,)
    )


def raise_floor(above: int) -> Call:
    parameters = (NAMESPACE, str(above))
    return Call(f"raise {above}", "raise_floor", parameters, lambda model: model.raise_floor(above))


def tidy() -> Call:
    parameters = ("00000000-0000-0000-0000-000000000000", "1000")
    return Call("tidy", "tidy", parameters, lambda model: model.tidy())


def passing(seconds: float) -> ScriptStep:
    """Let time pass for everybody at once. A sequence obeys no transaction."""
    moved = f"SELECT setval('explored.clock', last_value + {round(seconds * 1e6)}) FROM explored.clock"
    return sql(moved, label=f"{seconds:g} s pass", about=float(seconds))


def locking(table: str, key: str) -> ScriptStep:
    """Somebody who only has a row locked: a holder whose commit hangs, a backup, an operator's look."""
    condition = f"id = '{UUID(public(key))}'" if table == "attempt" else f"name = '{key}'"
    return sql(f"SELECT FROM fenced.{table} WHERE {condition} FOR UPDATE", label=f"lock {table} {key}")


@dataclass(frozen=True)
class Story:
    """What was before, and who does what at once. `merges` is how many orders there are: all are run.

    A session is a tuple of transactions, each a call or a lock, and then a COMMIT unless the story says ROLLBACK;
    or a list of calls that are not split, as in production.
    """

    name: str
    merges: int
    setup: tuple[Call | ScriptStep, ...]
    sessions: tuple[Sequence[Call | ScriptStep], ...]
    token: int = 0  # the last one before the story

    def scripts(self) -> list[InterleavingScript]:
        scripts = []
        for letter, session in zip("ABCD", self.sessions, strict=False):
            if isinstance(session, list):
                scripts.append(InterleavingScript(letter, tuple(map(as_step, session)), autocommit=True))
                continue
            steps: list[ScriptStep] = []
            for move, following in itertools.zip_longest(session, session[1:]):
                steps.append(as_step(move))
                if move is not ROLLBACK and following is not ROLLBACK:
                    steps.append(COMMIT)
            scripts.append(InterleavingScript(letter, tuple(steps)))
        return scripts


def as_step(move: Call | ScriptStep) -> ScriptStep:
    return move.step() if isinstance(move, Call) else move


LAST = "63401"
"""An attempt that every sweep meets: they begin anywhere, and this one is behind them all."""
assert public(LAST).startswith("ffff")
SHORT = 5.0
LATE = passing(2)
LONG_AGO = passing(3600)
A, B, C = ask("a", "x"), ask("b", "x"), ask("c", "x")
AXY, BXY, BY = ask("a", "x", "y"), ask("b", "x", "y"), ask("b", "y")
RENEW, RELEASE, WITHDRAW, FORCE = renew("a"), release("a"), withdraw("a"), force("x", 1)
HELD = (ask("z", "x"),)
IDLE = (*HELD, release("z"))
TWO_IDLE = (ask("z", "x", "y"), release("z"))
ENDING = (ask("a", "x", ttl=SHORT), passing(3))  # LATE is the moment at which it expires
EXPIRED = (ask("z", "x", ttl=SHORT), passing(SHORT))
QUEUED = (ask("z", "x", ttl=30.0), *ENDING)
DEAD = (ask("y", "x", ttl=30.0), ask("z", "y", ttl=30.0), ask("d", "x", "y", ttl=SHORT), passing(SHORT))
SWEPT = (ask(LAST, "x", ttl=SHORT), passing(SHORT), release(LAST), LONG_AGO)
TWO_SWEPT = (ask(LAST, "x", "y"), release(LAST), LONG_AGO)
BEFORE = {"new": (), "idle": IDLE, "expired": EXPIRED, "held": HELD}
ATTEMPT_LOCKED = (locking("attempt", "a"), ROLLBACK)
X_LOCKED, Y_LOCKED = (locking("name", "x"),), (locking("name", "y"),)

STORIES = [
    *(Story(f"two asks, name {k}", 6, v, ((A,), (B,))) for k, v in BEFORE.items()),
    *(Story(f"three asks, name {k}", 90, BEFORE[k], ((A,), (B,), (C,))) for k in ("idle", "expired")),
    *(Story(f"ask rolled back, name {k}", 30, v, ((A, ROLLBACK), (B,), [C])) for k, v in BEFORE.items()),
    *(Story(f"one attempt asks twice, name {k}", 30, v, ((A,), (A,), [B])) for k, v in BEFORE.items()),
    Story("renewal and ask at the expiry", 30, ENDING, ((RENEW,), (B,), [LATE])),
    Story("renewal behind a lock, ask, expiry", 180, ENDING, ((RENEW,), [B], ATTEMPT_LOCKED, [LATE])),
    Story("renewal, ask behind a lock, expiry", 180, ENDING, ((RENEW,), [B], X_LOCKED, [LATE])),
    Story("two renewals and an ask at the expiry", 180, ENDING, ((RENEW,), (RENEW,), [B], [LATE])),
    Story("release and two asks", 90, (A,), ((RELEASE,), (B,), (C,))),
    Story("release, and the head withdraws", 30, (A, B), ((RELEASE,), (withdraw("b"),), [C])),
    Story("release, and the waiter looks again", 30, (A, B), ((RELEASE,), (B,), [C])),
    Story("release and renewal at the expiry", 30, ENDING, ((RENEW,), (RELEASE,), [LATE])),
    Story("release, and the waiter's last renewal", 30, QUEUED, ((RENEW,), (release("z"),), [LATE])),
    *(
        Story(f"withdrawal and late ask, name {k}", 30, v, ((A,), (WITHDRAW,), [B]))
        for k, v in BEFORE.items()
    ),
    Story("withdrawal and late ask, two names", 6, (), ((AXY,), (WITHDRAW,))),
    Story("two names, two asks", 6, (), ((AXY,), (BXY,))),
    Story("two names, a ring of asks", 90, (), ((AXY,), (ask("b", "y", "z"),), (ask("c", "x", "z"),))),
    Story("two names, two asks behind two locks", 180, TWO_IDLE, (X_LOCKED, Y_LOCKED, [AXY], [BXY])),
    Story("two names behind a lock, another goes by", 30, TWO_IDLE, (X_LOCKED, [AXY], [BY, release("b")])),
    Story("two names, release and an ask for each", 90, (AXY,), ((RELEASE,), (B,), (ask("c", "y"),))),
    Story("two names, a dead waiter is met in both", 90, DEAD, ((A,), (BY,), (release("z"),))),
    Story("force and release", 30, (A,), ((RELEASE,), (FORCE,), [B])),
    Story("force and renewal", 30, (A,), ((RENEW,), (FORCE,), [B])),
    Story("force and renewal at the expiry", 30, ENDING, ((RENEW,), (FORCE,), [LATE])),
    Story("force twice", 6, (A, B), ((FORCE,), (FORCE,))),
    Story("raise and ask", 15, (), ((A,), (raise_floor(100), BY))),
    Story("raise, and an ask behind a lock", 60, IDLE, (X_LOCKED, [A], [raise_floor(2)], [BY])),
    Story("raise twice and ask twice", 12, (), ([raise_floor(100)], [raise_floor(50)], [A, BY])),
    Story("raise, and a waiter's ask", 30, (*HELD, A), ([release("z")], (raise_floor(100),), (A,))),
    Story("tidy and two asks, name expired", 90, (*EXPIRED, LONG_AGO), ((tidy(),), (A,), (B,))),
    Story("tidy and two asks, name idle", 90, (*IDLE, LONG_AGO), ((tidy(),), (A,), (B,))),
    Story("asks that sweep on their way, name expired", 6, SWEPT, ((A,), (B,)), token=62),
    Story("asks that sweep on their way, two names", 6, TWO_SWEPT, ((AXY,), (BXY,)), token=62),
]
BY_NAME = {story.name: story for story in STORIES}


# The world.


@dataclass
class World:
    """A database with our schema and a clock that stands, and somebody who listens."""

    explorer: Explorer
    watch: psycopg.Connection[tuple[Any, ...]]

    def reset(self, story: Story) -> None:
        """Counting state never falls; only a replica's session may do this."""
        run = self.watch.execute
        run(
            "DELETE FROM fenced.queue; DELETE FROM fenced.attempt; DELETE FROM fenced.name; "
            "UPDATE fenced.namespace SET floor = 0; SELECT setval('explored.clock', 0), setval('fenced.ticket', 1), "
            f"setval('fenced.token', {story.token or 1}, {story.token > 0})"
        )
        for move in story.setup:
            step = as_step(move)
            run(step.statement.encode(), step.parameters or None)
        self.heard()

    def heard(self) -> set[str]:
        """Who was woken. A notification comes before the answer to the first statement after its commit."""
        self.watch.execute("SELECT 1")
        return {notification.payload for notification in self.watch.notifies(timeout=0)}

    def explore(self, story: Story) -> str:
        def judge(trace: Trace) -> None:
            Judge(self, story, trace).judge()

        report = self.explorer.explore(story.scripts(), reset=lambda: self.reset(story), judge=judge)
        assert report.orders.seed is None and report.orders.total == story.merges
        return str(report)

    @contextlib.contextmanager
    def planted(self, bug: Bug) -> Iterator[None]:
        self.watch.execute(bug.planted(SCHEMA).encode())
        try:
            yield
        finally:
            self.watch.execute(clocked(function(SCHEMA, bug.function)).encode())


@pytest.fixture(scope="module")
def world(postgresql_server: PostgresqlServer) -> Iterator[World]:
    database = postgresql_server.create_database()
    url = postgresql_server.url(database)
    postgresql_server.execute(
        """
        CREATE SCHEMA explored;
        CREATE SEQUENCE explored.clock MINVALUE 0;
        CREATE FUNCTION explored.now() RETURNS timestamptz LANGUAGE sql AS
          $$ SELECT timestamptz '2020-01-01 00:00+00' + last_value * interval '1 us' FROM explored.clock $$;
        CREATE TABLE explored.counter AS SELECT id, 0 AS n FROM generate_series(1, 2) AS id;
        """
        + clocked(SCHEMA)
        + "; SELECT fenced.enter('default', '00000000000000aa', true)",
        database,
    )
    with (
        psycopg.connect(url, autocommit=True, cursor_factory=psycopg.RawCursor) as watch,
        Explorer(PostgresqlEngine(url)) as explorer,
    ):
        watch.execute("SET session_replication_role = replica")
        watch.execute("LISTEN woken")
        yield World(explorer, watch)
    postgresql_server.drop_database(database)


# The judge.


@dataclass(frozen=True)
class Done:
    """A call whose transaction was committed, with the times that it may have read from the clock."""

    call: Call
    answer: object
    began: int
    ended: int
    clocks: tuple[float, ...]


@dataclass
class Judge:
    """Holds one trace, and the store that it left, against what must never be."""

    world: World
    story: Story
    trace: Trace
    ticks: list[tuple[int, float]] = field(default_factory=list)
    done: list[Done] = field(default_factory=list)

    def judge(self) -> None:
        self.ticks = [(0, 0.0)]
        for step in self.story.setup:
            if isinstance(step, ScriptStep):
                self.ticks.append((0, self.ticks[-1][1] + step.about))
        for event in self.trace.events:
            ensure(not event.outcome.code, f"an error: {event.outcome}")
            if isinstance(event.step.about, float):
                self.ticks.append((event.ended, self.ticks[-1][1] + event.step.about))
        try:
            for session in self.trace.sessions:
                self._read([event for event in self.trace.events if event.session == session])
        except ValueError as error:
            raise AssertionError(f"an answer that no client understands: {error}") from error
        self.done.sort(key=lambda done: done.ended)
        self._tokens_rise()
        standing = [(self._label(who), *rest) for who, *rest in self.world.watch.execute(STANDING)]
        self._one_holder(standing)
        self._nobody_sleeps({who for who, state, _, _ in standing if state == "waiting"})
        self._is_explained()

    def _read(self, events: list[ScriptEvent]) -> None:
        """A session's calls that were committed, by the step that follows or at once."""
        for event, following in itertools.zip_longest(events, events[1:]):
            end = following if following and following.step in (COMMIT, ROLLBACK) else event
            if isinstance(event.step.about, Call) and end.outcome.tag != "ROLLBACK":
                answer = event.step.about.read(event.outcome.rows[0])
                first = [clock for place, clock in self.ticks if place < event.began][-1]
                later = [clock for place, clock in self.ticks if event.began < place < event.ended]
                self.done.append(Done(event.step.about, answer, event.began, end.ended, (first, *later)))

    def _tokens_rise(self) -> None:
        """I1 and I2: one attempt, one token; no token twice; rising for a name, in real time, and above a floor."""
        minted: dict[str, tuple[int, Done]] = {}
        floors: list[tuple[int, Done]] = []
        for done in self.done:
            number = token_of(done.call, done.answer)
            if number is None:
                continue
            if done.call.query == "raise_floor":
                floors.append((number, done))
                continue
            who = done.call.attempt or f"{done.call.label} at {done.began}"
            ensure(minted.setdefault(who, (number, done))[0] == number, f"I1: {who} has two tokens")
        for (one, first), (two, second) in itertools.combinations(minted.values(), 2):
            ensure(one != two, f"I1: token {one} twice")
            if set(first.call.names) & set(second.call.names) or first.ended < second.began:
                ensure(one < two, f"I2: {second.call.label} got {two} after {one} was granted")
        for (floor, raising), (token, done) in itertools.product(floors, minted.values()):
            if raising.ended < done.began:
                ensure(floor < token, f"I2: {done.call.label} got {token} after the floor was {floor}")

    def _one_holder(self, standing: list[tuple[str, str, str, bool]]) -> None:
        """I10: one live grant of a name, and the rows agree about it; who waits stands in every queue."""
        held: dict[str, str] = {}
        for who, state, name, _ in standing:
            if state == "granted":
                other = held.setdefault(name, who)
                ensure(other == who, f"I10: both {other} and {who} hold {name}")
        for who, state, name, right in standing:
            ensure(right, f"the store: {who} is {state}, and {name} or its queue says something else")

    def _label(self, attempt: str) -> str:
        moves = [*self.story.setup, *(step.about for s in self.story.scripts() for step in s.steps)]
        labels = {public(move.attempt): move.attempt for move in moves if isinstance(move, Call)}
        return labels[attempt]

    def _nobody_sleeps(self, living: set[str]) -> None:
        """Who waits and could be granted now was woken, or has been told to look again by now."""
        woken = self.world.heard()
        told: dict[str, float] = {}
        _, setup = self._model()
        for call, answer, clock in [*setup, *((d.call, d.answer, d.clocks[-1]) for d in self.done)]:
            if isinstance(answer, Waiting):
                told[call.attempt] = clock + answer.check_in
        for waiter in told.keys() & living:
            ready = self.world.watch.execute(SQL["ready"], [NAMESPACE, f"{{{public(waiter)}}}"]).fetchall()
            if ready and told[waiter] > self.ticks[-1][1] + 0.010:
                ensure(public(waiter) in woken, f"a lost wake-up: {waiter} could be granted, and sleeps")

    # The oracle.

    def _model(self) -> tuple[MemoryStore, list[tuple[Call, object, float]]]:
        """The reference model as the story begins, and its answers until then."""
        now = 0.0
        model = MemoryStore(lambda: now)
        model.rows.token = self.story.token
        said = []
        for move in self.story.setup:
            if isinstance(move, ScriptStep):
                now += move.about
            else:
                said.append((move, move.model(Stepped.over(model)), now))
        return model, said

    def _is_explained(self) -> None:
        """Some order that agrees with the commits has the model give these answers and show this picture."""
        seen = self.world.watch.execute(SQL["survey"], [NAMESPACE, "", "100"]).fetchall()
        picture = [plain(answers.viewed(view)) for (view,) in seen]
        known = [done for done in self.done if not isinstance(done.answer, Unknown)]
        for order in itertools.permutations(known):
            if any(late.ended < early.began for early, late in itertools.combinations(order, 2)):
                continue
            for clocks in itertools.product(*map(self._clocks, order)):
                known_clocks = [c for d, c in zip(order, clocks, strict=True) if c in d.clocks]
                if known_clocks == sorted(known_clocks) and self._agrees(order, clocks, picture):
                    return
        told = [f"{done.call.label} -> {done.answer}" for done in known]
        raise AssertionError(f"no order explains this: {told} and {picture}")

    def _clocks(self, done: Done) -> tuple[float, ...]:
        """Who is told to look again at once has met a row that somebody renews, or did: that may be over."""
        if isinstance(done.answer, Waiting) and 0 < done.answer.check_in <= 0.010:
            return tuple(clock for place, clock in self.ticks if place < done.ended)
        return done.clocks

    def _agrees(self, order: tuple[Done, ...], clocks: tuple[float, ...], picture: list[object]) -> bool:
        model, _ = self._model()
        tokens = []
        for done, clock in zip(order, clocks, strict=True):
            model.clock = partial(float, clock)
            answer = done.call.model(Stepped.over(model))
            if plain(answer) != plain(done.answer):
                return False
            if (number := token_of(done.call, answer)) is not None:
                tokens.append((number, token_of(done.call, done.answer)))
        model.clock = lambda: self.ticks[-1][1]
        ranks = [sorted(column) for column in zip(*tokens, strict=True)]
        same = not tokens or all(ranks[0].index(m) == ranks[1].index(r) for m, r in tokens)
        return same and [plain(view) for view in Stepped.over(model).survey(limit=100)] == picture


STANDING = """
SELECT replace(a.id::text, '-', ''), a.state, wanted.name, CASE a.state
  WHEN 'granted' THEN n.held AND n.attempt = a.id
  ELSE n.contended AND EXISTS (SELECT FROM fenced.queue q
    WHERE q.name = n.name AND q.ticket = a.ticket AND q.attempt = a.id) END IS TRUE
FROM fenced.attempt a CROSS JOIN LATERAL unnest(a.names) AS wanted (name) LEFT JOIN fenced.name n USING (name)
WHERE a.state IN ('granted', 'waiting') AND a.expires > explored.now()
UNION ALL
SELECT replace(a.id::text, '-', ''), a.state, n.name, false
FROM fenced.name n JOIN fenced.attempt a ON a.id = n.attempt
WHERE n.held AND a.state IN ('granted', 'withdrawn') AND n.name <> ALL (a.names)
"""
"""Who lives, for which names, and whether these know of it; and who holds a name that he never asked for."""


def token_of(call: Call, answer: object) -> int | None:
    """How much was forgotten is a number, too, and nobody's promise: asks forget some on their way."""
    token = answer.token if isinstance(answer, Granted) else answer
    return token if isinstance(token, int) and call.query != "tidy" else None


def plain(answer: object) -> object:
    """An answer without its token, which is compared by rank, and without what is only a hint."""
    match answer:
        case Granted(_, remaining, ttl):
            return ("granted", round(remaining, 6), ttl)
        case Waiting() | Busy():
            return type(answer)
        case Kept(remaining):
            return ("kept", round(remaining, 6))
        case NameView():
            held_by = answer.held_by and answer.held_by.grant
            return (answer.name, held_by, round(answer.free_in, 6), [w.holder.label for w in answer.waiters])
        case int():
            return int
        case _:
            return answer


# The tests.


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.name)
def test_no_interleaving_breaks_a_promise(story: Story, world: World) -> None:
    print(f"{story.name}: {world.explore(story)}")


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug: Bug, world: World) -> None:
    with world.planted(bug):
        for name in bug.found_by:
            with pytest.raises(StoryBroken) as found:
                world.explore(BY_NAME[name])
            assert bug.sign in str(found.value)
            print(f"{bug.name}, in {name!r}: {found.value}")


@pytest.mark.parametrize("isolation", [IsolationLevel.REPEATABLE_READ, IsolationLevel.SERIALIZABLE])
def test_other_isolation_levels_are_refused(isolation: IsolationLevel, world: World) -> None:
    world.reset(BY_NAME["two asks, name new"])
    trace = world.explorer.run([InterleavingScript("A", (A.step(), COMMIT), isolation)], "AA")
    assert [event.outcome.code for event in trace.events] == ["ZFA03", ""], str(trace)


def test_the_schema_reads_no_other_clock() -> None:
    """Else a story would not move it, and prove nothing."""
    others = (
        r"(?i)\bnow\(\)|current_timestamp|localtimestamp|statement_timestamp|transaction_timestamp|timeofday"
    )
    assert not re.findall(others, SCHEMA)


# The explorer itself.

RAISE = sql("UPDATE explored.counter SET n = n + 1 WHERE id = 1")
OTHER = sql("UPDATE explored.counter SET n = n + 1 WHERE id = 2")


def counted(world: World, *scripts: InterleavingScript) -> dict[str, tuple[list[str], list[int]]]:
    """By order: the SQLSTATEs that came up, and what the two counters show."""
    found = {}
    for order in interleavings(scripts).chosen:
        world.watch.execute("UPDATE explored.counter SET n = 0")
        trace = world.explorer.run(scripts, order)
        rows = world.watch.execute("SELECT n FROM explored.counter ORDER BY id").fetchall()
        states = [event.outcome.code for event in trace.events if event.outcome.code]
        found[order] = (states, [n for (n,) in rows])
    return found


def test_a_waiting_session_is_held_back_and_errors_are_outcomes(world: World) -> None:
    for isolation, state in (
        (IsolationLevel.READ_COMMITTED, []),
        (IsolationLevel.REPEATABLE_READ, ["40001"]),
    ):
        found = counted(world, *(InterleavingScript(name, (RAISE, COMMIT), isolation) for name in "AB"))
        lost = {order for order, (states, _) in found.items() if states == state != []}
        assert lost == ({"ABAB", "ABBA", "BABA", "BAAB"} if state else set())
        assert all(n == 2 - len(states) for states, (n, _) in found.values())


def test_a_deadlock_has_one_victim(world: World) -> None:
    found = counted(
        world,
        InterleavingScript("A", (RAISE, OTHER, COMMIT)),
        InterleavingScript("B", (OTHER, RAISE, COMMIT)),
    )
    assert len(found) == 20
    assert {order for order, (states, _) in found.items() if states} == {
        order for order in found if sorted(order[:2]) == ["A", "B"]
    }
    assert all(states in ([], ["40P01"]) for states, _ in found.values())


def test_open_transactions_are_rolled_back(world: World) -> None:
    found = counted(world, InterleavingScript("A", (RAISE,)), InterleavingScript("B", (RAISE, COMMIT)))
    assert found == dict.fromkeys(("ABB", "BAB", "BBA"), ([], [1, 0]))


def test_a_sample_says_that_it_is_one() -> None:
    scripts = [InterleavingScript(name, (RAISE, RAISE, COMMIT)) for name in "ABC"]
    orders = interleavings(scripts, limit=50, seed=7)
    assert str(orders) == "50 of 1680 interleavings, drawn by seed 7"
    assert len({*orders.chosen}) == 50 and orders == interleavings(scripts, limit=50, seed=7)
    assert str(interleavings(scripts)) == "all 1680 interleavings"


def test_a_trace_is_a_table(world: World) -> None:
    short = sql(RAISE.statement, label="raise")
    trace = world.explorer.run(
        [InterleavingScript("A", (short, COMMIT)), InterleavingScript("B", (short, ROLLBACK))], "ABBA"
    )
    assert str(trace).splitlines() == [
        "order 'ABBA'",
        "  A                  B",
        "  raise -> UPDATE 1",
        "                     raise ... waits for A",
        "  COMMIT",
        "                     ... raise -> UPDATE 1",
        "                     ROLLBACK",
    ]
