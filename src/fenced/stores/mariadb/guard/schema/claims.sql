-- Claims on rows of a table. The trigger of the table (`claiming.py` writes it) admits nearly every write by itself; these
-- routines decide about claims, and about all other writes.
--
-- @fenced_lines has a line for the claim that this transaction has announced: a tab, scope/table/name, a tab, the token. It is a
-- hint: the trigger compares it with the row, under the row's lock.

-- Whether this transaction has announced this claim.
CREATE FUNCTION fenced_guard.carries_claim(p_scope VARBINARY(64), p_table VARBINARY(64), p_name MEDIUMBLOB, p_token BIGINT)
RETURNS BOOLEAN NOT DETERMINISTIC NO SQL
BEGIN
  RETURN COALESCE(LOCATE(CONCAT(x'0A09', p_scope, '/', p_table, '/', p_name, x'09', p_token, x'0A'), @fenced_lines) > 0, FALSE);
END
$$
-- Fail unless this is a good claim: `p_holder` is the realm of the worker's authority and the worker, with a token above that of
-- the last claim of the row. Whatever the mode is, a bad claim is refused: only programs that claim rows write `claim_holder`.
-- Nothing records that: a worker whose token is too old asks for another one.
CREATE PROCEDURE fenced_guard.check_claim(
  p_scope VARBINARY(64), p_name MEDIUMBLOB, p_free BOOLEAN, p_holder VARBINARY(64), p_token BIGINT, p_before BIGINT
)
BEGIN
  DECLARE v_realm VARBINARY(16);
  DECLARE v_errno INT;
  DECLARE v_says TEXT CHARACTER SET utf8mb4;
  SELECT realm INTO v_realm FROM fenced_guard.trust WHERE scope = p_scope LOCK IN SHARE MODE;
  IF NOT p_free THEN
    SET v_errno = 907, v_says = 'another worker has claimed it, or the claim changes its name';
  ELSEIF NOT CONVERT(p_holder USING utf8mb4) REGEXP '^[0-9a-f]{16}:[0-9a-f]{32}$' OR (p_token BETWEEN 1 AND 8796093022207) IS NOT TRUE THEN
    SET v_errno = 907, v_says = 'a claim has a token of the authority';
  ELSEIF (v_realm = LEFT(p_holder, 16)) IS NOT TRUE THEN
    SET v_errno = 906, v_says = CONCAT('the worker is of realm ', LEFT(p_holder, 16), ', and the guard trusts ', COALESCE(v_realm, 'none'));
  ELSEIF p_token <= p_before THEN
    SET v_errno = 901, v_says = CONCAT('token ', p_token, ' is stale: ', p_before, ' has been seen');
  END IF;
  IF v_errno IS NOT NULL THEN
    IF @fenced_lines IS NULL THEN
      SET @fenced_refused = NULL;  -- of an earlier statement
    END IF;
    SET v_says = LEFT(CONCAT('fenced: ', CONVERT(LEFT(p_name, 50) USING utf8mb4), ': ', v_says), 128);
    SIGNAL SQLSTATE 'ZF001' SET MYSQL_ERRNO = v_errno, MESSAGE_TEXT = v_says;
  END IF;
END
$$
-- Act on a write of a row that is or was claimed, and that carries no good stamp: `p_token` and `p_write` are the row's,
-- `p_new_write` is what it would be. Returns if the mode lets the write through.
CREATE PROCEDURE fenced_guard.rule_on_write(
  p_scope VARBINARY(64), p_table VARBINARY(64), p_name MEDIUMBLOB, p_moved BOOLEAN, p_token BIGINT, p_write BIGINT, p_new_write BIGINT
)
BEGIN
  DECLARE v_realm VARBINARY(16);
  DECLARE v_verdict VARBINARY(12) DEFAULT 'stale';
  DECLARE v_stamp MEDIUMBLOB;
  DECLARE v_carried BIGINT DEFAULT IF(p_new_write <=> p_write, NULL, p_new_write DIV 1048576);
  IF p_moved THEN
    SET v_verdict = 'uncovered';
  ELSEIF v_carried IS NULL THEN
    SET v_verdict = IF(LOCATE(x'0A09', @fenced_lines) > 0, 'uncovered', 'missing');
  ELSEIF v_carried >= p_token THEN
    SET v_verdict = IF(v_carried = p_token, 'out_of_order', 'forged');
  END IF;
  IF v_carried > 0 AND CONVERT(p_name USING utf8mb4) REGEXP '^[A-Za-z0-9_.~/-]+$' THEN  -- others would have to be quoted
    SELECT realm INTO v_realm FROM fenced_guard.trust WHERE scope = p_scope LOCK IN SHARE MODE;
    SET v_stamp = CONCAT_WS(':', '1', v_realm, v_carried, IF(p_new_write % 1048576 > 0, p_new_write % 1048576, '-'),
      LEFT(SHA2(CONCAT('claim ', v_realm, ' ', v_carried, ' ', p_name), 256), 32), p_name);
  END IF;
  CALL fenced_guard.rule_on(p_scope, p_table, p_name, v_stamp, p_write DIV 1048576, '', p_write % 1048576, v_verdict);
END
$$
-- A new row that is claimed already.
CREATE PROCEDURE fenced_guard.refuse_born_claimed(p_name MEDIUMBLOB)
BEGIN
  DECLARE v_says TEXT CHARACTER SET utf8mb4
    DEFAULT CONCAT('fenced: ', CONVERT(LEFT(p_name, 60) USING utf8mb4), ': a new row is claimed by nobody');
  SIGNAL SQLSTATE 'ZF001' SET MYSQL_ERRNO = 907, MESSAGE_TEXT = v_says;
END
$$
-- Begin a transaction of the claimant. Its next statement locks the row and compares the token.
CREATE PROCEDURE fenced_guard.enter_claim(p_scope VARBINARY(64), p_table VARBINARY(64), p_name VARBINARY(200), p_token BIGINT)
BEGIN
  {refuse_open}
  START TRANSACTION;
  SAVEPOINT fenced_guard;
  SET @fenced_lines = CONCAT(x'0A09', p_scope, '/', p_table, '/', p_name, x'09', p_token, x'0A'), @fenced_ok = NULL, @fenced_free = NULL,
    @fenced_refused = NULL;
END
$$
-- What a worker asks first. Fails without a guard of claims, and for a foreign worker; the first worker's realm is trusted.
CREATE PROCEDURE fenced_guard.begin_work(p_scope VARBINARY(64), p_table VARBINARY(64), p_realm VARBINARY(16))
BEGIN
  DECLARE v_realm VARBINARY(16);
  DECLARE v_claims BIGINT;
  DECLARE v_says TEXT CHARACTER SET utf8mb4;
  SELECT COUNT(claims) INTO v_claims FROM fenced_guard.guard WHERE scope = p_scope AND tbl = p_table LOCK IN SHARE MODE;
  IF v_claims = 0 THEN
    SET v_says = LEFT(CONCAT('fenced: claims are not installed on ', CONVERT(p_table USING utf8mb4)), 120);
    SIGNAL SQLSTATE 'ZF001' SET MYSQL_ERRNO = 920, MESSAGE_TEXT = v_says;
  END IF;
  -- In share mode first: an exclusive lock would wait for every open transaction that has met a guard.
  SELECT realm INTO v_realm FROM fenced_guard.trust WHERE scope = p_scope LOCK IN SHARE MODE;
  IF v_realm IS NULL THEN
    UPDATE fenced_guard.trust SET realm = p_realm WHERE scope = p_scope AND realm IS NULL;
    SELECT realm INTO v_realm FROM fenced_guard.trust WHERE scope = p_scope LOCK IN SHARE MODE;
  END IF;
  IF v_realm <> p_realm THEN
    SET v_says = CONCAT('fenced: the worker is of realm ', CONVERT(p_realm USING utf8mb4), ', and the guard trusts ',
      CONVERT(v_realm USING utf8mb4));
    SIGNAL SQLSTATE 'ZF001' SET MYSQL_ERRNO = 906, MESSAGE_TEXT = v_says;
  END IF;
END
