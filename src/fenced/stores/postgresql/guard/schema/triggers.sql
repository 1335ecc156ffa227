-- The functions that triggers call to decide about a write, and the functions that writers call to ask and to report.

-- Decide about a name that a statement wrote to. `p_name` NULL means all rows (TRUNCATE).
CREATE OR REPLACE FUNCTION fenced_guard.decide(p_guard text, p_name text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_xid   text := pg_current_xact_id();
  v_lines text := current_setting('fenced.stamp', true);
  v_rule  text;
  v_proof boolean;
  v_verdict text := 'missing';
  v_mode  record;
  v_text  text;                          -- a stamp, or a mode
  s       fenced_guard.stamp;
BEGIN
  p_name := replace(p_name, E'\n', E'\r');  -- `one_line`, inlined
  IF NOT coalesce(starts_with(v_lines, E'\n' || v_xid), false) THEN
    -- Nothing is announced, as in nearly every write while a rollout begins. With one mode for all names, record and return.
    SELECT max(mode) INTO v_text FROM fenced_guard.mode WHERE guard = p_guard
    HAVING count(*) = 1 AND max(mode) <> 'require' AND (max(mode) IN ('observe', 'shadow') OR NOT EXISTS (
      SELECT 1 FROM fenced_guard.override WHERE guard = p_guard));
    IF FOUND THEN
      PERFORM fenced_guard.note(p_guard, ARRAY[nullif(p_name, '')], NULL, 'missing',
        CASE v_text WHEN 'shadow' THEN 'record' ELSE 'count' END, v_text);
      PERFORM set_config('fenced.stamp', concat(E'\n', v_xid, '*', p_guard, E'\n'), true);
      RETURN;
    END IF;
  ELSE
    SELECT g.rule, t.proof INTO v_rule, v_proof FROM fenced_guard.guard g, fenced_guard.trust t WHERE g.guard = p_guard;
    IF v_proof THEN
      IF fenced_guard.confirmed(p_guard, p_name, v_rule, v_lines) THEN
        RETURN;
      END IF;
    ELSIF strpos(v_lines, concat(E'\n', v_xid, '|', p_guard, '/', p_name, E'\n')) > 0
      OR (v_rule = 'retry' AND strpos(v_lines, concat(E'\n', v_xid, '/', p_name, E'\n')) > 0)
      OR (strpos(v_lines, concat(E'\n', v_xid, '*', p_guard, E'\n')) > 0 AND strpos(v_lines, E'\n' || v_xid || ' ') = 0) THEN
      RETURN;
    ELSIF v_rule = 'retry' AND fenced_guard.carries_mark(p_name) THEN
      RETURN;
    END IF;
    IF strpos(v_lines, E'\n' || v_xid || ' ') > 0 THEN
      v_verdict := CASE WHEN strpos(v_lines, E'\n' || v_xid || E' ?\n') > 0 THEN 'invalid' ELSE 'uncovered' END;
      FOR v_text IN SELECT split_part(line, ' ', 2) FROM string_to_table(v_lines, E'\n') AS line
                    WHERE starts_with(line, v_xid || ' ') LOOP
        s := fenced_guard.parse(v_text);
        EXIT WHEN p_name = ANY (s.names);
        s.names := NULL;
      END LOOP;
      IF s.names IS NOT NULL AND fenced_guard.announced(p_name, v_lines) THEN
        v_mode := fenced_guard.mode_of(p_guard, p_name);
        v_verdict := fenced_guard.admit_with_short_wait(s, p_name, v_rule, v_mode.refuses);
      END IF;
    END IF;
  END IF;
  IF v_verdict = 'admit' THEN
    PERFORM fenced_guard.carry(concat(v_xid, CASE WHEN v_rule <> 'retry' THEN '|' || p_guard END, '/', p_name, E'\n'));
    RETURN;
  ELSIF v_verdict <> 'contended' THEN
    PERFORM fenced_guard.rule_on(p_guard, p_name, v_text, v_verdict);
  END IF;
  PERFORM fenced_guard.carry_let_through(p_guard, ARRAY[p_name], v_verdict);
END $$;

-- Remember which writes were recorded and let through, so that each name is recorded once per transaction. Names are no longer
-- remembered when the setting is long, because every statement searches it. For a missing stamp one line covers the whole guard,
-- unless some pattern is at require.
CREATE OR REPLACE FUNCTION fenced_guard.carry_let_through(p_guard text, p_names text[], p_verdict text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_xid text := pg_current_xact_id();
BEGIN
  IF p_verdict = 'missing' AND NOT EXISTS (SELECT 1 FROM fenced_guard.mode WHERE guard = p_guard AND mode = 'require') THEN
    PERFORM fenced_guard.carry(concat(v_xid, '*', p_guard, E'\n'));
  ELSIF cardinality(p_names) > 0 AND length(fenced_guard.carried()) < 8192 THEN
    PERFORM fenced_guard.carry(
      (SELECT string_agg(concat(v_xid, '|', p_guard, '/', n, E'\n'), '') FROM unnest(p_names[1:64]) AS n));
  END IF;
END $$;

-- The names that the stamps of this transaction cover, each with its stamp. `whole`: all names of that lease are announced and
-- carry its mark (see `carries_mark`).
CREATE OR REPLACE FUNCTION fenced_guard.covered(p_lines text, p_xid text) RETURNS TABLE (name text, stamp text, place bigint, whole boolean)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
  SELECT CASE WHEN strpos(n, '%') = 0 THEN n ELSE fenced_guard.decoded(n) END, s.text, s.place, s.whole
  FROM (
    SELECT text, place, coalesce(strpos(
      current_setting(concat('fenced.token', split_part(text, ':', 3)::bigint % 16), true),
      concat(E'\n', p_xid, '#', split_part(text, ':', 5), E'\n')) > 0, false) AS whole
    FROM string_to_table(p_lines, E'\n') WITH ORDINALITY AS l (line, place), split_part(line, ' ', 2) AS text
    WHERE starts_with(line, p_xid || ' 1:') OFFSET 0  -- so that the planner splits each stamp once
  ) AS s, string_to_table(split_part(s.text, ':', 6), ',') AS n
$$;

-- Decide about all names that a statement wrote to; `p_names` has no duplicates. The slow work is done only for names that a
-- stamp of this transaction covers and that have not been admitted yet.
CREATE OR REPLACE FUNCTION fenced_guard.decide_all(p_guard text, p_names text[]) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_xid    text := pg_current_xact_id();
  v_lines  text := fenced_guard.carried();
  v_left   text[];
  v_open   text[] := '{}';
  v_let    text[] := '{}';               -- covered names that were not admitted
  v_why    text[] := '{}';               -- the verdict and the stamp of each
  v_rule   text;
  v_proof  boolean;
  v_verdict text;
  v_last   text;
  w        record;
BEGIN
  SELECT g.rule, t.proof INTO v_rule, v_proof FROM fenced_guard.guard g, fenced_guard.trust t WHERE g.guard = p_guard;
  IF v_proof OR cardinality(p_names) <= 8 THEN
    PERFORM fenced_guard.decide(p_guard, n) FROM unnest(p_names) AS n;
    RETURN;
  END IF;
  IF strpos(v_lines, E'\n' || v_xid || ' ') = 0 THEN
    IF strpos(v_lines, concat(E'\n', v_xid, '*', p_guard, E'\n')) = 0 THEN
      PERFORM fenced_guard.rule_on_all(p_guard, p_names, NULL, 'missing');
      PERFORM fenced_guard.carry_let_through(p_guard, '{}', 'missing');
    END IF;
    RETURN;
  END IF;
  v_left := ARRAY(
    SELECT n FROM unnest(p_names) AS n EXCEPT ALL (
      SELECT substr(line, length(v_xid) + 2) FROM string_to_table(v_lines, E'\n') AS line
      WHERE v_rule = 'retry' AND starts_with(line, v_xid || '/')
      UNION SELECT substr(line, length(concat(v_xid, p_guard)) + 3) FROM string_to_table(v_lines, E'\n') AS line
      WHERE starts_with(line, concat(v_xid, '|', p_guard, '/'))
      UNION SELECT name FROM fenced_guard.covered(v_lines, v_xid) WHERE whole AND v_rule = 'retry'
    )
  );
  IF cardinality(v_left) = 0 THEN
    RETURN;
  END IF;
  FOR w IN
    SELECT DISTINCT ON (c.name) c.name, c.stamp, c.whole OR a.name IS NOT NULL AS announced
    FROM fenced_guard.covered(v_lines, v_xid) AS c
    JOIN unnest(v_left) AS wanted ON wanted = c.name
    LEFT JOIN (                          -- `announced`, for all names
      SELECT substr(line, strpos(line, '/') + 1) AS name FROM string_to_table(v_lines, E'\n') AS line
      WHERE starts_with(line, v_xid || '/') OR starts_with(line, v_xid || '|')
    ) AS a ON a.name = c.name
    ORDER BY c.name, c.place
  LOOP
    v_verdict := 'uncovered';
    IF w.announced THEN
      v_verdict := fenced_guard.admit_with_short_wait(
        fenced_guard.parse(w.stamp), w.name, v_rule, (SELECT refuses FROM fenced_guard.mode_of(p_guard, w.name)));
    END IF;
    IF v_verdict = 'admit' THEN
      v_open := v_open || w.name;
    ELSE
      v_let := v_let || w.name;
      v_why := v_why || concat(v_verdict, ' ', w.stamp);
    END IF;
  END LOOP;
  PERFORM fenced_guard.rule_on_all(p_guard, array_agg(name), split_part(why, ' ', 2), split_part(why, ' ', 1))
  FROM unnest(v_let, v_why) AS u (name, why) WHERE NOT starts_with(why, 'contended') GROUP BY why;
  IF cardinality(v_open || v_let) > 0 THEN
    v_left := ARRAY(SELECT n FROM unnest(v_left) AS n EXCEPT SELECT unnest(v_open || v_let));
  END IF;
  IF cardinality(v_left) > 0 THEN
    SELECT split_part(line, ' ', 2) INTO v_last FROM string_to_table(v_lines, E'\n') WITH ORDINALITY AS l (line, i)
    WHERE starts_with(line, v_xid || ' ') ORDER BY i DESC LIMIT 1;
    PERFORM fenced_guard.rule_on_all(p_guard, v_left, v_last,
      CASE WHEN strpos(v_lines, E'\n' || v_xid || E' ?\n') > 0 THEN 'invalid' ELSE 'uncovered' END);
  END IF;
  IF cardinality(v_open) > 0 THEN
    PERFORM fenced_guard.carry((SELECT string_agg(
      concat(v_xid, CASE WHEN v_rule <> 'retry' THEN '|' || p_guard END, '/', n, E'\n'), '') FROM unnest(v_open) AS n));
  END IF;
  PERFORM fenced_guard.carry_let_through(p_guard, v_let, 'let through');
END $$;

-- Admit a name that this transaction has announced but not locked strongly enough: this guard's rule needs a stronger lock, or
-- another guard's mode did not wait for it. The transaction holds row locks by now, so it waits for at most 100 ms.
CREATE OR REPLACE FUNCTION fenced_guard.admit_with_short_wait(s fenced_guard.stamp, p_name text, p_rule text, p_refuses boolean) RETURNS text
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_before text := current_setting('lock_timeout');
  v_verdict text;
  v        record;
BEGIN
  IF NOT p_refuses THEN
    RETURN fenced_guard.admit_without_waiting(s, p_name, p_rule, 'write', NULL);
  ELSIF EXISTS (SELECT 1 FROM fenced_guard.mark WHERE name = p_name AND xmax = pg_current_xact_id()::xid) THEN
    -- This transaction alone has locked the mark: several lockers would be a multixact. So nothing can wait.
    v := fenced_guard.admit(s, p_name, p_rule, 'row', NULL);
    RETURN v.verdict;
  END IF;
  PERFORM set_config('lock_timeout', '100', true);
  SELECT verdict INTO v_verdict FROM fenced_guard.admit(s, p_name, p_rule, 'row', NULL);
  IF v_verdict = 'contended' THEN
    RAISE lock_not_available;
  END IF;
  PERFORM set_config('lock_timeout', v_before, true);
  RETURN v_verdict;
EXCEPTION WHEN lock_not_available THEN
  RAISE EXCEPTION USING ERRCODE = fenced_guard.sqlstate_of('contended'), MESSAGE = format(
    'fenced: %s: another transaction had locked its mark when this one announced it, or has locked it now; announce it '
    'with the guard of this table', fenced_guard.sendable(p_name));
END $$;

-- The token under which this transaction writes the name; NULL unless this transaction has admitted the name.
CREATE OR REPLACE FUNCTION fenced_guard.token_for(p_name text) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  IF NOT fenced_guard.carries_mark(p_name)
     AND strpos(fenced_guard.carried(), concat(E'\n', pg_current_xact_id(), '/', p_name, E'\n')) = 0 THEN
    RETURN NULL;
  END IF;
  RETURN (SELECT token FROM fenced_guard.mark WHERE name = p_name);
END $$;

-- Called before COMMIT on connections that begin transactions implicitly: fail unless this is the announced transaction.
CREATE OR REPLACE FUNCTION fenced_guard.still_stamped() RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  IF (strpos(current_setting('fenced.stamp', true), concat(E'\n', pg_current_xact_id_if_assigned(), ' ')) > 0) IS NOT TRUE THEN
    RAISE EXCEPTION USING ERRCODE = fenced_guard.sqlstate_of('ended'),
      MESSAGE = 'fenced: the transaction was ended inside the guarded block, and another one began';
  END IF;
END $$;

-- The mark of a name, for every role that may read or write a guarded table.
CREATE OR REPLACE FUNCTION fenced_guard.peek(p_name text, OUT token bigint, OUT grant_id text, OUT seq bigint)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  IF NOT fenced_guard.may_write(true) THEN
    PERFORM fenced_guard.refuse_stranger('cannot look at marks');
  END IF;
  SELECT m.token, m.grant_id, m.seq INTO token, grant_id, seq FROM fenced_guard.mark m WHERE m.name = p_name;
END $$;

-- Record a refusal. The writer calls this after the refused transaction was rolled back, because a record made inside it would
-- be lost. The seal proves that this database refused it, and the id lets each refusal be recorded once.
CREATE OR REPLACE FUNCTION fenced_guard.report(p_detail text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  d jsonb := p_detail::jsonb;
  v_id bigint := (d ->> 'id')::bigint;
BEGIN
  IF (d ->> 'seal' = fenced_guard.sealed(d - 'seal')) IS NOT TRUE THEN
    RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege', MESSAGE = 'fenced: this detail is not a refusal of this database';
  END IF;
  INSERT INTO fenced_guard.record (
    id, guard, name, stamp, token, grant_id, seq, verdict, ruling, mode, who, application, address, pid)
  SELECT v_id, d ->> 'guard', left(d ->> 'name', 200), left(d ->> 'stamp', 1000), (d ->> 'mark')::bigint,
    d ->> 'holder', (d ->> 'seq')::bigint, d ->> 'verdict', 'refuse', d ->> 'mode', d ->> 'who', d ->> 'application',
    (d ->> 'address')::inet, (d ->> 'pid')::integer
  WHERE d ->> 'guard' IS NOT NULL AND v_id > (SELECT last_value FROM fenced_guard.record_id) - 10000
  ON CONFLICT (id) DO NOTHING;
  IF v_id % 1000 = 0 THEN
    PERFORM fenced_guard.tidy(v_id - 10000);
  END IF;
END $$;
