-- Schema 1 of the PostgreSQL guard. A role that may create a schema runs it once in a database. Afterwards a writer needs
-- only USAGE on schema fenced_guard, since announce and the triggers run as their owner.
--
-- The stamps of a transaction are kept in the setting `fenced.stamp`, local to the transaction. Only `announce` puts them
-- there, after it has locked their marks. Every line begins with the transaction's id, so that lines of another
-- transaction are ignored. The lines:
--
--   XID/NAME         the stamp is admitted for NAME, and the mark of NAME is locked until this transaction ends
--   XID|GUARD/NAME   GUARD has decided about NAME: it admitted a write under rule once or sequenced, or it recorded a
--                    bad stamp and let the write through
--   XID*GUARD        GUARD has recorded that this transaction writes without a stamp, and lets it
--   XID STAMP        a stamp, as it was announced; `?` for a text that is not a stamp
--
-- The settings `fenced.token0` to `fenced.token15` (token modulo 16) stay short however many names a lease has. Their lines:
--
--   XID@TOKEN        a token that was admitted for all names of its lease; rows carry it in their epoch column
--   XID#GRANT        the grant of that token; marks carry it
--
-- A statement trigger looks for the line of the one name that the statement wrote to. If it finds none it calls `decide`,
-- or `decide_all` for many names. Functions that every transaction calls are one statement where possible: plpgsql
-- prepares each expression again in every transaction.
--
-- A text with a backslash is written E'', which does not depend on `standard_conforming_strings`.

CREATE SCHEMA fenced_guard;

CREATE FUNCTION fenced_guard.version() RETURNS integer LANGUAGE sql AS 'SELECT 1';

-- What the guards of this database trust, in one row.
CREATE TABLE fenced_guard.trust (
  one       boolean PRIMARY KEY DEFAULT true CHECK (one),
  realm     text,                                    -- the one authority that is trusted; NULL: the first that announces
  floor     bigint NOT NULL DEFAULT 0,               -- tokens below it are stale, even for names without a mark
  max_jump  bigint,                                  -- how far a token may be above the highest mark; NULL: no limit
  sample    double precision NOT NULL DEFAULT 0,     -- the share of admitted operations that is recorded
  proof     boolean NOT NULL DEFAULT false,          -- whether only a signed stamp may raise a mark
  patience  double precision NOT NULL DEFAULT 5,     -- seconds that a successor waits for an older transaction
  seal      bytea NOT NULL DEFAULT sha256(convert_to(concat(gen_random_uuid(), gen_random_uuid()), 'UTF8'))
                                                     -- a secret that signs refusals, so that `report` accepts no others
);
INSERT INTO fenced_guard.trust DEFAULT VALUES;

-- A cache of the highest token in `mark`, kept only while `max_jump` is set. `is_called` false: read `mark` instead.
CREATE SEQUENCE fenced_guard.highest;

-- The keys that may sign stamps: HMAC-SHA256, Ed25519, or both. Old and new keys may be in use at the same time.
CREATE TABLE fenced_guard.key (
  id      text COLLATE "C" PRIMARY KEY,
  kind    text NOT NULL CHECK (kind IN ('hmac', 'ed25519')),
  secret  bytea NOT NULL,                            -- for ed25519 the public key
  added   timestamptz NOT NULL DEFAULT clock_timestamp(),
  revoked timestamptz
);

-- The highest stamp admitted for each name. Its row lock is the fence. Only `reset` and `drop_marks` delete marks, and both
-- write a line into the history.
CREATE TABLE fenced_guard.mark (
  name      text COLLATE "C" PRIMARY KEY,
  token     bigint NOT NULL,
  grant_id  text COLLATE "C" NOT NULL,
  seq       bigint NOT NULL,
  operation xid8                                     -- the transaction that wrote, for its further statements
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02);

-- One row per lease whose names all still carry its mark. FOR SHARE on this row stands for FOR SHARE on every one of those
-- marks. That is safe because a transaction that raises one of the marks deletes the row before it commits, and so waits
-- for every transaction that shares it.
CREATE TABLE fenced_guard.lease (
  grant_id text COLLATE "C" PRIMARY KEY,
  token    bigint NOT NULL,
  realm    text COLLATE "C" NOT NULL,                -- the realm in `trust`
  names    text COLLATE "C" NOT NULL,                -- as in the stamp
  sample   double precision NOT NULL                 -- a copy of the one in `trust`
) WITH (autovacuum_vacuum_scale_factor = 0.02);

-- One row per grant that has marks. A successor locks it before it waits for a mark or a lease row of this grant, and keeps
-- the lock until its transaction ends. Other announcements only read it: the row's xmax shows the lock without waiting
-- (`has_successor`). They then queue behind the successor instead of sharing the lock of the mark. Without this table,
-- overlapping transactions of the old holder would keep its successor waiting for ever: PostgreSQL lets new lockers share
-- a row lock even while another transaction waits for it.
CREATE TABLE fenced_guard.turn (
  grant_id text COLLATE "C" PRIMARY KEY,
  names    text COLLATE "C" NOT NULL                 -- as in the stamp
) WITH (autovacuum_vacuum_scale_factor = 0.02);

-- The guarded tables. The rule is part of the guard, so that no writer can choose a weaker one.
CREATE TABLE fenced_guard.guard (
  guard     text COLLATE "C" PRIMARY KEY,            -- schema.table
  template  text NOT NULL,
  rule      text NOT NULL CHECK (rule IN ('retry', 'once', 'sequenced')),
  mandatory boolean NOT NULL,
  epoch     text,                                    -- the column that keeps the token of the last write
  epoch_made boolean NOT NULL DEFAULT false,         -- whether the installation made that column
  refused   text NOT NULL,                           -- a sequence: its count survives the rollback of a refusal
  changed   xid8 NOT NULL DEFAULT pg_current_xact_id(),  -- the transaction that last changed a mode, or ended an override
  changed_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- The stage of the rollout, by guard and name pattern; the longest pattern counts.
CREATE TABLE fenced_guard.mode (
  guard   text COLLATE "C" NOT NULL,
  pattern text COLLATE "C" NOT NULL,
  likes   text COLLATE "C" NOT NULL,                 -- the same pattern for LIKE
  mode    text NOT NULL,
  percent double precision NOT NULL DEFAULT 0,
  since   timestamptz NOT NULL DEFAULT clock_timestamp(),
  PRIMARY KEY (guard, pattern)
);

-- Emergencies. Until `until`, writes to names that match are let through and recorded, whatever the mode is.
CREATE TABLE fenced_guard.override (
  id      bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  guard   text COLLATE "C" NOT NULL,
  pattern text COLLATE "C" NOT NULL,
  likes   text COLLATE "C" NOT NULL,
  until   timestamptz NOT NULL,
  who     text NOT NULL,
  why     text NOT NULL
);

-- What operators did.
CREATE TABLE fenced_guard.history (
  id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  at          timestamptz NOT NULL DEFAULT clock_timestamp(),
  who         text NOT NULL DEFAULT session_user,
  application text NOT NULL DEFAULT current_setting('application_name'),
  guard       text COLLATE "C",
  what        text NOT NULL,
  detail      jsonb NOT NULL
);

-- The audit. Writers only insert, so that no writer waits for another. The newest 10,000 records are kept as they are; older
-- ones are added up in `tally`.
CREATE SEQUENCE fenced_guard.record_id;
CREATE TABLE fenced_guard.record (
  id          bigint PRIMARY KEY DEFAULT nextval('fenced_guard.record_id'),
  at          timestamptz NOT NULL DEFAULT clock_timestamp(),
  guard       text COLLATE "C" NOT NULL,
  name        text COLLATE "C",
  stamp       text COLLATE "C",
  token       bigint,                                -- the mark at the time of the decision
  grant_id    text COLLATE "C",
  seq         bigint,
  verdict     text NOT NULL,
  ruling      text NOT NULL,                         -- refuse, record, count; admit for a sample
  mode        text NOT NULL,
  count       bigint NOT NULL DEFAULT 1,             -- how many names of one statement this record stands for
  who         text NOT NULL DEFAULT session_user,
  application text NOT NULL DEFAULT current_setting('application_name'),
  query       text
);
CREATE TABLE fenced_guard.tally (
  guard       text COLLATE "C" NOT NULL,
  verdict     text NOT NULL,
  ruling      text NOT NULL,
  mode        text NOT NULL,
  who         text NOT NULL,
  application text NOT NULL,
  count       bigint NOT NULL,
  last        timestamptz NOT NULL,
  PRIMARY KEY (guard, verdict, ruling, mode, who, application)
);

-- Values under names, for programs without tables of their own. Guarded like any other table.
CREATE TABLE fenced_guard.value (
  name    text COLLATE "C" PRIMARY KEY,
  value   bytea,
  version bigint NOT NULL
);

-- Stamps.

CREATE TYPE fenced_guard.stamp AS (text text, realm text, token bigint, seq bigint, grant_id text, names text[]);

-- Decode a name from a stamp: percent-encoded bytes of UTF-8.
CREATE FUNCTION fenced_guard.decoded(p_name text) RETURNS text
LANGUAGE plpgsql IMMUTABLE STRICT SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  IF strpos(p_name, '%') = 0 THEN
    RETURN p_name;
  END IF;
  RETURN (
    SELECT convert_from(string_agg(coalesce(decode(m[1], 'hex'), convert_to(m[2], 'UTF8')), ''::bytea ORDER BY n), 'UTF8')
    FROM regexp_matches(p_name, '%([0-9A-F]{2})|([^%]+)', 'g') WITH ORDINALITY AS found (m, n)
  );
END $$;

-- Parse the one canonical text form of a stamp; NULL for any other text.
CREATE FUNCTION fenced_guard.parse(p_text text) RETURNS fenced_guard.stamp
LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  part  text[] := string_to_array(p_text, ':');
  names text[];
  found fenced_guard.stamp;
BEGIN
  IF p_text IS NULL OR p_text !~ '^1:[0-9a-f]{16}:[1-9][0-9]{0,15}:(-|0|[1-9][0-9]{0,15}):[0-9a-f]{32}:[A-Za-z0-9_.~/,%-]+$'
     OR part[3]::bigint > 9007199254740991 OR (part[4] <> '-' AND part[4]::bigint > 9007199254740991) THEN
    RETURN NULL;
  END IF;
  names := string_to_array(part[6], ',');
  IF strpos(part[6], '%') > 0 THEN
    IF part[6] ~ '%(?![0-9A-F]{2})|%(2[DEF]|3[0-9]|4[1-9A-F]|5[0-9AF]|6[1-9A-F]|7[0-9AE]|[01][0-9A-F]|7F)' THEN
      RETURN NULL;
    END IF;
    BEGIN
      names := ARRAY(SELECT fenced_guard.decoded(n) FROM unnest(names) WITH ORDINALITY AS u (n, o) ORDER BY o);
    EXCEPTION WHEN character_not_in_repertoire OR untranslatable_character THEN
      RETURN NULL;
    END;
    IF EXISTS (
      SELECT 1 FROM unnest(names) AS n  -- controls, marks that turn text round, white space at the ends of segments
      WHERE n ~ E'[\\u0080-\\u009F\\u061C\\u200E\\u200F\\u2028-\\u202E\\u2066-\\u2069\\uFEFF]'
        OR n ~ E'(^|/)[ \\u00A0\\u1680\\u2000-\\u200A\\u202F\\u205F\\u3000]|[ \\u00A0\\u1680\\u2000-\\u200A\\u202F\\u205F\\u3000](/|$)'
    ) THEN
      RETURN NULL;
    END IF;
  END IF;
  IF cardinality(names) > 64 OR (',' || part[6] || ',') ~ E'[,/](\\.{0,2})[,/]'
     OR names <> ARRAY(SELECT DISTINCT n COLLATE "C" FROM unnest(names) AS n ORDER BY 1)
     OR (SELECT max(octet_length(n)) FROM unnest(names) AS n) > 200 THEN
    RETURN NULL;
  END IF;
  found := (p_text, part[2], part[3]::bigint, nullif(part[4], '-')::bigint, part[5], names);
  RETURN found;
END $$;

-- Replace line ends. No valid name has one; a row's name that has one must not look like several lines of the setting.
CREATE FUNCTION fenced_guard.one_line(p_name text) RETURNS text
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$ SELECT replace(p_name, E'\n', E'\r') $$;

-- The lines of the setting, if they belong to this transaction. The text begins and ends with a line end.
CREATE FUNCTION fenced_guard.carried() RETURNS text
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_lines text := current_setting('fenced.stamp', true);
  v_mark  text := E'\n' || pg_current_xact_id();
BEGIN
  IF v_lines IS NULL OR NOT starts_with(v_lines, v_mark) THEN
    RETURN E'\n';
  END IF;
  RETURN v_lines;
END $$;

-- Append lines to the setting.
CREATE FUNCTION fenced_guard.carry(p_lines text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  PERFORM set_config('fenced.stamp', fenced_guard.carried() || p_lines, true);
END $$;

-- Append the tokens and grants of these stamps to the settings `fenced.token0` to `15`.
CREATE FUNCTION fenced_guard.carry_tokens(p_texts text[]) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_xid text := pg_current_xact_id();
BEGIN
  PERFORM set_config(setting, concat(
    CASE WHEN starts_with(current_setting(setting, true), E'\n' || v_xid) THEN current_setting(setting, true) ELSE E'\n' END,
    string_agg(concat(v_xid, '@', token, E'\n', v_xid, '#', grant_id, E'\n'), '')), true)
  FROM (
    SELECT token, grant_id, concat('fenced.token', token % 16) AS setting FROM unnest(p_texts) AS text
    CROSS JOIN LATERAL (SELECT split_part(text, ':', 3)::bigint AS token, split_part(text, ':', 5) AS grant_id) AS part
  ) AS carried
  GROUP BY setting;
END $$;

-- Whether the name's mark belongs to a grant that this transaction has announced with all its names (an XID#GRANT line).
CREATE FUNCTION fenced_guard.carries_mark(p_name text) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  RETURN EXISTS (
    SELECT 1 FROM fenced_guard.mark m WHERE m.name = p_name
      AND strpos(current_setting(concat('fenced.token', m.token % 16), true),
        concat(E'\n', pg_current_xact_id(), '#', m.grant_id, E'\n')) > 0
  );
END $$;

-- Whether this transaction has announced the name, admitted or not. It is not enough that it has announced another name of
-- the same lease: rows of this name that it read earlier were not fenced, and a late holder may have changed them since.
CREATE FUNCTION fenced_guard.announced(p_name text, p_lines text) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_xid text := pg_current_xact_id();
BEGIN
  RETURN strpos(p_lines, concat(E'\n', v_xid, '/', p_name, E'\n')) > 0 OR fenced_guard.carries_mark(p_name) OR EXISTS (
    SELECT 1 FROM string_to_table(p_lines, E'\n') AS line
    WHERE starts_with(line, v_xid || '|') AND substr(line, strpos(line, '/') + 1) = p_name
  );
END $$;

-- Whether a row may pass where callers are not trusted (proofs are required). Every role can write the setting, so its lines
-- are checked against the tables: the name must have been announced, and its mark must be that of an announced stamp. This
-- function locks the lease row, or else the mark itself, so that the answer stays true until the transaction ends. It never
-- waits (SKIP LOCKED): a row that a successor has locked confirms nothing.
-- Lines that say "already recorded" are believed only where the mode does not refuse.
-- (Signing the lines would not help: a writer could restore them after ROLLBACK TO SAVEPOINT has undone the locks.)
CREATE FUNCTION fenced_guard.confirmed(p_guard text, p_name text, p_rule text, p_lines text) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_xid   text := pg_current_xact_id();
  v_announced boolean := fenced_guard.announced(p_name, p_lines);
  v_mode  record;
BEGIN
  PERFORM 1 FROM fenced_guard.mark m, fenced_guard.trust t, fenced_guard.lease l
  WHERE v_announced AND p_rule = 'retry' AND m.name = p_name AND l.grant_id = m.grant_id
    AND p_lines ~ concat(E'\n', v_xid, ' 1:', t.realm, ':', m.token, ':[0-9-]+:', m.grant_id, ':')
  FOR SHARE OF l SKIP LOCKED;
  IF FOUND THEN
    RETURN true;
  END IF;
  PERFORM 1 FROM fenced_guard.mark m, fenced_guard.trust t
  WHERE v_announced AND m.name = p_name AND (p_rule = 'retry' OR m.operation = pg_current_xact_id())
    AND p_lines ~ concat(E'\n', v_xid, ' 1:', t.realm, ':', m.token, ':[0-9-]+:', m.grant_id, ':')
  FOR SHARE OF m SKIP LOCKED;
  IF FOUND THEN
    RETURN true;
  END IF;
  SELECT * INTO v_mode FROM fenced_guard.mode_of(p_guard, p_name);
  RETURN (NOT v_mode.refuses AND strpos(p_lines, concat(E'\n', v_xid, '|', p_guard, '/', p_name, E'\n')) > 0)
    OR (NOT v_mode.requires AND strpos(p_lines, concat(E'\n', v_xid, '*', p_guard, E'\n')) > 0
      AND strpos(p_lines, E'\n' || v_xid || ' ') = 0);
END $$;

-- The decision, the same as `fenced.decision.judge`: the verdict, and whether the mark rises to this stamp.
CREATE FUNCTION fenced_guard.judge(
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
CREATE FUNCTION fenced_guard.beside_authority() RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  IF (SELECT nspowner FROM pg_namespace WHERE nspname = 'fenced')
     = (SELECT nspowner FROM pg_namespace WHERE nspname = 'fenced_guard') THEN
    RETURN to_regclass('fenced.namespace') IS NOT NULL AND to_regclass('fenced.token') IS NOT NULL;
  END IF;
  RETURN false;
END $$;

-- Whether a token may raise a mark. It must not be above the last token that the authority has minted, if the authority is
-- in this database. It must be signed, if proofs are required. It must not be more than `max_jump` above the highest mark.
CREATE FUNCTION fenced_guard.plausible(s fenced_guard.stamp, p_proof text) RETURNS boolean
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
CREATE FUNCTION fenced_guard.within_max_jump(p_token bigint, p_max bigint) RETURNS boolean
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

-- Verify a proof, `KEY:SIGNATURE`. `fenced.proofs` makes it: the hexadecimal signature covers the stamp without its seq.
CREATE FUNCTION fenced_guard.proven(s fenced_guard.stamp, p_proof text) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  k fenced_guard.key;
  v_parts text[] := regexp_match(p_proof, '^([A-Za-z0-9_-]{1,32}):([0-9a-f]{64}|[0-9a-f]{128})$');
  v_signature bytea := decode(v_parts[2], 'hex');
  v_signed bytea := convert_to(
    E'fenced proof 1\n' || regexp_replace(s.text, '^((?:[^:]*:){3})[^:]*', E'\\1-'), 'UTF8');
BEGIN
  SELECT * INTO k FROM fenced_guard.key WHERE id = v_parts[1] AND revoked IS NULL;
  IF k.kind = 'hmac' AND length(v_signature) = 32 THEN
    -- Compare MACs of both, so that the time of the comparison tells nothing about the right signature.
    RETURN fenced_guard.hmac_sha256(k.secret, fenced_guard.hmac_sha256(k.secret, v_signed))
      = fenced_guard.hmac_sha256(k.secret, v_signature);
  END IF;
  RETURN coalesce(k.kind = 'ed25519' AND length(v_signature) = 64
    AND fenced_guard.ed25519_verifies(k.secret, v_signed, v_signature), false);
END $$;

CREATE FUNCTION fenced_guard.hmac_sha256(p_key bytea, p_message bytea) RETURNS bytea
LANGUAGE plpgsql IMMUTABLE STRICT SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_key   bytea := CASE WHEN length(p_key) > 64 THEN sha256(p_key) ELSE p_key END;
  v_inner bytea := decode(repeat('36', 64), 'hex');
  v_outer bytea := decode(repeat('5c', 64), 'hex');
BEGIN
  FOR i IN 0 .. length(v_key) - 1 LOOP
    v_inner := set_byte(v_inner, i, get_byte(v_inner, i) # get_byte(v_key, i));
    v_outer := set_byte(v_outer, i, get_byte(v_outer, i) # get_byte(v_key, i));
  END LOOP;
  RETURN sha256(v_outer || sha256(v_inner || p_message));
END $$;

-- Modes and records.

-- The mode that counts for a name: that of the longest pattern that matches. For NULL, which means all rows (TRUNCATE), the
-- strictest mode of any pattern. While an override is in force nothing is refused, and bad stamps are recorded as under shadow.
CREATE FUNCTION fenced_guard.mode_of(p_guard text, p_name text, OUT mode text, OUT refuses boolean, OUT requires boolean)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_name text := coalesce(p_name, '');
  v_percent double precision;
BEGIN
  SELECT m.mode, m.percent INTO mode, v_percent FROM fenced_guard.mode m
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
  IF refuses AND EXISTS (
    SELECT 1 FROM fenced_guard.override o
    WHERE o.guard = p_guard AND v_name LIKE o.likes AND o.until > clock_timestamp()
  ) THEN
    mode := 'override';
    refuses := false;
    requires := false;
  END IF;
END $$;

-- The guard whose mode counts for a name when the caller gave none: the strictest guard whose template can make that name.
CREATE FUNCTION fenced_guard.guard_for(p_name text) RETURNS text
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
CREATE SEQUENCE fenced_guard.unrecorded;
CREATE FUNCTION fenced_guard.note(
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
CREATE FUNCTION fenced_guard.tidy(p_before bigint) RETURNS bigint
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

CREATE FUNCTION fenced_guard.sqlstate_of(p_verdict text) RETURNS text
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
  SELECT 'ZF0' || lpad(array_position(ARRAY[
    'stale', 'duplicate', 'out_of_order', 'reused', 'uncovered', 'foreign', 'missing', 'invalid', 'forged', 'applied',
    'contended', 'announce', 'lost', 'ended'
  ], p_verdict)::text, 2, '0')
$$;

-- Sign the detail of a refusal with this database's secret, so that `report` can tell that the refusal happened here.
CREATE FUNCTION fenced_guard.sealed(p_detail jsonb) RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
  SELECT encode(sha256(seal || sha256(convert_to(p_detail::text, 'UTF8'))), 'hex') FROM fenced_guard.trust
$$;

-- Say why `plausible` was false for this stamp.
CREATE FUNCTION fenced_guard.why_forged(s fenced_guard.stamp) RETURNS text
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
CREATE FUNCTION fenced_guard.sendable(p_text text) RETURNS text
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
CREATE FUNCTION fenced_guard.refuse(p_guard text, p_name text, p_stamp text, p_verdict text, p_mode text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  m fenced_guard.mark;
  v_token text := split_part(p_stamp, ':', 3);
  v_detail jsonb;
  v_says text;
BEGIN
  SELECT * INTO m FROM fenced_guard.mark WHERE name = p_name;
  v_detail := jsonb_build_object(
    'id', nextval('fenced_guard.record_id'), 'verdict', p_verdict, 'guard', p_guard, 'name', p_name, 'stamp', p_stamp, 'mark', m.token, 'holder', m.grant_id,
    'seq', m.seq, 'mode', p_mode, 'who', session_user, 'application', current_setting('application_name')
  );
  v_says := CASE p_verdict
    WHEN 'stale' THEN format('token %s is stale: %s has been seen', v_token,
      coalesce(m.token, (SELECT floor FROM fenced_guard.trust)))
    WHEN 'duplicate' THEN 'this grant has made its one operation (rule once)'
    WHEN 'out_of_order' THEN 'a later operation of the same lease was applied before (rule sequenced)'
    WHEN 'reused' THEN format('token %s was seen from another grant: the authority lost its history', v_token)
    WHEN 'uncovered' THEN CASE WHEN p_name = ANY ((fenced_guard.parse(p_stamp)).names)
      THEN format('covered by the lease (token %s), but not announced in this transaction; announce it too', v_token)
      ELSE format('not covered by the lease that was announced (token %s)', v_token) END
    WHEN 'foreign' THEN 'the stamp is of another authority than the one trusted here'
    WHEN 'missing' THEN 'the write carries no stamp'
    WHEN 'invalid' THEN 'not a stamp that this rule can use'
    WHEN 'forged' THEN fenced_guard.why_forged(fenced_guard.parse(p_stamp))
    WHEN 'applied' THEN 'this operation was applied before; nothing was done'
  END;
  IF p_verdict = 'forged' THEN
    v_detail := v_detail || jsonb_build_object('says', v_says);
  END IF;
  v_detail := v_detail || jsonb_build_object('seal', fenced_guard.sealed(v_detail));
  IF p_verdict <> 'applied' THEN
    PERFORM nextval((SELECT refused FROM fenced_guard.guard WHERE guard = p_guard)::regclass);
    PERFORM pg_logical_emit_message(false, 'fenced', v_detail::text);
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
CREATE FUNCTION fenced_guard.rule_on(p_guard text, p_name text, p_stamp text, p_verdict text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v record;
BEGIN
  SELECT * INTO v FROM fenced_guard.mode_of(p_guard, p_name);
  IF p_verdict = 'applied' OR (p_verdict = 'missing' AND v.requires) OR (p_verdict <> 'missing' AND v.refuses) THEN
    PERFORM fenced_guard.refuse(p_guard, nullif(p_name, ''), p_stamp, p_verdict, v.mode);
  END IF;
  PERFORM fenced_guard.note(p_guard, ARRAY[nullif(p_name, '')], p_stamp, p_verdict, CASE
    WHEN v.mode = 'observe' OR (p_verdict = 'missing' AND v.mode NOT IN ('shadow', 'override')) THEN 'count'
    ELSE 'record' END, v.mode);
END $$;

-- The same for many names. It applies the patterns one by one, the longest first, which is the order of `mode_of`.
CREATE FUNCTION fenced_guard.rule_on_all(p_guard text, p_names text[], p_stamp text, p_verdict text) RETURNS void
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

-- Announcing.

-- Raise ZF012: the caller must announce in a transaction of its own first.
CREATE FUNCTION fenced_guard.raise_announce_alone_first(p_name text) RETURNS void
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
--   alone     an announcement in a transaction of its own, which reads nothing
--   announce  an announcement; a write will follow
--   write     a write that is its own announcement
--   row       a write that was announced earlier. It never raises a mark to a new token: the transaction may have read rows
--             before it had the lock.
-- `p_without_waiting`: called by `admit_without_waiting`, which has limited every wait to 1 ms and has checked the isolation
-- level. Do not check it again, and do not lock turn rows.
CREATE FUNCTION fenced_guard.admit(
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
        IF NOT FOUND THEN  -- another has locked it. A stamp that may not raise the mark must not make others queue behind it.
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

-- Lock the turn rows of these grants, which makes `has_successor` true for them. It never waits: a row that another successor
-- has locked already has the same effect.
CREATE FUNCTION fenced_guard.lock_turn_rows(p_grants text[]) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  PERFORM 1 FROM fenced_guard.turn WHERE grant_id = ANY (p_grants) FOR UPDATE SKIP LOCKED;
END $$;

-- Whether the transaction in a row's xmax, the last one that locked the row, has ended. Turn rows are only locked FOR UPDATE,
-- so that xmax is always a single transaction and never a multixact.
CREATE FUNCTION fenced_guard.locker_has_ended(p_xmax xid) RETURNS boolean
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

-- Whether a successor waits for a name of this grant: it has locked the turn row and has not ended.
CREATE FUNCTION fenced_guard.has_successor(p_grant text) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  RETURN EXISTS (SELECT 1 FROM fenced_guard.turn t WHERE t.grant_id = p_grant AND NOT fenced_guard.locker_has_ended(t.xmax));
END $$;

-- Delete the lease rows of these grants, because one of their marks now belongs to another grant. It waits for every
-- transaction that shares such a row instead of locking its marks. No deadlock: every caller locks marks first, then lease
-- rows, sorted. A transaction that begins later sees `has_successor`, does not share the lease row, and queues at the marks.
CREATE FUNCTION fenced_guard.retire_lease_rows(p_grants text[]) RETURNS void
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
  ) AND NOT EXISTS (
    SELECT 1 FROM string_to_table(names, ',') AS n JOIN fenced_guard.mark m ON m.name = fenced_guard.decoded(n)
    WHERE m.grant_id = turn.grant_id
  );
END $$;

-- Whether this stamp would raise a mark at an isolation level above READ COMMITTED. There the snapshot may not see the lease
-- row that has to be retired, and at SERIALIZABLE the write could make the program's COMMIT fail.
CREATE FUNCTION fenced_guard.would_conflict(s fenced_guard.stamp, p_name text, p_rule text) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  RETURN current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') AND p_name = ANY (s.names)
    AND (p_rule = 'retry' OR s.seq > 0)  -- otherwise the stamp is invalid, and raises nothing
    AND NOT EXISTS (SELECT 1 FROM fenced_guard.mark WHERE name = p_name AND token >= s.token)
    AND NOT EXISTS (SELECT 1 FROM fenced_guard.trust WHERE realm <> s.realm);
END $$;

-- `admit` for modes in which the guard must not delay or fail a program: observe, shadow, and the names outside a canary.
-- It returns `contended` where `admit` would wait for more than 1 ms or fail.
CREATE FUNCTION fenced_guard.admit_without_waiting(
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
CREATE FUNCTION fenced_guard.milliseconds(p_setting text) RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  RETURN extract(epoch FROM current_setting(p_setting)::interval) * 1000;
END $$;

-- Make the server end this transaction when the program leaves it idle for `p_left` milliseconds. A shorter limit of the
-- program's own stays. No limit is set where the mode refuses nothing.
CREATE FUNCTION fenced_guard.limit_idling(p_left bigint, p_guard text, p_names text[]) RETURNS void
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

-- Successors: how they find and end older transactions.

-- Every announcing transaction takes advisory locks, so that a successor can find it in pg_locks (`in_the_way`): one for its
-- grant, and two for each name whose mark it raises. The two hold the token, which other transactions cannot read from the
-- mark before COMMIT. All are shared and tried, so no transaction ever waits for one. No decision depends on them.
CREATE FUNCTION fenced_guard.list_in_pg_locks(p_name text, p_token bigint) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  PERFORM pg_try_advisory_xact_lock_shared(hashtext(p_name), (p_token >> 31)::integer),
    pg_try_advisory_xact_lock_shared(hashtext('/' || p_name), (p_token & 2147483647)::integer);
END $$;

-- The transactions of older tokens that keep an announcement of this stamp waiting. `may_end`: the guard's owner has the right
-- to end the transaction, and `p_waited` milliseconds are at least the guard's `patience`.
CREATE FUNCTION fenced_guard.in_the_way(p_stamp text, p_names text DEFAULT NULL, p_waited bigint DEFAULT NULL)
RETURNS TABLE (pid integer, name text, token bigint, who text, may_end boolean)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
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

-- End the transactions that are in the way and may be ended. Their lease is over: the authority gave a newer token for one of
-- its names. Only a stamp that may raise the mark can do this. Each one ended is written into the history.
CREATE FUNCTION fenced_guard.make_way(p_stamp text, p_names text, p_waited bigint, p_proof text DEFAULT NULL) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  s fenced_guard.stamp := fenced_guard.parse(p_stamp);
  o record;
BEGIN
  IF s.realm = (SELECT coalesce(realm, s.realm) FROM fenced_guard.trust) AND fenced_guard.plausible(s, p_proof) THEN
    FOR o IN SELECT DISTINCT ON (w.pid) w.* FROM fenced_guard.in_the_way(p_stamp, p_names, p_waited) AS w WHERE w.may_end LOOP
      IF pg_terminate_backend(o.pid) THEN
        INSERT INTO fenced_guard.history (what, detail) VALUES ('ended', jsonb_build_object(
          'name', o.name, 'token', o.token, 'who', o.who, 'for', s.token));
      END IF;
    END LOOP;
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
CREATE FUNCTION fenced_guard.announce(
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
     AND current_setting('transaction_isolation') = 'read committed' THEN
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
      FROM fenced_guard.lease l, fenced_guard.turn t
      WHERE l.grant_id = split_part(p_stamps, ':', 5) AND split_part(p_stamps, ':', 4) ~ '^(-|0|[1-9][0-9]{0,15})$'
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

-- Raise the marks in a transaction of their own. Reads that begin after its COMMIT are fenced.
CREATE FUNCTION fenced_guard.announce_alone(
  p_stamps text, p_guard text DEFAULT NULL, p_names text DEFAULT NULL, p_proofs text DEFAULT NULL
) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  PERFORM fenced_guard.announce_general(p_stamps, NULL, p_guard, p_names, false, false, p_proofs, true, false);
END $$;

-- The short way for a stale stamp with one plain name, if the guard has a single mode, observe or shadow: record it and let the
-- transaction through. Returns false, and does nothing, in every other case. It needs no lock, because a mark above the stamp
-- only rises. It need not check the name further: a name that has a mark is valid.
CREATE FUNCTION fenced_guard.let_stale_through(p_stamp text, p_guard text) RETURNS boolean
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
CREATE FUNCTION fenced_guard.announce_general(
  p_stamps text, p_left bigint, p_guard text, p_names text, p_exclusive boolean, p_still_held boolean, p_proofs text,
  p_alone boolean, p_repeats boolean
) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_texts text[] := string_to_array(coalesce(p_stamps, ''), ' ');
  v_rule  text;
  v_step  text;
BEGIN
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
      v_texts, p_guard, v_rule, v_step, string_to_array(p_names, ','), p_still_held, string_to_array(p_proofs, ' '),
      p_repeats);
  END IF;
  IF p_left IS NOT NULL THEN
    PERFORM fenced_guard.limit_idling(p_left, p_guard, string_to_array(coalesce(p_names,
      (SELECT string_agg(split_part(text, ':', 6), ',') FROM unnest(v_texts) AS text)), ','));
  END IF;
END $$;

-- Announce several leases by sharing their lease rows. Returns false, with all locks released, unless every stamp has one.
CREATE FUNCTION fenced_guard.announce_by_lease_rows(p_texts text[], p_alone boolean) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_xid    text := pg_current_xact_id();
  v_count  bigint;
BEGIN
  BEGIN
    SELECT count(*) INTO v_count FROM (
      SELECT 1 FROM unnest(p_texts) AS wanted, fenced_guard.lease l
      WHERE l.grant_id = split_part(wanted, ':', 5) AND split_part(wanted, ':', 4) ~ '^(-|0|[1-9][0-9]{0,15})$'
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
CREATE FUNCTION fenced_guard.all_marks_are_ours(s fenced_guard.stamp) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  RETURN NOT EXISTS (
    SELECT 1 FROM unnest(s.names) AS n LEFT JOIN fenced_guard.mark m ON m.name = n
    WHERE m.grant_id IS DISTINCT FROM s.grant_id OR m.token <> s.token
  );
END $$;

-- Fail if the guarded table has lost its triggers, which happens when a tool rebuilds a table under the old name, or if another
-- table inherits from it without triggers. The first announcement of a lease checks this, where the mode refuses.
CREATE FUNCTION fenced_guard.refuse_unguarded_table(p_guard text) RETURNS void
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
CREATE FUNCTION fenced_guard.announce_each(
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
    -- Only if all names of the lease were admitted: a row's epoch tells the lease of its last write, but not the name.
    PERFORM fenced_guard.carry_tokens(ARRAY(
      SELECT p_texts[i] FROM generate_subscripts(v_stamps, 1) AS i
      WHERE v_counts[i] = cardinality(v_stamps[i].names) AND fenced_guard.all_marks_are_ours(v_stamps[i])));
  END IF;
END $$;

-- Fail unless the authority in this database says that the lease is still held. It does not lock the attempt: a lock would
-- block renewals. That is safe, because a successor that is granted the name later must wait for our lock on its mark.
CREATE FUNCTION fenced_guard.still_held(s fenced_guard.stamp) RETURNS void
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

-- Writing.

-- Decide about a name that a statement wrote to. `p_name` NULL means all rows (TRUNCATE).
CREATE FUNCTION fenced_guard.decide(p_guard text, p_name text) RETURNS void
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
    ELSIF (v_rule = 'retry' AND fenced_guard.carries_mark(p_name))
      OR strpos(v_lines, concat(E'\n', v_xid, '|', p_guard, '/', p_name, E'\n')) > 0
      OR (v_rule = 'retry' AND strpos(v_lines, concat(E'\n', v_xid, '/', p_name, E'\n')) > 0)
      OR (strpos(v_lines, concat(E'\n', v_xid, '*', p_guard, E'\n')) > 0 AND strpos(v_lines, E'\n' || v_xid || ' ') = 0) THEN
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
        SELECT * INTO v_mode FROM fenced_guard.mode_of(p_guard, p_name);
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
CREATE FUNCTION fenced_guard.carry_let_through(p_guard text, p_names text[], p_verdict text) RETURNS void
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
CREATE FUNCTION fenced_guard.covered(p_lines text, p_xid text) RETURNS TABLE (name text, stamp text, place bigint, whole boolean)
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
CREATE FUNCTION fenced_guard.decide_all(p_guard text, p_names text[]) RETURNS void
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
CREATE FUNCTION fenced_guard.admit_with_short_wait(s fenced_guard.stamp, p_name text, p_rule text, p_refuses boolean) RETURNS text
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_before text := current_setting('lock_timeout');
  v_verdict text;
BEGIN
  IF NOT p_refuses THEN
    RETURN fenced_guard.admit_without_waiting(s, p_name, p_rule, 'write', NULL);
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
CREATE FUNCTION fenced_guard.token_for(p_name text) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  IF NOT fenced_guard.carries_mark(p_name)
     AND strpos(fenced_guard.carried(), concat(E'\n', pg_current_xact_id(), '/', p_name, E'\n')) = 0 THEN
    RETURN NULL;
  END IF;
  RETURN (SELECT token FROM fenced_guard.mark WHERE name = p_name);
END $$;

-- Called before COMMIT on connections that begin transactions implicitly: fail unless this is the announced transaction.
CREATE FUNCTION fenced_guard.still_stamped() RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  IF (strpos(current_setting('fenced.stamp', true), concat(E'\n', pg_current_xact_id_if_assigned(), ' ')) > 0) IS NOT TRUE THEN
    RAISE EXCEPTION USING ERRCODE = fenced_guard.sqlstate_of('ended'),
      MESSAGE = 'fenced: the transaction was ended inside the guarded block, and another one began';
  END IF;
END $$;

-- The mark of a name, for every role.
CREATE FUNCTION fenced_guard.peek(p_name text, OUT token bigint, OUT grant_id text, OUT seq bigint)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  SELECT m.token, m.grant_id, m.seq INTO token, grant_id, seq FROM fenced_guard.mark m WHERE m.name = p_name;
END $$;

-- Record a refusal. The writer calls this after the refused transaction was rolled back, because a record made inside it would
-- be lost. The seal proves that this database refused it, and the id lets each refusal be recorded once.
CREATE FUNCTION fenced_guard.report(p_detail text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  d jsonb := p_detail::jsonb;
  v_id bigint := (d ->> 'id')::bigint;
BEGIN
  IF (d ->> 'seal' = fenced_guard.sealed(d - 'seal')) IS NOT TRUE THEN
    RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege', MESSAGE = 'fenced: this detail is not a refusal of this database';
  END IF;
  INSERT INTO fenced_guard.record (id, guard, name, stamp, token, grant_id, seq, verdict, ruling, mode, who, application)
  SELECT v_id, d ->> 'guard', left(d ->> 'name', 200), left(d ->> 'stamp', 1000), (d ->> 'mark')::bigint,
    d ->> 'holder', (d ->> 'seq')::bigint, d ->> 'verdict', 'refuse', d ->> 'mode', d ->> 'who', d ->> 'application'
  WHERE d ->> 'guard' IS NOT NULL AND v_id > (SELECT last_value FROM fenced_guard.record_id) - 10000
  ON CONFLICT (id) DO NOTHING;
  IF v_id % 1000 = 0 THEN
    PERFORM fenced_guard.tidy(v_id - 10000);
  END IF;
END $$;

-- Operators' functions. Each writes a line into the history.

-- A name pattern as a LIKE pattern.
CREATE FUNCTION fenced_guard.likes(p_pattern text) RETURNS text
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
  SELECT replace(replace(replace(replace(p_pattern, E'\\', E'\\\\'), '%', E'\\%'), '_', E'\\_'), '*', '%')
$$;

-- Remember when a mode changed: older transactions may not be bound by the new mode (`pending`).
CREATE FUNCTION fenced_guard.note_mode_change(p_guard text) RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
  UPDATE fenced_guard.guard SET changed = pg_current_xact_id(), changed_at = clock_timestamp() WHERE guard = p_guard
$$;

-- The transactions that began before the last change of a guard's modes and may still commit a write that the new mode refuses:
-- they wrote before the change, were let through before it, or read from an older snapshot. A transaction that started less than
-- a minute after the change counts if its snapshot may be older. Transactions that were let through by an override count after the
-- override has expired. `known` false: the role that asks may not see the state of this transaction, so it may be harmless.
CREATE FUNCTION fenced_guard.pending(p_guard text) RETURNS TABLE (who text, transaction text, known boolean)
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

CREATE FUNCTION fenced_guard.set_mode(p_guard text, p_mode text, p_pattern text DEFAULT '*') RETURNS void
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
CREATE FUNCTION fenced_guard.unset_mode(p_guard text, p_pattern text) RETURNS boolean
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

CREATE FUNCTION fenced_guard.override_for(p_guard text, p_span interval, p_why text, p_pattern text DEFAULT '*')
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

CREATE FUNCTION fenced_guard.end_overrides(p_guard text, p_pattern text DEFAULT NULL) RETURNS bigint
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
CREATE FUNCTION fenced_guard.reset(p_name text, p_why text) RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  m fenced_guard.mark;
BEGIN
  IF coalesce(btrim(p_why), '') = '' THEN
    RAISE EXCEPTION 'fenced: a reset needs a reason';
  END IF;
  PERFORM fenced_guard.lock_turn_rows(ARRAY(SELECT grant_id FROM fenced_guard.mark WHERE name = p_name));
  DELETE FROM fenced_guard.mark WHERE name = p_name RETURNING * INTO m;
  PERFORM fenced_guard.retire_lease_rows(ARRAY[m.grant_id]);
  IF m.name IS NOT NULL THEN
    PERFORM setval('fenced_guard.highest', 1, false);
    INSERT INTO fenced_guard.history (what, detail) VALUES ('reset', jsonb_build_object(
      'name', p_name, 'token', m.token, 'grant', m.grant_id, 'why', p_why));
  END IF;
  RETURN m.token;
END $$;

-- Delete marks below a token and raise the floor to it, so that the floor refuses every stamp that those marks refused. It
-- deletes at most `p_limit` marks, and none that a transaction has locked, directly or by its lease row. Returns how many.
CREATE FUNCTION fenced_guard.drop_marks(p_realm text, p_below bigint, p_limit bigint) RETURNS bigint
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
CREATE FUNCTION fenced_guard.adopt(p_realm text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_before text;
BEGIN
  -- `admit` holds ROW SHARE until COMMIT. This lock waits for those transactions, and later ones queue behind it.
  LOCK TABLE fenced_guard.trust IN EXCLUSIVE MODE;
  SELECT realm INTO v_before FROM fenced_guard.trust;
  UPDATE fenced_guard.trust SET realm = p_realm;
  PERFORM fenced_guard.lock_turn_rows(ARRAY(SELECT grant_id FROM fenced_guard.lease WHERE realm <> p_realm));
  DELETE FROM fenced_guard.lease WHERE realm <> p_realm;
  INSERT INTO fenced_guard.history (what, detail)
  VALUES ('adopt', jsonb_build_object('before', v_before, 'after', p_realm));
END $$;

-- Change max_jump, sample or patience: the ones that `p_change` has.
CREATE FUNCTION fenced_guard.set_trust(p_change jsonb) RETURNS void
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

-- How many decisions could not be recorded since the last `tidy_up`.
CREATE FUNCTION fenced_guard.unrecorded() RETURNS bigint
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
  SELECT coalesce(pg_sequence_last_value('fenced_guard.unrecorded'), 0)
    - coalesce((SELECT sum((detail ->> 'count')::bigint) FROM fenced_guard.history WHERE what = 'unrecorded'), 0)::bigint
$$;

-- Add up all but the newest `p_keep` records, delete turn rows without marks and expired overrides, and write the number of
-- unrecorded decisions into the history.
CREATE FUNCTION fenced_guard.tidy_up(p_keep bigint, OUT summed bigint, OUT overrides bigint, OUT unrecorded bigint)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  PERFORM 1 FROM fenced_guard.trust FOR UPDATE;  -- one at a time
  summed := fenced_guard.tidy((SELECT id FROM fenced_guard.record ORDER BY id DESC OFFSET p_keep LIMIT 1));
  DELETE FROM fenced_guard.turn t WHERE NOT EXISTS (SELECT 1 FROM fenced_guard.mark m WHERE m.grant_id = t.grant_id)
    AND grant_id IN (SELECT grant_id FROM fenced_guard.turn FOR UPDATE SKIP LOCKED);
  DELETE FROM fenced_guard.override WHERE until < clock_timestamp();
  GET DIAGNOSTICS overrides = ROW_COUNT;
  unrecorded := fenced_guard.unrecorded();
  INSERT INTO fenced_guard.history (what, detail)
  SELECT 'unrecorded', jsonb_build_object('count', tidy_up.unrecorded) WHERE tidy_up.unrecorded > 0;
END $$;

-- Let a key sign stamps. An id is never reused. Old and new keys are both valid until one is revoked.
CREATE FUNCTION fenced_guard.add_key(p_id text, p_kind text, p_secret bytea) RETURNS void
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
CREATE FUNCTION fenced_guard.revoke_key(p_id text) RETURNS void
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
CREATE FUNCTION fenced_guard.require_proofs(p_required boolean) RETURNS void
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

-- Writers may call these functions; all others are for the owner.
REVOKE ALL ON ALL FUNCTIONS IN SCHEMA fenced_guard FROM PUBLIC;
GRANT USAGE ON SCHEMA fenced_guard TO PUBLIC;
GRANT EXECUTE ON FUNCTION fenced_guard.version(), fenced_guard.announce(text, bigint, text, text, boolean, boolean, text, boolean),
  fenced_guard.announce_alone(text, text, text, text), fenced_guard.decide(text, text),
  fenced_guard.still_stamped(), fenced_guard.peek(text), fenced_guard.report(text),
  fenced_guard.in_the_way(text, text, bigint), fenced_guard.make_way(text, text, bigint, text) TO PUBLIC;
