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

-- Decode a name from a stamp: percent-encoded bytes of UTF-8.
CREATE OR REPLACE FUNCTION fenced_guard.decoded(p_name text) RETURNS text
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
CREATE OR REPLACE FUNCTION fenced_guard.parse(p_text text) RETURNS fenced_guard.stamp
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
      SELECT 1 FROM unnest(names) AS n  -- control characters, direction marks, white space at the ends of segments
      WHERE n ~ E'[\\u0080-\\u009F\\u061C\\u200E\\u200F\\u2028-\\u202E\\u2066-\\u2069\\uFEFF]'
        OR n ~ E'(^|/)[ \\u00A0\\u1680\\u2000-\\u200A\\u202F\\u205F\\u3000]|[ \\u00A0\\u1680\\u2000-\\u200A\\u202F\\u205F\\u3000](/|$)'
    ) THEN
      RETURN NULL;
    END IF;
  END IF;
  IF cardinality(names) > 64 OR (',' || part[6] || ',') ~ E'[,/](\\.{0,2})[,/]' OR octet_length(names[1]) > 200 THEN
    RETURN NULL;
  END IF;
  IF cardinality(names) > 1 THEN
    IF names <> ARRAY(SELECT DISTINCT n COLLATE "C" FROM unnest(names) AS n ORDER BY 1)
       OR (SELECT max(octet_length(n)) FROM unnest(names) AS n) > 200 THEN
      RETURN NULL;
    END IF;
  END IF;
  found := (p_text, part[2], part[3]::bigint, nullif(part[4], '-')::bigint, part[5], names);
  RETURN found;
END $$;

-- Replace line ends. No valid name has one; a row's name that has one must not look like several lines of the setting.
CREATE OR REPLACE FUNCTION fenced_guard.one_line(p_name text) RETURNS text
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$ SELECT replace(p_name, E'\n', E'\r') $$;

-- The lines of the setting, if they belong to this transaction. The text begins and ends with a line end.
CREATE OR REPLACE FUNCTION fenced_guard.carried() RETURNS text
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
CREATE OR REPLACE FUNCTION fenced_guard.carry(p_lines text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  PERFORM set_config('fenced.stamp', fenced_guard.carried() || p_lines, true);
END $$;

-- Append the tokens and grants of these stamps to the settings `fenced.token0` to `15`.
CREATE OR REPLACE FUNCTION fenced_guard.carry_tokens(p_texts text[]) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_xid  text := pg_current_xact_id();
  v_setting text;
  v_lines text;
  v_text text;
BEGIN
  FOREACH v_text IN ARRAY p_texts LOOP
    v_setting := concat('fenced.token', split_part(v_text, ':', 3)::bigint % 16);
    v_lines := current_setting(v_setting, true);
    v_lines := set_config(v_setting, concat(
      CASE WHEN starts_with(v_lines, E'\n' || v_xid) THEN v_lines ELSE E'\n' END,
      v_xid, '@', split_part(v_text, ':', 3), E'\n', v_xid, '#', split_part(v_text, ':', 5), E'\n'), true);
  END LOOP;
END $$;

-- Whether the name's mark belongs to a grant that this transaction has announced with all its names (an XID#GRANT line).
CREATE OR REPLACE FUNCTION fenced_guard.carries_mark(p_name text) RETURNS boolean
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
CREATE OR REPLACE FUNCTION fenced_guard.announced(p_name text, p_lines text) RETURNS boolean
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
CREATE OR REPLACE FUNCTION fenced_guard.confirmed(p_guard text, p_name text, p_rule text, p_lines text) RETURNS boolean
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
