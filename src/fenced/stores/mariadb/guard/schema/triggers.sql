-- The procedure that triggers call to decide about a write, and the functions that writers ask.

-- Decide about a row that was written. The triggers call it once for each statement and name: NOW(6) is the same for all rows
-- of a statement.
CREATE PROCEDURE fenced_guard.decide(p_scope VARBINARY(64), p_table VARBINARY(64), p_rule VARBINARY(9), p_name MEDIUMBLOB)
decide: BEGIN
  DECLARE v_key MEDIUMBLOB DEFAULT CONCAT(x'0A', p_scope, '/', p_name, x'09');
  DECLARE v_at BIGINT DEFAULT LOCATE(v_key, @fenced_lines);
  DECLARE v_line, v_stamp MEDIUMBLOB;
  DECLARE v_verdict VARBINARY(12) DEFAULT 'missing';
  DECLARE v_mode VARBINARY(40);
  DECLARE v_refuses, v_requires BOOLEAN;
  DECLARE m_token BIGINT DEFAULT 0;
  DECLARE m_seq BIGINT;
  DECLARE m_grant, m_operation VARBINARY(32);
  IF v_at > 0 THEN
    SET v_line = SUBSTRING_INDEX(SUBSTRING(@fenced_lines, v_at + LENGTH(v_key)), x'0A', 1);
    SET v_stamp = SUBSTRING_INDEX(v_line, x'09', -1);
    IF LEFT(v_line, 1) = 'L' THEN
      CALL fenced_guard.mode_of(p_scope, p_table, p_name, v_mode, v_refuses, v_requires);
      IF NOT v_refuses THEN  -- it was recorded when it was announced
        SET @fenced_ok = CONCAT(NOW(6), p_table, ':', p_name);
        LEAVE decide;
      END IF;
    END IF;
    -- The lock keeps the mark as it is until this transaction ends. It waits for nobody if the name was admitted here: then
    -- this transaction has the lock already.
    IF p_rule = 'retry' THEN
      SELECT token, grant_id INTO m_token, m_grant FROM fenced_guard.mark WHERE scope = p_scope AND name = p_name LOCK IN SHARE MODE;
    ELSE
      SELECT token, grant_id, seq, operation INTO m_token, m_grant, m_seq, m_operation FROM fenced_guard.mark
      WHERE scope = p_scope AND name = p_name FOR UPDATE;
    END IF;
    SET v_verdict = fenced_guard.judge(m_token, m_grant, m_seq, m_operation,
      SUBSTRING_INDEX(SUBSTRING_INDEX(v_line, x'09', 2), x'09', -1), SUBSTRING_INDEX(SUBSTRING_INDEX(v_line, x'09', 3), x'09', -1),
      SUBSTRING_INDEX(SUBSTRING_INDEX(v_line, x'09', 4), x'09', -1), p_rule, FALSE, @fenced_operation);
    IF v_verdict = 'rises' AND SUBSTRING_INDEX(SUBSTRING_INDEX(v_line, x'09', 2), x'09', -1) > m_token THEN
      -- No mark is raised here: this transaction may have read before it had the lock.
      SIGNAL SQLSTATE 'ZF001' SET MYSQL_ERRNO = 911,
        MESSAGE_TEXT = 'fenced: the mark was not locked when this transaction announced it; begin again';
    ELSEIF v_verdict = 'rises' THEN
      UPDATE fenced_guard.mark SET seq = SUBSTRING_INDEX(SUBSTRING_INDEX(v_line, x'09', 4), x'09', -1), operation = @fenced_operation
      WHERE scope = p_scope AND name = p_name;
    END IF;
  ELSEIF LOCATE(CONCAT(x'0A', p_scope, '/'), @fenced_lines) > 0 THEN
    SET v_verdict = 'uncovered', v_stamp = SUBSTRING_INDEX(SUBSTRING_INDEX(SUBSTRING(@fenced_lines, 2), x'0A', 1), x'09', -1);
  END IF;
  IF v_verdict NOT IN ('admit', 'rises') THEN
    CALL fenced_guard.rule_on(p_scope, p_table, p_name, v_stamp, m_token, m_grant, m_seq, v_verdict);
  END IF;
  SET @fenced_ok = CONCAT(NOW(6), p_table, ':', p_name);
END
$$
-- The token under which this transaction writes the name; NULL unless it was admitted here.
CREATE FUNCTION fenced_guard.token_for(p_scope VARBINARY(64), p_name MEDIUMBLOB) RETURNS BIGINT NOT DETERMINISTIC NO SQL
BEGIN
  DECLARE v_key MEDIUMBLOB DEFAULT CONCAT(x'0A', p_scope, '/', p_name, x'0941', x'09');
  DECLARE v_at BIGINT DEFAULT LOCATE(v_key, @fenced_lines);
  RETURN IF(v_at > 0, SUBSTRING_INDEX(SUBSTRING(@fenced_lines, v_at + LENGTH(v_key), 20), x'09', 1), NULL);
END
$$
-- The mark of a name, for writers: token, grant and seq, separated by colons; NULL if it has none.
CREATE FUNCTION fenced_guard.peek(p_scope VARBINARY(64), p_name VARBINARY(200)) RETURNS VARBINARY(100) NOT DETERMINISTIC READS SQL DATA
BEGIN
  DECLARE v_found VARBINARY(100);
  SELECT CONCAT_WS(':', token, grant_id, seq) INTO v_found FROM fenced_guard.mark
  WHERE scope = p_scope AND name = p_name AND token > 0;
  RETURN v_found;
END
$$
-- Decide about an operation without a stamp, for a guard without triggers.
CREATE PROCEDURE fenced_guard.miss(p_scope VARBINARY(64), p_table VARBINARY(64), p_name MEDIUMBLOB)
BEGIN
  CALL fenced_guard.rule_on(p_scope, p_table, p_name, NULL, 0, NULL, NULL, 'missing');
END
