"""The PostgreSQL guard under every interleaving of two or three sessions, and a judge of what comes out.

Sessions announce, read, write, commit and roll back as the wrapper does. Whatever was committed is played again, in
the order of the commits, through the pure decision: it must have admitted all of it, the marks and the rows must be
those that it leaves, and every refusal must be one that it would have made at that moment.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import psycopg
import pytest

from fenced.guards.spec import Spec
from fenced.runtime.blocking import step as run_now
from fenced.stores.postgresql.guard.refusals import ANNOUNCE_FIRST, SERIALIZATION, SQLSTATES
from fenced.stores.postgresql.guard.sessions import PsycopgSession
from fenced.stores.postgresql.guard.tables import PostgresqlTable
from fenced.testing.kit import ensure
from fenced.values.decision import RULES, Judgement, Mark, Mode, Rule, Ruling, Verdict, judge, rule_on
from fenced.values.model import Stamp
from fenced_testkit.interleaving import (
    COMMIT,
    ROLLBACK,
    Explorer,
    IsolationLevel,
    ScriptEvent,
    ScriptStep,
    StoryBroken,
    Trace,
)
from fenced_testkit.interleaving.postgresql import PostgresqlEngine
from fenced_testkit.servers import PostgresqlServer
from tests.postgresql.guard_stories import (
    BACK,
    BY_NAME,
    NEW,
    OLD,
    READ_COMMITTED,
    REALM,
    REPEATABLE_READ,
    SAVE,
    SERIALIZABLE,
    STORIES,
    Move,
    Story,
    add,
    alone,
    announce,
    lease,
)
from tests.postgresql.planted_guard_sql import BUGS, Bug, functions

pytestmark = pytest.mark.xdist_group("guard interleavings")

MERGES_MAX = {READ_COMMITTED: 24, REPEATABLE_READ: 8, SERIALIZABLE: 8}
DEADLOCK_TIMEOUT = "100ms"
"""As much longer than the moment for which a write waits at a fence as it is in production."""

# The world.

TABLES = (*RULES, *(f"{rule}_line" for rule in RULES), "epoch")
RESET = "; ".join(
    [
        *(f"DELETE FROM explored.{rule}_line" for rule in RULES),
        *(f"UPDATE explored.{table} SET labels = '' WHERE labels <> ''" for table in (*RULES, "epoch")),
        "UPDATE explored.epoch SET epoch = NULL WHERE epoch IS NOT NULL",
        "DELETE FROM fenced_guard.lease; DELETE FROM fenced_guard.turn; DELETE FROM fenced_guard.mark",
        "DELETE FROM fenced_guard.record",
        "SELECT setval(refused::regclass, 1, false) FROM fenced_guard.guard",
    ]
)
LEFT = " UNION ALL ".join(
    [
        "SELECT 'mark', name, concat_ws(' ', token, grant_id, seq) FROM fenced_guard.mark",
        *(f"SELECT 'line', '{rule}/' || name, label FROM explored.{rule}_line" for rule in RULES),
        *(
            f"SELECT 'row', '{t}/' || name, labels FROM explored.{t} WHERE labels <> ''"
            for t in (*RULES, "epoch")
        ),
        "SELECT 'refused', guard, pg_sequence_last_value(refused::regclass)::text FROM fenced_guard.guard",
    ]
)
"""What a story leaves in the database."""


@dataclass
class World:
    """A database with guarded tables."""

    explorer: Explorer
    watch: psycopg.Connection[tuple[Any, ...]]

    def reset(self, story: Story) -> None:
        setup = "".join(f"; {alone(stamp).statement}" for stamp in story.before)
        self.watch.execute(f"{RESET}; UPDATE fenced_guard.mode SET mode = '{story.mode}'{setup}".encode())

    def explore(self, story: Story, level: IsolationLevel, announcing: str = "") -> str:
        def judged(trace: Trace) -> None:
            Judge(self, story, level, trace).judge()

        scripts = [
            replace(script, steps=tuple(in_place_of_announce(announcing, step) for step in script.steps))
            for script in story.scripts(level)
        ]
        return str(
            self.explorer.explore(
                scripts, reset=lambda: self.reset(story), judge=judged, limit=MERGES_MAX[level]
            )
        )

    def install(self, bug: Bug | None = None) -> None:
        """Make the guards anew, as they are or with a bug."""
        for table in TABLES:
            rule = table.partition("_")[0]
            epoch = "epoch" if table == "epoch" else None
            spec = Spec(f"explored.{table}", f"{rule}/{{name}}", "retry" if epoch else rule, epoch)  # type: ignore[arg-type]
            for statement in run_now(PostgresqlTable(spec, PsycopgSession(self.watch)).statements("enforce")):
                self.watch.execute((bug.everywhere(statement) if bug else statement).encode())
        self.watch.execute(";".join(bug.functions() if bug else functions().values()).encode())

    @contextlib.contextmanager
    def planted(self, bug: Bug) -> Iterator[None]:
        self.install(bug)
        try:
            yield
        finally:
            self.install()


def in_place_of_announce(statement: str, step: ScriptStep) -> ScriptStep:
    if not statement or not isinstance(step.about, Move) or step.about.kind != "announce":
        return step
    return replace(step, statement=statement)


@pytest.fixture(scope="module")
def world(postgresql_server: PostgresqlServer) -> Iterator[World]:
    database = postgresql_server.create_database()
    rows = "".join(
        f"""CREATE TABLE explored.{table} (name text PRIMARY KEY, labels text NOT NULL DEFAULT '');
        INSERT INTO explored.{table} VALUES ('x'), ('y'), ('z');"""
        for table in (*RULES, "epoch")
    )
    lines = "".join(
        f"""CREATE TABLE explored.{rule}_line (id bigserial PRIMARY KEY, name text NOT NULL, label text NOT NULL);
        CREATE INDEX ON explored.{rule}_line (name);"""
        for rule in RULES
    )
    postgresql_server.execute(
        f"""
        CREATE SCHEMA explored; {rows} {lines}
        CREATE ROLE explored_stranger;
        GRANT USAGE ON SCHEMA explored TO explored_stranger;
        GRANT ALL ON ALL TABLES IN SCHEMA explored TO explored_stranger;
        GRANT ALL ON ALL SEQUENCES IN SCHEMA explored TO explored_stranger;
        CREATE SCHEMA explored_trap AUTHORIZATION explored_stranger;
        SET ROLE explored_stranger;
        CREATE FUNCTION explored_trap.never(bigint, bigint) RETURNS boolean LANGUAGE sql AS 'SELECT false';
        CREATE OPERATOR explored_trap.< (LEFTARG = bigint, RIGHTARG = bigint, FUNCTION = explored_trap.never);
        """,
        database,
    )
    # A table of two rows is scanned as a whole, which at SERIALIZABLE is a read of both.
    for setting in (
        "enable_seqscan",
        "jit",
    ):
        # What cannot be scanned otherwise would be compiled, as it looks dear.
        postgresql_server.execute(f'ALTER DATABASE "{database}" SET {setting} = off')
    url = postgresql_server.url(database)
    with (
        psycopg.connect(url, autocommit=True, cursor_factory=psycopg.RawCursor) as watch,
        Explorer(PostgresqlEngine(url, DEADLOCK_TIMEOUT)) as explorer,
    ):
        watch.execute("SET session_replication_role = replica")
        world = World(explorer, watch)
        world.install()
        watch.execute(f"UPDATE fenced_guard.trust SET realm = '{REALM}'".encode())
        yield world
    postgresql_server.drop_database(database)
    postgresql_server.execute("DROP ROLE explored_stranger")


# The judge.


@dataclass
class Transaction:
    """What of a transaction stands: its moves that were not rolled back to a savepoint."""

    id: str
    moves: list[Move] = field(default_factory=list)
    reads: list[tuple[Move, list[str]]] = field(default_factory=list)
    committed: int | None = None
    failed: bool = False

    def copied(self) -> Transaction:
        return replace(self, moves=[*self.moves], reads=[*self.reads])


@dataclass
class State:
    """The marks and the rows as they are by the pure decision."""

    marks: dict[str, Mark]
    labels: dict[str, list[tuple[str, int]]] = field(default_factory=dict)  # with the token of each
    mode: Mode = field(default_factory=lambda: Mode("enforce"))

    def play(self, transaction: Transaction) -> None:
        carried: list[Stamp] = []
        for move in transaction.moves:
            for name, judgement, stamp in self.judged(move, carried, transaction.id):
                admitted = judgement.verdict is Verdict.ADMIT
                ensure(
                    admitted or rule_on(judgement.verdict, self.mode, name) is not Ruling.REFUSE,
                    f"I3: {transaction.id} was admitted to {name}, and is {judgement.verdict}: {self.marks.get(name)}",
                )
                if admitted and judgement.mark is not None:
                    self.marks[name] = judgement.mark
                if move.kind == "write":
                    self.labels.setdefault(name, []).append((move.label, stamp.token if stamp else 0))
            carried += announced_by(move)

    def judged(
        self, move: Move, carried: list[Stamp], operation: str
    ) -> Iterator[tuple[str, Judgement, Stamp | None]]:
        """What the pure decision says of a move, name by name as the guard takes them."""
        writes = move.kind == "write"
        for name in sorted(move.names) if move.kind != "read" else ():
            candidates = carried if writes else move.stamps
            stamp = next((s for s in candidates if name in s.names), candidates[0] if candidates else None)
            yield (
                name,
                judge(
                    self.marks.get(name),
                    stamp,
                    name=name,
                    rule=rule_of(name),
                    realm=REALM,
                    announce=not writes,
                    operation=operation if writes else None,
                ),
                stamp,
            )


def announced_by(move: Move) -> list[Stamp]:
    """The stamps that a move lets further writes be made under: of a part of a lease, that part."""
    if move.kind != "announce":
        return []
    return [stamp._replace(names=tuple(n for n in stamp.names if n in move.names)) for stamp in move.stamps]


def rule_of(name: str) -> Rule:
    table = name.partition("/")[0]
    return next((rule for rule in RULES if rule == table), "retry")


@dataclass
class Judge:
    """Holds one trace, and the database that it left, against what must never be."""

    world: World
    story: Story
    level: IsolationLevel
    trace: Trace
    transactions: list[Transaction] = field(default_factory=list)
    failures: list[tuple[ScriptEvent, Transaction]] = field(default_factory=list)

    def judge(self) -> None:
        for session in self.trace.sessions:
            self._read([event for event in self.trace.events if event.session == session])
        for event, transaction in self.failures:
            self._is_explained(event, transaction)
        state = self._replayed(None)
        self._nobody_missed_anything()
        left = self.world.watch.execute(LEFT).fetchall()
        self._marks_are(state, {name: value.split() for kind, name, value in left if kind == "mark"})
        self._rows_are(state, left)
        refused = [e for e, _ in self.failures if e.outcome.code in SQLSTATES and e.outcome.code != "ZF010"]
        counted = sum(int(count or 0) for kind, _, count in left if kind == "refused")
        ensure(counted == len(refused), f"I6: {len(refused)} refusals, {counted} of them counted")
        if self.story.always or (self.story.serial and [*self.trace.order] == sorted(self.trace.order)):
            failed = [f"{e.step.label}: {e.outcome}" for e, _ in self.failures]
            ensure(not failed, f"nothing was to fail here: {failed}")

    def _read(self, events: list[ScriptEvent]) -> None:
        """Tell a session's steps apart into transactions, and what stands of them."""
        saved = current = None
        for event in events:
            if current is None:
                current = Transaction(f"{event.session} from {event.began}")
                self.transactions.append(current)
            if event.outcome.code:
                self.failures.append((event, current.copied()))
                current.failed = True
            elif event.step == SAVE:
                saved = current.copied()
            elif event.step == BACK and saved is not None:
                current.moves, current.reads, current.failed = saved.moves, saved.reads, False
            elif isinstance(event.step.about, Move):
                current.moves.append(event.step.about)
                if event.step.about.kind == "read":
                    current.reads.append((event.step.about, [label for (label,) in event.outcome.rows]))
            if event.step in (COMMIT, ROLLBACK):
                if event.outcome.tag == "COMMIT":
                    current.committed = event.began
                current = None

    def _committed(self, until: int | None = None) -> list[Transaction]:
        """In order. A transaction that ends lets go of its fences: in this order it had them."""
        done = [(t.committed, t) for t in self.transactions if t.committed is not None]
        return [t for place, t in sorted(done, key=lambda d: d[0]) if until is None or place < until]

    def _replayed(self, until: int | None) -> State:
        marks = {name: Mark(token, f"{token:032x}") for name, token in self.story.marks.items()}
        state = State(marks, mode=Mode.parse(self.story.mode))
        for transaction in self._committed(until):
            state.play(transaction)
        return state

    def _is_explained(self, event: ScriptEvent, transaction: Transaction) -> None:
        """A step failed: was it to?"""
        code, move, told = event.outcome.code, event.step.about, f"{event.step.label}: {event.outcome}"
        if code == "25P02":
            ensure(transaction.failed, told)
        elif code == SERIALIZATION:
            ensure(self.level is not READ_COMMITTED, told)
        elif code == ANNOUNCE_FIRST:
            ensure(self.level is not READ_COMMITTED, told)
            ensure(not self.story.apart or self._was_alone_in_vain(event), told)
        else:
            ensure(code in SQLSTATES, f"an error: {told}")
            state = self._replayed(event.ended)
            state.play(transaction)
            carried = [stamp for m in transaction.moves for stamp in announced_by(m)]
            verdicts = [j.verdict for _, j, _ in state.judged(move, carried, transaction.id)]
            first = next((v for v in verdicts if v is not Verdict.ADMIT), Verdict.ADMIT)
            ensure(SQLSTATES[code] is first, f"it is {first}, and was refused: {told}")
            ruling = rule_on(first, state.mode, move.names[0])
            ensure(ruling is Ruling.REFUSE or first is Verdict.APPLIED, f"refused in {state.mode}: {told}")

    def _was_alone_in_vain(self, event: ScriptEvent) -> bool:
        """Whether this session's own announcement was to be repeated, which a script cannot do."""
        earlier = [
            e.step.about for e, _ in self.failures if e.session == event.session and e.began < event.began
        ]
        return any(move is not None and move.kind == "alone" for move in earlier)

    def _nobody_missed_anything(self) -> None:
        """I5 and I8: a read that is announced, or that a write may rest on, shows all that others acknowledged."""
        state = self._replayed(0)
        for transaction in self._committed():
            own = {s.token for m in transaction.moves if m.kind == "announce" for s in m.stamps}
            fenced = {n for m in transaction.moves if m.kind in ("announce", "write") for n in m.names}
            for move, seen in transaction.reads:
                if not fenced & {*move.names} or not state.mode.refuses(move.names[0]):
                    continue
                lines = [(x, t) for x, t in state.labels.get(move.names[0], []) if not x.startswith("=")]
                missed = [label for label, token in lines if token not in own and label not in seen]
                ensure(not missed, f"I5: {transaction.id} read {seen}, and missed {missed}")
            state.play(transaction)

    def _marks_are(self, state: State, values: dict[str, list[str]]) -> None:
        found = {name: Mark(int(token), grant, int(seq)) for name, (token, grant, seq) in values.items()}
        due = {name: replace(mark, operation=None) for name, mark in state.marks.items()}
        if state.mode.name in ("enforce", "require") or [*self.trace.order] == sorted(self.trace.order):
            ensure(found == due, f"the marks are {found}, not {due}")
            return
        # What may not wait gives a mark up that somebody else is at.
        for name, mark in found.items():
            before = self.story.marks.get(name, 0)
            ensure(before <= mark.token <= due[name].token, f"the mark of {name} is {mark}, was {before}")

    def _rows_are(self, state: State, left: list[tuple[str, str, str]]) -> None:
        """I5 and I6: what was committed is there, and nothing else."""
        lines = sorted((name, label) for kind, name, label in left if kind == "line")
        rows = {name: labels.split() for kind, name, labels in left if kind == "row"}
        pairs = [(name, label) for name, labels in state.labels.items() for label, _ in labels]
        due = sorted((name, label) for name, label in pairs if not label.startswith("="))
        ensure(lines == due, f"I5, I6: the lines are {lines}, not {due}")
        touched: dict[str, list[str]] = {}
        for name, label in pairs:
            if label.startswith("="):
                touched.setdefault(name, []).append(label[1:])
        ensure(rows == touched, f"I5, I6: the rows are {rows}, not {touched}")


# The tests.


@pytest.mark.parametrize(
    ("story", "level"),
    [(story, level) for story in STORIES for level in story.levels],
    ids=lambda value: value.name.lower(),
)
def test_no_interleaving_breaks_a_promise(story: Story, level: IsolationLevel, world: World) -> None:
    print(f"{story.name}, {level.name}: {world.explore(story, level)}")


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug: Bug, world: World) -> None:
    with world.planted(bug):
        for name, level in bug.found_by:
            with pytest.raises(StoryBroken) as found:
                world.explore(BY_NAME[name], level, bug.announcing)
            assert bug.sign in str(found.value)
            print(f"{bug.name}, in {name!r}: {found.value}")


PAIR = ("retry/x", "retry/y")
HALVES = [announce(lease(OLD, *PAIR), only=(name,), kind="alone") for name in PAIR]


@pytest.mark.parametrize(
    "level", [READ_COMMITTED, REPEATABLE_READ, SERIALIZABLE], ids=lambda level: level.name
)
@pytest.mark.parametrize("mode", ["observe", "shadow"])
@pytest.mark.parametrize(
    ("before", "holder", "other"),
    [
        ([alone(lease(8))], lease(OLD), lease(NEW)),
        ([alone(lease(OLD))], lease(OLD), lease(NEW)),
        ([], lease(OLD), lease(NEW)),
        ([], lease(NEW), lease(OLD)),
        ([], lease(OLD), lease(OLD)),
        (HALVES, lease(OLD, *PAIR), lease(OLD, *PAIR)),
        ([alone(lease(OLD, *PAIR))], lease(OLD, *PAIR), lease(NEW, *PAIR)),
    ],
)
def test_observed_holders_do_not_wait_for_each_other(
    before: list[ScriptStep], holder: Stamp, other: Stamp, mode: str, level: IsolationLevel, world: World
) -> None:
    """One holder stays in the middle of its transaction; the other gets through all of his."""
    world.reset(Story("observed", (), mode=mode))
    for step in before:
        world.watch.execute(step.statement.encode())
    with psycopg.connect(world.watch.info.dsn) as first, psycopg.connect(world.watch.info.dsn) as second:
        first.isolation_level = second.isolation_level = psycopg.IsolationLevel[level.name]
        second.execute("SET statement_timeout = '3s'")
        second.commit()
        for connection, stamp in ((first, holder), (second, other)):
            connection.execute(announce(stamp).statement.encode())
            connection.execute(add("a").statement.encode())
        second.commit()
        first.commit()
