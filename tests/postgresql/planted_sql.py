"""Planted bugs of the PostgreSQL schema: one function each, with a mistake that somebody made or would make.

Each is kept as a change to the real function's text, so that they stay in step.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


def clocked(script: str) -> str:
    """The same SQL by the clock of the stories, which stands still until it is moved."""
    return script.replace("clock_timestamp()", "explored.now()")


def function(schema: str, name: str) -> str:
    """The statement that makes a function of the schema, or makes it anew."""
    found = re.search(
        rf"^CREATE OR REPLACE (FUNCTION fenced\.{name}\(.*?\$\$;\n)", schema, re.DOTALL | re.MULTILINE
    )
    assert found is not None, name
    return f"CREATE OR REPLACE {found[1]}"


@dataclass(frozen=True)
class Bug:
    """A mistake: in which function, what of it reads how instead, and the stories that find it, by which sign."""

    name: str
    who: str
    function: str
    changes: tuple[tuple[str, str], ...]
    sign: str
    found_by: tuple[str, ...]

    def planted(self, schema: str) -> str:
        script = function(schema, self.function)
        for right, wrong in self.changes:
            assert script.count(right) == 1, f"{self.name}: {right!r} is there {script.count(right)} times"
            script = script.replace(right, wrong)
        return clocked(script)


BUGS = (
    Bug(
        "renewal waits, with now()",
        "A draft of ours: it was decided before its lock was free, and revives what expired meanwhile.",
        "renew",
        (
            ("BEGIN\n", "BEGIN\n  v_now := clock_timestamp();\n"),
            ("    FOR UPDATE SKIP LOCKED) AS mine;", "      AND a.expires > v_now FOR UPDATE) AS mine;"),
            ("a.state IN ('granted', 'waiting') AND a.expires > v_now", "a.state IN ('granted', 'waiting')"),
        ),
        "no order explains",
        ("renewal behind a lock, ask, expiry",),
    ),
    Bug(
        "renewal waits, with clock_timestamp() in the WHERE",
        "The same draft, mended in vain: a row that was only locked is not looked at again.",
        "renew",
        (
            (
                "    FOR UPDATE SKIP LOCKED) AS mine;",
                "      AND a.expires > clock_timestamp() FOR UPDATE) AS mine;",
            ),
            ("a.state IN ('granted', 'waiting') AND a.expires > v_now", "a.state IN ('granted', 'waiting')"),
        ),
        "no order explains",
        ("renewal behind a lock, ask, expiry",),
    ),
    Bug(
        "what is locked is kept",
        "A draft of ours: `NOT id = ANY (NULL)` is NULL, so a renewal that renewed nothing said kept.",
        "renew",
        (("coalesce(array_agg(mine.id), '{}')", "array_agg(mine.id)"),),
        "no order explains",
        ("renewal behind a lock, ask, expiry", "two renewals and an ask at the expiry"),
    ),
    Bug(
        "token before the lock",
        "A draft of ours, and every `excluded.token`: the number is drawn before the wait. It gave 2, and then 1.",
        "ask_in_line",
        (
            ("  v_token  bigint;\n", ""),
            ("DECLARE\n", "DECLARE\n  v_token  bigint := fenced.mint(p_namespace);\n"),
            ("    v_token := fenced.mint(p_namespace);", ""),
        ),
        "I2",
        ("two names behind a lock, another goes by",),
    ),
    Bug(
        "the sweep takes one's own name away",
        "A draft of ours: SKIP LOCKED does not skip one's own lock. Two held one name, without any concurrency.",
        "ask_in_line",
        (
            ("    v_token := fenced.mint(p_namespace); -- not earlier", "    -- not earlier"),
            (
                "  IF v_at <= v_now THEN\n",
                "  IF v_at <= v_now THEN\n    v_token := fenced.mint(p_namespace);\n",
            ),
        ),
        "I10",
        ("asks that sweep on their way, name expired", "asks that sweep on their way, two names"),
    ),
    Bug(
        "a tombstone is overwritten",
        "A draft of ours: an upsert of what was looked up before the withdrawal came makes a ghost.",
        "ask_in_line",
        ((" WHERE a.state = 'waiting';", ";"),),
        "the store",
        ("withdrawal and late ask, two names",),
    ),
    Bug(
        "who is being renewed is taken for dead",
        "Whoever compares the expiry that a snapshot shows, without the holder's row.",
        "free_from",
        (("v_at := p_now + interval '10 ms'; -- it is", "v_at := p_now; -- it is"),),
        "I10",
        ("renewal and ask at the expiry",),
    ),
    Bug(
        "expiry overwrites a renewal",
        "Whoever writes UPDATE ... WHERE id: it waits for the renewal, and ends what was just renewed.",
        "expire",
        (
            (
                """(
    SELECT b.id FROM fenced.attempt b
    WHERE b.id = p_id AND b.state IN ('granted', 'waiting') AND b.expires <= p_now
    FOR UPDATE SKIP LOCKED)""",
                "p_id",
            ),
        ),
        "no order explains",
        ("renewal and ask at the expiry",),
    ),
    Bug(
        "release looks for waiters before it has the name",
        "Whoever looks first: the waiter whose commit the release then waits for is never woken.",
        "release",
        (
            (
                "BEGIN\n",
                "BEGIN\n  SELECT n.contended INTO v_contended FROM fenced.name n WHERE n.attempt = p_id;\n",
            ),
            ("RETURNING n.name, n.contended INTO v_name, v_contended;", "RETURNING n.name INTO v_name;"),
        ),
        "a lost wake-up",
        ("release and two asks",),
    ),
    Bug(
        "look, then upsert",
        "Many a lock table: INSERT ... ON CONFLICT DO UPDATE takes what somebody got since one looked.",
        "ask",
        (
            (
                """    UPDATE fenced.name n SET attempt = p_id, held = true
    WHERE n.namespace = p_namespace AND n.name = p_names[1] AND NOT n.held AND NOT n.contended
      AND cardinality(p_names) = 1 AND current_setting('transaction_isolation') = 'read committed'
      AND current_setting('synchronous_commit') NOT IN ('off', 'local')
""",
                """    INSERT INTO fenced.name (namespace, name, attempt, held)
    SELECT p_namespace, p_names[1], p_id, true WHERE NOT EXISTS (
      SELECT FROM fenced.name n WHERE n.namespace = p_namespace AND n.name = p_names[1] AND (n.held OR n.contended))
    ON CONFLICT (namespace, name) DO UPDATE SET attempt = excluded.attempt, held = true
""",
            ),
        ),
        "I10",
        ("two asks, name new", "two asks, name idle"),
    ),
    Bug(
        "locks in the caller's order",
        "A client that does not sort: here b's names are locked the other way round.",
        "ask_in_line",
        (
            (
                "fenced.lock_names(p_namespace, p_names)",
                """fenced.lock_names(p_namespace, CASE WHEN p_holder LIKE '%"b"%'
    THEN ARRAY (SELECT n FROM unnest(p_names) AS n ORDER BY n DESC) ELSE p_names END)""",
            ),
        ),
        "40P01",
        ("two names, two asks behind two locks",),
    ),
    Bug(
        "idle by an old snapshot",
        "Any clean-up by NOT EXISTS: it waits for the new holder, cannot see him, and deletes the name under him.",
        "tidy",
        (
            (
                """      PERFORM FROM fenced.name n
      WHERE n.namespace = v_idle.namespace AND n.name = v_idle.name FOR UPDATE SKIP LOCKED;
      IF FOUND THEN""",
                "      IF true THEN",
            ),
        ),
        "I10",
        ("tidy and two asks, name idle",),
    ),
    Bug(
        "no tombstone",
        "Whoever withdraws only what is there: the ask that comes later makes a ghost.",
        "release_in_line",
        (
            (
                "  IF NOT FOUND AND p_state = 'withdrawn' THEN\n",
                "  IF NOT FOUND AND p_state = 'withdrawn' THEN\n    RETURN 'released';\n",
            ),
        ),
        "no order explains",
        ("withdrawal and late ask, name idle", "withdrawal and late ask, two names"),
    ),
    Bug(
        "barging",
        "python-redis-lock #58: a free name goes to who comes by, not to the head of the queue.",
        "ask",
        (("AND NOT n.held AND NOT n.contended\n", "AND NOT n.held\n"),),
        "no order explains",
        ("release, and the waiter looks again",),
    ),
    Bug(
        "the next waiter is forgotten",
        "Whoever keeps a flag that somebody waits, and lets each grant clear it.",
        "ask_in_line",
        (("contended = n.contended AND EXISTS (", "contended = false AND EXISTS ("),),
        "the store",
        ("release, and the waiter looks again",),
    ),
    Bug(
        "the floor is set",
        "A draft of ours: setval() in place of an offset hands tokens out again.",
        "raise_floor",
        (("  SELECT CASE WHEN", "  PERFORM setval('fenced.token', p_above);\n  SELECT CASE WHEN"),),
        "I2",
        ("raise twice and ask twice",),
    ),
    Bug(
        "the floor is read by an old snapshot",
        "A draft of ours: the row of the floor was locked, but whoever waits for a name has read it before.",
        "raise_floor",
        (
            (
                "LOCK TABLE fenced.namespace IN ACCESS EXCLUSIVE MODE;",
                "PERFORM FROM fenced.namespace n WHERE n.id = p_namespace FOR UPDATE;",
            ),
        ),
        "I1",
        ("raise, and an ask behind a lock",),
    ),
    Bug(
        "force does not look again",
        "An operator's two statements: the name is taken from whoever has it by now.",
        "force_release",
        (
            ("v_now;\n  IF NOT FOUND THEN\n    RETURN NULL;\n  END IF;\n", "v_now;\n"),
            ("AND n.name = ANY (v_names) AND n.attempt = v_id;", "AND n.name = ANY (v_names);"),
        ),
        "no order explains",
        ("force and release", "force twice"),
    ),
)
