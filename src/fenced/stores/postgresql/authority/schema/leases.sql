-- The operations of a lease: ask, release, renew, and which waiters could be granted.

-- Grant, queue or refuse. The same attempt gets the same grant.
--
-- The usual case is one statement: one name that nobody holds and nobody waits for. No clock is needed to see that it
-- is free. (plpgsql prepares each of its expressions again in every transaction, which costs more than evaluating it.)
-- All other cases are in `ask_in_line`.
CREATE OR REPLACE FUNCTION fenced.ask(
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

-- The other cases of `ask`: held names, names with a queue, several names, new names, an attempt that asks again.
CREATE OR REPLACE FUNCTION fenced.ask_in_line(
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

-- Notify the first live waiter of each of these names. A hint: the waiter gets the grant by asking again.
CREATE OR REPLACE FUNCTION fenced.wake_heads(p_namespace integer, p_names text[], p_now timestamptz) RETURNS void
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

-- Release a lease or leave the queue. `p_state` is released, or withdrawn, which leaves a tombstone. The usual case
-- comes first and is short: a lease on one name.
--
-- The commit is not flushed: the next grant's commit flushes it too. After a crash before that, the lease's ttl ends it.
CREATE OR REPLACE FUNCTION fenced.release(
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

-- The other cases of `release`: waiters, several names, attempts that have ended, unknown attempts.
CREATE OR REPLACE FUNCTION fenced.release_in_line(
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

-- Release a lease whose names nobody may be granted for `p_keep`: they stay held by the released attempt. Flushed, so that
-- a crash does not free them. The waiters ask again, and learn for how long.
CREATE OR REPLACE FUNCTION fenced.release_later(
  p_namespace integer, p_id uuid, p_secret uuid, p_keep interval, p_remember interval
) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '4s' AS $$
DECLARE
  v_names text[];
  v_now   timestamptz;
BEGIN
  SELECT a.names INTO v_names FROM fenced.attempt a
  WHERE a.id = p_id AND a.secret = p_secret AND a.namespace = p_namespace AND a.state = 'granted';
  IF FOUND THEN
    PERFORM fenced.lock_names(p_namespace, v_names);
    PERFORM FROM fenced.attempt a WHERE a.id = p_id FOR UPDATE; -- it may be being renewed
    v_now := clock_timestamp();
    UPDATE fenced.attempt a SET state = 'released', expires = v_now + p_keep - a.lock_delay,
      forget = v_now + p_keep + greatest(p_remember, 4 * a.ttl)
    WHERE a.id = p_id AND a.state = 'granted' AND a.expires > v_now;
    IF FOUND THEN
      PERFORM fenced.wake_heads(p_namespace, v_names, v_now);
      PERFORM fenced.flushed();
      RETURN 'released';
    END IF;
  END IF;
  RETURN fenced.release_in_line(p_namespace, p_id, p_secret, 'released', p_remember);
END $$;

-- How long until a waiting attempt could be granted, by its position in the queue. Reads only.
CREATE OR REPLACE FUNCTION fenced.check_in(p_waiter fenced.attempt, p_now timestamptz) RETURNS interval
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
    WHERE a.id = v_claim AND a.state IN ('granted', 'expired', 'released');
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

-- Extend leases and queue entries, all in one statement. A locked row is skipped and reported as unknown: a renewal
-- that waited for the lock could renew a lease that has expired meanwhile.
CREATE OR REPLACE FUNCTION fenced.renew(
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
CREATE OR REPLACE FUNCTION fenced.ready(p_namespace integer, p_ids uuid[]) RETURNS SETOF text
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  SELECT replace(a.id::text, '-', '') FROM fenced.attempt a
  WHERE a.id = ANY (p_ids) AND a.namespace = p_namespace AND a.state = 'waiting'
    AND fenced.check_in(a, clock_timestamp()) <= interval '0'
$$;
