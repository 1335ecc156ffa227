"""Stories for the PostgreSQL guard: what was before, and what two or three sessions do at once."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any, Literal

from fenced.values.decision import Rule
from fenced.values.model import Stamp
from fenced_testkit.interleaving import COMMIT, ROLLBACK, InterleavingScript, IsolationLevel, ScriptStep, sql

READ_COMMITTED, REPEATABLE_READ, SERIALIZABLE = LEVELS = (
    IsolationLevel.READ_COMMITTED,
    IsolationLevel.REPEATABLE_READ,
    IsolationLevel.SERIALIZABLE,
)
REALM = "00000000000000aa"
OLD, NEW = 9, 10
"""The two holders' tokens; as texts they would be the other way round."""
# What sessions do. A name is TABLE/ROW; a table has the rule that it is called by.


@dataclass(frozen=True)
class Move:
    """A step that the oracle knows. `names`: what of the stamps is announced; of a write, its one name."""

    kind: Literal["announce", "alone", "read", "write"]
    names: tuple[str, ...]
    stamps: tuple[Stamp, ...] = ()
    label: str = ""


def lease(token: int, *names: str, seq: int = 0, grant: int = 0) -> Stamp:
    return Stamp(REALM, names or ("retry/x",), token, seq, f"{grant or token:032x}")


def announce(
    *stamps: Stamp, only: tuple[str, ...] = (), kind: Literal["announce", "alone"] = "announce"
) -> ScriptStep:
    names = only or tuple(name for stamp in stamps for name in stamp.names)
    table = names[0].partition("/")[0]
    options = f", p_names => '{','.join(only)}'" if only else ""
    if kind == "announce" and table in ("once", "sequenced"):
        options += ", p_exclusive => true"
    function = "announce" if kind == "announce" else "announce_alone"
    told = " ".join(map(str, stamps))
    told_tokens = " ".join(f"{stamp.token}" for stamp in stamps)
    # As the wrapper does it.
    level = "SET TRANSACTION ISOLATION LEVEL READ COMMITTED; " if kind == "alone" else ""
    return sql(
        f"{level}SELECT fenced_guard.{function}('{told}', p_guard => 'explored.{table}'{options})",
        label=f"{kind} {told_tokens} {','.join(only)}".strip(),
        about=Move(kind, names, stamps),
    )


def alone(*stamps: Stamp) -> ScriptStep:
    return announce(*stamps, kind="alone")


def read(name: str = "retry/x") -> ScriptStep:
    table, _, row = name.partition("/")
    lines = f"SELECT label FROM explored.{table}_line WHERE name = '{row}' ORDER BY id"
    return sql(lines, label=f"read {name}", about=Move("read", (name,)))


def add(label: str, name: str = "retry/x") -> ScriptStep:
    """Insert a line: no two of them wait for each other, nor conflict."""
    table, _, row = name.partition("/")
    statement = f"INSERT INTO explored.{table}_line (name, label) VALUES ('{row}', '{label}')"
    return sql(statement, label=f"add {label}", about=Move("write", (name,), label=label))


def touch(label: str, name: str = "retry/x") -> ScriptStep:
    """Update the row itself, and lock it."""
    table, _, row = name.partition("/")
    statement = f"UPDATE explored.{table} SET labels = labels || ' {label}' WHERE name = '{row}'"
    return sql(statement, label=f"touch {name} {label}", about=Move("write", (name,), label=f"={label}"))


SAVE = sql("SAVEPOINT here")
BACK = sql("ROLLBACK TO here")
DISGUISE = sql("SET LOCAL ROLE explored_stranger", label="as a stranger")
OWN_OPERATORS = sql("SET LOCAL search_path = explored_trap, pg_catalog", label="with operators of one's own")


@dataclass(frozen=True)
class Story:
    """What was before, and who does what at once, the holder of the oldest token first.

    `apart`: at REPEATABLE READ and above a token that would raise its mark is announced and committed first, as
    the wrapper does it. `serial`: one after the other, all of it is committed. `always`: in any order.
    """

    name: str
    sessions: tuple[tuple[ScriptStep, ...], ...]
    before: tuple[Stamp, ...] = ()
    mode: str = "enforce"
    levels: tuple[IsolationLevel, ...] = LEVELS
    apart: bool = True
    serial: bool = True
    always: bool = False

    def scripts(self, level: IsolationLevel) -> list[InterleavingScript]:
        scripts = []
        for letter, session in zip("ABC", self.sessions, strict=False):
            steps: list[ScriptStep] = []
            for step in session:
                if self.apart and level is not READ_COMMITTED and self._rises(step.about):
                    steps += [alone(*step.about.stamps), COMMIT]
                steps.append(step)
            scripts.append(InterleavingScript(letter, tuple(steps), level))
        return scripts

    @property
    def marks(self) -> dict[str, int]:
        return {name: stamp.token for stamp in self.before for name in stamp.names}

    def _rises(self, move: Move | None) -> bool:
        return (
            move is not None
            and move.kind == "announce"
            and any(self.marks.get(name, 0) < stamp.token for stamp in move.stamps for name in stamp.names)
        )


def both(name: str, *rest: ScriptStep, **options: Any) -> Story:
    """The old holder in the middle of its work, and another session."""
    return Story(name, ((announce(lease(OLD)), read(), add("a"), COMMIT), rest), **options)


X, Y = "retry/x", "retry/y"
AT_OLD, NINES = (lease(OLD),), (lease(OLD, X, Y),)
NEW_WORKS = (announce(lease(NEW)), read(), add("b"), COMMIT)
BEFORE = {"is the old holder's": AT_OLD, "is below both": (lease(8),), "is not there": ()}
AGAIN = (announce(lease(OLD)), add("a1"), COMMIT, announce(lease(OLD)), add("a2"), COMMIT)
SIBLING = (announce(lease(OLD)), touch("a"), COMMIT)
OTHER_SIBLING = (announce(lease(OLD)), touch("b"), COMMIT)
OLD_PAIR, NEW_PAIR = lease(OLD, X, Y), lease(NEW, X, Y)
ONE_OF_TWO = (announce(OLD_PAIR, only=(Y,)), touch("a", X), touch("a", Y), COMMIT)
BOTH_OF_TWO = (announce(NEW_PAIR), touch("b", X), touch("b", Y), COMMIT)
EX, EY = "epoch/x", "epoch/y"


def leases_of_two(first: int, second: int, label: str, *order: str) -> tuple[ScriptStep, ...]:
    """Two leases, announced in this order, and their rows written in it."""
    stamps = {X: lease(first, X), Y: lease(second, Y)}
    return (announce(*(stamps[name] for name in order)), *(touch(label, name) for name in order), COMMIT)


def twice(rule: Rule, *seqs: int) -> Story:
    """Two connections of one lease, each with an operation."""
    name = f"{rule}/x"
    sessions = tuple(
        (announce(lease(OLD, name, seq=seq)), read(name), add(label, name), COMMIT)
        for label, seq in zip("ab", seqs, strict=True)
    )
    told = f"{rule}, two connections with seq {seqs[0]} and {seqs[1]}"
    return Story(told, sessions, (lease(OLD, name),), serial=rule == "sequenced" and seqs[0] < seqs[1])


def apart_by_name(mode: str, *before: Stamp) -> Story:
    sessions = tuple(
        (announce(lease(token, name)), touch(label, name), COMMIT)
        for token, name, label in ((OLD, X, "a"), (NEW, Y, "b"), (11, "retry/z", "c"))
    )
    told = f"three names, three holders, {mode}, marks before: {[stamp.token for stamp in before]}"
    return Story(told, sessions, before, mode, (REPEATABLE_READ, SERIALIZABLE), apart=False, always=True)


STORIES = [
    *(
        replace(both(f"old and new, and the mark {k}", *NEW_WORKS), before=v, mode=mode)
        for (k, v), mode in zip(BEFORE.items(), ("require", "enforce", "enforce"), strict=True)
    ),
    Story("the new one only reads", (AGAIN, (announce(lease(NEW)), read(), COMMIT)), AT_OLD),
    Story(
        "the new one rolls back",
        (AGAIN, (announce(lease(NEW)), read(), add("b"), ROLLBACK)),
        AT_OLD,
        levels=(READ_COMMITTED,),
    ),
    both("the new one does not announce first", *NEW_WORKS, before=AT_OLD, apart=False, serial=False),
    both(
        "a savepoint around the announcement",
        *(SAVE, announce(lease(NEW)), BACK, COMMIT),
        before=AT_OLD,
        levels=(READ_COMMITTED,),
    ),
    both(
        "a savepoint around the announcement, then a write",
        *(SAVE, announce(lease(NEW)), BACK, add("b"), COMMIT),
        before=AT_OLD,
        mode="require",
        levels=(READ_COMMITTED,),
        serial=False,
    ),
    both(
        "a savepoint around a write", *(NEW_WORKS[0], SAVE, add("b1"), BACK, add("b2"), COMMIT), before=AT_OLD
    ),
    *(Story(f"siblings, and the mark {k}", (SIBLING, OTHER_SIBLING), v) for k, v in BEFORE.items()),
    Story("siblings and a new one", (SIBLING, OTHER_SIBLING, NEW_WORKS), AT_OLD),
    Story(
        "one token, two grants", (SIBLING, (announce(lease(OLD, grant=1)), touch("b"), COMMIT)), serial=False
    ),
    Story(
        "one token, two grants, later",
        (AGAIN, (announce(lease(OLD, grant=1)), read(), COMMIT)),
        AT_OLD,
        serial=False,
    ),
    Story(
        "two names, two leases each, the other way round",
        (leases_of_two(11, 12, "a", Y, X), leases_of_two(13, 14, "b", X, Y)),
        NINES,
    ),
    Story(
        "two names, and somebody in the middle of one",
        ((announce(OLD_PAIR), COMMIT), (announce(OLD_PAIR, only=(Y,)), COMMIT), (announce(NEW_PAIR), COMMIT)),
        NINES,
        levels=(READ_COMMITTED,),
    ),
    Story(
        "two leases, and somebody in the middle of one",
        (
            (announce(lease(11, X), lease(12, Y)), COMMIT),
            (announce(lease(12, Y)), COMMIT),
            (announce(lease(13, X), lease(14, Y)), COMMIT),
        ),
        (lease(11, X), lease(12, Y)),
        levels=(READ_COMMITTED,),
    ),
    Story(
        "a lease, and a part of it",
        (
            (announce(lease(OLD)), COMMIT),
            (announce(lease(OLD), only=(X,)), COMMIT),
            (announce(lease(NEW)), COMMIT),
        ),
        AT_OLD,
        levels=(READ_COMMITTED,),
    ),
    Story("two names, one of them announced", (ONE_OF_TWO, BOTH_OF_TWO), NINES, serial=False),
    Story(
        "a name that is read, and not announced",
        (
            (announce(lease(OLD, Y)), read(Y), add("a", Y), COMMIT),
            (announce(NEW_PAIR, only=(X,)), read(Y), add("b", Y), COMMIT),
        ),
        (lease(OLD, Y),),
        serial=False,
    ),
    Story(
        "a name that is read, and announced by an earlier transaction of its lease",
        (
            (announce(lease(OLD, Y)), read(Y), add("a", Y), COMMIT),
            (announce(NEW_PAIR), COMMIT, announce(NEW_PAIR, only=(X,)), read(Y), add("b", Y), COMMIT),
        ),
        (lease(OLD, Y),),
        serial=False,
    ),
    Story(
        "two names, one of them announced, and the other's new holder",
        (ONE_OF_TWO, (announce(lease(NEW)), touch("b"), COMMIT)),
        NINES,
        serial=False,
    ),
    Story(
        "two names the other way round, and somebody in the middle of one",
        (
            (announce(lease(OLD), only=(X,)), COMMIT),
            (announce(lease(12, Y), lease(11, X)), COMMIT),
            (announce(lease(13, X), lease(14, Y)), COMMIT),
        ),
        AT_OLD,
        levels=(READ_COMMITTED,),
    ),
    twice("once", 1, 2),
    twice("sequenced", 1, 2),
    twice("sequenced", 1, 1),
    Story(
        "a second transaction without a stamp",
        ((*SIBLING, touch("c"), COMMIT), (announce(lease(NEW)), read(), COMMIT)),
        AT_OLD,
        mode="require",
        serial=False,
    ),
    Story(
        "an epoch, and its name not announced",
        (
            (
                announce(lease(OLD, EX, EY)),
                touch("a1", EY),
                COMMIT,
                announce(lease(OLD, EX, EY), only=(EX,)),
                touch("a2", EY),
                COMMIT,
            ),
            (announce(lease(NEW, EY)), COMMIT),
        ),
        (lease(OLD, EX, EY),),
        serial=False,
    ),
    Story(
        "a stranger with operators of his own",
        ((DISGUISE, OWN_OPERATORS, announce(lease(OLD)), add("a"), COMMIT), NEW_WORKS),
        (lease(8),),
        levels=(READ_COMMITTED,),
    ),
    *(
        Story(
            f"old and new, {mode}, and the mark {k}",
            ((announce(lease(OLD)), read(), add("a"), COMMIT), NEW_WORKS),
            *(v, mode, (READ_COMMITTED, REPEATABLE_READ)),
            apart=False,
            always=True,
        )
        for mode, (k, v) in itertools.product(
            ("observe", "shadow"), {**BEFORE, "is the new holder's": (lease(NEW),)}.items()
        )
    ),
    apart_by_name("enforce", lease(OLD, X), lease(NEW, Y), lease(11, "retry/z")),
    apart_by_name("shadow", lease(6, X), lease(7, Y), lease(8, "retry/z")),
    apart_by_name("observe"),
]
BY_NAME = {story.name: story for story in STORIES}
