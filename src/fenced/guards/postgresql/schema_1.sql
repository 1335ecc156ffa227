-- Schema 1 of the PostgreSQL guard. Runs once in a database, by whoever may create a schema there; afterwards USAGE
-- on schema fenced_guard is all that a writer needs, since announce and the triggers run as their owner.
--
-- The stamps of a transaction travel in the setting `fenced.stamp`, local to it. Only `announce` puts them there,
-- once it has locked their fences, and every line begins with the transaction's id: what is left from another
-- transaction means nothing. The lines:
--
--   XID/NAME         the stamp is admitted for NAME, and its fence is locked until this transaction ends
--   XID|GUARD/NAME   GUARD has decided about NAME: a write under rule once or sequenced, or let through and noted
--   XID*GUARD        GUARD lets rows without a stamp through; noted
--   XID STAMP        a stamp, as it was announced; `?` for what was no stamp
--
-- and in the settings `fenced.token0` to `15`, by the token, which stay short however many names there are:
--
--   XID@TOKEN        a token that was admitted for all names of its lease, for rows that carry it in their epoch column
--   XID#GRANT        and its grant, for names that carry its mark
--
-- A statement's trigger looks for the line of the one name that the statement wrote to. Everything else goes through
-- `decide`, many names at once through `decide_all`. What is called in every transaction is one statement where possible,
-- as plpgsql sets every further expression up anew in each transaction.
--
-- A text with a backslash is written E'', which means the same whatever `standard_conforming_strings` says.

CREATE SCHEMA fenced_guard;

CREATE FUNCTION fenced_guard.version() RETURNS integer LANGUAGE sql AS 'SELECT 1';

-- What the guards of this database trust, in one row.
CREATE TABLE fenced_guard.trust (
  one       boolean PRIMARY KEY DEFAULT true CHECK (one),
  realm     text,                                    -- the one authority whose stamps count; NULL: the first that comes
  floor     bigint NOT NULL DEFAULT 0,               -- tokens below it are stale, also for names without a mark
  max_jump  bigint,                                  -- how far above a mark a token may be; NULL: as far as it likes
  sample    double precision NOT NULL DEFAULT 0,     -- the share of admitted operations that is recorded
  proof     boolean NOT NULL DEFAULT false,          -- whether a mark rises by a signed stamp alone
  patience  double precision NOT NULL DEFAULT 5,     -- for how many seconds a successor waits for an older transaction
  seal      bytea NOT NULL DEFAULT sha256(convert_to(concat(gen_random_uuid(), gen_random_uuid()), 'UTF8'))
                                                     -- a secret: what was refused here can be told from what was not
);
INSERT INTO fenced_guard.trust DEFAULT VALUES;

-- The highest token that was admitted under any name, kept only where `max_jump` is set; not called: look it up.
CREATE SEQUENCE fenced_guard.highest;

-- Who may sign stamps. HMAC-SHA256 or Ed25519; both kinds may be there, and old keys beside new ones.
CREATE TABLE fenced_guard.key (
  id      text COLLATE "C" PRIMARY KEY,
  kind    text NOT NULL CHECK (kind IN ('hmac', 'ed25519')),
  secret  bytea NOT NULL,                            -- of ed25519 the public key
  added   timestamptz NOT NULL DEFAULT clock_timestamp(),
  revoked timestamptz
);

-- The highest stamp admitted for each name: the fence. Falls by `reset` alone, which is written down.
CREATE TABLE fenced_guard.mark (
  name      text COLLATE "C" PRIMARY KEY,
  token     bigint NOT NULL,
  grant_id  text COLLATE "C" NOT NULL,
  seq       bigint NOT NULL,
  operation xid8                                     -- the transaction that wrote, for its further statements
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02);

-- Leases whose names all carry their mark, as long as they do: who shares the lock of this one row has locked all of
-- its fences. Whoever raises one of those marks deletes it, and so waits for those who share it.
CREATE TABLE fenced_guard.lease (
  grant_id text COLLATE "C" PRIMARY KEY,
  token    bigint NOT NULL,
  realm    text COLLATE "C" NOT NULL,                -- the one that is trusted
  names    text COLLATE "C" NOT NULL,                -- as in the stamp
  sample   double precision NOT NULL                 -- as in `trust`
) WITH (autovacuum_vacuum_scale_factor = 0.02);

-- Whose names somebody is about to take: a row for each grant that has marks. Whoever takes a name from a grant locks its
-- row here before anything else, and until it ends; nobody else ever locks one. The lock is seen by whoever reads the row
-- (`wanted`), and takes nothing. Locks that are shared are shared by whoever comes, also while somebody waits for them:
-- without this, transactions of an old holder that overlap would keep its successor out for ever.
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
  refused   text NOT NULL,                           -- a sequence: counts refusals, which roll back all else
  changed   xid8 NOT NULL DEFAULT pg_current_xact_id(),  -- who last changed its modes, or ended an override
  changed_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- The stage of the rollout, by guard and name pattern; the longest pattern counts.
CREATE TABLE fenced_guard.mode (
  guard   text COLLATE "C" NOT NULL,
  pattern text COLLATE "C" NOT NULL,
  likes   text COLLATE "C" NOT NULL,                 -- the pattern for LIKE
  mode    text NOT NULL,
  percent double precision NOT NULL DEFAULT 0,
  since   timestamptz NOT NULL DEFAULT clock_timestamp(),
  PRIMARY KEY (guard, pattern)
);

-- Emergencies: until then, names that match are let through and recorded, whatever the mode says.
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

-- The audit. Only ever inserted into, so that no writer waits for another's count; the newest 10,000 are kept one by
-- one, older ones as sums in `tally`.
CREATE SEQUENCE fenced_guard.record_id;
CREATE TABLE fenced_guard.record (
  id          bigint PRIMARY KEY DEFAULT nextval('fenced_guard.record_id'),
  at          timestamptz NOT NULL DEFAULT clock_timestamp(),
  guard       text COLLATE "C" NOT NULL,
  name        text COLLATE "C",
  stamp       text COLLATE "C",
  token       bigint,                                -- the mark as it was
  grant_id    text COLLATE "C",
  seq         bigint,
  verdict     text NOT NULL,
  ruling      text NOT NULL,                         -- refuse, record, count; admit for a sample
  mode        text NOT NULL,
  count       bigint NOT NULL DEFAULT 1,             -- how many names of one statement this line stands for
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
  value   text,
  version bigint NOT NULL
);

-- Stamps.

CREATE TYPE fenced_guard.stamp AS (text text, realm text, token bigint, seq bigint, grant_id text, names text[]);

-- A name out of a stamp: percent-encoded bytes of UTF-8.
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

-- The one canonical text form; NULL for anything else.
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

-- No name holds a line's end; what does must not look like several lines of the setting.
CREATE FUNCTION fenced_guard.one_line(p_name text) RETURNS text
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$ SELECT replace(p_name, E'\n', E'\r') $$;

-- What the setting holds for this transaction, and nothing of another one's. Begins and ends with a line's end.
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

-- Put lines into the setting.
CREATE FUNCTION fenced_guard.carry(p_lines text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  PERFORM set_config('fenced.stamp', fenced_guard.carried() || p_lines, true);
END $$;

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

-- Whether this name's mark is of a grant that is carried for its whole lease.
CREATE FUNCTION fenced_guard.carries_mark(p_name text) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  RETURN EXISTS (
    SELECT 1 FROM fenced_guard.mark m WHERE m.name = p_name
      AND strpos(current_setting(concat('fenced.token', m.token % 16), true),
        concat(E'\n', pg_current_xact_id(), '#', m.grant_id, E'\n')) > 0
  );
END $$;

-- Whether this transaction has announced a name, admitted or not. Another name of the same lease is not enough: what the
-- transaction read under it before was not fenced, and a late holder may have written since.
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

-- Whether a row may pass where callers are not trusted: anybody can write the setting, so what it says is looked up. The
-- name's mark must be that of a stamp which is carried, and is locked, alone or with its lease, unless it is already; and
-- the name must have been announced.
-- Lines that only say what has been noted are believed of rows that are not refused anyway.
-- (A seal over the lines would not do: they could be put back after ROLLBACK TO SAVEPOINT has undone what they say.)
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

-- The decision, as `fenced.decision.judge` makes it: what the operation is, and the mark that then stands, if it rises.
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
    verdict := 'invalid';  -- a write needs a seq of its own; 0 and none announce
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

-- Whether the authority's own tables are in this database, of the same owner: what others call `fenced` is not read.
CREATE FUNCTION fenced_guard.beside_authority() RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  IF (SELECT nspowner FROM pg_namespace WHERE nspname = 'fenced')
     = (SELECT nspowner FROM pg_namespace WHERE nspname = 'fenced_guard') THEN
    RETURN to_regclass('fenced.namespace') IS NOT NULL AND to_regclass('fenced.token') IS NOT NULL;
  END IF;
  RETURN false;
END $$;

-- Whether a token that would raise a mark can be one: not above what the authority has minted, if that is in this
-- database; not further above the highest mark of all names than allowed; signed, if proofs are required.
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
  RETURN t.max_jump IS NULL OR fenced_guard.jumps(s.token, t.max_jump);
END $$;

-- Tokens are one stream for all names, so a name that was idle may jump far above its own mark. The highest mark is
-- looked up when the one that is remembered does not do; without any mark there is nothing to compare with.
CREATE FUNCTION fenced_guard.jumps(p_token bigint, p_max bigint) RETURNS boolean
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

-- A proof is `KEY:SIGNATURE` in hexadecimal, over the stamp without its seq, as `fenced.proofs` makes it.
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
    -- Compared through a MAC of both, so that the time it takes says nothing about the right one.
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

-- What the stage of the rollout says about a name; about all rows at once, which is NULL, what the strictest stage of
-- any name says. An override lets through, and is recorded like shadow.
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

-- The guard whose mode counts for a name where none is given: the strictest of those whose template can make it.
CREATE FUNCTION fenced_guard.guard_for(p_name text) RETURNS text
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  RETURN (
    SELECT g.guard FROM fenced_guard.guard g CROSS JOIN LATERAL fenced_guard.mode_of(g.guard, p_name) AS m
    WHERE p_name LIKE regexp_replace(fenced_guard.likes(g.template), E'\\{[^{}]*\\}', '%', 'g')
    ORDER BY m.requires DESC, m.refuses DESC, g.guard LIMIT 1
  );
END $$;

-- Write decisions of one statement down, without ever failing or waiting: what cannot be recorded is counted at least.
-- However many names there are, at most ten lines are written, without a stamp one; the last one counts the rest.
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

-- Add up old records. One at a time; whoever comes second leaves it to the first.
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

-- What only this database can have said: without the secret nobody makes it up.
CREATE FUNCTION fenced_guard.sealed(p_detail jsonb) RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
  SELECT encode(sha256(seal || sha256(convert_to(p_detail::text, 'UTF8'))), 'hex') FROM fenced_guard.trust
$$;

-- Why a token that would raise a mark was not believed, as `plausible` finds it.
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

-- What every client can be sent: where its encoding cannot carry a character, the server would send an error about that
-- instead. As JSON writes them, which also reads well in a message.
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

-- Refuse. The count survives the roll-back that follows, and so does the message in the write-ahead log.
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

-- What is done about a verdict that is not `admit`: refuse, or write down that it was not done.
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

-- The same about many names at once, pattern by pattern, the longest first, as `mode_of` does it for one.
CREATE FUNCTION fenced_guard.rule_on_all(p_guard text, p_names text[], p_stamp text, p_verdict text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  m          record;
  v_left     text[] := p_names;
  v_match    text[];
  v_refusing text[];                     -- names under a stage that refuses bad stamps
  v_lifted   text[];                     -- and those of them that an override lets through
BEGIN
  IF p_verdict = 'applied' THEN
    PERFORM fenced_guard.rule_on(p_guard, p_names[1], p_stamp, p_verdict);
  END IF;
  FOR m IN
    (SELECT mode, percent, likes FROM fenced_guard.mode WHERE guard = p_guard ORDER BY length(pattern) DESC, pattern DESC)
    UNION ALL SELECT 'observe', 0, '%'   -- where no pattern matches
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

CREATE FUNCTION fenced_guard.announce_first(p_name text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  RAISE EXCEPTION USING ERRCODE = fenced_guard.sqlstate_of('announce'), MESSAGE = format(
    'fenced: %s: at %s a new token is announced and committed on its own, before the transaction begins',
    fenced_guard.sendable(p_name), current_setting('transaction_isolation'));
END $$;

-- Decide about one name: lock its fence, judge, raise the mark. `replaced` is the grant whose mark it was: its lease has
-- to be unmade.
--
-- `p_step`: `alone`, in a transaction that ends with it and reads nothing; `announce`, a write will follow; `write`; `row`,
-- a write whose announcement came before: it raises no mark to a new token, since it may rest on what was read before.
-- `p_gently`: whatever the isolation is.
CREATE FUNCTION fenced_guard.admit(
  s fenced_guard.stamp, p_name text, p_rule text, p_step text, p_proof text, p_gently boolean DEFAULT false,
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
      verdict := CASE WHEN m.grant_id = s.grant_id THEN 'admit' ELSE 'reused' END;  -- locked with its whole lease
      RETURN;
    ELSIF m.token = s.token AND p_rule = 'retry' AND (
      NOT fenced_guard.wanted(m.grant_id) OR fenced_guard.announced(p_name, fenced_guard.carried())  -- locked already
    ) THEN
      SELECT * INTO m FROM fenced_guard.mark WHERE name = p_name FOR SHARE;
    ELSIF m.token <= s.token THEN  -- a mark above it stays above it, locked or not
      v_waits := true;
      IF m.token < s.token AND NOT p_gently THEN
        PERFORM fenced_guard.list_rise(p_name, s.token);
        PERFORM 1 FROM fenced_guard.mark WHERE name = p_name FOR NO KEY UPDATE SKIP LOCKED;
        IF NOT FOUND THEN  -- somebody is there. What raises nothing keeps nobody waiting behind it.
          v_waits := fenced_guard.plausible(s, p_proof);
          PERFORM fenced_guard.take_turn(ARRAY[m.grant_id]) WHERE v_waits;
        END IF;
      END IF;
      IF v_waits THEN
        SELECT * INTO m FROM fenced_guard.mark WHERE name = p_name FOR NO KEY UPDATE;  -- one after the other, in a queue
      END IF;
    END IF;
    IF m.name IS NULL AND s.token < (SELECT floor FROM fenced_guard.trust) THEN
      verdict := 'stale';  -- looked up after the mark: who sees that it was dropped sees the floor
      RETURN;
    END IF;
    SELECT * INTO v FROM fenced_guard.judge(m, s, p_rule, p_step NOT IN ('write', 'row'), v_operation);
    IF v.verdict = 'admit' AND p_step = 'announce' AND p_rule <> 'retry' AND coalesce(s.seq, 0) = 0 THEN
      verdict := 'invalid';  -- as the write that follows would be
      RETURN;
    ELSIF NOT v.rises THEN
      verdict := v.verdict;
      RETURN;
    ELSIF (m.token IS NULL OR m.token < s.token) AND p_step NOT IN ('alone', 'row') AND NOT p_gently
      AND current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
      -- This transaction's snapshot is older than the lock: it may not see what the last holder wrote.
      PERFORM fenced_guard.announce_first(p_name);
    ELSIF (m.token IS NULL OR m.token < s.token) AND NOT fenced_guard.plausible(s, p_proof) THEN
      verdict := 'forged';
      RETURN;
    ELSIF (m.token IS NULL OR m.token < s.token) AND p_step = 'row' THEN
      verdict := 'contended';
      RETURN;
    END IF;
    -- A mark rises under the authority that is trusted when it does, until COMMIT: `adopt` waits for this lock, and
    -- whoever comes after it for `adopt`. Which realm is trusted may have changed while the fence was waited for.
    LOCK TABLE fenced_guard.trust IN ROW SHARE MODE;
    SELECT realm INTO v_realm FROM fenced_guard.trust;
    IF s.realm <> v_realm THEN
      verdict := 'foreign';
      RETURN;
    ELSIF v_realm IS NULL THEN
      UPDATE fenced_guard.trust SET realm = s.realm WHERE realm IS NULL;
      IF NOT FOUND THEN
        SELECT * INTO verdict, replaced FROM fenced_guard.admit(s, p_name, p_rule, p_step, p_proof, p_gently);
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
    PERFORM fenced_guard.list_rise(p_name, s.token);
    INSERT INTO fenced_guard.mark (name, token, grant_id, seq, operation)
    VALUES (p_name, s.token, s.grant_id, v_seq, v_operation)
    ON CONFLICT (name) DO NOTHING;
    verdict := CASE WHEN FOUND THEN 'admit' END;
  END LOOP;
END $$;

-- Say that names of these grants are about to be taken. It never waits: where somebody else says so, that is enough.
CREATE FUNCTION fenced_guard.take_turn(p_grants text[]) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  PERFORM 1 FROM fenced_guard.turn WHERE grant_id = ANY (p_grants) FOR UPDATE SKIP LOCKED;
END $$;

-- Whether the transaction that locked a row, which its xmax tells, is over. Such a row has had one locker at a time.
CREATE FUNCTION fenced_guard.is_over(p_xmax xid) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_next bigint := pg_snapshot_xmax(pg_current_snapshot())::text::bigint;
  v_near bigint := p_xmax::text::bigint - v_next % 4294967296 + 2147483648;  -- how far from it, in 32 bits
BEGIN
  IF p_xmax = '0' THEN
    RETURN true;
  END IF;
  v_near := v_next + (v_near + 4294967296) % 4294967296 - 2147483648;
  RETURN v_near < 3 OR pg_xact_status(v_near::text::xid8) IS DISTINCT FROM 'in progress';
EXCEPTION WHEN invalid_parameter_value THEN
  RETURN false;  -- younger than the server can say: it has just begun
END $$;

-- Whether somebody is about to take a name from this grant.
CREATE FUNCTION fenced_guard.wanted(p_grant text) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  RETURN EXISTS (SELECT 1 FROM fenced_guard.turn t WHERE t.grant_id = p_grant AND NOT fenced_guard.is_over(t.xmax));
END $$;

-- Wait for those who share a lease's one row instead of locking its marks, and end that. Sorted, after the marks. Whoever
-- comes from now on finds the grant wanted, shares the row no more, and queues at the marks.
CREATE FUNCTION fenced_guard.unmake_leases(p_grants text[]) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  IF cardinality(array_remove(p_grants, NULL)) > 0
     AND current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
    RAISE EXCEPTION USING ERRCODE = fenced_guard.sqlstate_of('announce'),
      MESSAGE = 'fenced: a mark changes hands at READ COMMITTED alone: an older snapshot may not see whose it was';
  END IF;
  PERFORM fenced_guard.take_turn(p_grants);
  PERFORM 1 FROM fenced_guard.lease WHERE grant_id = ANY (p_grants) ORDER BY grant_id FOR UPDATE;
  DELETE FROM fenced_guard.lease WHERE grant_id = ANY (p_grants);
  -- Without marks of its own a grant is in nobody's way. What two takers at once leave behind goes with `tidy_up`.
  DELETE FROM fenced_guard.turn WHERE grant_id IN (
    SELECT grant_id FROM fenced_guard.turn WHERE grant_id = ANY (p_grants) FOR UPDATE SKIP LOCKED
  ) AND NOT EXISTS (
    SELECT 1 FROM string_to_table(names, ',') AS n JOIN fenced_guard.mark m ON m.name = fenced_guard.decoded(n)
    WHERE m.grant_id = turn.grant_id
  );
END $$;

-- Whether a mark would rise above READ COMMITTED: by an old snapshot, which may not see the lease that has to be unmade,
-- and which at SERIALIZABLE could cost the program its COMMIT.
CREATE FUNCTION fenced_guard.would_conflict(s fenced_guard.stamp, p_name text, p_rule text) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  RETURN current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') AND p_name = ANY (s.names)
    AND (p_rule = 'retry' OR s.seq > 0)  -- else it is invalid, and nothing rises
    AND NOT EXISTS (SELECT 1 FROM fenced_guard.mark WHERE name = p_name AND token >= s.token)
    AND NOT EXISTS (SELECT 1 FROM fenced_guard.trust WHERE realm <> s.realm);
END $$;

-- The same where nothing may wait or fail: observe, shadow, and the names that a canary leaves out.
CREATE FUNCTION fenced_guard.admit_gently(
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
  PERFORM fenced_guard.unmake_leases(ARRAY[v_replaced]) WHERE v_replaced IS NOT NULL;
  PERFORM set_config('lock_timeout', v_before, true);
  RETURN v_verdict;
EXCEPTION WHEN OTHERS THEN
  RETURN 'contended';
END $$;

-- A setting that is a time, in milliseconds; 0 for none.
CREATE FUNCTION fenced_guard.milliseconds(p_setting text) RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  RETURN extract(epoch FROM current_setting(p_setting)::interval) * 1000;
END $$;

-- Let the server end this transaction when its holder leaves it idle for so long; never later than the program's own limit.
-- Where nothing is refused, nothing is ended either.
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

-- Waiting for older transactions, and ending them.

-- Every announced transaction is listed in the server's table of locks, so that a successor can tell whom it waits for:
-- under its grant, and under each name whose mark it raises, with its token, which nobody can read from the mark yet.
-- Nobody ever waits for such a lock, and nothing is decided by it.
CREATE FUNCTION fenced_guard.list_rise(p_name text, p_token bigint) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  PERFORM pg_try_advisory_xact_lock_shared(hashtext(p_name), (p_token >> 31)::integer),
    pg_try_advisory_xact_lock_shared(hashtext('/' || p_name), (p_token & 2147483647)::integer);
END $$;

-- The transactions of older tokens that an announcement of this stamp waits for. `may_end`: the guard's owner has the right
-- to end it, and `p_waited` milliseconds are as long as the guard is patient.
CREATE FUNCTION fenced_guard.in_the_way(p_stamp text, p_names text DEFAULT NULL, p_waited bigint DEFAULT NULL)
RETURNS TABLE (pid integer, name text, token bigint, who text, may_end boolean)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  s fenced_guard.stamp := fenced_guard.parse(p_stamp);
  v_patient boolean := p_waited >= 900 * (SELECT patience FROM fenced_guard.trust);  -- a clock elsewhere measured it
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
  WHERE o.pid IS NULL OR EXISTS (  -- anybody can take a lock of that kind, but not one of these
    SELECT 1 FROM pg_locks k WHERE k.pid = o.pid AND k.granted AND k.mode IN ('RowShareLock', 'RowExclusiveLock')
      AND k.relation IN ('fenced_guard.mark'::regclass, 'fenced_guard.lease'::regclass)
  );
END $$;

-- End them, where that is possible: their lease is over, or nobody could have been given a newer token for its name. For a
-- stamp that could raise the mark alone. Written down in the history.
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

-- Lock the fences of these stamps, sorted by name, and let this transaction write under them.
--
-- Stamps are separated by spaces. `p_left`: for how many milliseconds the transaction may be idle. `p_guard`: whose rule and
-- modes count; without one, those of the strictest guard that the name can belong to. `p_names`: only these, encoded and separated by commas as in a stamp.
-- `p_exclusive`: no other transaction of the same lease meanwhile, for rules once and sequenced. `p_still_held`: the
-- authority is in this database and says so. `p_proofs`: one for each stamp. `p_repeats`: who is told to announce on its
-- own first (ZF012) can do so, in every mode.
CREATE FUNCTION fenced_guard.announce(
  p_stamps text, p_left bigint DEFAULT NULL, p_guard text DEFAULT NULL, p_names text DEFAULT NULL,
  p_exclusive boolean DEFAULT false, p_still_held boolean DEFAULT false, p_proofs text DEFAULT NULL,
  p_repeats boolean DEFAULT false
) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_sample double precision;
BEGIN
  -- One stamp, of a lease whose names carry its mark already: one statement, and nothing is written but a lock.
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
      pg_try_advisory_xact_lock_shared(hashtextextended(held.grant_id, 0)),  -- see `list_rise`
      CASE WHEN p_left IS NOT NULL THEN fenced_guard.limit_idling(p_left, p_guard, string_to_array(held.names, ','))::text END
    INTO v_sample
    FROM (
      SELECT l.names, l.token, l.grant_id, l.sample, concat('fenced.token', l.token % 16) AS setting,
        pg_current_xact_id()::text AS xid
      FROM fenced_guard.lease l, fenced_guard.turn t
      WHERE l.grant_id = split_part(p_stamps, ':', 5) AND split_part(p_stamps, ':', 4) ~ '^(-|0|[1-9][0-9]{0,15})$'
        AND t.grant_id = split_part(p_stamps, ':', 5) AND (t.xmax = '0' OR fenced_guard.is_over(t.xmax))  -- as `wanted`
        AND p_stamps = concat('1:', l.realm, ':', l.token, ':', split_part(p_stamps, ':', 4), ':', l.grant_id, ':', l.names)
        AND strpos(l.names, '%') = 0
      FOR SHARE OF l SKIP LOCKED
    ) AS held;
  END IF;
  IF v_sample IS NULL THEN
    PERFORM fenced_guard.announce_slowly(
      p_stamps, p_left, p_guard, p_names, p_exclusive, p_still_held, p_proofs, false, p_repeats);
  ELSIF v_sample > 0 AND random() < v_sample THEN
    PERFORM fenced_guard.note(p_guard, ARRAY[split_part(p_stamps, ':', 6)], p_stamps, 'admit', 'admit', 'sample');
  END IF;
END $$;

-- Raise the marks, in a transaction that ends with this: reads that begin after it are fenced.
CREATE FUNCTION fenced_guard.announce_alone(
  p_stamps text, p_guard text DEFAULT NULL, p_names text DEFAULT NULL, p_proofs text DEFAULT NULL
) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  PERFORM fenced_guard.announce_slowly(p_stamps, NULL, p_guard, p_names, false, false, p_proofs, true, false);
END $$;

-- Let a stale stamp of one plain name through, where the whole guard only observes or records; false, and nothing done,
-- in every other case. Nothing is locked: a mark above the stamp stays above it. A name that has a mark is a valid one.
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

-- Every case that is not the usual one.
CREATE FUNCTION fenced_guard.announce_slowly(
  p_stamps text, p_left bigint, p_guard text, p_names text, p_exclusive boolean, p_still_held boolean, p_proofs text,
  p_alone boolean, p_repeats boolean
) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_texts text[] := string_to_array(coalesce(p_stamps, ''), ' ');
  v_rule  text;
  v_step  text;
BEGIN
  -- A guard without triggers decides about the write now.
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
    RETURN;  -- and nothing limits how long it may idle: nobody waits for it
  END IF;
  IF v_rule <> 'retry' OR p_names IS NOT NULL OR p_still_held OR NOT fenced_guard.announce_whole(v_texts, p_alone) THEN
    PERFORM fenced_guard.announce_each(
      v_texts, p_guard, v_rule, v_step, string_to_array(p_names, ','), p_still_held, string_to_array(p_proofs, ' '),
      p_repeats);
  END IF;
  IF p_left IS NOT NULL THEN
    PERFORM fenced_guard.limit_idling(p_left, p_guard, string_to_array(coalesce(p_names,
      (SELECT string_agg(split_part(text, ':', 6), ',') FROM unnest(v_texts) AS text)), ','));
  END IF;
END $$;

-- Leases that are whole, all at once, however many; false, and nothing done, when one is not.
CREATE FUNCTION fenced_guard.announce_whole(p_texts text[], p_alone boolean) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_xid    text := pg_current_xact_id();
  v_count  bigint;
BEGIN
  BEGIN
    SELECT count(*) INTO v_count FROM (
      SELECT 1 FROM unnest(p_texts) AS wanted, fenced_guard.lease l
      WHERE l.grant_id = split_part(wanted, ':', 5) AND split_part(wanted, ':', 4) ~ '^(-|0|[1-9][0-9]{0,15})$'
        AND (NOT fenced_guard.wanted(l.grant_id) OR strpos(current_setting(concat('fenced.token', l.token % 16), true),
          concat(E'\n', v_xid, '#', l.grant_id, E'\n')) > 0)  -- shared by this transaction already
        AND wanted = concat('1:', l.realm, ':', l.token, ':', split_part(wanted, ':', 4), ':', l.grant_id, ':', l.names)
      FOR SHARE OF l SKIP LOCKED
    ) AS held;
    PERFORM pg_try_advisory_xact_lock_shared(hashtextextended(split_part(wanted, ':', 5), 0)) FROM unnest(p_texts) AS wanted;
    IF v_count < cardinality(p_texts) THEN  -- let go of the others: who waits for marks next must hold no lease
      RAISE EXCEPTION USING ERRCODE = 'ZF011';
    END IF;
  EXCEPTION WHEN SQLSTATE 'ZF011' OR serialization_failure THEN
    RETURN false;
  END;
  IF NOT p_alone THEN
    -- Lines for a few of their names; others are let through by the token, so that the setting stays short.
    PERFORM fenced_guard.carry((
      SELECT string_agg(concat(v_xid, '/', fenced_guard.decoded(n), E'\n'), '') FROM (
        SELECT n FROM unnest(p_texts) AS text, string_to_table(split_part(text, ':', 6), ',') AS n LIMIT 8
      ) AS few
    ) || (SELECT string_agg(concat(v_xid, ' ', text, E'\n'), '') FROM unnest(p_texts) AS text));
    PERFORM fenced_guard.carry_tokens(p_texts);
  END IF;
  RETURN true;
END $$;

-- Whether all names of a lease carry its mark. Of two leases of one name in one announcement only the newer one's do.
CREATE FUNCTION fenced_guard.is_whole(s fenced_guard.stamp) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  RETURN NOT EXISTS (
    SELECT 1 FROM unnest(s.names) AS n LEFT JOIN fenced_guard.mark m ON m.name = n
    WHERE m.grant_id IS DISTINCT FROM s.grant_id OR m.token <> s.token
  );
END $$;

-- A table that was rebuilt, and took the name of the guarded one, has no triggers; a table that inherits from it has none of
-- its own. Looked at by the first announcement of a lease, and said where something would be refused.
CREATE FUNCTION fenced_guard.refuse_unwatched(p_guard text) RETURNS void
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
      THEN format('fenced: %s has no triggers of its guard, as a table that was rebuilt; install the guard again', p_guard)
      ELSE format('fenced: %s inherits from %s, and its rows are not guarded; partitions are', v_child, p_guard) END;
  END IF;
END $$;

-- Name by name, sorted, so that two announcements never wait for each other in a circle.
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
  v_counts bigint[];                     -- how many names of each stamp are admitted
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
    PERFORM set_config('lock_timeout', v_patience::text, true);  -- whoever is waited for longer can be ended: `make_way`
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
      v_verdict := 'stale';  -- a mark above it stays above it: nothing has to be locked
    ELSIF p_repeats AND p_step <> 'alone' AND fenced_guard.would_conflict(w.stamp, w.name, p_rule) THEN
      PERFORM fenced_guard.announce_first(w.name);
    ELSE
      v_verdict := fenced_guard.admit_gently(w.stamp, w.name, p_rule, p_step, w.proof);
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
  PERFORM fenced_guard.unmake_leases(v_grants);
  PERFORM set_config('lock_timeout', v_before, true);
  IF p_guard IS NOT NULL AND cardinality(v_grants) > 0 THEN  -- something was decided that could be refused
    PERFORM fenced_guard.refuse_unwatched(p_guard);
  END IF;
  IF p_rule = 'retry' AND (p_step = 'alone' OR current_setting('transaction_isolation') <> 'serializable') AND EXISTS (
    SELECT 1 FROM generate_subscripts(v_counts, 1) AS i LEFT JOIN fenced_guard.turn t ON t.grant_id = v_stamps[i].grant_id
    LEFT JOIN fenced_guard.lease l ON l.grant_id = v_stamps[i].grant_id
    WHERE v_counts[i] > 0 AND (t.grant_id IS NULL OR (l.grant_id IS NULL AND v_counts[i] = cardinality(v_stamps[i].names)))
  ) THEN
    BEGIN
      PERFORM set_config('lock_timeout', '1', true);
      LOCK TABLE fenced_guard.trust IN ROW SHARE MODE;  -- so that `adopt` comes before, or finds the row
      INSERT INTO fenced_guard.turn (grant_id, names)
      SELECT v_stamps[i].grant_id, split_part(p_texts[i], ':', 6) FROM generate_subscripts(v_counts, 1) AS i
      WHERE v_counts[i] > 0
      ON CONFLICT (grant_id) DO NOTHING;
      INSERT INTO fenced_guard.lease (grant_id, token, realm, names, sample)
      SELECT v_stamps[i].grant_id, v_stamps[i].token, t.realm, split_part(p_texts[i], ':', 6), t.sample
      FROM generate_subscripts(v_stamps, 1) AS i, fenced_guard.trust t WHERE v_counts[i] = cardinality(v_stamps[i].names)
        AND t.realm = v_stamps[i].realm AND fenced_guard.is_whole(v_stamps[i])
      ON CONFLICT (grant_id) DO NOTHING;
      PERFORM set_config('lock_timeout', v_before, true);
    EXCEPTION WHEN lock_not_available OR serialization_failure THEN
      NULL;  -- another transaction of the lease is at it
    END;
  END IF;
  IF p_step <> 'alone' THEN
    PERFORM fenced_guard.carry(array_to_string(v_lines, '') || (
      SELECT string_agg(concat(v_xid, ' ', CASE WHEN v_stamps[i] IS NULL THEN '?' ELSE p_texts[i] END, E'\n'), '')
      FROM generate_subscripts(p_texts, 1) AS i));
    -- Not for a part of a lease, nor for what is only let through: a row's epoch tells the lease, and not its fence.
    PERFORM fenced_guard.carry_tokens(ARRAY(
      SELECT p_texts[i] FROM generate_subscripts(v_stamps, 1) AS i
      WHERE v_counts[i] = cardinality(v_stamps[i].names) AND fenced_guard.is_whole(v_stamps[i])));
  END IF;
END $$;

-- The authority in this database says that the lease is still held. Not locked: any lock keeps renewals out, and
-- whoever is granted the name after this waits for its fence.
CREATE FUNCTION fenced_guard.still_held(s fenced_guard.stamp) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_beside  boolean;
  v_expires timestamptz;
BEGIN
  IF fenced_guard.beside_authority() THEN  -- only then are there tables to name
    v_beside := EXISTS (SELECT 1 FROM fenced.namespace WHERE realm = s.realm);
  END IF;
  IF v_beside IS NOT TRUE THEN
    RAISE EXCEPTION USING ERRCODE = 'object_not_in_prerequisite_state',
      MESSAGE = 'fenced: still_held needs the authority in the same database, of the same owner';
  END IF;
  SELECT expires INTO v_expires FROM fenced.attempt
  WHERE id = s.grant_id::uuid AND state = 'granted' AND token = s.token;
  IF v_expires IS NULL OR v_expires <= clock_timestamp() THEN
    RAISE EXCEPTION USING ERRCODE = fenced_guard.sqlstate_of('lost'),
      MESSAGE = format('fenced: the lease of %s (token %s) is over', fenced_guard.sendable(array_to_string(s.names, ', ')), s.token);
  END IF;
END $$;

-- Writing.

-- Decide about a name that a statement wrote to. `p_name` is NULL for all rows at once.
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
  p_name := replace(p_name, E'\n', E'\r');  -- as `one_line` does
  IF NOT coalesce(starts_with(v_lines, E'\n' || v_xid), false) THEN
    -- Nothing is announced, as in nearly every write while a rollout begins: one stage for all names is told at once.
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
        v_verdict := fenced_guard.admit_briefly(s, p_name, v_rule, v_mode.refuses);
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

-- Remember what was let through, so that it is noted once per transaction: each name, until the setting is long, since
-- every statement looks through it; without a stamp all at once, if no name needs one.
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

-- The names that the stamps of this transaction cover, as texts. `whole`: the lease is locked as a whole, and all its names
-- carry its mark (see `carries_mark`).
CREATE FUNCTION fenced_guard.covered(p_lines text, p_xid text) RETURNS TABLE (name text, stamp text, place bigint, whole boolean)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
  SELECT CASE WHEN strpos(n, '%') = 0 THEN n ELSE fenced_guard.decoded(n) END, s.text, s.place, s.whole
  FROM (
    SELECT text, place, coalesce(strpos(
      current_setting(concat('fenced.token', split_part(text, ':', 3)::bigint % 16), true),
      concat(E'\n', p_xid, '#', split_part(text, ':', 5), E'\n')) > 0, false) AS whole
    FROM string_to_table(p_lines, E'\n') WITH ORDINALITY AS l (line, place), split_part(line, ' ', 2) AS text
    WHERE starts_with(line, p_xid || ' 1:') OFFSET 0  -- so that each stamp is taken apart once
  ) AS s, string_to_table(split_part(s.text, ':', 6), ',') AS n
$$;

-- Decide about all names that a statement wrote to, each given once. What costs time for each is done for those alone that a
-- stamp of this transaction covers, and that are not open yet.
CREATE FUNCTION fenced_guard.decide_all(p_guard text, p_names text[]) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_xid    text := pg_current_xact_id();
  v_lines  text := fenced_guard.carried();
  v_left   text[];
  v_open   text[] := '{}';
  v_let    text[] := '{}';               -- covered names that are not admitted, and why
  v_why    text[] := '{}';
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
    LEFT JOIN (                          -- as `announced` does
      SELECT substr(line, strpos(line, '/') + 1) AS name FROM string_to_table(v_lines, E'\n') AS line
      WHERE starts_with(line, v_xid || '/') OR starts_with(line, v_xid || '|')
    ) AS a ON a.name = c.name
    ORDER BY c.name, c.place
  LOOP
    v_verdict := 'uncovered';
    IF w.announced THEN
      v_verdict := fenced_guard.admit_briefly(
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

-- A fence that this transaction has announced, and not locked enough: for a rule that wants more, or because another
-- guard's mode did not wait for it. Rows are locked already, so it waits only a moment.
CREATE FUNCTION fenced_guard.admit_briefly(s fenced_guard.stamp, p_name text, p_rule text, p_refuses boolean) RETURNS text
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_before text := current_setting('lock_timeout');
  v_verdict text;
BEGIN
  IF NOT p_refuses THEN
    RETURN fenced_guard.admit_gently(s, p_name, p_rule, 'write', NULL);
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
    'fenced: %s: its fence was locked by another transaction when this one announced it, or is now; announce it by the '
    'guard of this table', fenced_guard.sendable(p_name));
END $$;

-- The token under which this transaction writes a name; NULL when the name is not admitted in it.
CREATE FUNCTION fenced_guard.token_for(p_name text) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  IF NOT fenced_guard.carries_mark(p_name)
     AND strpos(fenced_guard.carried(), concat(E'\n', pg_current_xact_id(), '/', p_name, E'\n')) = 0 THEN
    RETURN NULL;
  END IF;
  RETURN (SELECT token FROM fenced_guard.mark WHERE name = p_name);
END $$;

-- Asked before COMMIT on connections that begin by themselves: is it the announced transaction that is committed?
CREATE FUNCTION fenced_guard.still_stamped() RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  IF (strpos(current_setting('fenced.stamp', true), concat(E'\n', pg_current_xact_id_if_assigned(), ' ')) > 0) IS NOT TRUE THEN
    RAISE EXCEPTION USING ERRCODE = fenced_guard.sqlstate_of('ended'),
      MESSAGE = 'fenced: the transaction was ended inside the guarded block, and another one began';
  END IF;
END $$;

-- The mark of a name, for onlookers.
CREATE FUNCTION fenced_guard.peek(p_name text, OUT token bigint, OUT grant_id text, OUT seq bigint)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  SELECT m.token, m.grant_id, m.seq INTO token, grant_id, seq FROM fenced_guard.mark m WHERE m.name = p_name;
END $$;

-- A refusal as its writer tells it, once the refused transaction is rolled back and cannot keep a record. What was not
-- refused here is not believed, and each refusal is recorded once.
CREATE FUNCTION fenced_guard.report(p_detail text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  d jsonb := p_detail::jsonb;
  v_id bigint := (d ->> 'id')::bigint;
BEGIN
  IF (d ->> 'seal' = fenced_guard.sealed(d - 'seal')) IS NOT TRUE THEN
    RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege', MESSAGE = 'fenced: no refusal of this database';
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

-- What operators do. Each leaves a line in the history.

CREATE FUNCTION fenced_guard.likes(p_pattern text) RETURNS text
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
  SELECT replace(replace(replace(replace(p_pattern, E'\\', E'\\\\'), '%', E'\\%'), '_', E'\\_'), '*', '%')
$$;

-- Take note that a stage has changed: transactions that are older may not be bound by it (`pending`).
CREATE FUNCTION fenced_guard.changes(p_guard text) RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
  UPDATE fenced_guard.guard SET changed = pg_current_xact_id(), changed_at = clock_timestamp() WHERE guard = p_guard
$$;

-- The transactions that began before the last change of a guard's stages, and may commit what the new stage refuses: they
-- wrote before it, were let through before it, or read from a snapshot that is older than it. The last minute's snapshots are
-- believed to be older if they may be. `known`: that is certain; else the role that asks may not see what a transaction of
-- another role has seen. A transaction that was let through by an override counts when that has ended by itself, too.
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
  PERFORM fenced_guard.changes(p_guard);
END $$;

-- Forget the mode of a pattern: the next longer one counts again.
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
  PERFORM fenced_guard.changes(p_guard);
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
    RAISE EXCEPTION 'fenced: an override says why, and ends by itself within 24 hours';
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
  PERFORM fenced_guard.changes(p_guard) WHERE v_count > 0;
  RETURN v_count;
END $$;

-- Forget a mark: a name that a wrong token wedged. Every token is admitted next.
CREATE FUNCTION fenced_guard.reset(p_name text, p_why text) RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  m fenced_guard.mark;
BEGIN
  IF coalesce(btrim(p_why), '') = '' THEN
    RAISE EXCEPTION 'fenced: a reset says why';
  END IF;
  PERFORM fenced_guard.take_turn(ARRAY(SELECT grant_id FROM fenced_guard.mark WHERE name = p_name));
  DELETE FROM fenced_guard.mark WHERE name = p_name RETURNING * INTO m;
  PERFORM fenced_guard.unmake_leases(ARRAY[m.grant_id]);
  IF m.name IS NOT NULL THEN
    PERFORM setval('fenced_guard.highest', 1, false);
    INSERT INTO fenced_guard.history (what, detail) VALUES ('reset', jsonb_build_object(
      'name', p_name, 'token', m.token, 'grant', m.grant_id, 'why', p_why));
  END IF;
  RETURN m.token;
END $$;

-- Drop marks below a token, and admit none below it any more: what they would refuse is refused by that. At most so many,
-- and none that a transaction has locked, by itself or with its lease; returns how many.
CREATE FUNCTION fenced_guard.drop_marks(p_realm text, p_below bigint, p_limit bigint) RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_count bigint;
BEGIN
  UPDATE fenced_guard.trust SET floor = greatest(floor, p_below) WHERE realm = p_realm;
  IF NOT FOUND THEN
    RAISE EXCEPTION USING ERRCODE = 'object_not_in_prerequisite_state', MESSAGE = format(
      'fenced: realm %s is trusted here, and not %s: ask its own authority', (SELECT realm FROM fenced_guard.trust), p_realm);
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

-- Trust this authority from now on, and no other. Transactions that raised a mark, or share a lease, are waited for.
CREATE FUNCTION fenced_guard.adopt(p_realm text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_before text;
BEGIN
  -- Wait for those that raise marks now, in a queue: those that come later wait for this.
  LOCK TABLE fenced_guard.trust IN EXCLUSIVE MODE;
  SELECT realm INTO v_before FROM fenced_guard.trust;
  UPDATE fenced_guard.trust SET realm = p_realm;
  PERFORM fenced_guard.take_turn(ARRAY(SELECT grant_id FROM fenced_guard.lease WHERE realm <> p_realm));
  DELETE FROM fenced_guard.lease WHERE realm <> p_realm;
  INSERT INTO fenced_guard.history (what, detail)
  VALUES ('adopt', jsonb_build_object('before', v_before, 'after', p_realm));
END $$;

-- How far a token may jump, and which share of admitted operations is recorded: those that the object names.
CREATE FUNCTION fenced_guard.set_trust(p_change jsonb) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_before jsonb;
BEGIN
  SELECT jsonb_build_object('max_jump', max_jump, 'sample', sample, 'patience', patience) INTO v_before
  FROM fenced_guard.trust FOR UPDATE;
  IF (p_change ->> 'max_jump')::bigint < 1 OR (p_change ->> 'sample')::double precision NOT BETWEEN 0 AND 1
     OR (p_change ->> 'patience')::double precision NOT BETWEEN 0.001 AND 86400 THEN
    RAISE EXCEPTION 'fenced: a jump is at least 1, a sample a share from 0 to 1, patience up to a day';
  END IF;
  UPDATE fenced_guard.trust SET
    max_jump = (v_before || p_change ->> 'max_jump')::bigint,
    sample = coalesce((v_before || p_change ->> 'sample')::double precision, 0),
    patience = coalesce((p_change ->> 'patience')::double precision, patience);
  UPDATE fenced_guard.lease l SET sample = t.sample FROM fenced_guard.trust t
  WHERE l.grant_id IN (SELECT grant_id FROM fenced_guard.lease FOR UPDATE SKIP LOCKED);  -- the others keep theirs
  INSERT INTO fenced_guard.history (what, detail)
  SELECT 'trust', jsonb_build_object('before', v_before, 'after',
    jsonb_build_object('max_jump', max_jump, 'sample', sample, 'patience', patience)) FROM fenced_guard.trust;
END $$;

-- What could not be recorded since the last time that somebody took note of it.
CREATE FUNCTION fenced_guard.unrecorded() RETURNS bigint
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
  SELECT coalesce(pg_sequence_last_value('fenced_guard.unrecorded'), 0)
    - coalesce((SELECT sum((detail ->> 'count')::bigint) FROM fenced_guard.history WHERE what = 'unrecorded'), 0)::bigint
$$;

-- Keep so many records one by one, forget overrides that are over, and take note of what could not be recorded.
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

-- Let a key sign stamps. An id is never used for another key; both the old and the new one count until one is revoked.
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
      'fenced: a key is hmac with 32 to 1024 bytes, or ed25519 with the 32 bytes of a public key that is a good point';
  END IF;
  INSERT INTO fenced_guard.key (id, kind, secret) VALUES (p_id, p_kind, p_secret) ON CONFLICT (id) DO NOTHING;
  IF NOT FOUND THEN
    RAISE EXCEPTION USING ERRCODE = 'object_not_in_prerequisite_state',
      MESSAGE = format('fenced: there is, or was, a key %s; take another id', p_id);
  END IF;
  INSERT INTO fenced_guard.history (what, detail)
  VALUES ('key added', jsonb_build_object('key', p_id, 'kind', p_kind));
END $$;

-- Its proofs count no more. Marks that it raised stay.
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

-- Whether a mark rises by a proven stamp alone. Part of a change: the triggers are made anew in the same transaction,
-- as `fenced guard key require` does it; the old ones believe the setting.
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

-- Writers call these; everything else is the owner's.
REVOKE ALL ON ALL FUNCTIONS IN SCHEMA fenced_guard FROM PUBLIC;
GRANT USAGE ON SCHEMA fenced_guard TO PUBLIC;
GRANT EXECUTE ON FUNCTION fenced_guard.version(), fenced_guard.announce(text, bigint, text, text, boolean, boolean, text, boolean),
  fenced_guard.announce_alone(text, text, text, text), fenced_guard.decide(text, text),
  fenced_guard.still_stamped(), fenced_guard.peek(text), fenced_guard.report(text),
  fenced_guard.in_the_way(text, text, bigint), fenced_guard.make_way(text, text, bigint, text) TO PUBLIC;
