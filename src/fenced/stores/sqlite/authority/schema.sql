-- The authority's own database: one file, many processes of one machine.
-- Times are nanoseconds of CLOCK_BOOTTIME, valid for the boot that `machine` names.

-- Which boot of which kernel the times below belong to.
CREATE TABLE machine (
  id   INTEGER PRIMARY KEY CHECK (id = 1),
  boot TEXT NOT NULL
) STRICT;

-- One strictly rising stream of tokens per namespace. These rows are never deleted.
CREATE TABLE namespace (
  id     INTEGER PRIMARY KEY,
  name   TEXT NOT NULL UNIQUE,
  realm  TEXT NOT NULL UNIQUE,
  token  INTEGER NOT NULL DEFAULT 0 CHECK (token BETWEEN 0 AND 9007199254740991),
  ticket INTEGER NOT NULL DEFAULT 0
) STRICT;

CREATE TRIGGER namespace_stays BEFORE DELETE ON namespace
BEGIN SELECT RAISE(ABORT, 'counting state is never deleted'); END;

CREATE TRIGGER namespace_rises BEFORE UPDATE ON namespace
WHEN NEW.token < OLD.token OR NEW.ticket < OLD.ticket OR NEW.realm <> OLD.realm
BEGIN SELECT RAISE(ABORT, 'counting state never falls'); END;

-- A REPLACE removes the old row without asking the trigger for deletions.
CREATE TRIGGER namespace_is_not_replaced BEFORE INSERT ON namespace
WHEN EXISTS (SELECT 1 FROM namespace WHERE id = NEW.id OR name = NEW.name OR realm = NEW.realm)
BEGIN SELECT RAISE(ABORT, 'counting state is never replaced'); END;

-- One row per ask, by its public id: waiting, granted, or ended and remembered for a while.
CREATE TABLE attempt (
  id         TEXT PRIMARY KEY,
  namespace  INTEGER NOT NULL,
  state      TEXT NOT NULL CHECK (state IN ('waiting', 'granted', 'released', 'withdrawn', 'expired', 'revoked')),
  names      TEXT NOT NULL,            -- JSON array, sorted
  ttl        INTEGER NOT NULL,
  lock_delay INTEGER NOT NULL,
  ticket     INTEGER NOT NULL,
  token      INTEGER NOT NULL,
  expires    INTEGER NOT NULL,
  forget     INTEGER NOT NULL,
  wake       TEXT NOT NULL,            -- the waiter's socket in the folder beside the database
  holder     TEXT NOT NULL             -- JSON: id, label, host, pid
) STRICT, WITHOUT ROWID;

-- Who holds a name, or held it last and let it expire.
CREATE TABLE claim (
  namespace INTEGER NOT NULL,
  name      TEXT NOT NULL,
  attempt   TEXT NOT NULL,
  PRIMARY KEY (namespace, name)
) STRICT, WITHOUT ROWID;

-- Who waits for a name, in the order of the tickets. One ask for several names has one ticket.
CREATE TABLE queue (
  namespace INTEGER NOT NULL,
  name      TEXT NOT NULL,
  ticket    INTEGER NOT NULL,
  attempt   TEXT NOT NULL,
  PRIMARY KEY (namespace, name, ticket)
) STRICT, WITHOUT ROWID;
