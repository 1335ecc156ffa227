-- Building blocks of the operations.
--
-- Every function locks in one order: names first, sorted by their bytes. It reads the clock after that. While names
-- are locked, no function waits for a row of `attempt` except the attempt's own: other locked rows are skipped.
-- A wait for a lock ends after 4 s, before the client gives the request up.
--
-- Functions that are called often are plpgsql and look rows up by key, one table at a time: a join would be planned
-- with statistics that a new table does not have, and a function in SQL is planned again at every call.

-- Which history this is: the cluster, its timeline, this database and this sequence. The promotion of a standby and
-- a recovery to a point in time begin a new timeline; a restored dump has a new database and a new sequence. Computed
-- once a session: it cannot change under a session that is not in recovery.
CREATE OR REPLACE FUNCTION fenced.lineage() RETURNS text
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

-- Seconds in the form that the client parses.
CREATE OR REPLACE FUNCTION fenced.seconds(span interval) RETURNS text
LANGUAGE sql IMMUTABLE AS $$
  SELECT extract(epoch FROM span)::text
$$;

-- The namespace's id, realm, last token and settings. With `p_create` a missing namespace is created.
CREATE OR REPLACE FUNCTION fenced.enter(p_name text, p_realm text, p_create boolean)
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

-- End an expired lease or queue entry. False if another transaction has the row locked, or has renewed it.
CREATE OR REPLACE FUNCTION fenced.expire(p_id uuid, p_now timestamptz, p_remember interval) RETURNS boolean
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

-- When the nearest live waiter ahead of a ticket expires; null if there is none. Expired waiters in between are
-- removed from the queue. The caller has locked the name.
CREATE OR REPLACE FUNCTION fenced.ahead_of(
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

-- When a name could be granted to the attempt with this ticket, if no other request arrives. The caller has locked
-- the name.
CREATE OR REPLACE FUNCTION fenced.free_from(
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
    ELSIF v_state IN ('granted', 'expired', 'released') THEN
      v_at := greatest(v_at, v_expires + v_delay);
    END IF;
  END IF;
  IF p_name.contended THEN
    v_at := greatest(v_at, fenced.ahead_of(p_name.namespace, p_name.name, p_ticket, p_now, p_remember));
  END IF;
  RETURN v_at;
END $$;

-- A holder of one of these names, as JSON; null if there is none.
CREATE OR REPLACE FUNCTION fenced.held_by(p_namespace integer, p_names text[], p_now timestamptz) RETURNS text
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

-- Have this transaction's commit flushed, and wait for synchronous standbys, whatever the server's setting is.
CREATE OR REPLACE FUNCTION fenced.flushed() RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
  IF current_setting('synchronous_commit') IN ('off', 'local') THEN
    PERFORM set_config('synchronous_commit', 'on', true);
  END IF;
END $$;

-- Lock the rows of these names, in order. Missing rows are created.
CREATE OR REPLACE FUNCTION fenced.lock_names(p_namespace integer, p_names text[]) RETURNS fenced.name[]
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

-- The next token. Runs after the names are locked. Raises if the history changed or the tokens are used up.
CREATE OR REPLACE FUNCTION fenced.mint(p_namespace integer) RETURNS bigint
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
