-- Announcing: lock the marks of stamps, and let this transaction write under them.

-- Raise ZF012: the caller must announce in a separate transaction first.
CREATE OR REPLACE FUNCTION fenced_guard.raise_announce_alone_first(p_name text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  RAISE EXCEPTION USING ERRCODE = fenced_guard.sqlstate_of('announce'), MESSAGE = format(
    'fenced: %s: at isolation level %s, announce a new token in a separate transaction, commit it, and begin again',
    fenced_guard.sendable(p_name), current_setting('transaction_isolation'));
END $$;

-- Decide about one name: lock its mark, judge the stamp, raise the mark. `replaced` is the grant that had the mark before, and
-- empty if the name had none; it is NULL unless the mark was raised. The caller must call `retire_lease_rows` for it.
--
-- `p_step`:
--   alone     an announcement in a separate transaction, which reads nothing
--   announce  an announcement; a write will follow
--   write     a write that is its own announcement
--   row       a write that was announced earlier. It never raises a mark to a new token: the transaction may have read rows
--             before it had the lock.
-- `p_without_waiting`: called by `admit_without_waiting`, which has limited every wait to 1 ms and has checked the isolation
-- level. Do not check it again, and do not lock turn rows.
--
-- The usual new token takes four statements: look, lock without waiting, lock `trust`, raise. A call that has no FROM is an
-- assignment, because plpgsql evaluates that without the executor.
CREATE OR REPLACE FUNCTION fenced_guard.admit(
  s fenced_guard.stamp, p_name text, p_rule text, p_step text, p_proof text, p_without_waiting boolean DEFAULT false,
  OUT verdict text, OUT replaced text
)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  t record;                              -- what is trusted, and the mark as it was seen without a lock
  m fenced_guard.mark;
  v_locked fenced_guard.mark;
  v record;
  v_done boolean;
  v_above boolean;                       -- whether the token is above the mark
  v_writes boolean := p_step IN ('write', 'row');
  v_operation xid8 := CASE WHEN v_writes THEN pg_current_xact_id() END;
  v_seq bigint := CASE WHEN v_writes THEN coalesce(s.seq, 0) ELSE 0 END;
BEGIN
  LOOP
    SELECT trust.realm, trust.proof, trust.floor, trust.max_jump, mark INTO t
    FROM fenced_guard.trust LEFT JOIN fenced_guard.mark ON mark.name = p_name;
    IF s.realm <> t.realm THEN
      verdict := 'foreign';
      RETURN;
    ELSIF NOT p_name = ANY (s.names) THEN
      verdict := 'uncovered';
      RETURN;
    END IF;
    m := t.mark;
    IF m.token = s.token AND p_rule = 'retry' AND NOT t.proof AND fenced_guard.carries_mark(p_name) THEN
      -- This transaction shares the lease row, which stands for the lock of this mark.
      verdict := CASE WHEN m.grant_id = s.grant_id THEN 'admit' ELSE 'reused' END;
      RETURN;
    ELSIF m.token = s.token AND p_rule = 'retry' AND (
      -- Do not overtake a successor, unless it waits for this transaction anyway.
      NOT fenced_guard.has_successor(fenced_guard.turn_of(s)) OR fenced_guard.announced(p_name, fenced_guard.carried())
    ) THEN
      SELECT * INTO m FROM fenced_guard.mark WHERE name = p_name FOR SHARE;
    ELSIF m.token <= s.token THEN  -- a mark above the stamp only rises, so a stale stamp needs no lock
      IF m.token < s.token THEN
        v_done := pg_try_advisory_xact_lock_shared(hashtext(p_name), (s.token >> 31)::integer)
          AND pg_try_advisory_xact_lock_shared(hashtext('/' || p_name), (s.token & 2147483647)::integer);
      END IF;
      SELECT * INTO v_locked FROM fenced_guard.mark WHERE name = p_name FOR NO KEY UPDATE SKIP LOCKED;
      IF FOUND THEN
        m := v_locked;
      ELSE  -- another transaction has locked it. A stamp that may not raise the mark must not make others queue behind it.
        IF m.token < s.token AND NOT p_without_waiting THEN
          IF NOT fenced_guard.plausible(s, p_proof) THEN
            verdict := 'forged';
            RETURN;
          END IF;
          PERFORM fenced_guard.lock_turn_rows(ARRAY[m.grant_id, '/' || p_name]);
        END IF;
        SELECT * INTO m FROM fenced_guard.mark WHERE name = p_name FOR NO KEY UPDATE;  -- waits in PostgreSQL's queue for the row
      END IF;
    END IF;
    IF m.name IS NULL AND s.token < (SELECT floor FROM fenced_guard.trust) THEN
      verdict := 'stale';  -- read after the mark: `drop_marks` raises the floor in the same transaction that deletes marks
      RETURN;
    END IF;
    v := fenced_guard.judge(m, s, p_rule, NOT v_writes, v_operation);
    v_above := m.token IS NULL OR m.token < s.token;
    IF v.verdict = 'admit' AND p_step = 'announce' AND p_rule <> 'retry' AND coalesce(s.seq, 0) = 0 THEN
      verdict := 'invalid';  -- the write that follows would be invalid
      RETURN;
    ELSIF NOT v.rises THEN
      verdict := v.verdict;
      RETURN;
    ELSIF v_above AND p_step NOT IN ('alone', 'row') AND NOT p_without_waiting
      AND current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
      -- The snapshot is older than the lock, so this transaction may not see the last holder's writes.
      PERFORM fenced_guard.raise_announce_alone_first(p_name);
    ELSIF v_above AND (t.proof OR t.max_jump IS NOT NULL OR to_regclass('fenced.namespace') IS NOT NULL)
      AND NOT fenced_guard.plausible(s, p_proof) THEN
      verdict := 'forged';
      RETURN;
    ELSIF v_above AND p_step = 'row' THEN
      verdict := 'contended';
      RETURN;
    END IF;
    -- The trusted realm must not change between here and COMMIT: `adopt` takes an EXCLUSIVE lock, which waits for this one.
    -- It may have changed while this transaction waited for the mark, so it is compared again under the lock.
    LOCK TABLE fenced_guard.trust IN ROW SHARE MODE;
    IF m.name IS NOT NULL THEN
      UPDATE fenced_guard.mark SET token = s.token, grant_id = s.grant_id, operation = v_operation, seq = v_seq
      FROM fenced_guard.trust WHERE name = p_name AND trust.realm = s.realm;
      IF FOUND THEN
        verdict := 'admit';
        replaced := CASE WHEN v_above THEN m.grant_id END;
        RETURN;
      END IF;
    END IF;
    UPDATE fenced_guard.trust SET realm = s.realm WHERE realm IS NULL;
    CONTINUE WHEN m.name IS NOT NULL OR NOT EXISTS (SELECT 1 FROM fenced_guard.trust WHERE realm = s.realm);
    v_done := pg_try_advisory_xact_lock_shared(hashtext(p_name), (s.token >> 31)::integer)
      AND pg_try_advisory_xact_lock_shared(hashtext('/' || p_name), (s.token & 2147483647)::integer);
    INSERT INTO fenced_guard.mark (name, token, grant_id, seq, operation)
    VALUES (p_name, s.token, s.grant_id, v_seq, v_operation)
    ON CONFLICT (name) DO NOTHING;
    IF FOUND THEN
      verdict := 'admit';
      replaced := '';
      RETURN;
    END IF;
  END LOOP;
END $$;

-- Whether this stamp would raise a mark at an isolation level above READ COMMITTED. There the snapshot may not see the lease
-- row that has to be retired, and at SERIALIZABLE the write could make the program's COMMIT fail.
CREATE OR REPLACE FUNCTION fenced_guard.would_conflict(s fenced_guard.stamp, p_name text, p_rule text) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  IF current_setting('transaction_isolation') IN ('read committed', 'read uncommitted') THEN
    RETURN false;
  END IF;
  RETURN p_name = ANY (s.names)
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
  v_limit  text;
  v        record;
BEGIN
  IF p_step <> 'alone' AND fenced_guard.would_conflict(s, p_name, p_rule) THEN
    RETURN 'contended';
  END IF;
  v_limit := set_config('lock_timeout', '1', true);
  v := fenced_guard.admit(s, p_name, p_rule, p_step, p_proof, true);
  IF v.replaced IS NOT NULL THEN
    PERFORM fenced_guard.retire_lease_rows(ARRAY[v.replaced, '/' || p_name]);
  END IF;
  v_limit := set_config('lock_timeout', v_before, true);
  RETURN v.verdict;
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
  IF p_names IS NULL AND NOT p_exclusive AND NOT p_still_held
     AND current_setting('transaction_isolation') = 'read committed'
     AND EXISTS (SELECT 1 FROM fenced_guard.lease WHERE grant_id = split_part(p_stamps, ':', 5)) THEN  -- a new token has none
    SELECT held.sample,
      set_config('fenced.stamp', concat(
        CASE WHEN starts_with(current_setting('fenced.stamp', true), E'\n' || held.xid)
          THEN current_setting('fenced.stamp', true) ELSE E'\n' END,
        held.xid, '/', replace(held.names, ',', concat(E'\n', held.xid, '/')), E'\n', held.xid, ' ', p_stamps, E'\n'), true),
      set_config(held.setting, concat(
        CASE WHEN starts_with(current_setting(held.setting, true), E'\n' || held.xid)
          THEN current_setting(held.setting, true) ELSE E'\n' END,
        held.xid, '@', held.token, E'\n', held.xid, '#', held.grant_id, E'\n'), true),
      pg_try_advisory_xact_lock_shared(hashtextextended(held.grant_id, 0)),  -- see `older_transactions`
      CASE WHEN p_left IS NOT NULL THEN fenced_guard.limit_idling(p_left, p_guard, string_to_array(held.names, ','))::text END
    INTO v_sample
    FROM (
      SELECT l.names, l.token, l.grant_id, l.sample, concat('fenced.token', l.token % 16) AS setting,
        pg_current_xact_id()::text AS xid
      FROM fenced_guard.lease l, fenced_guard.turn t, fenced_guard.trust trust
      WHERE (NOT trust.proof OR fenced_guard.may_write())  -- otherwise `announce_general` looks for a proof
        AND l.grant_id = split_part(p_stamps, ':', 5) AND split_part(p_stamps, ':', 4) ~ '^(-|0|[1-9][0-9]{0,14})$'  -- longer ones are parsed
        AND t.grant_id = CASE WHEN strpos(l.names, ',') = 0 THEN '/' || l.names ELSE l.grant_id END  -- `turn_of`, inlined
        AND (t.xmax = '0' OR fenced_guard.locker_has_ended(t.xmax))  -- `has_successor`, inlined
        AND p_stamps = concat('1:', l.realm, ':', l.token, ':', split_part(p_stamps, ':', 4), ':', l.grant_id, ':', l.names)
        AND strpos(l.names, '%') = 0
        -- A lease may cover names of guards with several rules, and its row admits under `retry` alone.
        AND NOT EXISTS (SELECT 1 FROM fenced_guard.guard WHERE guard = p_guard AND rule <> 'retry')
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

-- Announce several leases by sharing their lease rows. Returns false, with all locks released, unless every stamp has one.
CREATE OR REPLACE FUNCTION fenced_guard.announce_by_lease_rows(p_texts text[], p_alone boolean) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_xid    text := pg_current_xact_id();
  v_count  bigint;
BEGIN
  BEGIN
    SELECT count(*) INTO v_count FROM (
      SELECT 1 FROM unnest(p_texts) AS wanted, fenced_guard.lease l, fenced_guard.turn t
      WHERE l.grant_id = split_part(wanted, ':', 5) AND split_part(wanted, ':', 4) ~ '^(-|0|[1-9][0-9]{0,14})$'
        AND t.grant_id = CASE WHEN strpos(l.names, ',') = 0 THEN '/' || fenced_guard.decoded(l.names) ELSE l.grant_id END
        AND (fenced_guard.locker_has_ended(t.xmax) OR strpos(current_setting(concat('fenced.token', l.token % 16), true),
          concat(E'\n', v_xid, '#', l.grant_id, E'\n')) > 0)  -- this transaction shares the row already
        AND wanted = concat('1:', l.realm, ':', l.token, ':', split_part(wanted, ':', 4), ':', l.grant_id, ':', l.names)
      FOR SHARE OF l SKIP LOCKED
    ) AS held;
    PERFORM pg_try_advisory_xact_lock_shared(hashtextextended(split_part(wanted, ':', 5), 0)) FROM unnest(p_texts) AS wanted;
    IF v_count < cardinality(p_texts) THEN  -- roll the block back to release the rows: `announce_general` waits for marks, and must hold no lease row
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

-- Announce in every case that `announce` does not handle itself: name by name, sorted, so that two announcements cannot
-- deadlock. A wait for a lock is limited by the guard's `patience`; after it the client calls `make_way`.
CREATE OR REPLACE FUNCTION fenced_guard.announce_general(
  p_stamps text, p_left bigint, p_guard text, p_names text, p_exclusive boolean, p_still_held boolean, p_proofs text,
  p_alone boolean, p_repeats boolean
) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_xid    text := pg_current_xact_id();
  v_texts  text[] := string_to_array(coalesce(p_stamps, ''), ' ');
  v_proofs text[] := string_to_array(p_proofs, ' ');
  v_before text := current_setting('lock_timeout');
  v_wait   bigint := CASE WHEN v_before <> '0' THEN fenced_guard.milliseconds('lock_timeout') ELSE 0 END;
  v_patience bigint;
  v_sample double precision;
  v_proof  boolean;
  v_rule   text;
  v_step   text;
  v_shared boolean;                      -- whether there is a lease row to share
  v_stamps fenced_guard.stamp[];
  v_only   text[];
  v_names  text[];                       -- all names, sorted
  v_places integer[];                    -- the stamp of each
  v_lines  text[] := '{}';
  v_counts bigint[];                     -- how many names of each stamp were admitted
  v_raised boolean[];                    -- whether one of its marks was raised
  v_whole  text[] := '{}';               -- the stamps that were admitted for all of their names
  v_retire text[] := '{}';
  v_admitted record;
  v_mode   record;
  v_verdict text;
  v_guard  text;
  v_name   text;
  v_turn   text;
  v_lacks  boolean;
  v_limits boolean := false;             -- whether `lock_timeout` is the guard's patience now
  v_table  regclass;
  v_old_rows boolean;
  v_guarded boolean;
  v_carried text;
  v_done   text;
  s        fenced_guard.stamp;
  i        integer;
BEGIN
  -- A guard without triggers decides about the write here.
  SELECT t.proof, t.patience * 1000, t.sample, g.rule, CASE WHEN p_alone THEN 'alone' WHEN g.mandatory IS false THEN 'write' ELSE 'announce' END,
    EXISTS (SELECT 1 FROM fenced_guard.lease WHERE grant_id = split_part(v_texts[1], ':', 5))
  INTO v_proof, v_patience, v_sample, v_rule, v_step, v_shared
  FROM fenced_guard.trust t LEFT JOIN fenced_guard.guard g ON g.guard = p_guard;
  IF v_proof THEN
    IF NOT fenced_guard.may_write() AND (
      SELECT bool_and(fenced_guard.proven(fenced_guard.parse(text), v_proofs[n])) FROM unnest(v_texts) WITH ORDINALITY AS t (text, n)
    ) IS NOT TRUE THEN
      PERFORM fenced_guard.refuse_stranger('cannot announce without a proof');
    END IF;
  END IF;
  IF p_guard IS NOT NULL AND v_rule IS NULL THEN
    RAISE EXCEPTION USING ERRCODE = 'undefined_object',
      MESSAGE = format('fenced: no guard is installed for %s', p_guard), HINT = 'Run: fenced guard install';
  END IF;
  v_rule := CASE WHEN p_exclusive AND v_rule IS NULL THEN 'sequenced' ELSE coalesce(v_rule, 'retry') END;
  IF p_left IS NOT NULL THEN
    PERFORM fenced_guard.limit_idling(p_left, p_guard, string_to_array(coalesce(p_names,
      (SELECT string_agg(split_part(text, ':', 6), ',') FROM unnest(v_texts) AS text)), ','));
  END IF;
  IF v_shared AND v_rule = 'retry' AND p_names IS NULL AND NOT p_still_held THEN
    IF fenced_guard.announce_by_lease_rows(v_texts, p_alone) THEN
      RETURN;
    END IF;
  END IF;
  IF p_names IS NOT NULL THEN
    v_only := ARRAY(SELECT DISTINCT fenced_guard.one_line(fenced_guard.decoded(n)) FROM string_to_table(p_names, ',') AS n);
  END IF;
  FOR i IN 1 .. cardinality(v_texts) LOOP
    v_done := pg_try_advisory_xact_lock_shared(hashtextextended(split_part(v_texts[i], ':', 5), 0));  -- see `older_transactions`
    v_stamps[i] := fenced_guard.parse(v_texts[i]);
    IF v_stamps[i] IS NULL THEN
      PERFORM fenced_guard.rule_on(p_guard, coalesce(v_only[1], ''), left(v_texts[i], 1000), 'invalid');
      v_lines := v_lines || ARRAY(SELECT concat(v_xid, '|', p_guard, '/', n, E'\n') FROM unnest(v_only) AS n);
    ELSIF p_still_held THEN
      PERFORM fenced_guard.still_held(v_stamps[i]);
    END IF;
  END LOOP;
  IF p_names IS NULL AND cardinality(v_texts) = 1 THEN
    v_names := coalesce((v_stamps[1]).names, '{}');  -- a stamp has them sorted
    v_places := array_fill(1, ARRAY[cardinality(v_names)]);
  ELSE
    SELECT array_agg(n.name ORDER BY n.name COLLATE "C"), array_agg(u.i ORDER BY n.name COLLATE "C")
    INTO v_names, v_places
    FROM (SELECT j AS i, v_stamps[j] AS stamp FROM generate_subscripts(v_stamps, 1) AS j) AS u
    CROSS JOIN LATERAL unnest(CASE WHEN p_names IS NULL THEN (u.stamp).names ELSE v_only END) AS n (name)
    WHERE (u.stamp).token IS NOT NULL
      AND (p_names IS NULL OR n.name = ANY ((u.stamp).names)
        OR (u.i = 1 AND NOT EXISTS (SELECT 1 FROM unnest(v_stamps) AS o WHERE n.name = ANY (o.names))));
  END IF;
  FOR k IN 1 .. coalesce(cardinality(v_names), 0) LOOP
    v_name := v_names[k];
    i := v_places[k];
    s := v_stamps[i];
    v_guard := p_guard;
    IF v_guard IS NULL THEN
      v_guard := fenced_guard.guard_for(v_name);
    END IF;
    v_mode := fenced_guard.mode_of(v_guard, v_name);
    IF v_mode.refuses THEN
      IF NOT v_limits AND (v_wait = 0 OR v_wait > v_patience) THEN
        v_done := set_config('lock_timeout', v_patience::text, true);
        v_limits := true;
      END IF;
      v_admitted := fenced_guard.admit(s, v_name, v_rule, v_step, v_proofs[i]);
      v_verdict := v_admitted.verdict;
      IF v_admitted.replaced IS NOT NULL THEN
        v_raised[i] := true;
        v_retire := v_retire || v_admitted.replaced || ('/' || v_name);
      END IF;
    ELSIF EXISTS (
      SELECT 1 FROM fenced_guard.mark m, fenced_guard.trust t WHERE m.name = v_name AND m.token > s.token AND t.realm = s.realm
    ) THEN
      v_verdict := 'stale';  -- a mark above the stamp only rises, so no lock is needed
    ELSIF p_repeats AND v_step <> 'alone' AND fenced_guard.would_conflict(s, v_name, v_rule) THEN
      PERFORM fenced_guard.raise_announce_alone_first(v_name);
    ELSE
      v_verdict := fenced_guard.admit_without_waiting(s, v_name, v_rule, v_step, v_proofs[i]);
    END IF;
    IF v_verdict = 'admit' THEN
      v_lines := v_lines || concat(v_xid, '/', v_name, E'\n');
      v_counts[i] := coalesce(v_counts[i], 0) + 1;
    ELSE
      IF v_verdict <> 'contended' THEN
        PERFORM fenced_guard.rule_by(v_guard, v_name, s.text, v_verdict, v_mode.mode, v_mode.refuses, v_mode.requires);
      END IF;
      v_lines := v_lines || concat(v_xid, '|', v_guard, '/', v_name, E'\n');
    END IF;
  END LOOP;
  IF cardinality(v_retire) > 0 THEN  -- `admit` has raised a mark, so a mode refuses
    -- Nearly always the grants before have no rows, and the table has its three triggers and no child: one statement sees both.
    v_table := CASE WHEN p_guard IS NOT NULL THEN
      to_regclass(format('%I.%I', split_part(p_guard, '.', 1), split_part(p_guard, '.', 2))) END;
    SELECT EXISTS (SELECT 1 FROM fenced_guard.lease WHERE grant_id = ANY (v_retire))
        OR EXISTS (SELECT 1 FROM fenced_guard.turn WHERE grant_id = ANY (v_retire) AND NOT starts_with(grant_id, '/')),
      (SELECT count(*) FROM pg_trigger WHERE tgrelid = v_table AND tgname IN ('fenced_insert', 'fenced_update', 'fenced_delete')) = 3
        AND NOT EXISTS (SELECT 1 FROM pg_inherits WHERE inhparent = v_table)
    INTO v_old_rows, v_guarded;
    -- An older snapshot may not show them: `retire_lease_rows` refuses it.
    IF v_old_rows OR current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
      PERFORM fenced_guard.retire_lease_rows(v_retire);
    END IF;
    IF p_guard IS NOT NULL AND NOT v_guarded THEN
      PERFORM fenced_guard.refuse_unguarded_table(p_guard);
    END IF;
  END IF;
  IF v_limits THEN
    v_done := set_config('lock_timeout', v_before, true);
  END IF;
  FOR i IN 1 .. CASE WHEN v_counts IS NULL THEN 0 ELSE cardinality(v_texts) END LOOP
    s := v_stamps[i];
    CONTINUE WHEN coalesce(v_counts[i], 0) = 0;
    -- Only if all names of the lease were admitted: a row's epoch identifies the lease of its last write, but not the name.
    IF v_counts[i] = cardinality(s.names) AND (cardinality(v_texts) = 1 OR fenced_guard.all_marks_are_ours(s)) THEN
      v_whole := v_whole || v_texts[i];
    END IF;
    IF v_sample > 0 AND v_step <> 'alone' AND random() < v_sample THEN
      PERFORM fenced_guard.note(p_guard, ARRAY[s.names[1]], s.text, 'admit', 'admit', 'sample');
    END IF;
    CONTINUE WHEN v_rule <> 'retry' OR (v_step <> 'alone' AND current_setting('transaction_isolation') = 'serializable');
    -- The first announcement inside a transaction makes no lease row: many leases write once, and are over.
    v_lacks := v_texts[i] = ANY (v_whole) AND (v_step = 'alone' OR v_raised[i] IS NULL);
    IF v_lacks THEN
      v_lacks := NOT EXISTS (SELECT 1 FROM fenced_guard.lease WHERE grant_id = s.grant_id);
    END IF;
    v_turn := CASE WHEN cardinality(s.names) = 1 THEN '/' || s.names[1] ELSE s.grant_id END;  -- `turn_of`, inlined
    IF v_lacks OR NOT EXISTS (SELECT 1 FROM fenced_guard.turn WHERE grant_id = v_turn) THEN
      PERFORM fenced_guard.make_rows(s, v_lacks);
    END IF;
  END LOOP;
  IF v_step <> 'alone' THEN
    FOR i IN 1 .. cardinality(v_texts) LOOP
      v_lines := v_lines || concat(v_xid, ' ', CASE WHEN v_stamps[i] IS NULL THEN '?' ELSE v_texts[i] END, E'\n');
    END LOOP;
    v_carried := current_setting('fenced.stamp', true);  -- `carry`, inlined
    v_done := set_config('fenced.stamp', concat(
      CASE WHEN starts_with(v_carried, E'\n' || v_xid) THEN v_carried ELSE E'\n' END, array_to_string(v_lines, '')), true);
    IF cardinality(v_whole) > 0 THEN
      v_done := fenced_guard.carry_tokens(v_whole);
    END IF;
  END IF;
END $$;

-- Make the turn row of a stamp, and with `p_whole` its lease row. It does not wait for another
-- transaction that is making them; then the next announcement looks again.
CREATE OR REPLACE FUNCTION fenced_guard.make_rows(s fenced_guard.stamp, p_whole boolean) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_turn   text := fenced_guard.turn_of(s);
  v_before text := current_setting('lock_timeout');
BEGIN
  PERFORM set_config('lock_timeout', '1', true);
  LOCK TABLE fenced_guard.trust IN ROW SHARE MODE;  -- so that `adopt` runs either before this, or after COMMIT and finds the row
  INSERT INTO fenced_guard.turn (grant_id, names) VALUES (v_turn, split_part(s.text, ':', 6)) ON CONFLICT (grant_id) DO NOTHING;
  INSERT INTO fenced_guard.lease (grant_id, token, realm, names, sample)
  SELECT s.grant_id, s.token, t.realm, split_part(s.text, ':', 6), t.sample FROM fenced_guard.trust t
  WHERE p_whole AND t.realm = s.realm
  ON CONFLICT (grant_id) DO NOTHING;
  PERFORM set_config('lock_timeout', v_before, true);
EXCEPTION WHEN lock_not_available OR serialization_failure THEN
  NULL;
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
