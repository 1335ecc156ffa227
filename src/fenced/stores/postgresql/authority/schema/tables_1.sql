-- Tables of the PostgreSQL authority, version 1: those of fenced 0.1. A role that may create a schema runs this file once in
-- a database. Afterwards a holder needs only USAGE on schema fenced, since every function runs as its owner.

CREATE SCHEMA fenced;

-- The one stream of tokens. A sequence, so that grants of different names do not wait for each other's commit.
CREATE SEQUENCE fenced.token;
CREATE SEQUENCE fenced.ticket;

-- One row per namespace, never deleted. A token is `floor` plus the sequence's next value.
CREATE TABLE fenced.namespace (
  id      integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  name    text COLLATE "C" NOT NULL UNIQUE,
  realm   text NOT NULL UNIQUE,
  floor   bigint NOT NULL DEFAULT 0,
  lineage text NOT NULL
);

-- What is locked to decide about a name.
CREATE TABLE fenced.name (
  namespace integer NOT NULL,
  name      text COLLATE "C" NOT NULL,
  attempt   uuid,                           -- who holds it, or held it last
  held      boolean NOT NULL DEFAULT false, -- false: surely nobody holds it; true: see the attempt's own row
  contended boolean NOT NULL DEFAULT false, -- false: surely nobody waits; true: see the queue
  PRIMARY KEY (namespace, name)
) WITH (fillfactor = 20, autovacuum_vacuum_scale_factor = 0.02);

-- One row per ask, by its public id: waiting, granted, or ended and remembered for a while.
CREATE TABLE fenced.attempt (
  id         uuid PRIMARY KEY,           -- the public one, which is in every stamp
  secret     uuid NOT NULL,              -- renewing and releasing need it
  namespace  integer NOT NULL,
  state      text NOT NULL,              -- waiting, granted, released, withdrawn, expired, revoked
  names      text[] COLLATE "C" NOT NULL,
  ttl        interval NOT NULL,
  lock_delay interval NOT NULL,
  ticket     bigint NOT NULL,            -- 0: never stood in a queue
  token      bigint NOT NULL,
  expires    timestamptz NOT NULL,
  forget     timestamptz NOT NULL,
  wake       text NOT NULL,              -- the channel that its client listens on
  holder     text NOT NULL               -- JSON: id, label, host, pid
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02);

-- Who waits for a name, in the order of the tickets. One ask for several names has one ticket.
CREATE TABLE fenced.queue (
  namespace integer NOT NULL,
  name      text COLLATE "C" NOT NULL,
  ticket    bigint NOT NULL,
  attempt   uuid NOT NULL,
  PRIMARY KEY (namespace, name, ticket)
) WITH (autovacuum_vacuum_scale_factor = 0.02);

-- Counting state is never deleted and never falls.
CREATE FUNCTION fenced.namespace_rises() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  IF TG_OP <> 'UPDATE' THEN
    RAISE EXCEPTION 'counting state is never deleted';
  ELSIF NEW.floor < OLD.floor OR NEW.realm <> OLD.realm OR NEW.id <> OLD.id THEN
    RAISE EXCEPTION 'counting state never falls';
  END IF;
  RETURN NEW;
END $$;

CREATE TRIGGER namespace_rises BEFORE UPDATE OR DELETE ON fenced.namespace
FOR EACH ROW EXECUTE FUNCTION fenced.namespace_rises();
CREATE TRIGGER namespace_stays BEFORE TRUNCATE ON fenced.namespace
FOR EACH STATEMENT EXECUTE FUNCTION fenced.namespace_rises();
