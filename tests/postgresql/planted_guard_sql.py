"""Planted bugs of the PostgreSQL guard: mistakes that somebody made or would make.

Each is kept as a change to the real text, so that they stay in step.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from fenced.stores.postgresql.guard import schema
from fenced_testkit.interleaving import IsolationLevel

READ_COMMITTED, REPEATABLE_READ = IsolationLevel.READ_COMMITTED, IsolationLevel.REPEATABLE_READ

Changes = tuple[tuple[str, str], ...]


def changed(text: str, changes: Changes, name: str) -> str:
    for right, wrong in changes:
        assert text.count(right) == 1, f"{name}: {right!r} is there {text.count(right)} times"
        text = text.replace(right, wrong)
    return text


def functions() -> dict[str, str]:
    """The statements that replace the schema's functions, by name. The short wait is shorter still in stories."""
    pattern = r"^CREATE OR REPLACE (FUNCTION fenced_guard\.(\w+)\((?:(?!\n\n).)*?\$\$.*?\$\$);\n"
    found = re.finditer(pattern, schema.SCHEMA.functions, re.DOTALL | re.MULTILINE)
    statements = {match[2]: f"CREATE OR REPLACE {match[1]}" for match in found}
    short = changed(
        statements["admit_with_short_wait"],
        (("'lock_timeout', '100'", "'lock_timeout', '10'"),),
        "the short wait",
    )
    return {**statements, "admit_with_short_wait": short}


@dataclass(frozen=True)
class Bug:
    """A mistake: what of which function reads how instead, and the stories that find it, by which sign.

    `all_over` is changed in every function and trigger. `announcing` is what a bad wrapper sends in place of the
    announcement.
    """

    name: str
    who: str
    sign: str
    found_by: tuple[tuple[str, IsolationLevel], ...]
    changes: Mapping[str, Changes] = field(default_factory=dict)
    all_over: Changes = ()
    announcing: str = ""

    def functions(self) -> list[str]:
        statements = functions()
        for name, changes in self.changes.items():
            statements[name] = changed(statements[name], changes, f"{self.name}, {name}")
        for right, _ in self.all_over:
            assert any(right in statement for statement in statements.values()), f"{self.name}: {right!r}"
        return [self.everywhere(statement) for statement in statements.values()]

    def everywhere(self, statement: str) -> str:
        for right, wrong in self.all_over:
            statement = statement.replace(right, wrong)
        return statement


UNLOCKED: Changes = (
    ("SELECT * INTO m FROM fenced_guard.mark WHERE name = p_name FOR SHARE;", "NULL;"),
    ("SELECT * INTO m FROM fenced_guard.mark WHERE name = p_name FOR NO KEY UPDATE;", "NULL;"),
    ("WHERE name = p_name FOR NO KEY UPDATE SKIP LOCKED;", "WHERE name = p_name;"),
)
NO_SHARE: Changes = (("    FOR SHARE OF l SKIP LOCKED\n", ""),)

BUGS = (
    Bug(
        "the mark is only read",
        "The classic: SELECT, compare, write. Who was paused in between writes over his successor.",
        "I5",
        (("old and new, and the mark is the old holder's", READ_COMMITTED),),
        {"admit": UNLOCKED, "announce": NO_SHARE},
    ),
    Bug(
        "checked outside the transaction",
        "A wrapper that asks the guard first, and then begins.",
        "I3",
        (("old and new, and the mark is below both", REPEATABLE_READ),),
        announcing="SELECT set_config('fenced.stamp', concat(E'\\n', pg_current_xact_id(), E'/retry/x\\n'), true)",
    ),
    Bug(
        "an equal token is stale",
        "`<=` for `<`: a second connection of the holder is refused.",
        "it is admit, and was refused",
        (("siblings, and the mark is not there", READ_COMMITTED),),
        {"judge": (("IF s.token < m.token THEN", "IF s.token <= m.token THEN"),)},
    ),
    Bug(
        "an equal token is anybody's",
        "`>=` alone: after a lost history two grants share a token, and both write.",
        "is reused",
        (("one token, two grants", READ_COMMITTED),),
        {"judge": (("s.grant_id <> m.grant_id", "s.grant_id < ''"),)},
    ),
    Bug(
        "raised by an upsert",
        "INSERT ... ON CONFLICT DO UPDATE after a look without a lock: the mark falls.",
        "I3",
        (
            ("old and new, and the mark is below both", READ_COMMITTED),
            ("old and new, and the mark is not there", READ_COMMITTED),
        ),
        {
            "admit": (
                *UNLOCKED,
                (
                    "ON CONFLICT (name) DO NOTHING;",
                    "ON CONFLICT (name) DO UPDATE SET token = excluded.token, grant_id = excluded.grant_id;",
                ),
            )
        },
    ),
    Bug(
        "the stamp stays on the connection",
        "A plain SET, bound to nothing: it leaked through pgbouncer to the next client.",
        "I3",
        (("a second transaction without a stamp", READ_COMMITTED),),
        all_over=(
            ("pg_current_xact_id()::text", "pg_backend_pid()::text"),
            ("text := pg_current_xact_id();", "text := pg_backend_pid();"),
            ("concat(E'\\n', pg_current_xact_id(),", "concat(E'\\n', pg_backend_pid(),"),
            ("E'\\n' || pg_current_xact_id();", "E'\\n' || pg_backend_pid();"),
            ("held.xid, ' ', p_stamps, E'\\n'), true)", "held.xid, ' ', p_stamps, E'\\n'), false)"),
            ("held.xid, '#', held.grant_id, E'\\n'), true)", "held.xid, '#', held.grant_id, E'\\n'), false)"),
        ),
    ),
    Bug(
        "any search_path",
        "SECURITY DEFINER without a pinned search_path: whoever calls brings his own `<`.",
        "I3",
        (("a stranger with operators of his own", READ_COMMITTED),),
        all_over=((" SET search_path = pg_catalog, pg_temp", ""),),
    ),
    Bug(
        "fences as they come",
        "Locks in the caller's order: two holders of two names wait for each other.",
        "40P01",
        (("two names the other way round, and somebody in the middle of one", READ_COMMITTED),),
        {
            "announce_general": (
                ('array_agg(n.name ORDER BY n.name COLLATE "C")', "array_agg(n.name ORDER BY u.i)"),
                ('array_agg(u.i ORDER BY n.name COLLATE "C")', "array_agg(u.i ORDER BY u.i)"),
            ),
        },
    ),
    Bug(
        "the lease is enough",
        "What we had: a name of the lease that was not announced was fenced when it was written, after it was read.",
        "is uncovered",
        (("a name that is read, and not announced", READ_COMMITTED),),
        {
            "decide": ((" AND fenced_guard.announced(p_name, v_lines) THEN", " THEN"),),
            "admit": (("AND p_step = 'row' THEN", "AND false THEN"),),
        },
    ),
    Bug(
        "leases in part",
        "A draft of ours: what could be locked at once stayed locked, while the rest was waited for in order.",
        "40P01",
        (("two leases, and somebody in the middle of one", READ_COMMITTED),),
        {
            "announce_by_lease_rows": (
                ("      RAISE EXCEPTION USING ERRCODE = 'ZF011';\n", "      RETURN false;\n"),
                (
                    "        AND (fenced_guard.locker_has_ended(t.xmax) OR",
                    "        AND (true OR",
                ),  # else only a race within a statement
            )
        },
    ),
    Bug(
        "raised by an old snapshot",
        "At REPEATABLE READ the snapshot is older than the lock: the last holder's work is not in it.",
        "I5",
        (("the new one does not announce first", REPEATABLE_READ),),
        {
            "admit": (("AND p_step NOT IN ('alone', 'row') AND NOT p_without_waiting\n", "AND false\n"),),
            "retire_lease_rows": (("  IF cardinality(array_remove(p_grants, NULL)) > 0\n", "  IF false\n"),),
        },
    ),
    Bug(
        "what is let through raises the mark",
        "Observing that is not only observing: a stale write takes the fence away from the holder.",
        "the mark",
        (("old and new, shadow, and the mark is the new holder's", READ_COMMITTED),),
        {
            "announce_general": (
                (
                    "v_mode.refuses, v_mode.requires);\n",
                    "v_mode.refuses, v_mode.requires);\n        UPDATE fenced_guard.mark SET token = s.token;\n",
                ),
            ),
        },
    ),
    Bug(
        "tokens as texts",
        "A column of type text: 10 comes before 9.",
        "it is",
        (("old and new, and the mark is below both", READ_COMMITTED),),
        {
            "judge": (
                ("IF s.token < m.token THEN", "IF s.token::text < m.token::text THEN"),
                ("OR s.token > m.token THEN", "OR s.token::text > m.token::text THEN"),
            ),
        },
    ),
    Bug(
        "the epoch of a part",
        "A draft of ours: a row that carries the token passed, though only another name of the lease was announced.",
        "I3",
        (("an epoch, and its name not announced", READ_COMMITTED),),
        {
            "announce_general": (
                (
                    "v_counts[i] = cardinality(s.names) AND (cardinality(v_texts) = 1 OR fenced_guard.all",
                    "true OR (cardinality(v_texts) = 1 OR fenced_guard.all",
                ),
            )
        },
    ),
)
