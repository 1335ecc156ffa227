-- What operators do.

-- Take a name from the holder that has this token, and mint a token above it. NULL: that grant does not hold the name.
CREATE OR REPLACE FUNCTION fenced.force_release(
  p_namespace integer, p_name text, p_token bigint, p_remember interval) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '4s' AS $$
DECLARE
  v_id    uuid;
  v_names text[];
  v_now   timestamptz;
  v_token bigint;
BEGIN
  SELECT a.id, a.names INTO v_id, v_names FROM fenced.name n JOIN fenced.attempt a ON a.id = n.attempt
  WHERE n.namespace = p_namespace AND n.name = p_name AND n.held AND a.token = p_token;
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

-- Make every later token greater than a number, and accept the current history as this namespace's.
--
-- A grant reads the floor in its statement's snapshot, which may be older than its row locks. Every grant locks the table
-- before it takes its snapshot. So this function locks the table against them: it waits until running grants have ended,
-- and later grants start only when the new floor is visible.
CREATE OR REPLACE FUNCTION fenced.raise_floor(p_namespace integer, p_above bigint) RETURNS bigint
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

-- Delete old attempts among the rows that follow an id. Ids are random, so this samples the table. The counter is not
-- touched. Locked rows are skipped and left to a later call.
CREATE OR REPLACE FUNCTION fenced.sweep(p_after uuid, p_limit integer) RETURNS bigint
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

-- The same for one page, so that no request waits long for a name. Returns how many were deleted, and the id to continue
-- after. The last page also deletes names that were locked or had a queue when their own page was processed.
CREATE OR REPLACE FUNCTION fenced.tidy(p_after uuid, p_limit integer) RETURNS TABLE (gone bigint, last uuid)
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

REVOKE EXECUTE ON FUNCTION fenced.force_release, fenced.raise_floor FROM PUBLIC;
