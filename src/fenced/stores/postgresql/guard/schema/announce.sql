-- Announcing: lock the marks of stamps, and let this transaction write under them.

-- Raise ZF012: the caller must announce in a separate transaction first.
CREATE OR REPLACE FUNCTION fenced_guard.raise_announce_alone_first(p_name text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  RAISE EXCEPTION USING ERRCODE = fenced_guard.sqlstate_of('announce'), MESSAGE = format(
    'fenced: %s: at isolation level %s, announce a new token in a separate transaction, commit it, and begin again',
    fenced_guard.sendable(p_name), current_setting('transaction_isolation'));
END $$;

-- Decide about one name: lock its mark, judge the stamp, raise the mark. `replaced` is the grant that had the mark before;
-- the caller must call `retire_lease_rows` for it.
--
-- `p_step`:
--   alone     an announcement in a separate transaction, which reads nothing
--   announce  an announcement; a write will follow
--   write     a write that is its own announcement
--   row       a write that was announced earlier. It never raises a mark to a new token: the transaction may have read rows
--             before it had the lock.
-- `p_without_waiting`: called by `admit_without_waiting`, which has limited every wait to 1 ms and has checked the isolation
-- level. Do not check it again, and do not lock turn rows.
CREATE OR REPLACE FUNCTION fenced_guard.admit(
  s fenced_guard.stamp, p_name text, p_rule text, p_step text, p_proof text, p_without_waiting boolean DEFAULT false,
  OUT verdict text, OUT replaced text
)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  m fenced_guard.mark;
  v record;
  v_realm text;
  v_proof boolean;
  v_waits boolean;
  v_operation xid8 := CASE WHEN p_step IN ('write', 'row') THEN pg_current_xact_id() END;
  v_seq bigint := CASE WHEN p_step IN ('write', 'row') THEN coalesce(s.seq, 0) ELSE 0 END;
BEGIN
  SELECT realm, proof INTO v_realm, v_proof FROM fenced_guard.trust;
  IF s.realm <> v_realm THEN
    verdict := 'foreign';
  ELSIF NOT p_name = ANY (s.names) THEN
    verdict := 'uncovered';
  END IF;
  WHILE verdict IS NULL LOOP
    SELECT * INTO m FROM fenced_guard.mark WHERE name = p_name;
    IF m.token = s.token AND p_rule = 'retry' AND NOT v_proof AND fenced_guard.carries_mark(p_name) THEN
      -- This transaction shares the lease row, which stands for the lock of this mark.
      verdict := CASE WHEN m.grant_id = s.grant_id THEN 'admit' ELSE 'reused' END;
      RETURN;
    ELSIF m.token = s.token AND p_rule = 'retry' AND (
      -- Do not overtake a successor, unless it waits for this transaction anyway.
      NOT fenced_guard.has_successor(m.grant_id) OR fenced_guard.announced(p_name, fenced_guard.carried())
    ) THEN
      SELECT * INTO m FROM fenced_guard.mark WHERE name = p_name FOR SHARE;
    ELSIF m.token <= s.token THEN  -- a mark above the stamp only rises, so a stale stamp needs no lock
      v_waits := true;
      IF m.token < s.token AND NOT p_without_waiting THEN
        PERFORM fenced_guard.list_in_pg_locks(p_name, s.token);
        PERFORM 1 FROM fenced_guard.mark WHERE name = p_name FOR NO KEY UPDATE SKIP LOCKED;
        IF NOT FOUND THEN  -- another transaction has locked it. A stamp that may not raise the mark must not make others queue behind it.
          v_waits := fenced_guard.plausible(s, p_proof);
          PERFORM fenced_guard.lock_turn_rows(ARRAY[m.grant_id]) WHERE v_waits;
        END IF;
      END IF;
      IF v_waits THEN
        SELECT * INTO m FROM fenced_guard.mark WHERE name = p_name FOR NO KEY UPDATE;  -- waits in PostgreSQL's queue for the row
      END IF;
    END IF;
    IF m.name IS NULL AND s.token < (SELECT floor FROM fenced_guard.trust) THEN
      verdict := 'stale';  -- read after the mark: `drop_marks` raises the floor in the same transaction that deletes marks
      RETURN;
    END IF;
    SELECT * INTO v FROM fenced_guard.judge(m, s, p_rule, p_step NOT IN ('write', 'row'), v_operation);
    IF v.verdict = 'admit' AND p_step = 'announce' AND p_rule <> 'retry' AND coalesce(s.seq, 0) = 0 THEN
      verdict := 'invalid';  -- the write that follows would be invalid
      RETURN;
    ELSIF NOT v.rises THEN
      verdict := v.verdict;
      RETURN;
    ELSIF (m.token IS NULL OR m.token < s.token) AND p_step NOT IN ('alone', 'row') AND NOT p_without_waiting
      AND current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
      -- The snapshot is older than the lock, so this transaction may not see the last holder's writes.
      PERFORM fenced_guard.raise_announce_alone_first(p_name);
    ELSIF (m.token IS NULL OR m.token < s.token) AND NOT fenced_guard.plausible(s, p_proof) THEN
      verdict := 'forged';
      RETURN;
    ELSIF (m.token IS NULL OR m.token < s.token) AND p_step = 'row' THEN
      verdict := 'contended';
      RETURN;
    END IF;
    -- The trusted realm must not change between here and COMMIT: `adopt` takes an EXCLUSIVE lock, which waits for this one.
    -- It may have changed while this transaction waited for the mark, so it is read again under the lock.
    LOCK TABLE fenced_guard.trust IN ROW SHARE MODE;
    SELECT realm INTO v_realm FROM fenced_guard.trust;
    IF s.realm <> v_realm THEN
      verdict := 'foreign';
      RETURN;
    ELSIF v_realm IS NULL THEN
      UPDATE fenced_guard.trust SET realm = s.realm WHERE realm IS NULL;
      IF NOT FOUND THEN
        SELECT * INTO verdict, replaced FROM fenced_guard.admit(s, p_name, p_rule, p_step, p_proof, p_without_waiting);
        RETURN;
      END IF;
    END IF;
    IF m.name IS NOT NULL THEN
      replaced := CASE WHEN m.token < s.token THEN m.grant_id END;
      UPDATE fenced_guard.mark SET token = s.token, grant_id = s.grant_id, operation = v_operation, seq = v_seq
      WHERE name = p_name;
      verdict := 'admit';
      RETURN;
    END IF;
    PERFORM fenced_guard.list_in_pg_locks(p_name, s.token);
    INSERT INTO fenced_guard.mark (name, token, grant_id, seq, operation)
    VALUES (p_name, s.token, s.grant_id, v_seq, v_operation)
    ON CONFLICT (name) DO NOTHING;
    verdict := CASE WHEN FOUND THEN 'admit' END;
  END LOOP;
END $$;

-- Whether this stamp would raise a mark at an isolation level above READ COMMITTED. There the snapshot may not see the lease
-- row that has to be retired, and at SERIALIZABLE the write could make the program's COMMIT fail.
CREATE OR REPLACE FUNCTION fenced_guard.would_conflict(s fenced_guard.stamp, p_name text, p_rule text) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  RETURN current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') AND p_name = ANY (s.names)
    AND (p_rule = 'retry' OR s.seq > 0)  -- otherwise the stamp is invalid, and raises nothing
    AND NOT EXISTS (SELECT 1 FROM fenced_guard.mark WHERE name = p_name AND token >= s.token)
    AND NOT EXISTS (SELECT 1 FROM fenced_guard.trust WHERE realm <> s.realm);
END $$;

-- `admit` for modes in which the guard must not delay or fail a program: observe, shadow, and the names outside a canary.
-- It returns `contended` where `admit` would wait for more than 1 ms or fail.
CREATE OR REPLACE FUNCTION fenced_guard.admit_without_waiting(
  s fenced_guard.stamp, p_name text, p_rule text, p_step text, p_proof text
) RETURNS text
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_before text := current_setting('lock_timeout');
  v_verdict text;
  v_replaced text;
BEGIN
  IF p_step <> 'alone' AND fenced_guard.would_conflict(s, p_name, p_rule) THEN
    RETURN 'contended';
  END IF;
  PERFORM set_config('lock_timeout', '1', true);
  SELECT * INTO v_verdict, v_replaced FROM fenced_guard.admit(s, p_name, p_rule, p_step, p_proof, true);
  PERFORM fenced_guard.retire_lease_rows(ARRAY[v_replaced]) WHERE v_replaced IS NOT NULL;
  PERFORM set_config('lock_timeout', v_before, true);
  RETURN v_verdict;
EXCEPTION WHEN OTHERS THEN
  RETURN 'contended';
END $$;

-- The value of a setting that is a duration, in milliseconds; 0 means no limit.
CREATE OR REPLACE FUNCTION fenced_guard.milliseconds(p_setting text) RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  RETURN extract(epoch FROM current_setting(p_setting)::interval) * 1000;
END $$;

-- Make the server end this transaction when the program leaves it idle for `p_left` milliseconds. If the program has set a
-- shorter limit, that one stays. No limit is set where the mode refuses nothing.
CREATE OR REPLACE FUNCTION fenced_guard.limit_idling(p_left bigint, p_guard text, p_names text[]) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_own bigint := fenced_guard.milliseconds('idle_in_transaction_session_timeout');
BEGIN
  IF (v_own = 0 OR v_own > p_left) AND EXISTS (
    SELECT 1 FROM unnest(p_names) AS n CROSS JOIN LATERAL fenced_guard.decoded(n) AS name
    CROSS JOIN LATERAL fenced_guard.mode_of(coalesce(p_guard, fenced_guard.guard_for(name)), name) AS m WHERE m.refuses
  ) THEN
    PERFORM set_config('idle_in_transaction_session_timeout', p_left::text, true);
  END IF;
END $$;

-- Lock the marks of these stamps, sorted by name, and let this transaction write under them.
--
-- `p_stamps`      separated by spaces
-- `p_left`        for how many milliseconds the transaction may be idle
-- `p_guard`       the guard whose rule and modes count; by default the strictest guard that each name can belong to
-- `p_names`       announce only these names, encoded and separated by commas as in a stamp
-- `p_exclusive`   no other transaction of the same lease at the same time, for rules once and sequenced
-- `p_still_held`  also ask the authority, which must be in this database, whether the lease is still held
-- `p_proofs`      one for each stamp, separated by spaces
-- `p_repeats`     the caller handles ZF012 (announce in a separate transaction first), so raise it in every mode
CREATE OR REPLACE FUNCTION fenced_guard.announce(
  p_stamps text, p_left bigint DEFAULT NULL, p_guard text DEFAULT NULL, p_names text DEFAULT NULL,
  p_exclusive boolean DEFAULT false, p_still_held boolean DEFAULT false, p_proofs text DEFAULT NULL,
  p_repeats boolean DEFAULT false
) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_sample double precision;
BEGIN
  -- The usual case: one stamp whose lease row exists. One statement locks that row and writes nothing else. SKIP LOCKED: if a
  -- successor is deleting the row, the general way queues at the marks.
  -- A lease may cover names of guards with several rules, and its row admits under `retry` alone.
  IF p_names IS NULL AND NOT p_exclusive AND NOT p_still_held
     AND current_setting('transaction_isolation') = 'read committed'
     AND NOT EXISTS (SELECT 1 FROM fenced_guard.guard WHERE guard = p_guard AND rule <> 'retry') THEN
    SELECT held.sample,
      set_config('fenced.stamp', concat(
        CASE WHEN starts_with(current_setting('fenced.stamp', true), E'\n' || held.xid)
          THEN current_setting('fenced.stamp', true) ELSE E'\n' END,
        held.xid, '/', replace(held.names, ',', concat(E'\n', held.xid, '/')), E'\n', held.xid, ' ', p_stamps, E'\n'), true),
      set_config(held.setting, concat(
        CASE WHEN starts_with(current_setting(held.setting, true), E'\n' || held.xid)
          THEN current_setting(held.setting, true) ELSE E'\n' END,
        held.xid, '@', held.token, E'\n', held.xid, '#', held.grant_id, E'\n'), true),
      pg_try_advisory_xact_lock_shared(hashtextextended(held.grant_id, 0)),  -- see `list_in_pg_locks`
      CASE WHEN p_left IS NOT NULL THEN fenced_guard.limit_idling(p_left, p_guard, string_to_array(held.names, ','))::text END
    INTO v_sample
    FROM (
      SELECT l.names, l.token, l.grant_id, l.sample, concat('fenced.token', l.token % 16) AS setting,
        pg_current_xact_id()::text AS xid
      FROM fenced_guard.lease l, fenced_guard.turn t, fenced_guard.trust trust
      WHERE (NOT trust.proof OR fenced_guard.may_write())  -- otherwise `announce_general` looks for a proof
        AND l.grant_id = split_part(p_stamps, ':', 5) AND split_part(p_stamps, ':', 4) ~ '^(-|0|[1-9][0-9]{0,14})$'  -- longer ones are parsed
        AND t.grant_id = split_part(p_stamps, ':', 5) AND (t.xmax = '0' OR fenced_guard.locker_has_ended(t.xmax))  -- `has_successor`, inlined
        AND p_stamps = concat('1:', l.realm, ':', l.token, ':', split_part(p_stamps, ':', 4), ':', l.grant_id, ':', l.names)
        AND strpos(l.names, '%') = 0
      FOR SHARE OF l SKIP LOCKED
    ) AS held;
  END IF;
  IF v_sample IS NULL THEN
    PERFORM fenced_guard.announce_general(
      p_stamps, p_left, p_guard, p_names, p_exclusive, p_still_held, p_proofs, false, p_repeats);
  ELSIF v_sample > 0 AND random() < v_sample THEN
    PERFORM fenced_guard.note(p_guard, ARRAY[split_part(p_stamps, ':', 6)], p_stamps, 'admit', 'admit', 'sample');
  END IF;
END $$;

-- Fail unless the guard is installed with this rule: a program that names one relies on it. Called in the statement that
-- announces.
CREATE OR REPLACE FUNCTION fenced_guard.expect_rule(p_guard text, p_rule text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_rule text := (SELECT rule FROM fenced_guard.guard WHERE guard = p_guard);
BEGIN
  IF v_rule <> p_rule THEN
    RAISE EXCEPTION USING ERRCODE = 'object_not_in_prerequisite_state', MESSAGE = format(
      'fenced: %s: the guard is installed with rule %s, and this program says %s; by the installed rule a repeat would be judged '
      'in another way. Name that one or none, or use a guard with the other rule', p_guard, v_rule, p_rule);
  END IF;
END $$;

-- Raise the marks in a separate transaction. Reads that begin after its COMMIT are fenced.
CREATE OR REPLACE FUNCTION fenced_guard.announce_alone(
  p_stamps text, p_guard text DEFAULT NULL, p_names text DEFAULT NULL, p_proofs text DEFAULT NULL
) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  PERFORM fenced_guard.announce_general(p_stamps, NULL, p_guard, p_names, false, false, p_proofs, true, false);
END $$;

-- The short way for a stale stamp with one plain name, if the guard has a single mode, observe or shadow: record it and let the
-- transaction through. Returns false, and does nothing, in every other case. It needs no lock, because a mark above the stamp
-- only rises. It need not check the name further: a name that has a mark is valid.
CREATE OR REPLACE FUNCTION fenced_guard.let_stale_through(p_stamp text, p_guard text) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_name text := split_part(p_stamp, ':', 6);
  v_xid  text := pg_current_xact_id();
  v_mode text;
BEGIN
  SELECT o.mode INTO v_mode FROM fenced_guard.mark m, fenced_guard.trust t, fenced_guard.mode o
  WHERE p_stamp ~ '^1:[0-9a-f]{16}:[1-9][0-9]{0,14}:(-|0|[1-9][0-9]{0,14}):[0-9a-f]{32}:[A-Za-z0-9_.~/-]+$'
    AND m.name = v_name AND m.token > split_part(p_stamp, ':', 3)::bigint AND t.realm = split_part(p_stamp, ':', 2)
    AND o.guard = p_guard AND o.pattern = '*' AND o.mode IN ('observe', 'shadow')
    AND NOT EXISTS (SELECT 1 FROM fenced_guard.mode WHERE guard = p_guard AND pattern <> '*');
  IF v_mode IS NULL THEN
    RETURN false;
  END IF;
  PERFORM fenced_guard.note(
    p_guard, ARRAY[v_name], p_stamp, 'stale', CASE v_mode WHEN 'observe' THEN 'count' ELSE 'record' END, v_mode);
  PERFORM fenced_guard.carry(concat(v_xid, '|', p_guard, '/', v_name, E'\n', v_xid, ' ', p_stamp, E'\n'));
  RETURN true;
END $$;

-- Announce in every case that `announce` does not handle itself.
CREATE OR REPLACE FUNCTION fenced_guard.announce_general(
  p_stamps text, p_left bigint, p_guard text, p_names text, p_exclusive boolean, p_still_held boolean, p_proofs text,
  p_alone boolean, p_repeats boolean
) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_texts text[] := string_to_array(coalesce(p_stamps, ''), ' ');
  v_proofs text[] := string_to_array(p_proofs, ' ');
  v_rule  text;
  v_step  text;
BEGIN
  IF (SELECT proof FROM fenced_guard.trust) AND NOT fenced_guard.may_write() AND (
    SELECT bool_and(fenced_guard.proven(fenced_guard.parse(text), v_proofs[i])) FROM unnest(v_texts) WITH ORDINALITY AS t (text, i)
  ) IS NOT TRUE THEN
    PERFORM fenced_guard.refuse_stranger('cannot announce without a proof');
  END IF;
  -- A guard without triggers decides about the write here.
  SELECT rule, CASE WHEN p_alone THEN 'alone' WHEN mandatory THEN 'announce' ELSE 'write' END INTO v_rule, v_step
  FROM fenced_guard.guard WHERE guard = p_guard;
  IF p_guard IS NOT NULL AND v_rule IS NULL THEN
    RAISE EXCEPTION USING ERRCODE = 'undefined_object',
      MESSAGE = format('fenced: no guard is installed for %s', p_guard), HINT = 'Run: fenced guard install';
  END IF;
  v_step := coalesce(v_step, CASE WHEN p_alone THEN 'alone' ELSE 'announce' END);
  v_rule := CASE WHEN p_exclusive AND v_rule IS NULL THEN 'sequenced' ELSE coalesce(v_rule, 'retry') END;
  IF NOT p_alone AND p_names IS NULL AND NOT p_still_held AND v_step = 'announce'
     AND fenced_guard.let_stale_through(p_stamps, p_guard) THEN
    RETURN;  -- no limit on idle time: this transaction holds no lock that a successor waits for
  END IF;
  IF v_rule <> 'retry' OR p_names IS NOT NULL OR p_still_held OR NOT fenced_guard.announce_by_lease_rows(v_texts, p_alone) THEN
    PERFORM fenced_guard.announce_each(
      v_texts, p_guard, v_rule, v_step, string_to_array(p_names, ','), p_still_held, v_proofs,
      p_repeats);
  END IF;
  IF p_left IS NOT NULL THEN
    PERFORM fenced_guard.limit_idling(p_left, p_guard, string_to_array(coalesce(p_names,
      (SELECT string_agg(split_part(text, ':', 6), ',') FROM unnest(v_texts) AS text)), ','));
  END IF;
END $$;

-- Announce several leases by sharing their lease rows. Returns false, with all locks released, unless every stamp has one.
CREATE OR REPLACE FUNCTION fenced_guard.announce_by_lease_rows(p_texts text[], p_alone boolean) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_xid    text := pg_current_xact_id();
  v_count  bigint;
BEGIN
  BEGIN
    SELECT count(*) INTO v_count FROM (
      SELECT 1 FROM unnest(p_texts) AS wanted, fenced_guard.lease l
      WHERE l.grant_id = split_part(wanted, ':', 5) AND split_part(wanted, ':', 4) ~ '^(-|0|[1-9][0-9]{0,14})$'
        AND (NOT fenced_guard.has_successor(l.grant_id) OR strpos(current_setting(concat('fenced.token', l.token % 16), true),
          concat(E'\n', v_xid, '#', l.grant_id, E'\n')) > 0)  -- this transaction shares the row already
        AND wanted = concat('1:', l.realm, ':', l.token, ':', split_part(wanted, ':', 4), ':', l.grant_id, ':', l.names)
      FOR SHARE OF l SKIP LOCKED
    ) AS held;
    PERFORM pg_try_advisory_xact_lock_shared(hashtextextended(split_part(wanted, ':', 5), 0)) FROM unnest(p_texts) AS wanted;
    IF v_count < cardinality(p_texts) THEN  -- roll the block back to release the rows: `announce_each` waits for marks, and must hold no lease row
      RAISE EXCEPTION USING ERRCODE = 'ZF011';
    END IF;
  EXCEPTION WHEN SQLSTATE 'ZF011' OR serialization_failure THEN
    RETURN false;
  END;
  IF NOT p_alone THEN
    -- Lines for eight names only, so that the setting stays short; `carries_mark` lets the other names through.
    PERFORM fenced_guard.carry((
      SELECT string_agg(concat(v_xid, '/', fenced_guard.decoded(n), E'\n'), '') FROM (
        SELECT n FROM unnest(p_texts) AS text, string_to_table(split_part(text, ':', 6), ',') AS n LIMIT 8
      ) AS few
    ) || (SELECT string_agg(concat(v_xid, ' ', text, E'\n'), '') FROM unnest(p_texts) AS text));
    PERFORM fenced_guard.carry_tokens(p_texts);
  END IF;
  RETURN true;
END $$;

-- Whether all names of a stamp carry its mark. False for the older of two leases of one name in one announcement.
CREATE OR REPLACE FUNCTION fenced_guard.all_marks_are_ours(s fenced_guard.stamp) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  RETURN NOT EXISTS (
    SELECT 1 FROM unnest(s.names) AS n LEFT JOIN fenced_guard.mark m ON m.name = n
    WHERE m.grant_id IS DISTINCT FROM s.grant_id OR m.token <> s.token
  );
END $$;

-- Fail if the guarded table has lost its triggers, which happens when a tool rebuilds a table under the old name, or if another
-- table inherits from it without triggers. The first announcement of a lease checks this, where the mode refuses.
CREATE OR REPLACE FUNCTION fenced_guard.refuse_unguarded_table(p_guard text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_table regclass := to_regclass(format('%I.%I', split_part(p_guard, '.', 1), split_part(p_guard, '.', 2)));
  v_child regclass;
BEGIN
  IF (SELECT count(DISTINCT replace(tgname, '_row_', '_')) FROM pg_trigger WHERE tgrelid = v_table AND tgname IN ('fenced_insert',
      'fenced_update', 'fenced_delete', 'fenced_row_insert', 'fenced_row_update', 'fenced_row_delete')) = 3 THEN
    SELECT i.inhrelid INTO v_child FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhparent
    WHERE i.inhparent = v_table AND c.relkind = 'r' LIMIT 1;
    IF v_child IS NULL THEN
      RETURN;
    END IF;
  END IF;
  IF v_table IS NOT NULL AND (SELECT mandatory FROM fenced_guard.guard WHERE guard = p_guard)
     AND (SELECT refuses FROM fenced_guard.mode_of(p_guard, NULL)) THEN
    RAISE EXCEPTION USING ERRCODE = 'object_not_in_prerequisite_state', MESSAGE = CASE WHEN v_child IS NULL
      THEN format('fenced: %s lacks the triggers of its guard (was the table rebuilt?); install the guard again', p_guard)
      ELSE format('fenced: %s inherits from %s, and its rows are not guarded; use a partition instead', v_child, p_guard) END;
  END IF;
END $$;

-- Announce name by name, sorted, so that two announcements cannot deadlock.
CREATE OR REPLACE FUNCTION fenced_guard.announce_each(
  p_texts text[], p_guard text, p_rule text, p_step text, p_names text[], p_still_held boolean, p_proofs text[],
  p_repeats boolean
) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_xid    text := pg_current_xact_id();
  v_stamps fenced_guard.stamp[];
  v_only   text[] := ARRAY(SELECT DISTINCT fenced_guard.one_line(fenced_guard.decoded(n)) FROM unnest(p_names) AS n);
  v_lines  text[] := '{}';
  v_counts bigint[];                     -- how many names of each stamp were admitted
  v_grants text[] := '{}';
  v_verdict text;
  v_replaced text;
  v_guard  text;
  v_before text := current_setting('lock_timeout');
  v_wait   bigint := fenced_guard.milliseconds('lock_timeout');
  v_patience bigint := (SELECT patience * 1000 FROM fenced_guard.trust);
  w        record;
BEGIN
  IF v_wait = 0 OR v_wait > v_patience THEN
    PERFORM set_config('lock_timeout', v_patience::text, true);  -- then the client calls `make_way`
  END IF;
  PERFORM pg_try_advisory_xact_lock_shared(hashtextextended(split_part(text, ':', 5), 0)) FROM unnest(p_texts) AS text;
  FOR i IN 1 .. cardinality(p_texts) LOOP
    v_stamps[i] := fenced_guard.parse(p_texts[i]);
    IF v_stamps[i] IS NULL THEN
      PERFORM fenced_guard.rule_on(p_guard, coalesce(v_only[1], ''), left(p_texts[i], 1000), 'invalid');
      v_lines := v_lines || ARRAY(SELECT concat(v_xid, '|', p_guard, '/', n, E'\n') FROM unnest(v_only) AS n);
    ELSIF p_still_held THEN
      PERFORM fenced_guard.still_held(v_stamps[i]);
    END IF;
  END LOOP;
  FOR w IN
    SELECT n.name, s.i, s.stamp, p_proofs[s.i] AS proof
    FROM (SELECT i, v_stamps[i] AS stamp FROM generate_subscripts(v_stamps, 1) AS i) AS s
    CROSS JOIN LATERAL unnest(CASE WHEN p_names IS NULL THEN (s.stamp).names ELSE v_only END) AS n (name)
    WHERE (s.stamp).token IS NOT NULL
      AND (p_names IS NULL OR n.name = ANY ((s.stamp).names)
        OR (s.i = 1 AND NOT EXISTS (SELECT 1 FROM unnest(v_stamps) AS o WHERE n.name = ANY (o.names))))
    ORDER BY n.name COLLATE "C"
  LOOP
    v_guard := coalesce(p_guard, fenced_guard.guard_for(w.name));
    IF (SELECT refuses FROM fenced_guard.mode_of(v_guard, w.name)) THEN
      SELECT * INTO v_verdict, v_replaced FROM fenced_guard.admit(w.stamp, w.name, p_rule, p_step, w.proof);
      v_grants := v_grants || v_replaced;
    ELSIF EXISTS (
      SELECT 1 FROM fenced_guard.mark m, fenced_guard.trust t
      WHERE m.name = w.name AND m.token > (w.stamp).token AND t.realm = (w.stamp).realm
    ) THEN
      v_verdict := 'stale';  -- a mark above the stamp only rises, so no lock is needed
    ELSIF p_repeats AND p_step <> 'alone' AND fenced_guard.would_conflict(w.stamp, w.name, p_rule) THEN
      PERFORM fenced_guard.raise_announce_alone_first(w.name);
    ELSE
      v_verdict := fenced_guard.admit_without_waiting(w.stamp, w.name, p_rule, p_step, w.proof);
    END IF;
    IF v_verdict = 'admit' THEN
      v_lines := v_lines || concat(v_xid, '/', w.name, E'\n');
      v_counts[w.i] := coalesce(v_counts[w.i], 0) + 1;
    ELSE
      IF v_verdict <> 'contended' THEN
        PERFORM fenced_guard.rule_on(v_guard, w.name, (w.stamp).text, v_verdict);
      END IF;
      v_lines := v_lines || concat(v_xid, '|', v_guard, '/', w.name, E'\n');
    END IF;
  END LOOP;
  PERFORM fenced_guard.retire_lease_rows(v_grants);
  PERFORM set_config('lock_timeout', v_before, true);
  IF p_guard IS NOT NULL AND cardinality(v_grants) > 0 THEN  -- `admit` decided about a name, so a mode refuses
    PERFORM fenced_guard.refuse_unguarded_table(p_guard);
  END IF;
  IF p_rule = 'retry' AND (p_step = 'alone' OR current_setting('transaction_isolation') <> 'serializable') AND EXISTS (
    SELECT 1 FROM generate_subscripts(v_counts, 1) AS i LEFT JOIN fenced_guard.turn t ON t.grant_id = v_stamps[i].grant_id
    LEFT JOIN fenced_guard.lease l ON l.grant_id = v_stamps[i].grant_id
    WHERE v_counts[i] > 0 AND (t.grant_id IS NULL OR (l.grant_id IS NULL AND v_counts[i] = cardinality(v_stamps[i].names)))
  ) THEN
    BEGIN
      PERFORM set_config('lock_timeout', '1', true);
      LOCK TABLE fenced_guard.trust IN ROW SHARE MODE;  -- so that `adopt` runs either before this, or after COMMIT and finds the row
      INSERT INTO fenced_guard.turn (grant_id, names)
      SELECT v_stamps[i].grant_id, split_part(p_texts[i], ':', 6) FROM generate_subscripts(v_counts, 1) AS i
      WHERE v_counts[i] > 0
      ON CONFLICT (grant_id) DO NOTHING;
      INSERT INTO fenced_guard.lease (grant_id, token, realm, names, sample)
      SELECT v_stamps[i].grant_id, v_stamps[i].token, t.realm, split_part(p_texts[i], ':', 6), t.sample
      FROM generate_subscripts(v_stamps, 1) AS i, fenced_guard.trust t WHERE v_counts[i] = cardinality(v_stamps[i].names)
        AND t.realm = v_stamps[i].realm AND fenced_guard.all_marks_are_ours(v_stamps[i])
      ON CONFLICT (grant_id) DO NOTHING;
      PERFORM set_config('lock_timeout', v_before, true);
    EXCEPTION WHEN lock_not_available OR serialization_failure THEN
      NULL;  -- another transaction of this lease is inserting the rows; the next announcement looks again
    END;
  END IF;
  IF p_step <> 'alone' THEN
    PERFORM fenced_guard.carry(array_to_string(v_lines, '') || (
      SELECT string_agg(concat(v_xid, ' ', CASE WHEN v_stamps[i] IS NULL THEN '?' ELSE p_texts[i] END, E'\n'), '')
      FROM generate_subscripts(p_texts, 1) AS i));
    -- Only if all names of the lease were admitted: a row's epoch identifies the lease of its last write, but not the name.
    PERFORM fenced_guard.carry_tokens(ARRAY(
      SELECT p_texts[i] FROM generate_subscripts(v_stamps, 1) AS i
      WHERE v_counts[i] = cardinality(v_stamps[i].names) AND fenced_guard.all_marks_are_ours(v_stamps[i])));
  END IF;
END $$;

-- Fail unless the authority in this database says that the lease is still held. It does not lock the attempt: a lock would
-- block renewals. That is safe, because a successor that is granted the name later must wait for our lock on its mark.
CREATE OR REPLACE FUNCTION fenced_guard.still_held(s fenced_guard.stamp) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_beside  boolean;
  v_expires timestamptz;
BEGIN
  IF fenced_guard.beside_authority() THEN  -- otherwise the tables below do not exist
    v_beside := EXISTS (SELECT 1 FROM fenced.namespace WHERE realm = s.realm);
  END IF;
  IF v_beside IS NOT TRUE THEN
    RAISE EXCEPTION USING ERRCODE = 'object_not_in_prerequisite_state',
      MESSAGE = 'fenced: still_held needs the authority in the same database, with the same owner';
  END IF;
  SELECT expires INTO v_expires FROM fenced.attempt
  WHERE id = s.grant_id::uuid AND state = 'granted' AND token = s.token;
  IF v_expires IS NULL OR v_expires <= clock_timestamp() THEN
    RAISE EXCEPTION USING ERRCODE = fenced_guard.sqlstate_of('lost'),
      MESSAGE = format('fenced: the lease of %s (token %s) is over', fenced_guard.sendable(array_to_string(s.names, ', ')), s.token);
  END IF;
END $$;
