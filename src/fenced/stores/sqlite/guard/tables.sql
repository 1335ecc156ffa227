-- What fenced keeps in a guarded SQLite database. The program's own tables get triggers, nothing else.

-- The version of the tables below, and which clients can use them. 0.1 was version 1, and had no such table.
CREATE TABLE IF NOT EXISTS fenced_schema (
  one         INTEGER PRIMARY KEY CHECK (one = 1),
  version     INTEGER NOT NULL,
  readable_by INTEGER NOT NULL,        -- the oldest version that a client must know
  release     TEXT NOT NULL            -- the fenced that installed it
) STRICT;

-- The highest stamp admitted for each name. A mark never falls and is never deleted.
CREATE TABLE IF NOT EXISTS fenced_mark (
  name     TEXT PRIMARY KEY,
  token    INTEGER NOT NULL CHECK (token BETWEEN 1 AND 9007199254740991),
  grant_id TEXT NOT NULL,
  seq      INTEGER NOT NULL CHECK (seq >= 0),
  stamp    TEXT NOT NULL               -- the stamp as text, without its seq
) STRICT, WITHOUT ROWID;

CREATE TRIGGER IF NOT EXISTS fenced_mark_rises BEFORE UPDATE ON fenced_mark
WHEN NEW.token < OLD.token OR NEW.name <> OLD.name
  OR (NEW.token = OLD.token AND (NEW.grant_id <> OLD.grant_id OR NEW.seq < OLD.seq))
BEGIN SELECT RAISE(ABORT, 'fenced: a mark never falls'); END;

CREATE TRIGGER IF NOT EXISTS fenced_mark_stays BEFORE DELETE ON fenced_mark
BEGIN SELECT RAISE(ABORT, 'fenced: a mark is never deleted'); END;

-- A REPLACE removes the old row without firing the trigger for deletions.
CREATE TRIGGER IF NOT EXISTS fenced_mark_is_not_replaced BEFORE INSERT ON fenced_mark
WHEN EXISTS (
  SELECT 1 FROM fenced_mark m WHERE m.name = NEW.name
  AND (NEW.token < m.token OR (NEW.token = m.token AND (NEW.grant_id <> m.grant_id OR NEW.seq < m.seq)))
)
BEGIN SELECT RAISE(ABORT, 'fenced: a mark never falls'); END;

-- The guarded tables. The rule is part of the guard, so that no writer can choose a weaker one. The realm is
-- the one authority whose stamps count here, the same in every row; NULL until the first stamp is admitted.
CREATE TABLE IF NOT EXISTS fenced_guard (
  guard    TEXT PRIMARY KEY,
  template TEXT NOT NULL,
  rule     TEXT NOT NULL CHECK (rule IN ('retry', 'once', 'sequenced')),
  triggers INTEGER NOT NULL,           -- how many there must be; a rebuilt table has lost them
  realm    TEXT
) STRICT, WITHOUT ROWID;

-- How the rows of a table are claimed, for guards of claims: JSON.
CREATE TABLE IF NOT EXISTS fenced_claims (
  guard  TEXT PRIMARY KEY,
  claims TEXT NOT NULL
) STRICT, WITHOUT ROWID;

-- The stage of the rollout, by guard and name pattern; the longest pattern counts.
CREATE TABLE IF NOT EXISTS fenced_mode (
  guard   TEXT NOT NULL,
  pattern TEXT NOT NULL,
  glob    TEXT NOT NULL,
  mode    TEXT NOT NULL,
  PRIMARY KEY (guard, pattern)
) STRICT, WITHOUT ROWID;

-- Always empty. Every stamp below refers to a row of this table, so that none of them can be committed.
CREATE TABLE IF NOT EXISTS fenced_nothing (id INTEGER PRIMARY KEY CHECK (0)) STRICT;

-- The stamps of the running transaction, by the names they cover. Only `announce` inserts them. They are deleted before
-- COMMIT, which fails as long as one is left.
CREATE TABLE IF NOT EXISTS fenced_stamp (
  name    TEXT PRIMARY KEY,
  guard   TEXT NOT NULL,               -- the guard that announced it; its mode binds no other guard
  stamp   TEXT NOT NULL,               -- without its seq; empty: the mark's own
  seq     INTEGER NOT NULL,            -- 0: it has none
  verdict TEXT NOT NULL,               -- the verdict of a write under this name
  refuse  INTEGER NOT NULL,            -- whether that guard's mode refuses it
  open    INTEGER NOT NULL,            -- 1: already decided, further rows need no check
  cleared INTEGER NOT NULL DEFAULT 1 REFERENCES fenced_nothing (id) DEFERRABLE INITIALLY DEFERRED
) STRICT, WITHOUT ROWID;

-- One row, (1, 0). The trigger `replaced` finds out with it whether a statement replaces rows.
CREATE TABLE IF NOT EXISTS fenced_policy (
  one      INTEGER PRIMARY KEY CHECK (one = 1),
  replaces INTEGER NOT NULL
) STRICT;
INSERT INTO fenced_policy (one, replaces) VALUES (1, 0) ON CONFLICT (one) DO UPDATE SET replaces = 0;

-- How many operations got each verdict in each mode. Where a trigger decides about rows without a stamp, it counts rows.
CREATE TABLE IF NOT EXISTS fenced_tally (
  guard   TEXT NOT NULL,
  verdict TEXT NOT NULL,
  mode    TEXT NOT NULL,
  count   INTEGER NOT NULL,
  PRIMARY KEY (guard, verdict, mode)
) STRICT, WITHOUT ROWID;

-- The audit: refusals and would-be refusals, the newest 10000.
CREATE TABLE IF NOT EXISTS fenced_record (
  id      INTEGER PRIMARY KEY AUTOINCREMENT,
  time    REAL NOT NULL,
  guard   TEXT NOT NULL,
  name    TEXT,
  stamp   TEXT,
  token   INTEGER,
  grant_id TEXT,
  seq     INTEGER,
  verdict TEXT NOT NULL,
  ruling  TEXT NOT NULL,
  mode    TEXT NOT NULL
) STRICT;

CREATE TRIGGER IF NOT EXISTS fenced_record_bounded AFTER INSERT ON fenced_record
BEGIN DELETE FROM fenced_record WHERE id <= NEW.id - 10000; END;
