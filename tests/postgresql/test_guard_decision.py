"""What the guard's SQL decides by itself agrees with the pure functions: the verdict, the stamp's text, the mode."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from unicodedata import category

import psycopg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fenced.errors import InvalidStamp
from fenced.guards.answers import error_for
from fenced.guards.spec import Spec
from fenced.runtime.blocking import step
from fenced.stores.postgresql.guard.sessions import PsycopgSession
from fenced.stores.postgresql.guard.tables import PostgresqlTable
from fenced.testing import vectors
from fenced.testing.inputs import BAD_STAMPS, ODD_NAMES
from fenced.values.decision import Mark, Mode, Ruling, Verdict, mode_of, rule_on
from fenced.values.model import SEQ_MAX, TOKEN_MAX, Stamp, is_seq
from fenced_testkit.servers import PostgresqlServer

REALM = "00000000000000aa"
GRANTS = (f"{1:032x}", f"{2:032x}")
GUARD = "fenced_guard.value"
TEXT = f"1:{REALM}:4:1:{GRANTS[1]}:y"
FILE = json.loads(vectors.PATH.read_text())

Database = psycopg.Connection[tuple[Any, ...]]


@pytest.fixture(scope="module")
def database(postgresql_server: PostgresqlServer) -> Iterator[Database]:
    name = postgresql_server.create_database()
    with psycopg.connect(postgresql_server.url(name), autocommit=True) as connection:
        step(PostgresqlTable(Spec(GUARD, "{name}"), PsycopgSession(connection)).install("enforce"))
        yield connection
    postgresql_server.drop_database(name)


# The verdict.

ASKED = """
SELECT j.verdict, j.rises FROM unnest(
  %s::bigint[], %s::text[], %s::bigint[], %s::text[], %s::text[], %s::text[], %s::boolean[], %s::text[]
) WITH ORDINALITY AS g (token, grant_id, seq, set_by, stamp, rule, announce, operation, n),
LATERAL fenced_guard.judge(
  CASE WHEN g.token IS NOT NULL
    THEN jsonb_populate_record(NULL::fenced_guard.mark, jsonb_build_object('name', 'x', 'token', g.token,
      'grant_id', g.grant_id, 'seq', g.seq, 'operation', g.set_by)) END,
  fenced_guard.parse(g.stamp), g.rule, g.announce, g.operation::xid8) AS j
ORDER BY n"""


def test_every_verdict_is_that_of_the_vectors(database: Database) -> None:
    """`judge` gets what passed the screening: a stamp that can be read, covers the name, is proven and not foreign."""
    cases = [
        case
        for case in vectors.cases()
        if case.covered and case.proven and case.stamp_realm == case.guard_realm
        if case.token is not None and 1 <= case.token <= TOKEN_MAX and is_seq(case.seq)
    ]
    columns: list[list[Any]] = [[] for _ in range(8)]
    for case in cases:
        transactions = [text and text.removeprefix("op-") for text in (case.mark_operation, case.operation)]
        mark = (case.mark_token, case.mark_grant, case.mark_seq, transactions[0])
        asked = (*mark, str(case.stamp), case.rule, case.announce, transactions[1])
        for column, value in zip(columns, asked, strict=True):
            column.append(value)
    found = database.execute(ASKED, columns).fetchall()
    different = [(c, f) for c, f in zip(cases, found, strict=True) if f != (c.verdict, c.rises)]
    assert not different, different[:3]
    assert len(cases) > 1000


# The stamp's text.

PARSED = """
SELECT s.realm, s.names, s.token, s.seq, s.grant_id FROM unnest(%s::text[]) WITH ORDINALITY AS t (text, n),
LATERAL fenced_guard.parse(t.text) AS s ORDER BY n"""


def parsed(database: Database, texts: list[str]) -> list[Stamp | None]:
    rows = database.execute(PARSED, [texts]).fetchall()
    return [Stamp(r, tuple(names), t, s, g) if r else None for r, names, t, s, g in rows]


def understood(text: str) -> Stamp | None:
    try:
        return Stamp.parse(text)
    except InvalidStamp:
        return None


def test_bad_stamps_are_none(database: Database) -> None:
    texts = [text for text in BAD_STAMPS if isinstance(text, str) and text != "\ud800"]
    assert len(texts) > 60
    assert parsed(database, texts) == [None] * len(texts)


def test_odd_names_come_back(database: Database) -> None:
    stamps = [Stamp(REALM, (name,), 5, 1, GRANTS[0]) for name in ODD_NAMES]
    stamps.append(Stamp(REALM, tuple(sorted(ODD_NAMES, key=str.encode)), TOKEN_MAX, None, GRANTS[1]))
    assert parsed(database, [str(stamp) for stamp in stamps]) == stamps


ENCODED = [f"%{byte:02X}" for byte in range(256)]
CHARACTERS = st.characters(codec="utf-8", exclude_characters="\0")
PIECES = st.one_of(
    st.sampled_from(["", "a", "b", "/", ",", ".", "..", "~", "-", "%", ":", " ", "\n", "x" * 200, *ENCODED]),
    CHARACTERS,
    CHARACTERS.map(lambda c: "".join(f"%{byte:02X}" for byte in c.encode())),
)
FIELDS = st.tuples(
    st.sampled_from(["1", "1", "1", "1", "2", ""]),
    st.sampled_from([REALM, REALM, REALM, REALM.upper(), REALM[1:]]),
    st.sampled_from(["5", "10", "0", "05", str(TOKEN_MAX), str(TOKEN_MAX + 1), "9" * 16, "-", "\u0661"]),
    st.sampled_from(["-", "0", "7", "07", str(SEQ_MAX), str(SEQ_MAX + 1), ""]),
    st.sampled_from([GRANTS[0], GRANTS[0], GRANTS[0], "f" * 31, "F" * 32]),
    st.lists(PIECES, max_size=8).map("".join),
)
NAMED = st.lists(PIECES, min_size=1, max_size=4).map(lambda p: f"1:{REALM}:5:1:{GRANTS[0]}:{''.join(p)}")


def test_every_character_of_a_name_is_judged_alike(database: Database) -> None:
    """Each one in the middle, at an end and alone: white space, controls and marks that turn text round."""
    odd = [
        chr(code) for code in range(128, 0x110000) if category(chr(code)) in ("Cc", "Cf", "Zs", "Zl", "Zp")
    ]
    plain = [c if c.isalnum() or c in "_.-~/" else f"%{ord(c):02X}" for c in map(chr, range(128))]
    plain += ["".join(f"%{byte:02X}" for byte in c.encode()) for c in odd]
    texts = [f"1:{REALM}:5:1:{GRANTS[0]}:{n}" for p in plain for n in (f"a{p}b", f"a/{p}b", f"a{p}")]
    found = parsed(database, texts)
    different = [(t, f) for t, f in zip(texts, found, strict=True) if f != understood(t)]
    assert not different, different[:3]


@settings(max_examples=100, deadline=None)
@given(texts=st.lists(st.one_of(FIELDS.map(":".join), NAMED), min_size=1, max_size=10))
def test_any_text_is_a_stamp_to_both_or_to_neither(database: Database, texts: list[str]) -> None:
    assert parsed(database, texts) == [understood(text) for text in texts]


@pytest.mark.parametrize(
    "text",
    [
        f"2:{REALM}:5:1:{GRANTS[0]}:x",
        f"1:{REALM}:5:01:{GRANTS[0]}:x",
        f"1:{REALM}:5:1:{GRANTS[0]}:x:y",
        f"1:{REALM}:5:\n:{GRANTS[0]}:x",
    ],
)
def test_a_malformed_copy_of_the_holders_stamp_is_refused(text: str, database: Database) -> None:
    """Also where the mark is its own already, and is only shared."""
    database.execute("SELECT fenced_guard.announce_alone(%s)", [f"1:{REALM}:5:0:{GRANTS[0]}:x"])
    with pytest.raises(psycopg.Error) as refused:
        database.execute("SELECT fenced_guard.announce(%s)", [text])
    assert refused.value.sqlstate == "ZF008"


# The mode.

PATTERNS = ("*", "a*", "*b", "a/*", "a/b", "*_*", "%", "a\\*", "\u00e9*", "?", "**", "a*b*")
NAMES = ("a", "b", "a/b", "a/b/c", "x_y", "xzy", "%", "a\\b", "\u00e9t\u00e9", "?", "aXbX", "*")
MODES = [Mode("observe"), Mode("shadow"), Mode("canary", 40.0), Mode("enforce"), Mode("require")]
RULED = """
SELECT m.mode, m.refuses, m.requires FROM unnest(%s::text[]) WITH ORDINALITY AS t (name, n),
LATERAL fenced_guard.mode_of(%s, t.name) AS m ORDER BY n"""


def set_modes(database: Database, modes: list[tuple[str, Mode]]) -> None:
    database.execute("DELETE FROM fenced_guard.mode")
    for pattern, mode in modes:
        database.execute("SELECT fenced_guard.set_mode(%s, %s, %s)", (GUARD, str(mode), pattern))


@settings(max_examples=60, deadline=None)
@given(
    modes=st.dictionaries(st.sampled_from(PATTERNS), st.sampled_from(MODES)).map(lambda d: list(d.items()))
)
def test_the_mode_of_a_name_is_the_pure_one(database: Database, modes: list[tuple[str, Mode]]) -> None:
    set_modes(database, modes)
    found = database.execute(RULED, (list(NAMES), GUARD)).fetchall()
    for name, (mode, refuses, requires) in zip(NAMES, found, strict=True):
        due = mode_of(name, modes)
        assert mode == str(due)
        assert refuses == (rule_on(Verdict.STALE, due, name) is Ruling.REFUSE)
        assert requires == (rule_on(Verdict.MISSING, due, name) is Ruling.REFUSE)


def test_every_ruling_is_that_of_the_vectors(database: Database) -> None:
    for verdict, mode, name, ruling in FILE["rule_on"]["rows"]:
        if verdict == "admit":
            continue  # nothing is to be done about it
        set_modes(database, [("*", Mode.parse(mode))])
        with database.transaction(force_rollback=True):
            database.execute("DELETE FROM fenced_guard.record")
            try:
                with database.transaction():
                    database.execute(
                        "SELECT fenced_guard.rule_on(%s, %s, %s, %s)", (GUARD, name, TEXT, verdict)
                    )
                (found,) = database.execute("SELECT ruling FROM fenced_guard.record").fetchone() or (None,)
            except psycopg.Error as error:
                ours = (error.sqlstate or "").startswith("ZF0")
                found = str(error) if not ours else "admit" if verdict == "applied" else "refuse"
        assert found == ruling, (verdict, mode, name)


def test_every_share_and_pattern_is_that_of_the_vectors(database: Database) -> None:
    for percent in (5, 50):
        set_modes(database, [("*", Mode("canary", percent))])
        found = database.execute(RULED, ([name for name, _ in FILE["canary"]["rows"]], GUARD)).fetchall()
        due = [point < percent / 100 * 2**32 for _, point in FILE["canary"]["rows"]]
        assert [refuses for _, refuses, _ in found] == due
    for story in FILE["mode_of"]:
        set_modes(database, [(pattern, Mode.parse(mode)) for pattern, mode in story["modes"].items()])
        found = database.execute(RULED, (list(story["names"]), GUARD)).fetchall()
        assert dict(zip(story["names"], (mode for mode, _, _ in found), strict=True)) == story["names"]


# The sentence.


@pytest.mark.parametrize("verdict", [verdict for verdict in Verdict if verdict not in ("admit", "forged")])
def test_a_refusal_is_said_in_the_same_words(verdict: Verdict, database: Database) -> None:
    """The server's own sentence reaches a program by any driver; a guard that decides in Python says the same."""
    stamp = Stamp.parse(TEXT)
    database.execute("DELETE FROM fenced_guard.mark")
    database.execute(
        "INSERT INTO fenced_guard.mark (name, token, grant_id, seq) VALUES ('x', 5, %s, 0)", [GRANTS[0]]
    )
    with pytest.raises(psycopg.Error) as refused:
        database.execute("SELECT fenced_guard.refuse(%s, 'x', %s, %s, 'require')", (GUARD, TEXT, verdict))
    ((realm,),) = database.execute("SELECT realm FROM fenced_guard.trust").fetchall()
    due = error_for(verdict, name="x", stamp=stamp, mark=Mark(5, GRANTS[0]), realm=realm)
    assert refused.value.diag.message_primary == f"fenced: {due}"


@pytest.mark.parametrize("percent", [0, 0.5, 33, 99.9, 100])
def test_the_canary_takes_the_same_names(percent: float, database: Database) -> None:
    mode = Mode("canary", percent)
    set_modes(database, [("*", mode)])
    names = [*ODD_NAMES, *(f"orders/{number}" for number in range(500))]
    found = database.execute(RULED, (names, GUARD)).fetchall()
    assert [refuses for _, refuses, _ in found] == [mode.refuses(name) for name in names]
