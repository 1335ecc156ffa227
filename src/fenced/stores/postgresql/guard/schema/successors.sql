-- Successors: how they queue for marks and leases, and how they find and end older transactions.

-- The key of the turn row of a lease: '/' and the name if it has one name. That row stays from grant to grant, so that a new
-- token writes nothing but the mark. A lease of several names has a row of its own, under its grant.
CREATE OR REPLACE FUNCTION fenced_guard.turn_of(s fenced_guard.stamp) RETURNS text
LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  RETURN CASE WHEN cardinality(s.names) = 1 THEN '/' || s.names[1] ELSE s.grant_id END;
END $$;

-- Lock the turn rows with these keys, which makes `has_successor` true for them. It never waits: a row that another successor
-- has locked already has the same effect.
CREATE OR REPLACE FUNCTION fenced_guard.lock_turn_rows(p_grants text[]) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  PERFORM 1 FROM fenced_guard.turn WHERE grant_id = ANY (p_grants) FOR UPDATE SKIP LOCKED;
END $$;

-- Whether the transaction in a row's xmax, the last one that locked the row, has ended. Turn rows are only locked FOR UPDATE,
-- so that xmax is always a single transaction and never a multixact.
CREATE OR REPLACE FUNCTION fenced_guard.locker_has_ended(p_xmax xid) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_next bigint := pg_snapshot_xmax(pg_current_snapshot())::text::bigint;
  v_near bigint := p_xmax::text::bigint - v_next % 4294967296 + 2147483648;  -- its distance from v_next, in 32 bits
BEGIN
  IF p_xmax = '0' THEN
    RETURN true;
  END IF;
  v_near := v_next + (v_near + 4294967296) % 4294967296 - 2147483648;
  RETURN v_near < 3 OR pg_xact_status(v_near::text::xid8) IS DISTINCT FROM 'in progress';
EXCEPTION WHEN invalid_parameter_value THEN
  RETURN false;  -- in the future of this snapshot: it has just begun
END $$;

-- Whether a successor waits for a name of the lease with this turn row (`turn_of`): it has locked the turn row and has not ended.
CREATE OR REPLACE FUNCTION fenced_guard.has_successor(p_grant text) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  RETURN EXISTS (SELECT 1 FROM fenced_guard.turn t WHERE t.grant_id = p_grant AND NOT fenced_guard.locker_has_ended(t.xmax));
END $$;

-- Delete the lease rows of these grants, because one of their marks now belongs to another grant. `p_grants` has also '/' and
-- the name of each such mark, for the turn rows. It waits for every
-- transaction that shares such a row instead of locking its marks. No deadlock: every caller locks marks first, then lease
-- rows, sorted. A transaction that begins later sees `has_successor`, does not share the lease row, and queues at the marks.
CREATE OR REPLACE FUNCTION fenced_guard.retire_lease_rows(p_grants text[]) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  IF cardinality(array_remove(p_grants, NULL)) > 0
     AND current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
    RAISE EXCEPTION USING ERRCODE = fenced_guard.sqlstate_of('announce'),
      MESSAGE = 'fenced: announce a new token at READ COMMITTED: an older snapshot may not see which grant has the mark';
  END IF;
  PERFORM fenced_guard.lock_turn_rows(p_grants);
  PERFORM 1 FROM fenced_guard.lease WHERE grant_id = ANY (p_grants) ORDER BY grant_id FOR UPDATE;
  DELETE FROM fenced_guard.lease WHERE grant_id = ANY (p_grants);
  -- A grant without marks needs no turn row. A row that another successor has locked is skipped; `tidy_up` deletes it later.
  DELETE FROM fenced_guard.turn WHERE grant_id IN (
    SELECT grant_id FROM fenced_guard.turn WHERE grant_id = ANY (p_grants) FOR UPDATE SKIP LOCKED
  ) AND NOT starts_with(grant_id, '/') AND NOT EXISTS (
    SELECT 1 FROM string_to_table(names, ',') AS n JOIN fenced_guard.mark m ON m.name = fenced_guard.decoded(n)
    WHERE m.grant_id = turn.grant_id
  );
END $$;

-- Every announcing transaction takes advisory locks, so that a successor can find it in pg_locks: one for its grant, and two for
-- each name whose mark it raises. The two hold the token, which other transactions cannot read from the mark before COMMIT. All
-- are shared and tried, so no transaction ever waits for one. No decision depends on them.

-- The transactions of older tokens that keep an announcement of this stamp waiting. `may_end`: the guard's owner has the right
-- to end the transaction, and `p_waited` milliseconds are at least the guard's `patience`.
CREATE OR REPLACE FUNCTION fenced_guard.older_transactions(p_stamp text, p_names text, p_waited bigint)
RETURNS TABLE (pid integer, name text, token bigint, who text, may_end boolean)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  s fenced_guard.stamp := fenced_guard.parse(p_stamp);
  v_patient boolean := p_waited >= 900 * (SELECT patience FROM fenced_guard.trust);  -- 90 %: the client's clock measured it
BEGIN
  RETURN QUERY
  WITH listed AS (
    SELECT k.pid, k.classid::bigint AS high, k.objid::bigint AS low, k.objsubid FROM pg_locks k
    WHERE k.locktype = 'advisory' AND k.granted AND k.pid IS DISTINCT FROM pg_backend_pid()
      AND k.database = (SELECT oid FROM pg_database WHERE datname = current_database())
  ), wanted AS (
    SELECT n AS name FROM unnest(s.names) AS n
    WHERE p_names IS NULL OR n IN (SELECT fenced_guard.decoded(o) FROM string_to_table(p_names, ',') AS o)
  ), older AS (
    SELECT l.pid, m.name, m.token FROM wanted w JOIN fenced_guard.mark m ON m.name = w.name AND m.token < s.token
    CROSS JOIN LATERAL hashtextextended(m.grant_id, 0) AS key
    JOIN listed l ON l.objsubid = 1 AND l.high = (key >> 32) & 4294967295 AND l.low = key & 4294967295
    UNION
    SELECT a.pid, w.name, (a.low << 31) + b.low FROM wanted w
    JOIN listed a ON a.objsubid = 2 AND a.high = hashtext(w.name)::bigint & 4294967295
    JOIN listed b ON b.objsubid = 2 AND b.high = hashtext('/' || w.name)::bigint & 4294967295
      AND b.pid IS NOT DISTINCT FROM a.pid
    WHERE (a.low << 31) + b.low < s.token
  )
  SELECT DISTINCT ON (o.pid, o.name) o.pid, o.name, o.token, CASE
      WHEN o.pid IS NULL THEN format('a prepared transaction under token %s', o.token)
      ELSE format('process %s (%s) under token %s', o.pid, concat_ws(', ', a.usename, nullif(a.application_name, '')), o.token)
    END, coalesce(v_patient AND o.pid IS NOT NULL AND (own.rolsuper OR NOT r.rolsuper AND (
      pg_has_role(current_user, 'pg_signal_backend', 'USAGE') OR pg_has_role(current_user, r.oid, 'USAGE'))), false)
  FROM older o LEFT JOIN pg_stat_activity a ON a.pid = o.pid LEFT JOIN pg_roles r ON r.oid = a.usesysid
  CROSS JOIN (SELECT rolsuper FROM pg_roles WHERE rolname = current_user) AS own
  WHERE o.pid IS NULL OR EXISTS (  -- every role can take advisory locks, but only a guard's function can lock these tables
    SELECT 1 FROM pg_locks k WHERE k.pid = o.pid AND k.granted AND k.mode IN ('RowShareLock', 'RowExclusiveLock')
      AND k.relation IN ('fenced_guard.mark'::regclass, 'fenced_guard.lease'::regclass)
  );
END $$;

-- The same, for writers.
CREATE OR REPLACE FUNCTION fenced_guard.in_the_way(p_stamp text, p_names text DEFAULT NULL, p_waited bigint DEFAULT NULL)
RETURNS TABLE (pid integer, name text, token bigint, who text, may_end boolean)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  RETURN QUERY SELECT * FROM fenced_guard.older_transactions(p_stamp, p_names, p_waited)
  WHERE fenced_guard.may_write() OR NOT (SELECT proof FROM fenced_guard.trust);
END $$;

-- End the transactions that are in the way and may be ended. Their lease is over: the authority gave a newer token for one of
-- its names. Only a stamp that may raise the mark can do this. Each one ended is written into the history.
CREATE OR REPLACE FUNCTION fenced_guard.make_way(p_stamp text, p_names text, p_waited bigint, p_proof text DEFAULT NULL) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  s fenced_guard.stamp := fenced_guard.parse(p_stamp);
  o record;
BEGIN
  IF s.realm = (SELECT coalesce(realm, s.realm) FROM fenced_guard.trust) AND fenced_guard.plausible(s, p_proof) THEN
    FOR o IN SELECT DISTINCT ON (w.pid) w.* FROM fenced_guard.older_transactions(p_stamp, p_names, p_waited) AS w WHERE w.may_end LOOP
      IF pg_terminate_backend(o.pid) THEN
        INSERT INTO fenced_guard.history (what, detail) VALUES ('ended', jsonb_build_object(
          'name', o.name, 'token', o.token, 'who', o.who, 'for', s.token));
      END IF;
    END LOOP;
  END IF;
END $$;
