-- The guard's verdict about a stamp, and what each mode does with the verdict: count it, record it or refuse.
--
-- Every read of a table here locks what it reads. A plain read inside a program's transaction would open its snapshot: what
-- the program reads afterwards could be older than the mark that it has waited for.

-- The decision, the same as `fenced.decision.judge`; 'rises' is 'admit' with a mark that rises to this stamp. Token 0: no mark.
CREATE FUNCTION fenced_guard.judge(
  m_token BIGINT, m_grant VARBINARY(32), m_seq BIGINT, m_operation VARBINARY(32),
  s_token BIGINT, s_grant VARBINARY(32), s_seq BIGINT, p_rule VARBINARY(9), p_announce BOOLEAN, p_operation VARBINARY(32)
) RETURNS VARBINARY(12) DETERMINISTIC NO SQL
BEGIN
  IF s_token < m_token THEN
    RETURN 'stale';
  ELSEIF s_token = m_token AND s_grant <> m_grant THEN
    RETURN 'reused';
  ELSEIF NOT p_announce AND p_rule <> 'retry' AND s_seq = 0 THEN
    RETURN 'invalid';  -- a write needs a seq above 0; a stamp with seq 0 or none can only announce
  ELSEIF s_token > m_token THEN
    RETURN 'rises';
  ELSEIF p_announce OR p_rule = 'retry' OR COALESCE(p_operation = m_operation, FALSE) THEN
    RETURN 'admit';
  ELSEIF p_rule = 'once' THEN
    RETURN IF(m_seq = 0, 'rises', 'duplicate');
  END IF;
  RETURN CASE WHEN s_seq > m_seq THEN 'rises' WHEN s_seq = m_seq THEN 'applied' ELSE 'out_of_order' END;
END
$$
-- The mode that counts for a name: that of the longest pattern that matches. While an override is in force nothing is refused,
-- and bad stamps are recorded as under shadow. Locks the guard's row, so that its modes stay until this transaction ends.
CREATE PROCEDURE fenced_guard.mode_of(
  p_scope VARBINARY(64), p_table VARBINARY(64), p_name MEDIUMBLOB, OUT p_mode VARBINARY(40), OUT p_refuses BOOLEAN, OUT p_requires BOOLEAN
)
BEGIN
  DECLARE v_percent DOUBLE;
  DECLARE v_patterned BOOLEAN;
  DECLARE v_lifted DATETIME(6);
  DECLARE v_lifts BIGINT;
  SELECT mode, percent, patterned, lifted INTO p_mode, v_percent, v_patterned, v_lifted FROM fenced_guard.guard
  WHERE scope = p_scope AND tbl = p_table LOCK IN SHARE MODE;
  IF v_patterned THEN
    SELECT mode, percent INTO p_mode, v_percent FROM fenced_guard.mode
    WHERE scope = p_scope AND tbl = p_table AND p_name LIKE likes ESCAPE '|'
    ORDER BY length DESC, pattern DESC LIMIT 1 LOCK IN SHARE MODE;
  END IF;
  SET p_mode = COALESCE(p_mode, 'observe');
  SET p_requires = p_mode = 'require';
  SET p_refuses = p_requires OR p_mode = 'enforce' OR (
    p_mode LIKE 'canary%' AND p_name <> '' AND CONV(LEFT(SHA2(p_name, 256), 8), 16, 10) + 0e0 < v_percent / 100e0 * 4294967296e0);
  IF p_refuses AND v_lifted > UTC_TIMESTAMP(6) THEN
    SELECT MAX(id) INTO v_lifts FROM fenced_guard.override
    WHERE scope = p_scope AND tbl = p_table AND p_name LIKE likes ESCAPE '|' AND until > UTC_TIMESTAMP(6) LOCK IN SHARE MODE;
    IF v_lifts IS NOT NULL THEN
      SET p_mode = 'override', p_refuses = FALSE, p_requires = FALSE;
    END IF;
  END IF;
END
$$
-- Record a decision that let a write through, in its own transaction.
CREATE PROCEDURE fenced_guard.note(
  p_scope VARBINARY(64), p_table VARBINARY(64), p_name MEDIUMBLOB, p_stamp MEDIUMBLOB, p_token BIGINT, p_grant VARBINARY(32),
  p_seq BIGINT, p_verdict VARBINARY(12), p_ruling VARBINARY(8), p_mode VARBINARY(40), p_count BIGINT
)
BEGIN
  INSERT INTO fenced_guard.record
    (at, scope, tbl, name, stamp, token, grant_id, seq, verdict, ruling, mode, who, address, pid, count)
  VALUES (UTC_TIMESTAMP(6), p_scope, p_table, LEFT(p_name, 200), LEFT(p_stamp, 1000), NULLIF(p_token, 0), p_grant, p_seq,
    p_verdict, p_ruling, p_mode, SUBSTRING_INDEX(USER(), '@', 1), SUBSTRING_INDEX(USER(), '@', -1), CONNECTION_ID(), p_count);
END
$$
-- Refuse: the statement fails, and `undo` records it from @fenced_refused after the transaction was rolled back.
CREATE PROCEDURE fenced_guard.refuse(
  p_scope VARBINARY(64), p_table VARBINARY(64), p_name MEDIUMBLOB, p_stamp MEDIUMBLOB, p_token BIGINT, p_grant VARBINARY(32),
  p_seq BIGINT, p_verdict VARBINARY(12), p_mode VARBINARY(40)
)
BEGIN
  DECLARE v_says TEXT CHARACTER SET utf8mb4;
  DECLARE v_errno INT;
  DECLARE v_carried VARBINARY(20) DEFAULT COALESCE(SUBSTRING_INDEX(SUBSTRING_INDEX(p_stamp, ':', 3), ':', -1), '?');
  DECLARE v_realm VARBINARY(16) DEFAULT '';
  IF p_verdict = 'foreign' THEN
    SELECT realm INTO v_realm FROM fenced_guard.trust WHERE scope = p_scope LOCK IN SHARE MODE;
  END IF;
  SET @fenced_refused = CONCAT_WS(',', p_verdict, HEX(p_scope), HEX(p_table), HEX(COALESCE(p_name, '')), HEX(COALESCE(p_stamp, '')),
    COALESCE(p_token, 0), COALESCE(p_grant, ''), COALESCE(p_seq, 0), COALESCE(v_realm, ''), COALESCE(p_mode, ''));
  SET v_errno = 900 + FIELD(p_verdict, 'stale', 'duplicate', 'out_of_order', 'reused', 'uncovered', 'foreign', 'missing', 'invalid',
    'forged', 'applied');
  SET v_says = CASE p_verdict
    WHEN 'stale' THEN CONCAT('token ', v_carried, ' is stale: ', IF(p_token > 0, p_token, 'a newer one'), ' has been seen')
    WHEN 'duplicate' THEN 'this grant has made its one operation (rule once)'
    WHEN 'out_of_order' THEN 'a later operation of the same lease was applied before (rule sequenced)'
    WHEN 'reused' THEN CONCAT('token ', v_carried, ' was seen from another grant')
    WHEN 'uncovered' THEN CONCAT('not covered, or not announced (token ', v_carried, ')')
    WHEN 'foreign' THEN 'the stamp is of an authority that this guard does not trust'
    WHEN 'missing' THEN 'the write carries no stamp, and the mode is require'
    WHEN 'invalid' THEN 'not a stamp that this rule can use'
    WHEN 'forged' THEN CONCAT('token ', v_carried, ' is not plausible')
    ELSE 'this operation was applied before; nothing was done' END;
  -- The message can be 128 characters long: a longer one would hide the refusal behind another error.
  SET v_says = LEFT(CONCAT('fenced: ', IF(COALESCE(p_name, '') = '', CONCAT('a row of ', CONVERT(p_table USING utf8mb4)),
    CONVERT(LEFT(p_name, 60) USING utf8mb4)), ': ', v_says), 120);
  SIGNAL SQLSTATE 'ZF001' SET MYSQL_ERRNO = v_errno, MESSAGE_TEXT = v_says;
END
$$
-- Act on a verdict that is not to admit, by the mode of the name.
CREATE PROCEDURE fenced_guard.rule_on(
  p_scope VARBINARY(64), p_table VARBINARY(64), p_name MEDIUMBLOB, p_stamp MEDIUMBLOB, p_token BIGINT, p_grant VARBINARY(32),
  p_seq BIGINT, p_verdict VARBINARY(12)
)
BEGIN
  DECLARE v_mode VARBINARY(40);
  DECLARE v_refuses, v_requires BOOLEAN;
  DECLARE v_key VARBINARY(200);
  CALL fenced_guard.mode_of(p_scope, p_table, p_name, v_mode, v_refuses, v_requires);
  IF IF(p_verdict = 'missing', v_requires, v_refuses OR p_verdict = 'applied') THEN
    CALL fenced_guard.refuse(p_scope, p_table, p_name, p_stamp, p_token, p_grant, p_seq, p_verdict, v_mode);
  ELSEIF v_mode <> 'shadow' AND p_verdict = 'missing' THEN
    -- Nearly all writes while a rollout begins: the first one of each connection and second is recorded, with the number of
    -- those before it that were not.
    SET v_key = CONCAT(p_scope, '/', p_table, ' ', v_mode, ' ', UNIX_TIMESTAMP());
    IF @fenced_noted <=> v_key THEN
      SET @fenced_unnoted = @fenced_unnoted + 1;
    ELSE
      CALL fenced_guard.note(p_scope, p_table, p_name, NULL, NULL, NULL, NULL, 'missing', 'count', v_mode,
        1 + IF(@fenced_noted LIKE CONCAT(p_scope, '/', p_table, ' ', v_mode, ' %'), @fenced_unnoted, 0));
      SET @fenced_noted = v_key, @fenced_unnoted = 0;
    END IF;
  ELSE
    CALL fenced_guard.note(p_scope, p_table, p_name, p_stamp, p_token, p_grant, p_seq, p_verdict,
      IF(v_mode = 'observe', 'count', 'record'), v_mode, 1);
  END IF;
END
