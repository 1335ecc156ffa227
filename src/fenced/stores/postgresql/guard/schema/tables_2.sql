-- Tables of the PostgreSQL guard, from version 1 to 2. Clients of version 1 can use it, except for values under
-- names: everything else only adds.

-- The version of the tables, and which clients can use them, in one row.
CREATE TABLE fenced_guard.schema (
  one         boolean PRIMARY KEY DEFAULT true CHECK (one),
  version     integer NOT NULL,                      -- the last migration that ran
  readable_by integer NOT NULL,                      -- the oldest version that a client must know
  release     text NOT NULL,                         -- the fenced that replaced the functions last
  functions   text NOT NULL                          -- a digest of their text
);
INSERT INTO fenced_guard.schema (version, readable_by, release, functions) VALUES (1, 1, '0.1', '');

ALTER TABLE fenced_guard.trust
  ADD COLUMN floor bigint NOT NULL DEFAULT 0,        -- tokens below it are stale, even for names without a mark
  ADD COLUMN patience double precision NOT NULL DEFAULT 5,  -- seconds that a successor waits for an older transaction
  ADD COLUMN seal bytea NOT NULL DEFAULT sha256(convert_to(concat(gen_random_uuid(), gen_random_uuid()), 'UTF8'));
                                                     -- a secret that signs refusals, so that `report` accepts no others

ALTER TABLE fenced_guard.guard
  ADD COLUMN changed xid8 NOT NULL DEFAULT pg_current_xact_id(),  -- the transaction that last changed a mode, or ended an override
  ADD COLUMN changed_at timestamptz NOT NULL DEFAULT clock_timestamp(),
  ADD COLUMN triggers text;                          -- a digest of the statements that make triggers; NULL: those of 0.1

ALTER TABLE fenced_guard.record
  ADD COLUMN count bigint NOT NULL DEFAULT 1;        -- how many names of one statement this record stands for

-- One row per grant that has marks. A successor locks it before it waits for a mark or a lease row of this grant, and keeps
-- the lock until its transaction ends. Other announcements only read it: the row's xmax shows the lock without waiting
-- (`has_successor`). They then queue behind the successor instead of sharing the lock of the mark. Without this table,
-- overlapping transactions of the old holder would keep its successor waiting for ever: PostgreSQL lets new lockers share
-- a row lock even while another transaction waits for it.
CREATE TABLE fenced_guard.turn (
  grant_id text COLLATE "C" PRIMARY KEY,
  names    text COLLATE "C" NOT NULL                 -- as in the stamp
) WITH (autovacuum_vacuum_scale_factor = 0.02);

-- Values were texts, and are bytes now. A client of 0.1 does not set `is_bytes`, so its INSERT fails. Without this column the
-- server would parse the client's text as a bytea literal, and store other bytes.
ALTER TABLE fenced_guard.value ALTER COLUMN value TYPE bytea USING convert_to(value, 'UTF8');
ALTER TABLE fenced_guard.value ADD COLUMN is_bytes boolean NOT NULL DEFAULT true CHECK (is_bytes);
ALTER TABLE fenced_guard.value ALTER COLUMN is_bytes DROP DEFAULT;

-- CREATE OR REPLACE cannot rename a parameter.
DROP FUNCTION IF EXISTS fenced_guard.admit(fenced_guard.stamp, text, text, text, text, boolean);
