-- Tables of the PostgreSQL guard, version 1: those of fenced 0.1. A role that may create a schema runs this file once in a
-- database. Afterwards a writer needs only USAGE on schema fenced_guard, since announce and the triggers run as their owner.

CREATE SCHEMA fenced_guard;

-- What the guards of this database trust, in one row.
CREATE TABLE fenced_guard.trust (
  one       boolean PRIMARY KEY DEFAULT true CHECK (one),
  realm     text,                                    -- the one authority that is trusted; NULL: the first one that announces
  max_jump  bigint,                                  -- how far a token may be above the highest mark; NULL: no limit
  sample    double precision NOT NULL DEFAULT 0,     -- the share of admitted operations that is recorded
  proof     boolean NOT NULL DEFAULT false           -- whether only a signed stamp may raise a mark
);
INSERT INTO fenced_guard.trust DEFAULT VALUES;

-- A cache of the highest token in `mark`, kept only while `max_jump` is set. `is_called` false: read `mark` instead.
CREATE SEQUENCE fenced_guard.highest;

-- The keys that may sign stamps: HMAC-SHA256, Ed25519, or both. Old and new keys may be in use at the same time.
CREATE TABLE fenced_guard.key (
  id      text COLLATE "C" PRIMARY KEY,
  kind    text NOT NULL CHECK (kind IN ('hmac', 'ed25519')),
  secret  bytea NOT NULL,                            -- for ed25519 the public key
  added   timestamptz NOT NULL DEFAULT clock_timestamp(),
  revoked timestamptz
);

-- The highest stamp admitted for each name. Its row lock is the fence. Only `reset` and `drop_marks` delete marks, and both
-- write a line into the history.
CREATE TABLE fenced_guard.mark (
  name      text COLLATE "C" PRIMARY KEY,
  token     bigint NOT NULL,
  grant_id  text COLLATE "C" NOT NULL,
  seq       bigint NOT NULL,
  operation xid8                                     -- the transaction that wrote, for its further statements
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02);

-- One row per lease whose names all still carry its mark. FOR SHARE on this row stands for FOR SHARE on every one of those
-- marks. That is safe because a transaction that raises one of the marks deletes the row before it commits, and so waits
-- for every transaction that shares it.
CREATE TABLE fenced_guard.lease (
  grant_id text COLLATE "C" PRIMARY KEY,
  token    bigint NOT NULL,
  realm    text COLLATE "C" NOT NULL,                -- the realm in `trust`
  names    text COLLATE "C" NOT NULL,                -- as in the stamp
  sample   double precision NOT NULL                 -- a copy of the one in `trust`
) WITH (autovacuum_vacuum_scale_factor = 0.02);

-- The guarded tables. The rule is part of the guard, so that no writer can choose a weaker one.
CREATE TABLE fenced_guard.guard (
  guard     text COLLATE "C" PRIMARY KEY,            -- schema.table
  template  text NOT NULL,
  rule      text NOT NULL CHECK (rule IN ('retry', 'once', 'sequenced')),
  mandatory boolean NOT NULL,
  epoch     text,                                    -- the column that keeps the token of the last write
  epoch_made boolean NOT NULL DEFAULT false,         -- whether the installation made that column
  refused   text NOT NULL                            -- a sequence: its count survives the rollback of a refusal
);

-- The stage of the rollout, by guard and name pattern; the longest pattern counts.
CREATE TABLE fenced_guard.mode (
  guard   text COLLATE "C" NOT NULL,
  pattern text COLLATE "C" NOT NULL,
  likes   text COLLATE "C" NOT NULL,                 -- the same pattern for LIKE
  mode    text NOT NULL,
  percent double precision NOT NULL DEFAULT 0,
  since   timestamptz NOT NULL DEFAULT clock_timestamp(),
  PRIMARY KEY (guard, pattern)
);

-- Overrides, for emergencies. Until `until`, writes to names that match are let through and recorded, whatever the mode is.
CREATE TABLE fenced_guard.override (
  id      bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  guard   text COLLATE "C" NOT NULL,
  pattern text COLLATE "C" NOT NULL,
  likes   text COLLATE "C" NOT NULL,
  until   timestamptz NOT NULL,
  who     text NOT NULL,
  why     text NOT NULL
);

-- What operators did.
CREATE TABLE fenced_guard.history (
  id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  at          timestamptz NOT NULL DEFAULT clock_timestamp(),
  who         text NOT NULL DEFAULT session_user,
  application text NOT NULL DEFAULT current_setting('application_name'),
  guard       text COLLATE "C",
  what        text NOT NULL,
  detail      jsonb NOT NULL
);

-- The audit. Writers only insert, so that no writer waits for another. The newest 10,000 records are kept as they are; older
-- ones are added up in `tally`.
CREATE SEQUENCE fenced_guard.record_id;
CREATE TABLE fenced_guard.record (
  id          bigint PRIMARY KEY DEFAULT nextval('fenced_guard.record_id'),
  at          timestamptz NOT NULL DEFAULT clock_timestamp(),
  guard       text COLLATE "C" NOT NULL,
  name        text COLLATE "C",
  stamp       text COLLATE "C",
  token       bigint,                                -- the mark at the time of the decision
  grant_id    text COLLATE "C",
  seq         bigint,
  verdict     text NOT NULL,
  ruling      text NOT NULL,                         -- refuse, record, count; admit for a sample
  mode        text NOT NULL,
  who         text NOT NULL DEFAULT session_user,
  application text NOT NULL DEFAULT current_setting('application_name'),
  query       text
);
CREATE TABLE fenced_guard.tally (
  guard       text COLLATE "C" NOT NULL,
  verdict     text NOT NULL,
  ruling      text NOT NULL,
  mode        text NOT NULL,
  who         text NOT NULL,
  application text NOT NULL,
  count       bigint NOT NULL,
  last        timestamptz NOT NULL,
  PRIMARY KEY (guard, verdict, ruling, mode, who, application)
);

-- Values under names, for programs without tables. Guarded like any other table.
CREATE TABLE fenced_guard.value (
  name    text COLLATE "C" PRIMARY KEY,
  value   text,
  version bigint NOT NULL
);

-- Counts the decisions that could not be recorded.
CREATE SEQUENCE fenced_guard.unrecorded;

-- A stamp, parsed.
CREATE TYPE fenced_guard.stamp AS (text text, realm text, token bigint, seq bigint, grant_id text, names text[]);
