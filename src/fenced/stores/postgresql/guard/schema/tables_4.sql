-- Tables of the PostgreSQL guard, from version 3 to 4. Clients of the versions before can use it: it only adds.

ALTER TABLE fenced_guard.guard
  ADD COLUMN claims text;                            -- JSON: how its rows are claimed; NULL: an ordinary guard

-- The tables whose workers wait for a new row. An INSERT sends a notification only then: every commit with one takes a lock of
-- the whole database.
CREATE TABLE fenced_guard.idle (
  guard text COLLATE "C" PRIMARY KEY,
  until timestamptz NOT NULL
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02);
