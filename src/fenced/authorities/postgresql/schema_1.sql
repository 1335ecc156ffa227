-- Schema 1 of the PostgreSQL authority. Runs once, in one transaction, by whoever may create a schema here;
-- afterwards USAGE on schema fenced is all that a holder needs, since every function runs as their owner.
--
-- Every function locks in one order: names first, sorted by their bytes, and the clock is read after that. Rows
-- of `attempt` are never waited for while names are locked, except an attempt's own: what is locked is skipped.
-- A wait for a lock ends after 4 s, before the client gives the request up.
--
-- What is called often looks rows up by their keys, one table at a time, in plpgsql: a join would be planned by
-- statistics that a new table does not have, and a function in SQL is planned anew by every call.

CREATE SCHEMA fenced;

CREATE FUNCTION fenced.version() RETURNS integer LANGUAGE sql AS 'SELECT 1';

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

-- Which history this is: the cluster, its timeline, this database and this very sequence. Promotion of a standby
-- and recovery to a point in time begin a timeline; a dump that is restored gets new numbers for both. Worked out
-- once a session: it cannot change under a session that is not in recovery.
CREATE FUNCTION fenced.lineage() RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
  known text := current_setting('fenced.lineage', true);
BEGIN
  IF known IS NULL OR known = '' THEN
    SELECT concat_ws('/', system_identifier, left(pg_walfile_name(pg_current_wal_insert_lsn()), 8),
      (SELECT oid FROM pg_database WHERE datname = current_database()), 'fenced.token'::regclass::oid)
    INTO known FROM pg_control_system();
    PERFORM set_config('fenced.lineage', known, false);
  END IF;
  RETURN known;
END $$;

-- Seconds as the client reads them.
CREATE FUNCTION fenced.seconds(span interval) RETURNS text
LANGUAGE sql IMMUTABLE AS $$
  SELECT extract(epoch FROM span)::text
$$;

-- The namespace's id, realm, last token and settings; a new one is made if `p_create`.
CREATE FUNCTION fenced.enter(p_name text, p_realm text, p_create boolean)
RETURNS TABLE (id integer, realm text, last_token bigint)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  IF p_create THEN
    INSERT INTO fenced.namespace (name, realm, lineage) VALUES (p_name, p_realm, fenced.lineage())
    ON CONFLICT (name) DO NOTHING;
  END IF;
  RETURN QUERY
    SELECT n.id, n.realm, n.floor + CASE WHEN t.is_called THEN t.last_value ELSE 0 END
    FROM fenced.namespace n, fenced.token t WHERE n.name = p_name;
END $$;

-- End a lease or a place that is past its time; false while somebody else has the row locked, or renewed it.
CREATE FUNCTION fenced.expire(p_id uuid, p_now timestamptz, p_remember interval) RETURNS boolean
LANGUAGE plpgsql AS $$
BEGIN
  UPDATE fenced.attempt a
  SET state = 'expired', forget = greatest(p_now, a.expires + a.lock_delay) + greatest(p_remember, 4 * a.ttl)
  WHERE a.id = (
    SELECT b.id FROM fenced.attempt b
    WHERE b.id = p_id AND b.state IN ('granted', 'waiting') AND b.expires <= p_now
    FOR UPDATE SKIP LOCKED);
  RETURN FOUND OR NOT EXISTS (
    SELECT FROM fenced.attempt a WHERE a.id = p_id AND a.state IN ('granted', 'waiting'));
END $$;

-- Until when the nearest living waiter ahead of a ticket keeps its place; null if there is none. The dead on the way
-- are taken out of the queue. The name is locked.
CREATE FUNCTION fenced.ahead_of(
  p_namespace integer, p_name text, p_ticket bigint, p_now timestamptz, p_remember interval
) RETURNS timestamptz
LANGUAGE plpgsql AS $$
DECLARE
  v_ticket  bigint;
  v_attempt uuid;
  v_expires timestamptz;
BEGIN
  LOOP
    SELECT q.ticket, q.attempt INTO v_ticket, v_attempt FROM fenced.queue q
    WHERE q.namespace = p_namespace AND q.name = p_name AND q.ticket < p_ticket ORDER BY q.ticket DESC LIMIT 1;
    IF NOT FOUND THEN
      RETURN NULL;
    END IF;
    SELECT a.expires INTO v_expires FROM fenced.attempt a WHERE a.id = v_attempt AND a.state = 'waiting';
    IF v_expires > p_now THEN
      RETURN v_expires;
    ELSIF v_expires IS NOT NULL AND NOT fenced.expire(v_attempt, p_now, p_remember) THEN
      RETURN p_now + interval '10 ms'; -- it is being renewed this very moment
    END IF;
    DELETE FROM fenced.queue q WHERE q.namespace = p_namespace AND q.name = p_name AND q.ticket = v_ticket;
  END LOOP;
END $$;

-- From when on a name could be granted to one with this ticket, if nobody says another word. The name is locked.
CREATE FUNCTION fenced.free_from(
  p_name fenced.name, p_ticket bigint, p_now timestamptz, p_remember interval
) RETURNS timestamptz
LANGUAGE plpgsql AS $$
DECLARE
  v_at      timestamptz := p_now;
  v_state   text;
  v_expires timestamptz;
  v_delay   interval;
BEGIN
  IF p_name.held THEN
    SELECT a.state, a.expires, a.lock_delay INTO v_state, v_expires, v_delay
    FROM fenced.attempt a WHERE a.id = p_name.attempt;
    IF v_state = 'granted' AND v_expires <= p_now AND NOT fenced.expire(p_name.attempt, p_now, p_remember) THEN
      v_at := p_now + interval '10 ms'; -- it is being renewed this very moment
    ELSIF v_state IN ('granted', 'expired') THEN
      v_at := greatest(v_at, v_expires + v_delay);
    END IF;
  END IF;
  IF p_name.contended THEN
    v_at := greatest(v_at, fenced.ahead_of(p_name.namespace, p_name.name, p_ticket, p_now, p_remember));
  END IF;
  RETURN v_at;
END $$;

-- Who holds one of these names, as JSON, or nothing.
CREATE FUNCTION fenced.held_by(p_namespace integer, p_names text[], p_now timestamptz) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
  v_name  text;
  v_claim uuid;
  v_held  fenced.attempt;
BEGIN
  FOREACH v_name IN ARRAY p_names LOOP
    SELECT n.attempt INTO v_claim FROM fenced.name n
    WHERE n.namespace = p_namespace AND n.name = v_name AND n.held;
    SELECT * INTO v_held FROM fenced.attempt a WHERE a.id = v_claim AND a.state = 'granted' AND a.expires > p_now;
    IF FOUND THEN
      RETURN json_build_array(v_held.holder, v_held.token, replace(v_held.id::text, '-', ''),
        extract(epoch FROM v_held.expires - p_now));
    END IF;
  END LOOP;
  RETURN NULL;
END $$;

-- This transaction's commit is flushed, and waits for synchronous standbys, whatever the setting says.
CREATE FUNCTION fenced.flushed() RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
  IF current_setting('synchronous_commit') IN ('off', 'local') THEN
    PERFORM set_config('synchronous_commit', 'on', true);
  END IF;
END $$;

-- Lock the rows of these names, in order; those that are missing are made.
CREATE FUNCTION fenced.lock_names(p_namespace integer, p_names text[]) RETURNS fenced.name[]
LANGUAGE plpgsql AS $$
DECLARE
  v_name  text;
  v_row   fenced.name;
  v_names fenced.name[] := '{}';
BEGIN
  FOREACH v_name IN ARRAY p_names LOOP
    LOOP
      SELECT * INTO v_row FROM fenced.name n WHERE n.namespace = p_namespace AND n.name = v_name FOR UPDATE;
      EXIT WHEN FOUND;
      INSERT INTO fenced.name (namespace, name) VALUES (p_namespace, v_name) ON CONFLICT DO NOTHING;
    END LOOP;
    v_names := array_append(v_names, v_row);
  END LOOP;
  RETURN v_names;
END $$;

-- The next token. Runs after the names are locked; what must not be handed out is refused.
CREATE FUNCTION fenced.mint(p_namespace integer) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
  v_token   bigint;
  v_lineage text;
BEGIN
  SELECT n.floor + nextval('fenced.token'), n.lineage INTO v_token, v_lineage
  FROM fenced.namespace n WHERE n.id = p_namespace;
  IF v_lineage <> fenced.lineage() THEN
    RAISE EXCEPTION USING ERRCODE = 'ZFA01', MESSAGE = concat('the history ', v_lineage, ' became ', fenced.lineage());
  ELSIF v_token > 9007199254740991 THEN
    RAISE EXCEPTION USING ERRCODE = 'ZFA02', MESSAGE = 'the tokens of this namespace are used up';
  END IF;
  IF v_token % 64 = 0 THEN
    PERFORM fenced.sweep(gen_random_uuid(), 200);
  END IF;
  PERFORM fenced.flushed();
  RETURN v_token;
END $$;

-- Grant, queue or refuse. The same attempt gets the same grant.
--
-- The usual case is one statement: one name, which nobody holds and nobody waits for, so that no clock is needed to
-- tell that it is free. (Every expression of plpgsql's own is set up anew in every transaction, and costs more than
-- what it does.) Whatever else there is to say is said in line.
CREATE FUNCTION fenced.ask(
  p_namespace integer, p_id uuid, p_secret uuid, p_names text[], p_ttl interval, p_delay interval, p_place interval,
  p_remember interval, p_wait boolean, p_queue_max integer, p_wake text, p_holder text
) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '4s' AS $$
DECLARE
  v_token bigint;
  v_taken boolean;
BEGIN
  WITH taken AS (
    UPDATE fenced.name n SET attempt = p_id, held = true
    WHERE n.namespace = p_namespace AND n.name = p_names[1] AND NOT n.held AND NOT n.contended
      AND cardinality(p_names) = 1 AND current_setting('transaction_isolation') = 'read committed'
      AND current_setting('synchronous_commit') NOT IN ('off', 'local')
    RETURNING clock_timestamp() AS at),
  granted AS (
    INSERT INTO fenced.attempt
    SELECT p_id, p_secret, p_namespace, 'granted', p_names, p_ttl, p_delay, 0, s.floor + nextval('fenced.token'), t.at + p_ttl,
      t.at + p_ttl + p_delay + greatest(p_remember, 4 * p_ttl), '', p_holder
    FROM taken t, fenced.namespace s
    WHERE s.id = p_namespace AND s.lineage = current_setting('fenced.lineage', true)
    ON CONFLICT (id) DO NOTHING RETURNING token)
  SELECT (SELECT g.token FROM granted g), EXISTS (SELECT FROM taken) INTO v_token, v_taken;
  IF v_token % 64 <> 0 AND v_token <= 9007199254740991 THEN
    RETURN 'granted ' || v_token;
  ELSIF v_token <= 9007199254740991 THEN
    PERFORM fenced.sweep(gen_random_uuid(), 200);
    RETURN 'granted ' || v_token;
  ELSIF v_token IS NOT NULL THEN
    RAISE EXCEPTION USING ERRCODE = 'ZFA02', MESSAGE = 'the tokens of this namespace are used up';
  ELSIF v_taken THEN -- but the attempt is known, or the server is new to us
    UPDATE fenced.name n SET held = false WHERE n.namespace = p_namespace AND n.name = p_names[1];
  END IF;
  RETURN fenced.ask_in_line(p_namespace, p_id, p_secret, p_names, p_ttl, p_delay, p_place, p_remember, p_wait, p_queue_max,
    p_wake, p_holder);
END $$;

-- The same for names that are held, waited for, several or new, and for an attempt that asks again.
CREATE FUNCTION fenced.ask_in_line(
  p_namespace integer, p_id uuid, p_secret uuid, p_names text[], p_ttl interval, p_delay interval, p_place interval,
  p_remember interval, p_wait boolean, p_queue_max integer, p_wake text, p_holder text
) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
  v_names  fenced.name[] := fenced.lock_names(p_namespace, p_names);
  v_now    timestamptz := clock_timestamp();
  v_at     timestamptz := v_now;
  v_row    fenced.name;
  v_mine   fenced.attempt;
  v_ticket bigint := 9223372036854775807;
  v_token  bigint;
  v_ahead  bigint;
BEGIN
  IF current_setting('transaction_isolation') <> 'read committed' THEN
    RAISE EXCEPTION USING ERRCODE = 'ZFA03', MESSAGE = 'transactions are not read committed by default';
  END IF;
  SELECT * INTO v_mine FROM fenced.attempt a WHERE a.id = p_id;
  IF v_mine.state IN ('granted', 'waiting') AND v_mine.expires <= v_now THEN
    SELECT * INTO v_mine FROM fenced.attempt a WHERE a.id = p_id FOR UPDATE; -- it may be being renewed
    v_now := clock_timestamp();
    IF v_mine.expires <= v_now AND fenced.expire(p_id, v_now, p_remember) THEN
      v_mine.state := 'expired';
      DELETE FROM fenced.queue q
      WHERE q.namespace = p_namespace AND q.name = ANY (p_names) AND q.ticket = v_mine.ticket;
    END IF;
  END IF;
  IF v_mine.secret <> p_secret THEN
    RETURN 'misuse';
  ELSIF v_mine.names = '{}' THEN
    RETURN 'ended ' || v_mine.state; -- withdrawn before it arrived
  ELSIF (v_mine.namespace, v_mine.names, v_mine.ttl) <> (p_namespace, p_names, p_ttl) THEN
    RETURN 'misuse';
  ELSIF v_mine.state = 'granted' THEN
    -- Written again, so that this commit waits for all that the first one should have waited for.
    UPDATE fenced.attempt SET holder = holder WHERE id = p_id;
    PERFORM fenced.flushed();
    RETURN concat_ws(' ', 'granted', v_mine.token, fenced.seconds(v_mine.expires - v_now));
  ELSIF v_mine.state <> 'waiting' THEN
    RETURN 'ended ' || v_mine.state;
  ELSIF v_mine.state = 'waiting' THEN
    v_ticket := v_mine.ticket;
  END IF;

  FOREACH v_row IN ARRAY v_names LOOP
    v_at := greatest(v_at, fenced.free_from(v_row, v_ticket, v_now, p_remember));
  END LOOP;
  IF v_at <= v_now THEN
    DELETE FROM fenced.queue q
    WHERE q.namespace = p_namespace AND q.name = ANY (p_names) AND q.ticket = v_ticket;
    UPDATE fenced.name n SET attempt = p_id, held = true, contended = n.contended AND EXISTS (
      SELECT FROM fenced.queue q WHERE q.namespace = p_namespace AND q.name = n.name)
    WHERE n.namespace = p_namespace AND n.name = ANY (p_names);
    v_token := fenced.mint(p_namespace); -- not earlier: it sweeps, and takes names away whose last attempt is over
    INSERT INTO fenced.attempt AS a VALUES (p_id, p_secret, p_namespace, 'granted', p_names, p_ttl, p_delay, 0, v_token,
      v_now + p_ttl, v_now + p_ttl + p_delay + greatest(p_remember, 4 * p_ttl), '', p_holder)
    ON CONFLICT (id) DO UPDATE SET state = excluded.state, token = excluded.token, expires = excluded.expires,
      forget = excluded.forget WHERE a.state = 'waiting';
    IF FOUND THEN
      RETURN 'granted ' || v_token;
    END IF;
    UPDATE fenced.name n SET held = false -- withdrawn this very moment
    WHERE n.namespace = p_namespace AND n.name = ANY (p_names);
    RETURN fenced.ask_in_line(p_namespace, p_id, p_secret, p_names, p_ttl, p_delay, p_place, p_remember, p_wait, p_queue_max,
      p_wake, p_holder);
  END IF;

  SELECT coalesce(max(c), 0) INTO v_ahead FROM (
    SELECT count(*) AS c FROM fenced.queue q
    WHERE q.namespace = p_namespace AND q.name = ANY (p_names) AND q.ticket < v_ticket
    GROUP BY q.name) AS ahead;
  IF v_mine.id IS NOT NULL THEN
    UPDATE fenced.attempt SET expires = v_now + least(p_ttl, p_place), wake = p_wake,
      forget = v_now + least(p_ttl, p_place) + greatest(p_remember, 4 * p_ttl) WHERE id = p_id;
  ELSIF NOT p_wait OR v_ahead >= p_queue_max THEN
    RETURN concat_ws(' ', 'busy', 0, v_ahead, fenced.held_by(p_namespace, p_names, v_now));
  ELSE
    v_ticket := nextval('fenced.ticket');
    INSERT INTO fenced.attempt VALUES (p_id, p_secret, p_namespace, 'waiting', p_names, p_ttl, p_delay, v_ticket, 0,
      v_now + least(p_ttl, p_place), v_now + least(p_ttl, p_place) + greatest(p_remember, 4 * p_ttl),
      p_wake, p_holder) ON CONFLICT (id) DO NOTHING;
    IF NOT FOUND THEN -- withdrawn this very moment
      RETURN fenced.ask_in_line(p_namespace, p_id, p_secret, p_names, p_ttl, p_delay, p_place, p_remember, p_wait, p_queue_max,
        p_wake, p_holder);
    END IF;
    INSERT INTO fenced.queue SELECT p_namespace, n, v_ticket, p_id FROM unnest(p_names) AS n;
    UPDATE fenced.name n SET contended = true
    WHERE n.namespace = p_namespace AND n.name = ANY (p_names) AND NOT n.contended;
    PERFORM fenced.sweep(p_id, 4);
  END IF;
  PERFORM set_config('synchronous_commit', 'off', true); -- a place that a crash takes away is asked for again
  RETURN concat_ws(' ', 'waiting', fenced.seconds(v_at - v_now), v_ahead,
    fenced.held_by(p_namespace, p_names, v_now));
END $$;

-- Wake the first living waiter of each of these names. A hint: it carries no right.
CREATE FUNCTION fenced.wake_heads(p_namespace integer, p_names text[], p_now timestamptz) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
  v_name  text;
  v_head  record;
  v_wake  text;
  v_alive boolean;
BEGIN
  FOREACH v_name IN ARRAY p_names LOOP
    FOR v_head IN
      SELECT q.attempt FROM fenced.queue q
      WHERE q.namespace = p_namespace AND q.name = v_name ORDER BY q.ticket
    LOOP
      SELECT a.wake, a.expires > p_now INTO v_wake, v_alive FROM fenced.attempt a
      WHERE a.id = v_head.attempt AND a.state = 'waiting'
        AND a.expires > p_now - interval '5 s'; -- one that lapsed just now may be being renewed this very moment
      CONTINUE WHEN NOT FOUND;
      IF v_wake <> '' THEN
        PERFORM pg_notify(v_wake, replace(v_head.attempt::text, '-', ''));
      END IF;
      EXIT WHEN v_alive;
    END LOOP;
  END LOOP;
END $$;

-- Give a lease back or leave the queue, as `p_state` says: released, or withdrawn (which leaves a tombstone). Again the
-- usual case comes first, in few words: a lease on one name.
--
-- It is not flushed: the next grant's commit carries it, and if a crash comes before that, its ttl ends it.
CREATE FUNCTION fenced.release(
  p_namespace integer, p_id uuid, p_secret uuid, p_state text, p_remember interval
) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '4s' AS $$
DECLARE
  v_name      text;
  v_contended boolean;
  v_unflushed text;
BEGIN
  UPDATE fenced.name n SET held = false
  WHERE n.namespace = p_namespace AND n.attempt = p_id AND n.held
    AND n.name = (SELECT a.names[1] FROM fenced.attempt a WHERE a.id = p_id AND a.secret = p_secret AND cardinality(a.names) = 1)
  RETURNING n.name, n.contended INTO v_name, v_contended;
  IF FOUND THEN
    PERFORM FROM fenced.attempt a WHERE a.id = p_id FOR UPDATE; -- it may be locked or being renewed: then the clock
    UPDATE fenced.attempt a SET state = CASE p_state WHEN 'withdrawn' THEN 'withdrawn' ELSE 'released' END, forget = clock_timestamp() + greatest(p_remember, 4 * a.ttl)
    WHERE a.id = p_id AND a.state = 'granted' AND a.expires > clock_timestamp()
    RETURNING set_config('synchronous_commit', 'off', true) INTO v_unflushed;
    IF FOUND THEN
      IF v_contended THEN
        PERFORM fenced.wake_heads(p_namespace, ARRAY[v_name], clock_timestamp());
      END IF;
      RETURN 'released';
    END IF;
    UPDATE fenced.name n SET held = true WHERE n.namespace = p_namespace AND n.name = v_name; -- over, or nearly
  END IF;
  RETURN fenced.release_in_line(p_namespace, p_id, p_secret, p_state, p_remember);
END $$;

-- The same for waiters, for several names, for what is over, and for what is not there.
CREATE FUNCTION fenced.release_in_line(
  p_namespace integer, p_id uuid, p_secret uuid, p_state text, p_remember interval
) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
  v_names     text[];
  v_contended boolean;
  v_ticket    bigint;
  v_state     text;
  v_now       timestamptz;
BEGIN
  SELECT a.names INTO v_names FROM fenced.attempt a
  WHERE a.id = p_id AND a.secret = p_secret AND a.namespace = p_namespace;
  IF NOT FOUND AND p_state = 'withdrawn' THEN
    INSERT INTO fenced.attempt VALUES (p_id, p_secret, p_namespace, 'withdrawn', '{}', '0', '0', 0, 0, '-infinity',
      clock_timestamp() + p_remember, '', '') ON CONFLICT DO NOTHING;
    IF FOUND THEN
      RETURN 'released';
    END IF;
    SELECT a.names INTO v_names FROM fenced.attempt a
    WHERE a.id = p_id AND a.secret = p_secret AND a.namespace = p_namespace;
  END IF;
  IF v_names IS NULL THEN
    RETURN 'gone';
  END IF;
  SELECT bool_or(l.contended) INTO v_contended FROM unnest(fenced.lock_names(p_namespace, v_names)) AS l;
  PERFORM FROM fenced.attempt a WHERE a.id = p_id FOR UPDATE; -- it may be being renewed
  v_now := clock_timestamp();
  UPDATE fenced.attempt a SET state = CASE p_state WHEN 'withdrawn' THEN 'withdrawn' ELSE 'released' END, forget = v_now + greatest(p_remember, 4 * a.ttl)
  WHERE a.id = p_id AND a.state IN ('granted', 'waiting') AND a.expires > v_now
  RETURNING a.ticket INTO v_ticket;
  IF NOT FOUND THEN
    PERFORM fenced.expire(p_id, v_now, p_remember);
    SELECT a.state INTO v_state FROM fenced.attempt a WHERE a.id = p_id;
    RETURN CASE WHEN v_state IN ('released', 'withdrawn') THEN 'released' ELSE 'ended ' || v_state END;
  END IF;
  UPDATE fenced.name n SET held = false
  WHERE n.namespace = p_namespace AND n.name = ANY (v_names) AND n.attempt = p_id AND n.held;
  IF v_contended THEN
    DELETE FROM fenced.queue q WHERE q.namespace = p_namespace AND q.name = ANY (v_names) AND q.ticket = v_ticket;
    PERFORM fenced.wake_heads(p_namespace, v_names, v_now);
  END IF;
  PERFORM set_config('synchronous_commit', 'off', true);
  RETURN 'released';
END $$;

-- How long until a waiting attempt could be granted, by its place in the queue. Reads only.
CREATE FUNCTION fenced.check_in(p_waiter fenced.attempt, p_now timestamptz) RETURNS interval
LANGUAGE plpgsql AS $$
DECLARE
  v_at     timestamptz := p_now;
  v_name   text;
  v_claim  uuid;
  v_until  timestamptz;
  v_before record;
BEGIN
  FOREACH v_name IN ARRAY p_waiter.names LOOP
    SELECT n.attempt INTO v_claim FROM fenced.name n
    WHERE n.namespace = p_waiter.namespace AND n.name = v_name AND n.held;
    SELECT a.expires + a.lock_delay INTO v_until FROM fenced.attempt a
    WHERE a.id = v_claim AND a.state IN ('granted', 'expired');
    v_at := greatest(v_at, v_until);
    FOR v_before IN
      SELECT q.attempt FROM fenced.queue q
      WHERE q.namespace = p_waiter.namespace AND q.name = v_name AND q.ticket < p_waiter.ticket
      ORDER BY q.ticket DESC
    LOOP
      SELECT a.expires INTO v_until FROM fenced.attempt a
      WHERE a.id = v_before.attempt AND a.state = 'waiting' AND a.expires > p_now;
      IF FOUND THEN
        v_at := greatest(v_at, v_until);
        EXIT;
      END IF;
    END LOOP;
  END LOOP;
  RETURN v_at - p_now;
END $$;

-- Keep leases and places alive, all at once. A row that is locked is skipped and unknown: who waits for a lock
-- would renew what has expired meanwhile.
CREATE FUNCTION fenced.renew(
  p_namespace integer, p_ids uuid[], p_secrets uuid[], p_place interval, p_remember interval
) RETURNS TABLE (id text, answer text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_ids    uuid[] := ARRAY (
    SELECT m.id FROM unnest(p_ids, p_secrets) AS m (id, secret)
    WHERE m.secret = (SELECT a.secret FROM fenced.attempt a WHERE a.id = m.id));
  v_locked uuid[];
  v_now    timestamptz;
BEGIN
  SELECT coalesce(array_agg(mine.id), '{}') INTO v_locked FROM (
    SELECT a.id FROM fenced.attempt a WHERE a.id = ANY (v_ids) AND a.namespace = p_namespace
    FOR UPDATE SKIP LOCKED) AS mine;
  v_now := clock_timestamp();
  UPDATE fenced.attempt a SET
    expires = v_now + CASE a.state WHEN 'granted' THEN a.ttl ELSE least(a.ttl, p_place) END,
    forget = v_now + a.ttl + a.lock_delay + greatest(p_remember, 4 * a.ttl)
  WHERE a.id = ANY (v_locked) AND a.state IN ('granted', 'waiting') AND a.expires > v_now;
  PERFORM FROM fenced.attempt a WHERE a.id = ANY (v_locked) AND a.state = 'granted' LIMIT 1;
  IF NOT FOUND THEN
    PERFORM set_config('synchronous_commit', 'off', true); -- places only
  ELSE
    PERFORM fenced.flushed();
  END IF;
  RETURN QUERY
    SELECT replace(a.id::text, '-', ''), CASE
      WHEN NOT a.id = ANY (v_locked) THEN 'unknown'
      WHEN a.state NOT IN ('granted', 'waiting') THEN 'ended ' || a.state
      WHEN a.expires <= v_now THEN 'ended expired'
      WHEN a.state = 'granted' THEN 'kept ' || fenced.seconds(a.expires - v_now)
      ELSE 'waiting ' || fenced.seconds(fenced.check_in(a, v_now)) END
    FROM fenced.attempt a WHERE a.id = ANY (v_ids) AND a.namespace = p_namespace;
END $$;

-- Which of these waiters could be granted now: for clients that cannot listen.
CREATE FUNCTION fenced.ready(p_namespace integer, p_ids uuid[]) RETURNS SETOF text
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  SELECT replace(a.id::text, '-', '') FROM fenced.attempt a
  WHERE a.id = ANY (p_ids) AND a.namespace = p_namespace AND a.state = 'waiting'
    AND fenced.check_in(a, clock_timestamp()) <= interval '0'
$$;

-- Take a name from its holder, and mint a token above the holder's.
CREATE FUNCTION fenced.force_release(p_namespace integer, p_name text, p_remember interval) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '4s' AS $$
DECLARE
  v_id    uuid;
  v_names text[];
  v_now   timestamptz;
  v_token bigint;
BEGIN
  SELECT a.id, a.names INTO v_id, v_names FROM fenced.name n JOIN fenced.attempt a ON a.id = n.attempt
  WHERE n.namespace = p_namespace AND n.name = p_name AND n.held;
  IF NOT FOUND THEN
    RETURN NULL;
  END IF;
  PERFORM fenced.lock_names(p_namespace, v_names);
  PERFORM FROM fenced.attempt a WHERE a.id = v_id FOR UPDATE; -- it may be being renewed
  v_now := clock_timestamp();
  UPDATE fenced.attempt a SET state = 'revoked', forget = v_now + greatest(p_remember, 4 * a.ttl)
  WHERE a.id = v_id AND a.state = 'granted' AND a.expires > v_now;
  IF NOT FOUND THEN
    RETURN NULL;
  END IF;
  UPDATE fenced.name n SET held = false
  WHERE n.namespace = p_namespace AND n.name = ANY (v_names) AND n.attempt = v_id;
  v_token := fenced.mint(p_namespace);
  PERFORM fenced.wake_heads(p_namespace, v_names, v_now);
  RETURN v_token;
END $$;

-- Every later token is above this. Also takes the present history for this namespace's own.
--
-- A grant reads the floor by the snapshot of its statement, which may be older than its locks. So this waits until every
-- grant that is under way is over, and lets the next ones begin when the new floor can be seen: they all hold a lock on
-- the table, taken before their snapshots.
CREATE FUNCTION fenced.raise_floor(p_namespace integer, p_above bigint) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '4s' AS $$
DECLARE
  v_last  bigint;
  v_floor bigint;
BEGIN
  LOCK TABLE fenced.namespace IN ACCESS EXCLUSIVE MODE;
  SELECT CASE WHEN t.is_called THEN t.last_value ELSE 0 END INTO v_last FROM fenced.token t;
  UPDATE fenced.namespace n SET floor = greatest(n.floor, p_above - v_last), lineage = fenced.lineage()
  WHERE n.id = p_namespace RETURNING n.floor INTO v_floor;
  PERFORM fenced.flushed();
  RETURN v_floor + v_last;
END $$;

-- Forget what is over among the rows that follow an id. Ids are random, so this samples the table; the counter
-- is not touched. What somebody has locked is left for the next time.
CREATE FUNCTION fenced.sweep(p_after uuid, p_limit integer) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
  v_now  timestamptz := clock_timestamp();
  v_gone bigint := 0;
  v_near record;
  v_over fenced.attempt;
  v_name text;
BEGIN
  FOR v_near IN SELECT a.id, a.forget FROM fenced.attempt a WHERE a.id > p_after ORDER BY a.id LIMIT p_limit LOOP
    CONTINUE WHEN v_near.forget > v_now;
    SELECT * INTO v_over FROM fenced.attempt a WHERE a.id = v_near.id AND a.forget <= v_now FOR UPDATE SKIP LOCKED;
    CONTINUE WHEN NOT FOUND;
    FOREACH v_name IN ARRAY v_over.names LOOP
      PERFORM FROM fenced.queue q
      WHERE q.namespace = v_over.namespace AND q.name = v_name AND q.ticket = v_over.ticket FOR UPDATE SKIP LOCKED;
      IF FOUND THEN
        DELETE FROM fenced.queue q
        WHERE q.namespace = v_over.namespace AND q.name = v_name AND q.ticket = v_over.ticket;
      END IF;
      PERFORM FROM fenced.name n
      WHERE n.namespace = v_over.namespace AND n.name = v_name AND n.attempt = v_over.id AND NOT n.contended
      FOR UPDATE SKIP LOCKED;
      IF FOUND THEN -- the lock is taken: nobody comes to hold or await it meanwhile
        DELETE FROM fenced.name n WHERE n.namespace = v_over.namespace AND n.name = v_name;
      END IF;
    END LOOP;
    DELETE FROM fenced.attempt a WHERE a.id = v_over.id;
    v_gone := v_gone + 1;
  END LOOP;
  RETURN v_gone;
END $$;

-- The same page by page, so that nobody waits long for a name: how many were forgotten, and behind which id to go on.
-- The last page also takes names along that were locked or waited for when their turn came.
CREATE FUNCTION fenced.tidy(p_after uuid, p_limit integer) RETURNS TABLE (gone bigint, last uuid)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_idle record;
BEGIN
  SELECT a.id INTO last FROM fenced.attempt a WHERE a.id > p_after ORDER BY a.id OFFSET p_limit - 1 LIMIT 1;
  gone := fenced.sweep(p_after, p_limit);
  IF last IS NULL THEN
    FOR v_idle IN
      SELECT n.namespace, n.name FROM fenced.name n
      WHERE NOT EXISTS (SELECT FROM fenced.attempt a WHERE a.id = n.attempt) LIMIT p_limit
    LOOP
      PERFORM FROM fenced.name n
      WHERE n.namespace = v_idle.namespace AND n.name = v_idle.name FOR UPDATE SKIP LOCKED;
      IF FOUND THEN -- the lock is taken: what the next statement sees cannot change
        DELETE FROM fenced.name n WHERE n.namespace = v_idle.namespace AND n.name = v_idle.name
          AND NOT EXISTS (SELECT FROM fenced.attempt a WHERE a.id = n.attempt)
          AND NOT EXISTS (SELECT FROM fenced.queue q WHERE q.namespace = n.namespace AND q.name = n.name);
      END IF;
    END LOOP;
  END IF;
  RETURN NEXT;
END $$;

-- One name as people want to see it, as JSON.
CREATE FUNCTION fenced.look(p_namespace integer, p_name text) RETURNS text
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  WITH at AS MATERIALIZED (SELECT clock_timestamp() AS now)
  SELECT json_build_object(
    'name', p_name,
    'claim', (
      SELECT json_build_array(a.state = 'granted' AND a.expires > at.now, a.holder, a.token,
        replace(a.id::text, '-', ''), extract(epoch FROM a.expires - at.now), a.names,
        extract(epoch FROM a.ttl), extract(epoch FROM a.expires + a.lock_delay - at.now))
      FROM fenced.name n JOIN fenced.attempt a ON a.id = n.attempt
      WHERE n.namespace = p_namespace AND n.name = p_name AND n.held AND a.state IN ('granted', 'expired')
        AND a.expires + a.lock_delay > at.now),
    'waiters', (
      SELECT json_agg(json_build_array(a.holder, a.names, extract(epoch FROM a.expires - at.now)) ORDER BY q.ticket)
      FROM fenced.queue q JOIN fenced.attempt a ON a.id = q.attempt
      WHERE q.namespace = p_namespace AND q.name = p_name AND a.state = 'waiting' AND a.expires > at.now)
  )::text FROM at
$$;

-- Names that are held, delayed or waited for, in order.
CREATE FUNCTION fenced.survey(p_namespace integer, p_after text, p_limit integer) RETURNS SETOF text
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  SELECT fenced.look(p_namespace, found.name) FROM (
    SELECT n.name FROM fenced.name n
    WHERE n.namespace = p_namespace AND n.name > p_after COLLATE "C" AND (
      n.held AND EXISTS (
        SELECT FROM fenced.attempt a WHERE a.id = n.attempt AND a.state IN ('granted', 'expired')
          AND a.expires + a.lock_delay > clock_timestamp())
      OR n.contended AND EXISTS (
        SELECT FROM fenced.queue q JOIN fenced.attempt a ON a.id = q.attempt
        WHERE q.namespace = p_namespace AND q.name = n.name
          AND a.state = 'waiting' AND a.expires > clock_timestamp()))
    ORDER BY n.name LIMIT p_limit) AS found
$$;

REVOKE EXECUTE ON FUNCTION fenced.force_release, fenced.raise_floor FROM PUBLIC;
