-- The guard's verdict about a stamp, and what each mode does with the verdict: count it, record it or refuse.

-- Does nothing. A role that may call it counts as a writer: grant it to a role that writes by views or by functions of others.
CREATE OR REPLACE FUNCTION fenced_guard.writer() RETURNS void
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$ SELECT $$;

-- Whether the caller may write a guarded table; or, with `p_or_read`, read one. In a function that runs as its owner neither
-- current_user nor a right of the function says who called it: the session's role does.
CREATE OR REPLACE FUNCTION fenced_guard.may_write(p_or_read boolean DEFAULT false) RETURNS boolean
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_caller text := CASE current_setting('role') WHEN 'none' THEN session_user ELSE current_setting('role') END;
BEGIN
  RETURN has_function_privilege(v_caller, 'fenced_guard.writer()', 'EXECUTE') OR EXISTS (
    SELECT 1 FROM fenced_guard.guard g, fenced_guard.relation(g.guard) AS t
    WHERE has_any_column_privilege(v_caller, t, 'INSERT, UPDATE') OR has_table_privilege(v_caller, t, 'DELETE, TRUNCATE')
      OR (p_or_read AND has_any_column_privilege(v_caller, t, 'SELECT')));
END $$;

-- Fail if this role writes nothing here. Nothing is locked, and nothing is recorded: it could fill the audit.
CREATE OR REPLACE FUNCTION fenced_guard.refuse_stranger(p_what text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege',
    MESSAGE = format('fenced: a role that may write no guarded table of this database %s', p_what),
    HINT = 'Grant it the table; or, if it writes by a view or a function: GRANT EXECUTE ON FUNCTION fenced_guard.writer() TO ...';
END $$;

-- Count a refusal, exactly: a crash of the server makes a sequence jump ahead by up to 32, unless its value was set. The lock is
-- against others that do the same, so that no count is lost. It ends with this transaction, which the refusal ends at once.
CREATE OR REPLACE FUNCTION fenced_guard.count_refusal(p_guard text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_sequence regclass := (SELECT refused FROM fenced_guard.guard WHERE guard = p_guard)::regclass;
BEGIN
  LOCK TABLE fenced_guard.tally IN SHARE UPDATE EXCLUSIVE MODE;  -- conflicts with itself, and with nothing that writers do
  PERFORM setval(v_sequence, nextval(v_sequence));
EXCEPTION WHEN lock_not_available THEN  -- the program's own lock_timeout
  PERFORM nextval(v_sequence);
END $$;

-- The decision, the same as `fenced.decision.judge`: the verdict, and whether the mark rises to this stamp.
CREATE OR REPLACE FUNCTION fenced_guard.judge(
  m fenced_guard.mark, s fenced_guard.stamp, p_rule text, p_announce boolean, p_operation xid8,
  OUT verdict text, OUT rises boolean
) LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_seq bigint := coalesce(s.seq, 0);
BEGIN
  verdict := 'admit';
  rises := false;
  IF s.token < m.token THEN
    verdict := 'stale';
  ELSIF s.token = m.token AND s.grant_id <> m.grant_id THEN
    verdict := 'reused';
  ELSIF NOT p_announce AND p_rule <> 'retry' AND v_seq = 0 THEN
    verdict := 'invalid';  -- a write needs a seq above 0; a stamp with seq 0 or none can only announce
  ELSIF m.token IS NULL OR s.token > m.token THEN
    rises := true;
  ELSIF p_announce OR p_rule = 'retry' OR p_operation = m.operation THEN
    rises := false;
  ELSIF p_rule = 'once' THEN
    rises := m.seq = 0;
    verdict := CASE WHEN rises THEN 'admit' ELSE 'duplicate' END;
  ELSE
    rises := v_seq > m.seq;
    verdict := CASE WHEN rises THEN 'admit' WHEN v_seq = m.seq THEN 'applied' ELSE 'out_of_order' END;
  END IF;
END $$;

-- Whether the authority's tables are in this database, with the same owner. A schema `fenced` of another owner is not read.
CREATE OR REPLACE FUNCTION fenced_guard.beside_authority() RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  IF to_regclass('fenced.namespace') IS NULL OR to_regclass('fenced.token') IS NULL THEN
    RETURN false;
  END IF;
  RETURN (SELECT count(DISTINCT nspowner) FROM pg_namespace WHERE nspname IN ('fenced', 'fenced_guard')) = 1;
END $$;

-- Whether a token may raise a mark. It must not be above the last token that the authority has minted, if the authority is
-- in this database. It must be signed, if proofs are required. It must not be more than `max_jump` above the highest mark.
CREATE OR REPLACE FUNCTION fenced_guard.plausible(s fenced_guard.stamp, p_proof text) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  t fenced_guard.trust;
  v_last bigint;
BEGIN
  SELECT * INTO t FROM fenced_guard.trust;
  IF fenced_guard.beside_authority() THEN
    SELECT n.floor + CASE WHEN q.is_called THEN q.last_value ELSE 0 END INTO v_last
    FROM fenced.namespace n, fenced.token q WHERE n.realm = s.realm;
    IF s.token > v_last THEN
      RETURN false;
    END IF;
  END IF;
  IF t.proof AND NOT fenced_guard.proven(s, p_proof) THEN
    RETURN false;
  END IF;
  RETURN t.max_jump IS NULL OR fenced_guard.within_max_jump(s.token, t.max_jump);
END $$;

-- Whether a token is at most `p_max` above the highest mark of all names. (All names share one stream of tokens, so a name
-- that was idle may jump far above its own mark.) The cached highest mark is tried first, then the table. True while there
-- is no mark at all.
CREATE OR REPLACE FUNCTION fenced_guard.within_max_jump(p_token bigint, p_max bigint) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_highest bigint;
BEGIN
  SELECT last_value INTO v_highest FROM fenced_guard.highest WHERE is_called;
  IF v_highest IS NULL OR p_token > v_highest + p_max THEN
    SELECT max(token) INTO v_highest FROM fenced_guard.mark;
    IF p_token > v_highest + p_max THEN
      RETURN false;
    END IF;
  END IF;
  IF v_highest IS NULL OR p_token > v_highest THEN
    PERFORM setval('fenced_guard.highest', p_token);
  END IF;
  RETURN true;
END $$;

-- The mode that counts for a name: that of the longest pattern that matches. For NULL, which means all rows (TRUNCATE), the
-- strictest mode of any pattern. While an override is in force nothing is refused, and bad stamps are recorded as under shadow.
CREATE OR REPLACE FUNCTION fenced_guard.mode_of(p_guard text, p_name text, OUT mode text, OUT refuses boolean, OUT requires boolean)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_name text := coalesce(p_name, '');
  v_percent double precision;
  v_lifted boolean;
BEGIN
  -- One statement, overrides included.
  SELECT m.mode, m.percent, EXISTS (
    SELECT 1 FROM fenced_guard.override o WHERE o.guard = p_guard AND v_name LIKE o.likes AND o.until > clock_timestamp()
  ) INTO mode, v_percent, v_lifted FROM fenced_guard.mode m
  WHERE m.guard = p_guard AND (p_name IS NULL OR p_name LIKE m.likes)
  ORDER BY CASE WHEN p_name IS NULL THEN
      array_position(ARRAY['observe', 'shadow', 'canary', 'enforce', 'require'], split_part(m.mode, '(', 1)) END DESC,
    length(m.pattern) DESC, m.pattern DESC LIMIT 1;
  mode := coalesce(mode, CASE WHEN p_guard IS NULL THEN 'enforce' ELSE 'observe' END);
  requires := mode = 'require';
  refuses := requires OR mode = 'enforce' OR (
    mode LIKE 'canary%' AND v_name <> ''
    AND ('x' || left(encode(sha256(convert_to(v_name, 'UTF8')), 'hex'), 8))::bit(32)::bigint < v_percent / 100 * 4294967296
  );
  IF refuses AND v_lifted THEN
    mode := 'override';
    refuses := false;
    requires := false;
  END IF;
END $$;

-- The guard whose mode counts for a name when the caller gave none: the strictest guard whose template can make that name.
CREATE OR REPLACE FUNCTION fenced_guard.guard_for(p_name text) RETURNS text
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  RETURN (
    SELECT g.guard FROM fenced_guard.guard g CROSS JOIN LATERAL fenced_guard.mode_of(g.guard, p_name) AS m
    WHERE p_name LIKE regexp_replace(fenced_guard.likes(g.template), E'\\{[^{}]*\\}', '%', 'g')
    ORDER BY m.requires DESC, m.refuses DESC, g.guard LIMIT 1
  );
END $$;

-- Record the decisions of one statement. It never waits and never fails: if the insert is not possible, the sequence
-- `unrecorded` counts it. It writes at most ten records, or one for a missing stamp; the last one counts the other names.
CREATE OR REPLACE FUNCTION fenced_guard.note(
  p_guard text, p_names text[], p_stamp text, p_verdict text, p_ruling text, p_mode text
) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_shown integer := CASE p_verdict WHEN 'missing' THEN 1 ELSE least(cardinality(p_names), 10) END;
  v_id bigint;
BEGIN
  LOCK TABLE fenced_guard.record IN ROW EXCLUSIVE MODE NOWAIT;
  IF v_shown > 1 THEN
    INSERT INTO fenced_guard.record (guard, name, stamp, token, grant_id, seq, verdict, ruling, mode, query)
    SELECT coalesce(p_guard, ''), n, p_stamp, m.token, m.grant_id, m.seq, p_verdict, p_ruling, p_mode, left(current_query(), 200)
    FROM unnest(p_names[1:v_shown - 1]) AS n LEFT JOIN fenced_guard.mark m ON m.name = n;
  END IF;
  INSERT INTO fenced_guard.record (guard, name, stamp, token, grant_id, seq, verdict, ruling, mode, count, query)
  SELECT coalesce(p_guard, ''), p_names[v_shown], p_stamp, m.token, m.grant_id, m.seq, p_verdict, p_ruling, p_mode,
    cardinality(p_names) - v_shown + 1, left(current_query(), 200)
  FROM (SELECT 1) AS always LEFT JOIN fenced_guard.mark m ON m.name = p_names[v_shown]
  RETURNING id INTO v_id;
  IF v_id % 1000 < v_shown AND current_setting('transaction_isolation') = 'read committed' THEN
    PERFORM fenced_guard.tidy(v_id - 10000);
  END IF;
EXCEPTION WHEN OTHERS THEN
  PERFORM nextval('fenced_guard.unrecorded');
END $$;

-- Add up old records in `tally`. If another transaction is doing this already, return at once.
CREATE OR REPLACE FUNCTION fenced_guard.tidy(p_before bigint) RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_count bigint;
BEGIN
  IF NOT pg_try_advisory_xact_lock(hashtextextended('fenced_guard.tidy', 0)) THEN
    RETURN 0;
  END IF;
  WITH old AS (
    DELETE FROM fenced_guard.record WHERE id <= p_before
    RETURNING guard, verdict, ruling, mode, who, application, at, count
  ), summed AS (
    INSERT INTO fenced_guard.tally AS t (guard, verdict, ruling, mode, who, application, count, last)
    SELECT guard, verdict, ruling, mode, who, application, sum(count), max(at) FROM old GROUP BY 1, 2, 3, 4, 5, 6
    ON CONFLICT (guard, verdict, ruling, mode, who, application)
      DO UPDATE SET count = t.count + excluded.count, last = greatest(t.last, excluded.last)
  )
  SELECT count(*) INTO v_count FROM old;
  RETURN v_count;
END $$;

CREATE OR REPLACE FUNCTION fenced_guard.sqlstate_of(p_verdict text) RETURNS text
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
  SELECT 'ZF0' || lpad(array_position(ARRAY[
    'stale', 'duplicate', 'out_of_order', 'reused', 'uncovered', 'foreign', 'missing', 'invalid', 'forged', 'applied',
    'contended', 'announce', 'lost', 'ended'
  ], p_verdict)::text, 2, '0')
$$;

-- Sign the detail of a refusal with this database's secret, so that `report` can check that the refusal happened here.
CREATE OR REPLACE FUNCTION fenced_guard.sealed(p_detail jsonb) RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
  SELECT encode(sha256(seal || sha256(convert_to(p_detail::text, 'UTF8'))), 'hex') FROM fenced_guard.trust
$$;

-- Say why `plausible` was false for this stamp.
CREATE OR REPLACE FUNCTION fenced_guard.why_forged(s fenced_guard.stamp) RETURNS text
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_jump bigint := (SELECT max_jump FROM fenced_guard.trust);
  v_highest bigint := (SELECT max(token) FROM fenced_guard.mark);
  v_last bigint;
BEGIN
  IF fenced_guard.beside_authority() THEN
    SELECT n.floor + CASE WHEN q.is_called THEN q.last_value ELSE 0 END INTO v_last
    FROM fenced.namespace n, fenced.token q WHERE n.realm = s.realm;
  END IF;
  RETURN CASE
    WHEN s.token > v_last THEN format('token %s is above the last one that the authority has minted, %s', s.token, v_last)
    WHEN s.token > v_highest + v_jump THEN format(
      'token %s is more than max_jump (%s) above the highest that was seen here, %s; an operator may allow more: '
      'fenced guard trust', s.token, v_jump, v_highest)
    ELSE format('the proof of token %s is missing, or does not verify', s.token) END;
END $$;

-- Write non-ASCII characters as JSON escapes, unless the client's encoding is UTF8. A client whose encoding lacks a character
-- would otherwise receive an encoding error instead of the refusal.
CREATE OR REPLACE FUNCTION fenced_guard.sendable(p_text text) RETURNS text
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  IF current_setting('client_encoding') = 'UTF8' OR octet_length(p_text) = length(p_text) THEN
    RETURN p_text;
  END IF;
  RETURN (
    SELECT string_agg(CASE
      WHEN ascii(c) < 128 THEN c
      WHEN ascii(c) < 65536 THEN E'\\u' || lpad(to_hex(ascii(c)), 4, '0')
      ELSE E'\\u' || to_hex(55296 + ((ascii(c) - 65536) >> 10)) || E'\\u' || to_hex(56320 + ((ascii(c) - 65536) & 1023)) END,
      '' ORDER BY i)
    FROM string_to_table(p_text, NULL) WITH ORDINALITY AS t (c, i)
  );
END $$;

-- Refuse. The sequence that counts refusals and the message in the write-ahead log survive the rollback that follows.
CREATE OR REPLACE FUNCTION fenced_guard.refuse(p_guard text, p_name text, p_stamp text, p_verdict text, p_mode text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  PERFORM fenced_guard.refuse_by(p_guard, p_name, p_stamp, p_verdict, p_mode,
    (SELECT m FROM fenced_guard.mark m WHERE m.name = p_name), NULL);
END $$;

-- The same, with the mark that decided, which is in a table or in the row itself, and a sentence of the caller.
CREATE OR REPLACE FUNCTION fenced_guard.refuse_by(
  p_guard text, p_name text, p_stamp text, p_verdict text, p_mode text, m fenced_guard.mark, p_says text
) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_token text := split_part(p_stamp, ':', 3);
  v_detail jsonb;
  v_says text;
  v_writer boolean := fenced_guard.may_write();
BEGIN
  v_detail := jsonb_build_object(
    'id', nextval('fenced_guard.record_id'), 'verdict', p_verdict, 'guard', p_guard, 'name', p_name, 'stamp', p_stamp, 'mark', m.token,
    'holder', CASE WHEN v_writer THEN m.grant_id END,
    'seq', m.seq, 'mode', p_mode, 'who', session_user, 'application', current_setting('application_name'),
    'address', host(inet_client_addr()), 'pid', pg_backend_pid()
  );
  v_says := coalesce(p_says, CASE p_verdict
    WHEN 'stale' THEN format('token %s is stale: %s has been seen', v_token,
      coalesce(m.token, (SELECT floor FROM fenced_guard.trust)))
    WHEN 'duplicate' THEN 'this grant has made its one operation (rule once)'
    WHEN 'out_of_order' THEN 'a later operation of the same lease was applied before (rule sequenced)'
    WHEN 'reused' THEN format('token %s was seen from another grant: the authority lost its history; raise its floor', v_token)
    WHEN 'uncovered' THEN CASE WHEN p_name ~ '(^|/)(/|$)' THEN 'no lease can cover it: a column of its name is NULL or empty'
      WHEN p_name = ANY ((fenced_guard.parse(p_stamp)).names)
      THEN format('covered by the lease (token %s), but not announced in this transaction; announce it too', v_token)
      ELSE format('not covered by the lease of %s (token %s)',
        array_to_string((fenced_guard.parse(p_stamp)).names, ', '), v_token) END
    WHEN 'foreign' THEN format('the stamp is of realm %s, and this guard trusts %s. Point the program at the authority of '
      'that realm (fenced authority show URL prints it), or move the guard: fenced authority move OLD NEW --guards URL',
      split_part(p_stamp, ':', 2), coalesce((SELECT 'realm ' || realm FROM fenced_guard.trust WHERE v_writer), 'another one'))
    WHEN 'missing' THEN 'the write carries no stamp, and the mode is require'
    WHEN 'invalid' THEN 'not a stamp that this rule can use'
    WHEN 'forged' THEN fenced_guard.why_forged(fenced_guard.parse(p_stamp))
    WHEN 'applied' THEN 'this operation was applied before; nothing was done'
  END);
  IF p_verdict = 'forged' THEN
    v_detail := v_detail || jsonb_build_object('says', v_says);
  END IF;
  v_detail := v_detail || jsonb_build_object('seal', fenced_guard.sealed(v_detail));
  IF p_verdict <> 'applied' THEN
    PERFORM pg_logical_emit_message(false, 'fenced', v_detail::text);
    PERFORM fenced_guard.count_refusal(p_guard);
  END IF;
  RAISE EXCEPTION USING
    ERRCODE = fenced_guard.sqlstate_of(p_verdict),
    MESSAGE = fenced_guard.sendable(format('fenced: %s: %s', coalesce(p_name, 'a row of ' || p_guard), v_says)),
    DETAIL = fenced_guard.sendable(v_detail::text),
    HINT = CASE p_verdict WHEN 'missing' THEN
      'Take a lease, begin, and announce its stamp first: SELECT fenced_guard.announce(...). An operator may let '
      || 'writes through for a while: fenced guard override.' ELSE '' END;
END $$;

-- Act on a verdict other than `admit`, as the name's mode says: refuse, or record it and let the write through.
CREATE OR REPLACE FUNCTION fenced_guard.rule_on(p_guard text, p_name text, p_stamp text, p_verdict text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v record;
BEGIN
  v := fenced_guard.mode_of(p_guard, p_name);
  PERFORM fenced_guard.rule_by(p_guard, p_name, p_stamp, p_verdict, v.mode, v.refuses, v.requires);
END $$;

-- The same, if the caller has asked `mode_of`.
CREATE OR REPLACE FUNCTION fenced_guard.rule_by(
  p_guard text, p_name text, p_stamp text, p_verdict text, p_mode text, p_refuses boolean, p_requires boolean
) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  IF p_verdict = 'applied' OR (p_verdict = 'missing' AND p_requires) OR (p_verdict <> 'missing' AND p_refuses) THEN
    PERFORM fenced_guard.refuse(p_guard, nullif(p_name, ''), p_stamp, p_verdict, p_mode);
  END IF;
  PERFORM fenced_guard.note(p_guard, ARRAY[nullif(p_name, '')], p_stamp, p_verdict, CASE
    WHEN p_mode = 'observe' OR (p_verdict = 'missing' AND p_mode NOT IN ('shadow', 'override')) THEN 'count'
    ELSE 'record' END, p_mode);
END $$;

-- The same for many names. It applies the patterns one by one, the longest first, which is the order of `mode_of`.
CREATE OR REPLACE FUNCTION fenced_guard.rule_on_all(p_guard text, p_names text[], p_stamp text, p_verdict text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  m          record;
  v_left     text[] := p_names;
  v_match    text[];
  v_refusing text[];                     -- names under a mode that refuses bad stamps
  v_lifted   text[];                     -- those of them that an override lets through
BEGIN
  IF p_verdict = 'applied' THEN
    PERFORM fenced_guard.rule_on(p_guard, p_names[1], p_stamp, p_verdict);
  END IF;
  FOR m IN
    (SELECT mode, percent, likes FROM fenced_guard.mode WHERE guard = p_guard ORDER BY length(pattern) DESC, pattern DESC)
    UNION ALL SELECT 'observe', 0, '%'   -- for names that no pattern matches
  LOOP
    EXIT WHEN cardinality(v_left) = 0;
    v_match := v_left;
    v_left := '{}';
    IF m.likes <> '%' THEN
      SELECT coalesce(array_agg(n) FILTER (WHERE n LIKE m.likes), '{}'), coalesce(array_agg(n) FILTER (WHERE n NOT LIKE m.likes), '{}')
      INTO v_match, v_left FROM unnest(v_match) AS n;
    END IF;
    v_refusing := CASE
      WHEN m.mode IN ('enforce', 'require') THEN v_match
      WHEN m.mode LIKE 'canary%' THEN ARRAY(SELECT n FROM unnest(v_match) AS n WHERE
        ('x' || left(encode(sha256(convert_to(n, 'UTF8')), 'hex'), 8))::bit(32)::bigint < m.percent / 100 * 4294967296)
      ELSE '{}' END;
    v_lifted := '{}';
    IF cardinality(v_refusing) > 0 THEN
      v_lifted := ARRAY(SELECT n FROM unnest(v_refusing) AS n WHERE EXISTS (
        SELECT 1 FROM fenced_guard.override o WHERE o.guard = p_guard AND n LIKE o.likes AND o.until > clock_timestamp()));
      IF (p_verdict <> 'missing' OR m.mode = 'require') AND cardinality(v_refusing) > cardinality(v_lifted) THEN
        PERFORM fenced_guard.refuse(p_guard, n, p_stamp, p_verdict, m.mode)
        FROM unnest(v_refusing) AS n WHERE n <> ALL (v_lifted) LIMIT 1;
      END IF;
      PERFORM fenced_guard.note(p_guard, v_lifted, p_stamp, p_verdict, 'record', 'override') WHERE cardinality(v_lifted) > 0;
      v_match := ARRAY(SELECT n FROM unnest(v_match) AS n WHERE n <> ALL (v_lifted));
    END IF;
    PERFORM fenced_guard.note(p_guard, v_match, p_stamp, p_verdict, CASE
      WHEN m.mode = 'observe' OR (p_verdict = 'missing' AND m.mode <> 'shadow') THEN 'count' ELSE 'record' END, m.mode)
    WHERE cardinality(v_match) > 0;
  END LOOP;
END $$;
