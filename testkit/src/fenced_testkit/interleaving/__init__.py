"""Real sessions of a database, stepped through every order of their statements.

A simulation cannot see the bugs of SQL: what a statement does when it wakes up from a lock, what a snapshot
hides, which of two transactions is the deadlock's victim. So each session has a script and its own
connection, every merge of the scripts is run on a real server, and a judge checks the outcome:

    explorer = Explorer(PostgresqlEngine(url))
    a = Script("A", (sql("UPDATE t SET n = n + 1"), COMMIT))
    b = Script("B", (sql("UPDATE t SET n = n + 1"), COMMIT))
    explorer.explore([a, b], reset=fill, judge=look)   # AABB, ABAB, ABBA, BAAB, BABA, BBAA

A transaction begins with the first statement after the previous one has ended, or each statement is one. The explorer
asks the server whether a step waits for a lock; it does not guess from the time that the step takes. The steps of a
session that waits are held back until it is free. Errors are outcomes, and go into the trace; the server chooses which
of two deadlocked transactions gets one.

The explorer is one for all databases. An `Engine` connects, runs a statement, and knows how its server says who waits:
`interleaving.postgresql`, `interleaving.mariadb`.
"""

from fenced_testkit.interleaving.explorer import Engine, EngineSession, Explorer, Report, StoryBroken, Stuck
from fenced_testkit.interleaving.scripts import (
    COMMIT,
    NOTHING,
    ROLLBACK,
    AnyScript,
    InterleavingProgram,
    InterleavingScript,
    IsolationLevel,
    Orders,
    Program,
    ScriptEvent,
    ScriptOutcome,
    ScriptStep,
    Trace,
    interleavings,
    sql,
)

__all__ = [
    "COMMIT",
    "NOTHING",
    "ROLLBACK",
    "AnyScript",
    "Engine",
    "EngineSession",
    "Explorer",
    "InterleavingProgram",
    "InterleavingScript",
    "IsolationLevel",
    "Orders",
    "Program",
    "Report",
    "ScriptEvent",
    "ScriptOutcome",
    "ScriptStep",
    "StoryBroken",
    "Stuck",
    "Trace",
    "interleavings",
    "sql",
]
