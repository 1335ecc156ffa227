-- Operators' functions. Each writes a line into the history.

-- A name pattern as a LIKE pattern.
CREATE OR REPLACE FUNCTION fenced_guard.likes(p_pattern text) RETURNS text
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
  SELECT replace(replace(replace(replace(p_pattern, E'\\', E'\\\\'), '%', E'\\%'), '_', E'\\_'), '*', '%')
$$;

-- Remember when a mode changed: older transactions may not be bound by the new mode (`pending`).
CREATE OR REPLACE FUNCTION fenced_guard.note_mode_change(p_guard text) RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
  UPDATE fenced_guard.guard SET changed = pg_current_xact_id(), changed_at = clock_timestamp() WHERE guard = p_guard
$$;

-- The transactions that began before the last change of a guard's modes and may still commit a write that the new mode refuses:
-- they wrote before the change, were let through before it, or read from an older snapshot. A transaction that started less than
-- a minute after the change counts if its snapshot may be older. Transactions that were let through by an override count after the
-- override has expired. `known` false: the role that asks may not see the state of this transaction, so it may be harmless.
CREATE OR REPLACE FUNCTION fenced_guard.pending(p_guard text) RETURNS TABLE (who text, transaction text, known boolean)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  RETURN QUERY
  WITH g AS (
    SELECT changed::xid AS changed, changed_at, (
      SELECT max(o.until) FROM fenced_guard.override o WHERE o.guard = p_guard AND o.until <= clock_timestamp()
    ) AS until FROM fenced_guard.guard WHERE guard = p_guard
  ), running AS (
    SELECT a.pid, a.usename, a.application_name, a.backend_xmin, a.xact_start, a.state IS NULL AS hidden, v.virtualtransaction,
      coalesce(a.backend_xid, (
        SELECT k.transactionid FROM pg_locks k WHERE k.pid = a.pid AND k.locktype = 'transactionid' AND k.granted
        ORDER BY age(k.transactionid) DESC LIMIT 1)) AS xid
    FROM pg_stat_activity a JOIN pg_locks v ON v.pid = a.pid AND v.locktype = 'virtualxid' AND v.granted
      AND v.virtualxid = v.virtualtransaction
    WHERE a.datname = current_database() AND a.pid <> pg_backend_pid() AND coalesce(a.backend_type, 'client backend') = 'client backend'
  )
  SELECT format('process %s (%s)', r.pid, concat_ws(', ', r.usename, nullif(r.application_name, ''))),
    r.virtualtransaction, r.xid IS NOT NULL OR NOT r.hidden
  FROM running r, g
  WHERE age(r.xid) > age(g.changed)
    OR (age(r.backend_xmin) >= age(g.changed) AND r.xact_start < g.changed_at + interval '1 minute')
    OR (r.xid IS NOT NULL AND r.xact_start < g.until)
    OR (r.hidden AND r.xid IS NULL)
  UNION ALL
  SELECT format('the prepared transaction %L', p.gid), p.gid, true FROM pg_prepared_xacts p, g
  WHERE p.database = current_database() AND age(p.transaction) > age(g.changed);
END $$;

CREATE OR REPLACE FUNCTION fenced_guard.set_mode(p_guard text, p_mode text, p_pattern text DEFAULT '*') RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_before text;
BEGIN
  IF p_mode !~ E'^(observe|shadow|canary\\([0-9]+(\\.[0-9]+)?%\\)|enforce|require)$' THEN
    RAISE EXCEPTION 'fenced: a mode is observe, shadow, canary(P%%), enforce or require, not %', left(p_mode, 100);
  ELSIF NOT EXISTS (SELECT 1 FROM fenced_guard.guard WHERE guard = p_guard) THEN
    RAISE EXCEPTION USING ERRCODE = 'undefined_object', MESSAGE = format('fenced: no guard is installed for %s', p_guard);
  END IF;
  SELECT mode INTO v_before FROM fenced_guard.mode WHERE guard = p_guard AND pattern = p_pattern FOR UPDATE;
  INSERT INTO fenced_guard.mode (guard, pattern, likes, mode, percent)
  VALUES (p_guard, p_pattern, fenced_guard.likes(p_pattern), p_mode,
    coalesce(substring(p_mode FROM E'\\(([0-9.]+)%')::double precision, 0))
  ON CONFLICT (guard, pattern) DO UPDATE
    SET mode = excluded.mode, percent = excluded.percent, since = clock_timestamp();
  INSERT INTO fenced_guard.history (guard, what, detail)
  VALUES (p_guard, 'mode', jsonb_build_object('pattern', p_pattern, 'before', v_before, 'after', p_mode));
  PERFORM fenced_guard.note_mode_change(p_guard);
END $$;

-- Delete the mode of a pattern: the next shorter pattern that matches counts again.
CREATE OR REPLACE FUNCTION fenced_guard.unset_mode(p_guard text, p_pattern text) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_before text;
BEGIN
  DELETE FROM fenced_guard.mode WHERE guard = p_guard AND pattern = p_pattern AND pattern <> '*'
  RETURNING mode INTO v_before;
  IF v_before IS NULL THEN
    RETURN false;
  END IF;
  INSERT INTO fenced_guard.history (guard, what, detail)
  VALUES (p_guard, 'mode', jsonb_build_object('pattern', p_pattern, 'before', v_before, 'after', NULL));
  PERFORM fenced_guard.note_mode_change(p_guard);
  RETURN true;
END $$;

CREATE OR REPLACE FUNCTION fenced_guard.override_for(p_guard text, p_span interval, p_why text, p_pattern text DEFAULT '*')
RETURNS timestamptz
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_until timestamptz := clock_timestamp() + p_span;
BEGIN
  IF NOT EXISTS (SELECT 1 FROM fenced_guard.guard WHERE guard = p_guard) THEN
    RAISE EXCEPTION USING ERRCODE = 'undefined_object', MESSAGE = format('fenced: no guard is installed for %s', p_guard);
  ELSIF p_span NOT BETWEEN interval '1 second' AND interval '24 hours' OR coalesce(btrim(p_why), '') = '' THEN
    RAISE EXCEPTION 'fenced: an override needs a reason, and a duration from 1 second to 24 hours';
  END IF;
  INSERT INTO fenced_guard.override (guard, pattern, likes, until, who, why)
  VALUES (p_guard, p_pattern, fenced_guard.likes(p_pattern), v_until, session_user, p_why);
  INSERT INTO fenced_guard.history (guard, what, detail)
  VALUES (p_guard, 'override', jsonb_build_object('pattern', p_pattern, 'until', v_until, 'why', p_why));
  RETURN v_until;
END $$;

CREATE OR REPLACE FUNCTION fenced_guard.end_overrides(p_guard text, p_pattern text DEFAULT NULL) RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_count bigint;
BEGIN
  UPDATE fenced_guard.override SET until = clock_timestamp()
  WHERE guard = p_guard AND until > clock_timestamp() AND pattern = coalesce(p_pattern, pattern);
  GET DIAGNOSTICS v_count = ROW_COUNT;
  INSERT INTO fenced_guard.history (guard, what, detail)
  SELECT p_guard, 'override ended', jsonb_build_object('pattern', p_pattern, 'count', v_count) WHERE v_count > 0;
  PERFORM fenced_guard.note_mode_change(p_guard) WHERE v_count > 0;
  RETURN v_count;
END $$;

-- Delete a mark that a wrong token raised too far. After that every token from the floor up is admitted.
CREATE OR REPLACE FUNCTION fenced_guard.reset(p_name text, p_why text) RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  m fenced_guard.mark;
BEGIN
  IF coalesce(btrim(p_why), '') = '' THEN
    RAISE EXCEPTION 'fenced: a reset needs a reason';
  END IF;
  PERFORM fenced_guard.lock_turn_rows(ARRAY(SELECT grant_id FROM fenced_guard.mark WHERE name = p_name) || ('/' || p_name));
  DELETE FROM fenced_guard.mark WHERE name = p_name RETURNING * INTO m;
  PERFORM fenced_guard.retire_lease_rows(ARRAY[m.grant_id, '/' || p_name]);
  IF m.name IS NOT NULL THEN
    PERFORM setval('fenced_guard.highest', 1, false);
    INSERT INTO fenced_guard.history (what, detail) VALUES ('reset', jsonb_build_object(
      'name', p_name, 'token', m.token, 'grant', m.grant_id, 'why', p_why));
  END IF;
  RETURN m.token;
END $$;

-- Delete marks below a token and raise the floor to it, so that the floor refuses every stamp that those marks refused. It
-- deletes at most `p_limit` marks, and none that a transaction has locked, directly or by its lease row. Returns how many.
CREATE OR REPLACE FUNCTION fenced_guard.drop_marks(p_realm text, p_below bigint, p_limit bigint) RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_count bigint;
BEGIN
  UPDATE fenced_guard.trust SET floor = greatest(floor, p_below) WHERE realm = p_realm;
  IF NOT FOUND THEN
    RAISE EXCEPTION USING ERRCODE = 'object_not_in_prerequisite_state', MESSAGE = format(
      'fenced: realm %s is trusted here, not %s; name the authority of the trusted realm',
      (SELECT realm FROM fenced_guard.trust), p_realm);
  END IF;
  DELETE FROM fenced_guard.lease WHERE grant_id IN (
    SELECT grant_id FROM fenced_guard.lease WHERE token < p_below LIMIT p_limit FOR UPDATE SKIP LOCKED);
  DELETE FROM fenced_guard.mark WHERE name IN (
    SELECT name FROM fenced_guard.mark m
    WHERE token < p_below AND NOT EXISTS (SELECT 1 FROM fenced_guard.lease l WHERE l.grant_id = m.grant_id)
    LIMIT p_limit FOR UPDATE SKIP LOCKED);
  GET DIAGNOSTICS v_count = ROW_COUNT;
  INSERT INTO fenced_guard.history (what, detail)
  SELECT 'marks dropped', jsonb_build_object('below', p_below, 'count', v_count) WHERE v_count > 0;
  RETURN v_count;
END $$;

-- Trust this authority from now on, and no other. Waits for the transactions that raised a mark or share a lease row.
CREATE OR REPLACE FUNCTION fenced_guard.adopt(p_realm text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_before text;
BEGIN
  -- `admit` holds ROW SHARE until COMMIT. This lock waits for those transactions, and later ones queue behind it.
  LOCK TABLE fenced_guard.trust IN EXCLUSIVE MODE;
  SELECT realm INTO v_before FROM fenced_guard.trust;
  UPDATE fenced_guard.trust SET realm = p_realm;
  PERFORM fenced_guard.lock_turn_rows(ARRAY(
    SELECT unnest(ARRAY[grant_id, '/' || fenced_guard.decoded(names)]) FROM fenced_guard.lease WHERE realm <> p_realm));
  DELETE FROM fenced_guard.lease WHERE realm <> p_realm;
  INSERT INTO fenced_guard.history (what, detail)
  VALUES ('adopt', jsonb_build_object('before', v_before, 'after', p_realm));
END $$;

-- Change max_jump, sample or patience: the ones that `p_change` has.
CREATE OR REPLACE FUNCTION fenced_guard.set_trust(p_change jsonb) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_before jsonb;
BEGIN
  SELECT jsonb_build_object('max_jump', max_jump, 'sample', sample, 'patience', patience) INTO v_before
  FROM fenced_guard.trust FOR UPDATE;
  IF (p_change ->> 'max_jump')::bigint < 1 OR (p_change ->> 'sample')::double precision NOT BETWEEN 0 AND 1
     OR (p_change ->> 'patience')::double precision NOT BETWEEN 0.001 AND 86400 THEN
    RAISE EXCEPTION 'fenced: max_jump is at least 1, sample from 0 to 1, patience from 0.001 to 86400 seconds';
  END IF;
  UPDATE fenced_guard.trust SET
    max_jump = (v_before || p_change ->> 'max_jump')::bigint,
    sample = coalesce((v_before || p_change ->> 'sample')::double precision, 0),
    patience = coalesce((p_change ->> 'patience')::double precision, patience);
  UPDATE fenced_guard.lease l SET sample = t.sample FROM fenced_guard.trust t
  WHERE l.grant_id IN (SELECT grant_id FROM fenced_guard.lease FOR UPDATE SKIP LOCKED);  -- rows in use keep the old sample
  INSERT INTO fenced_guard.history (what, detail)
  SELECT 'trust', jsonb_build_object('before', v_before, 'after',
    jsonb_build_object('max_jump', max_jump, 'sample', sample, 'patience', patience)) FROM fenced_guard.trust;
END $$;

-- The table of a guard; NULL if it was dropped or renamed. Unlike `to_regclass`, this needs no right on the table's schema.
CREATE OR REPLACE FUNCTION fenced_guard.relation(p_guard text) RETURNS oid
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
  SELECT c.oid FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
  WHERE n.nspname = split_part(p_guard, '.', 1) AND c.relname = split_part(p_guard, '.', 2)
$$;

-- How many writes a guard has refused. Every guard has a sequence of its own, so monitors get no right on sequences.
CREATE OR REPLACE FUNCTION fenced_guard.refusals(p_guard text) RETURNS bigint
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  SELECT coalesce(pg_sequence_last_value(to_regclass(refused)), 0) FROM fenced_guard.guard WHERE guard = p_guard
$$;

-- How many decisions could not be recorded since the last `tidy_up`.
CREATE OR REPLACE FUNCTION fenced_guard.unrecorded() RETURNS bigint
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
  SELECT coalesce(pg_sequence_last_value('fenced_guard.unrecorded'), 0)
    - coalesce((SELECT sum((detail ->> 'count')::bigint) FROM fenced_guard.history WHERE what = 'unrecorded'), 0)::bigint
$$;

-- Add up all but the newest `p_keep` records, delete turn rows without marks and expired overrides, and write the number of
-- unrecorded decisions into the history.
CREATE OR REPLACE FUNCTION fenced_guard.tidy_up(p_keep bigint, OUT summed bigint, OUT overrides bigint, OUT unrecorded bigint)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  PERFORM 1 FROM fenced_guard.trust FOR UPDATE;  -- one at a time
  summed := fenced_guard.tidy((SELECT id FROM fenced_guard.record ORDER BY id DESC OFFSET p_keep LIMIT 1));
  DELETE FROM fenced_guard.turn t WHERE CASE WHEN starts_with(grant_id, '/')
      THEN NOT EXISTS (SELECT 1 FROM fenced_guard.mark m WHERE m.name = substr(t.grant_id, 2))
      ELSE NOT EXISTS (SELECT 1 FROM fenced_guard.mark m WHERE m.grant_id = t.grant_id) END
    AND grant_id IN (SELECT grant_id FROM fenced_guard.turn FOR UPDATE SKIP LOCKED);
  DELETE FROM fenced_guard.override WHERE until < clock_timestamp();
  GET DIAGNOSTICS overrides = ROW_COUNT;
  unrecorded := fenced_guard.unrecorded();
  INSERT INTO fenced_guard.history (what, detail)
  SELECT 'unrecorded', jsonb_build_object('count', tidy_up.unrecorded) WHERE tidy_up.unrecorded > 0;
END $$;

-- Give a role the right to read what operators read, and no more: not the secrets of `key`, and not the seal in `trust`. The
-- marks are among it, because a status counts them.
CREATE OR REPLACE FUNCTION fenced_guard.let_read(p_role text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  EXECUTE format('GRANT SELECT ON fenced_guard.schema, fenced_guard.guard, fenced_guard.mode, fenced_guard.override, '
    'fenced_guard.history, fenced_guard.record, fenced_guard.tally, fenced_guard.mark, fenced_guard.unrecorded TO %I', p_role);
  EXECUTE format('GRANT SELECT (one, realm, max_jump, sample, proof, floor, patience) ON fenced_guard.trust TO %I', p_role);
  EXECUTE format('GRANT SELECT (id, kind, added, revoked) ON fenced_guard.key TO %I', p_role);
  EXECUTE format('GRANT EXECUTE ON FUNCTION fenced_guard.relation(text), fenced_guard.refusals(text), '
    'fenced_guard.unrecorded(), fenced_guard.pending(text) TO %I', p_role);
END $$;

-- Let a role monitor the guards. An upgrade renews the right: see grants.sql.
CREATE OR REPLACE FUNCTION fenced_guard.grant_monitor(p_role text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  IF NOT EXISTS (SELECT 1 FROM pg_roles WHERE rolname = p_role) THEN
    RAISE EXCEPTION USING ERRCODE = 'undefined_object', MESSAGE = format('fenced: there is no role %s', left(p_role, 100));
  END IF;
  PERFORM fenced_guard.let_read(p_role);
  INSERT INTO fenced_guard.history (what, detail) VALUES ('monitor', jsonb_build_object('role', p_role));
END $$;

CREATE OR REPLACE FUNCTION fenced_guard.revoke_monitor(p_role text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  EXECUTE format('REVOKE SELECT ON ALL TABLES IN SCHEMA fenced_guard FROM %I', p_role);
  EXECUTE format('REVOKE SELECT ON fenced_guard.unrecorded FROM %I', p_role);
  EXECUTE format('REVOKE EXECUTE ON FUNCTION fenced_guard.relation(text), fenced_guard.refusals(text), '
    'fenced_guard.unrecorded(), fenced_guard.pending(text) FROM %I', p_role);
  INSERT INTO fenced_guard.history (what, detail) VALUES ('monitor revoked', jsonb_build_object('role', p_role));
END $$;

-- Let a key sign stamps. An id is never reused. Old and new keys are both valid until one is revoked.
CREATE OR REPLACE FUNCTION fenced_guard.add_key(p_id text, p_kind text, p_secret bytea) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  IF p_id IS NULL OR p_id !~ '^[A-Za-z0-9_-]{1,32}$' THEN
    RAISE EXCEPTION 'fenced: a key''s id is 1 to 32 of A-Z, a-z, 0-9, _ and -';
  ELSIF p_kind = 'hmac' AND length(p_secret) BETWEEN 32 AND 1024 THEN
    NULL;
  ELSIF p_kind = 'ed25519' AND length(p_secret) = 32 AND fenced_guard.ed25519_x(p_secret) IS NOT NULL
    AND NOT fenced_guard.ed25519_is_small(p_secret) THEN
    NULL;
  ELSE
    RAISE EXCEPTION USING ERRCODE = 'object_not_in_prerequisite_state', MESSAGE =
      'fenced: a key is hmac with 32 to 1024 bytes, or ed25519 with the 32 bytes of a valid public key';
  END IF;
  INSERT INTO fenced_guard.key (id, kind, secret) VALUES (p_id, p_kind, p_secret) ON CONFLICT (id) DO NOTHING;
  IF NOT FOUND THEN
    RAISE EXCEPTION USING ERRCODE = 'object_not_in_prerequisite_state',
      MESSAGE = format('fenced: the key id %s is or was in use; take another id', p_id);
  END IF;
  INSERT INTO fenced_guard.history (what, detail)
  VALUES ('key added', jsonb_build_object('key', p_id, 'kind', p_kind));
END $$;

-- Revoke a key: its proofs are no longer valid. Marks that they raised stay.
CREATE OR REPLACE FUNCTION fenced_guard.revoke_key(p_id text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_proof boolean;
BEGIN
  SELECT proof INTO v_proof FROM fenced_guard.trust FOR UPDATE;
  UPDATE fenced_guard.key SET revoked = clock_timestamp() WHERE id = p_id AND revoked IS NULL;
  IF NOT FOUND THEN
    RAISE EXCEPTION USING ERRCODE = 'undefined_object', MESSAGE = format('fenced: there is no live key %s', left(p_id, 100));
  ELSIF v_proof AND NOT EXISTS (SELECT 1 FROM fenced_guard.key WHERE revoked IS NULL) THEN
    RAISE EXCEPTION USING ERRCODE = 'object_not_in_prerequisite_state',
      MESSAGE = format('fenced: proofs are required, and %s is the last key; add another one first', p_id);
  END IF;
  INSERT INTO fenced_guard.history (what, detail) VALUES ('key revoked', jsonb_build_object('key', p_id));
END $$;

-- Require proofs, or stop requiring them. `fenced guard key require` calls this and replaces the triggers in the same
-- transaction: triggers made without proofs trust the setting.
CREATE OR REPLACE FUNCTION fenced_guard.require_proofs(p_required boolean) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_before boolean;
BEGIN
  SELECT proof INTO v_before FROM fenced_guard.trust FOR UPDATE;
  IF p_required AND NOT EXISTS (SELECT 1 FROM fenced_guard.key WHERE revoked IS NULL) THEN
    RAISE EXCEPTION USING ERRCODE = 'object_not_in_prerequisite_state',
      MESSAGE = 'fenced: there is no key that could prove a stamp; add one first';
  END IF;
  UPDATE fenced_guard.trust SET proof = p_required;
  INSERT INTO fenced_guard.history (what, detail)
  VALUES ('proofs', jsonb_build_object('before', v_before, 'after', p_required));
END $$;
