-- Claims on rows of a table. The trigger of the table (`claims.py` writes it) decides about nearly every claim, and its condition
-- about nearly every write; these functions decide about the rest.
--
-- The setting `fenced.claims` has one line for each claim that this transaction has announced (XID@TOKEN NAME: where the worker
-- declares its tokens, rows share one), and for each worker whose rows it gives back (XID~HOLDER). It begins and ends with a line end.

-- The text of the stamp of a claim, as the client makes it; NULL for a name that would have to be quoted.
CREATE OR REPLACE FUNCTION fenced_guard.claim_stamp(p_name text, p_write bigint) RETURNS text
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_realm text := (SELECT realm FROM fenced_guard.trust);
  v_token bigint := p_write >> 20;
BEGIN
  IF p_name ~ '^[A-Za-z0-9_.~/-]+$' AND v_token > 0 THEN
    RETURN format('1:%s:%s:%s:%s:%s', v_realm, v_token, coalesce(nullif(p_write & 1048575, 0)::text, '-'),
      left(encode(sha256(convert_to(format('claim %s %s %s', v_realm, v_token, p_name), 'UTF8')), 'hex'), 32), p_name);
  END IF;
  RETURN NULL;
END $$;

-- Act on a verdict about a write of a claimed row, as the name's mode says: refuse, or record it and let the write through.
CREATE OR REPLACE FUNCTION fenced_guard.rule_on_claim(
  p_guard text, p_name text, p_write bigint, p_verdict text, p_seen bigint, p_says text
) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v record;
  v_stamp text := fenced_guard.claim_stamp(p_name, p_write);
BEGIN
  SELECT * INTO v FROM fenced_guard.mode_of(p_guard, p_name);
  IF (p_verdict = 'missing' AND v.requires) OR (p_verdict <> 'missing' AND v.refuses) THEN
    PERFORM fenced_guard.refuse_by(p_guard, p_name, v_stamp, p_verdict, v.mode,
      ROW(coalesce(p_name, ''), p_seen >> 20, '', p_seen & 1048575, NULL)::fenced_guard.mark, p_says);
  END IF;
  PERFORM fenced_guard.note(p_guard, ARRAY[p_name], v_stamp, p_verdict, CASE
    WHEN v.mode = 'observe' OR (p_verdict = 'missing' AND v.mode NOT IN ('shadow', 'override')) THEN 'count'
    ELSE 'record' END, v.mode);
END $$;

-- Add a line to the setting.
CREATE OR REPLACE FUNCTION fenced_guard.carry_claim(p_line text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_xid text := pg_current_xact_id();
  v_said text := current_setting('fenced.claims', true);
BEGIN
  PERFORM set_config('fenced.claims', concat(
    CASE WHEN starts_with(v_said, E'\n' || v_xid) THEN v_said ELSE E'\n' END, v_xid, p_line, E'\n'), true);
END $$;

CREATE OR REPLACE FUNCTION fenced_guard.carries_claim(p_line text) RETURNS boolean
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
  SELECT coalesce(strpos(current_setting('fenced.claims', true), concat(E'\n', pg_current_xact_id(), p_line, E'\n')) > 0, false)
$$;

-- How a write without a stamp is refused: its transaction has announced another claim, or none.
CREATE OR REPLACE FUNCTION fenced_guard.verdict_unstamped() RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
  SELECT CASE WHEN starts_with(current_setting('fenced.claims', true), concat(E'\n', pg_current_xact_id(), '@'))
    THEN 'uncovered' ELSE 'missing' END
$$;

-- Mint the token of a claim in every case that the trigger does not handle itself: the first claim of this session, or of this
-- database, a worker whose lease is over, a changed history. Whatever the mode is, a bad claim is refused: only programs that
-- claim rows write `claim_holder`.
CREATE OR REPLACE FUNCTION fenced_guard.mint_claim(p_name text, p_holder uuid, p_before bigint) RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_namespace integer;
  v_realm text;
  v_trusted text;
  v_token bigint;
BEGIN
  SELECT a.namespace, n.realm INTO v_namespace, v_realm FROM fenced.attempt a JOIN fenced.namespace n ON n.id = a.namespace
  WHERE a.id = p_holder AND a.state = 'granted' AND a.expires > clock_timestamp();
  IF NOT FOUND THEN
    RAISE EXCEPTION USING ERRCODE = fenced_guard.sqlstate_of('lost'),
      MESSAGE = format('fenced: %s: the lease of the worker that claims it is over, or not of the authority in this database',
        fenced_guard.sendable(p_name));
  END IF;
  v_trusted := fenced_guard.trust_realm(v_realm);
  IF v_trusted <> v_realm THEN
    PERFORM fenced_guard.refuse_foreign_worker(v_realm, v_trusted);
  END IF;
  v_token := fenced.mint(v_namespace);
  IF v_token <= p_before THEN
    RAISE EXCEPTION USING ERRCODE = 'ZFA01', MESSAGE = format(
      'fenced: %s was claimed under token %s, and the authority has minted %s: it has lost its history, or the table is of '
      'another database; run: fenced authority raise', fenced_guard.sendable(p_name), p_before, v_token);
  ELSIF v_token >= 8796093022208 THEN  -- 2^43: `claim_write` has no room for it
    RAISE EXCEPTION USING ERRCODE = 'ZFA02', MESSAGE = 'fenced: the tokens that claims can use are used up';
  END IF;
  RETURN v_token;
END $$;

-- The trusted realm. If none is trusted yet, this one is from now on.
CREATE OR REPLACE FUNCTION fenced_guard.trust_realm(p_realm text) RETURNS text
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  UPDATE fenced_guard.trust SET realm = p_realm WHERE realm IS NULL;
  RETURN (SELECT realm FROM fenced_guard.trust);
END $$;

CREATE OR REPLACE FUNCTION fenced_guard.refuse_foreign_worker(p_realm text, p_trusted text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  RAISE EXCEPTION USING ERRCODE = fenced_guard.sqlstate_of('foreign'), MESSAGE = format(
    'fenced: the worker is of realm %s, and the guards of this database trust %s. Point the program at the authority of that '
    'realm (fenced authority show URL prints it), or move the guard: fenced authority move OLD NEW --guards URL', p_realm, p_trusted);
END $$;

-- A claim whose token the worker has from an authority elsewhere.
CREATE OR REPLACE FUNCTION fenced_guard.check_claim(p_guard text, p_name text, p_token bigint, p_before bigint) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  IF (p_token BETWEEN 1 AND 8796093022207) IS NOT TRUE THEN
    RAISE EXCEPTION USING ERRCODE = fenced_guard.sqlstate_of('missing'),
      MESSAGE = format('fenced: %s: a claim has a token of the authority', fenced_guard.sendable(p_name));
  ELSIF p_token <= p_before THEN
    RAISE EXCEPTION USING ERRCODE = fenced_guard.sqlstate_of('stale'), MESSAGE = format(
      'fenced: %s: token %s is stale: %s has been seen', fenced_guard.sendable(p_name), p_token, p_before);
  END IF;
END $$;

-- Decide about a write of a row that is or was claimed. False: the mode lets it through; then the claim's columns stay as they
-- are. The condition of the trigger has admitted writes that carry the number of the next write under the row's own token.
CREATE OR REPLACE FUNCTION fenced_guard.admits_write(
  p_guard text, p_name text, p_minted boolean, p_moved boolean,
  p_token bigint, p_write bigint, p_holder uuid, p_new_token bigint, p_new_write bigint, p_new_holder uuid
) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_says text;
  v_verdict text;
BEGIN
  IF p_new_holder IS NOT NULL AND p_new_holder IS DISTINCT FROM p_holder AND NOT (p_moved AND p_holder IS NULL) THEN
    RAISE EXCEPTION USING ERRCODE = fenced_guard.sqlstate_of('missing'),
      MESSAGE = format('fenced: %s: another worker has claimed it', fenced_guard.sendable(p_name));
  ELSIF p_moved AND p_new_holder IS NOT DISTINCT FROM p_holder AND p_token IS NULL THEN
    RETURN true;  -- never claimed
  ELSIF p_new_token IS NOT DISTINCT FROM p_token AND p_new_write IS NOT DISTINCT FROM p_write AND NOT p_moved AND (
    fenced_guard.carries_claim(concat('@', p_token, ' ', p_name))
    OR (p_new_holder IS NULL AND fenced_guard.carries_claim('~' || p_holder) AND (NOT p_minted OR fenced_guard.is_over(p_holder)))
  ) THEN
    RETURN true;
  ELSIF p_moved THEN
    v_verdict := 'uncovered';
    v_says := 'the columns of its name cannot change: it is or was claimed under that name';
  ELSIF p_new_write IS DISTINCT FROM p_write AND p_new_write IS NOT NULL THEN
    IF p_new_write >> 20 > p_token THEN
      v_verdict := 'forged';
      v_says := format('token %s is not that of its last claim, %s', p_new_write >> 20, p_token);
    ELSIF p_new_write >> 20 = p_token THEN
      v_verdict := 'out_of_order';
      v_says := 'a later write under the same claim was applied before, or an operator has revoked the claim';
    ELSE
      v_verdict := 'stale';
      v_says := format('token %s is stale: %s has been seen', p_new_write >> 20, coalesce(p_token::text, 'another row'));
    END IF;
  ELSE
    v_verdict := fenced_guard.verdict_unstamped();
    v_says := format('it was claimed (token %s), %s', p_token, CASE v_verdict WHEN 'missing'
      THEN 'the write carries no stamp, and the mode is require' ELSE 'and the transaction has announced another claim' END);
  END IF;
  PERFORM fenced_guard.rule_on_claim(
    p_guard, p_name, CASE WHEN p_new_write IS DISTINCT FROM p_write THEN p_new_write END, v_verdict, p_write, v_says);
  RETURN false;
END $$;

-- A new row that is claimed already, and a claimed row that is deleted.
CREATE OR REPLACE FUNCTION fenced_guard.refuse_born_claimed(p_name text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  RAISE EXCEPTION USING ERRCODE = fenced_guard.sqlstate_of('missing'),
    MESSAGE = format('fenced: %s: a new row is claimed by nobody', fenced_guard.sendable(p_name));
END $$;

CREATE OR REPLACE FUNCTION fenced_guard.decide_delete(p_guard text, p_name text, p_write bigint) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  IF NOT fenced_guard.carries_claim(concat('@', p_write >> 20, ' ', p_name)) THEN
    PERFORM fenced_guard.rule_on_claim(p_guard, p_name, NULL, fenced_guard.verdict_unstamped(), p_write,
      'it is claimed, and the delete carries no stamp of its claim');
  END IF;
END $$;

-- Begin a transaction of the claimant. `p_write` is that of the row, which the caller has locked in the same statement.
CREATE OR REPLACE FUNCTION fenced_guard.announce_claim(p_guard text, p_name text, p_realm text, p_token bigint, p_write bigint) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_xid text := pg_current_xact_id();
BEGIN
  IF p_write IS NULL OR p_write >> 20 <> p_token OR p_write & 1048575 >= 1047552 THEN
    IF NOT fenced_guard.may_write() THEN
      PERFORM fenced_guard.refuse_stranger('cannot announce a claim');
    END IF;
    PERFORM fenced_guard.rule_on_claim(p_guard, p_name, p_token << 20,
      CASE WHEN p_write >> 20 = p_token THEN 'out_of_order' ELSE 'stale' END, p_write, CASE
      WHEN p_write IS NULL THEN format('token %s is stale: there is no such row', p_token)
      WHEN p_write >> 20 = p_token THEN 'an operator has revoked the claim'
      ELSE format('token %s is stale: %s has been seen', p_token, p_write >> 20) END);
  ELSE
    PERFORM fenced_guard.carry_claim(concat('@', p_token, ' ', p_name));
  END IF;
  PERFORM fenced_guard.carry(concat(v_xid, ' ', coalesce(fenced_guard.claim_stamp(p_name, p_token << 20), '?'), E'\n'));
END $$;

-- Whether the lease of a worker is over for ever. If it has expired, this ends it; a renewal that is under way has locked it, and
-- then it is not over.
CREATE OR REPLACE FUNCTION fenced_guard.is_over(p_holder uuid) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_now timestamptz := clock_timestamp();
BEGIN
  IF EXISTS (SELECT FROM fenced.attempt a WHERE a.id = p_holder AND a.state = 'granted') THEN
    RETURN fenced.expire(p_holder, v_now, interval '600 s');
  END IF;
  RETURN true;
END $$;

-- Which of these workers are over, and let this transaction give their rows back. Where the authority is elsewhere the caller has
-- asked it, and names only those that are over.
CREATE OR REPLACE FUNCTION fenced_guard.over_workers(p_guard text, p_holders uuid[]) RETURNS uuid[]
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_minted boolean := (SELECT (claims::jsonb ->> 'minted')::boolean FROM fenced_guard.guard WHERE guard = p_guard);
  v_holder uuid;
  v_over uuid[] := '{}';
BEGIN
  IF NOT fenced_guard.may_write() THEN
    PERFORM fenced_guard.refuse_stranger('cannot give rows back');
  END IF;
  FOREACH v_holder IN ARRAY p_holders LOOP
    IF NOT v_minted OR fenced_guard.is_over(v_holder) THEN
      v_over := v_over || v_holder;
      PERFORM fenced_guard.carry_claim('~' || v_holder);
    END IF;
  END LOOP;
  RETURN v_over;
END $$;

-- What a worker asks first: whether this database mints the tokens. Fails without a guard of claims, and for a foreign worker.
CREATE OR REPLACE FUNCTION fenced_guard.begin_work(p_guard text, p_realm text) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_claims jsonb := (SELECT claims FROM fenced_guard.guard WHERE guard = p_guard);
  v_trusted text;
BEGIN
  IF v_claims IS NULL THEN
    RAISE EXCEPTION USING ERRCODE = 'undefined_object', MESSAGE = format('fenced: claims are not installed on %s', p_guard),
      HINT = 'Run install() of its Claims.';
  ELSIF NOT fenced_guard.may_write() THEN
    PERFORM fenced_guard.refuse_stranger('cannot work here');
  END IF;
  IF (v_claims ->> 'minted')::boolean THEN
    IF NOT EXISTS (SELECT FROM fenced.namespace WHERE realm = p_realm) THEN
      RAISE EXCEPTION USING ERRCODE = 'object_not_in_prerequisite_state', MESSAGE = format(
        'fenced: this database mints the tokens of %s itself, and the worker is of an authority elsewhere (realm %s). Use a client of '
        'this database, or install with mint=False', p_guard, p_realm);
    END IF;
  END IF;
  v_trusted := fenced_guard.trust_realm(p_realm);
  IF v_trusted <> p_realm THEN
    PERFORM fenced_guard.refuse_foreign_worker(p_realm, v_trusted);
  END IF;
  RETURN (v_claims ->> 'minted')::boolean;
END $$;

-- Fail unless this realm is trusted. A claim with a token of an authority elsewhere calls it once.
CREATE OR REPLACE FUNCTION fenced_guard.check_worker(p_realm text) RETURNS boolean
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  v_trusted text := (SELECT realm FROM fenced_guard.trust);
BEGIN
  IF v_trusted IS DISTINCT FROM p_realm THEN
    PERFORM fenced_guard.refuse_foreign_worker(p_realm, v_trusted);
  END IF;
  RETURN true;
END $$;

-- A worker waits for new rows: INSERTs notify until then.
CREATE OR REPLACE FUNCTION fenced_guard.idle_until(p_guard text, p_seconds double precision) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  INSERT INTO fenced_guard.idle AS i (guard, until)
  SELECT p_guard, clock_timestamp() + least(p_seconds, 120) * interval '1 s' WHERE fenced_guard.may_write()
  ON CONFLICT (guard) DO UPDATE SET until = excluded.until WHERE i.until < excluded.until
$$;

-- AFTER INSERT, once a statement: notify the workers of this table, if one waits.
CREATE OR REPLACE FUNCTION fenced_guard.notify_idle(p_guard text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  IF EXISTS (SELECT FROM fenced_guard.idle WHERE guard = p_guard AND until > clock_timestamp()) THEN
    PERFORM pg_notify('fenced_work', p_guard);
  END IF;
END $$;
