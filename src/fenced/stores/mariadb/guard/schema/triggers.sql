-- The procedure that triggers call to decide about a write, and the functions that writers ask.

-- Decide about a row that was written, under rule retry. The triggers call it once for each statement and name: NOW(6) is the
-- same for all rows of a statement.
--
-- Nothing that this calls may change a mark. A statement locks what its triggers could write, so the read below would take an
-- exclusive lock, and deadlock with a successor that waits for the shared one of the announcement.
CREATE PROCEDURE fenced_guard.decide(p_scope VARBINARY(64), p_table VARBINARY(64), p_name MEDIUMBLOB)
decide: BEGIN
  DECLARE v_key MEDIUMBLOB DEFAULT CONCAT(x'0A', p_scope, '/', p_name, x'094109');
  DECLARE v_at BIGINT DEFAULT LOCATE(v_key, @fenced_lines);
  DECLARE v_name VARBINARY(200);
  DECLARE m_token BIGINT;
  DECLARE m_grant VARBINARY(32);
  IF v_at > 0 THEN
    -- The lock keeps the mark as it is until this transaction ends. It waits for nobody if the name was admitted here: then
    -- this transaction has the lock already.
    SET v_name = LEFT(p_name, 200);
    SELECT token, grant_id INTO m_token, m_grant FROM fenced_guard.mark WHERE scope = p_scope AND name = v_name LOCK IN SHARE MODE;
    IF LOCATE(CONCAT(v_key, m_token, x'09', m_grant, x'09'), @fenced_lines) = v_at THEN  -- announced, and still the mark
      SET @fenced_ok = CONCAT(NOW(6), p_table, ':', p_name);
      LEAVE decide;
    END IF;
  END IF;
  CALL fenced_guard.decide_general(p_scope, p_table, p_name);
END
$$
-- The same for what is not that simple.
CREATE PROCEDURE fenced_guard.decide_general(p_scope VARBINARY(64), p_table VARBINARY(64), p_name MEDIUMBLOB)
decide: BEGIN
  DECLARE v_line MEDIUMBLOB DEFAULT fenced_guard.line_of(p_scope, p_name);
  DECLARE v_name VARBINARY(200) DEFAULT LEFT(p_name, 200);
  DECLARE v_verdict VARBINARY(12);
  DECLARE v_let BOOLEAN;
  DECLARE m_token BIGINT DEFAULT 0;
  DECLARE m_grant VARBINARY(32);
  IF v_line IS NULL THEN
    CALL fenced_guard.not_announced(p_scope, p_table, p_name);
    SET @fenced_ok = CONCAT(NOW(6), p_table, ':', p_name);
    LEAVE decide;
  END IF;
  CALL fenced_guard.let_through(p_scope, p_table, p_name, v_line, v_let);
  IF NOT v_let THEN
    SELECT token, grant_id INTO m_token, m_grant FROM fenced_guard.mark WHERE scope = p_scope AND name = v_name LOCK IN SHARE MODE;
    SET v_verdict = fenced_guard.judge(m_token, m_grant, 0, NULL, fenced_guard.part(v_line, 2), fenced_guard.part(v_line, 3), 0, 'retry',
      FALSE, NULL);
    IF v_verdict = 'rises' THEN
      CALL fenced_guard.not_locked();
    ELSEIF v_verdict <> 'admit' THEN
      CALL fenced_guard.rule_on(p_scope, p_table, p_name, fenced_guard.part(v_line, 5), m_token, m_grant, 0, v_verdict);
    END IF;
  END IF;
  SET @fenced_ok = CONCAT(NOW(6), p_table, ':', p_name);
END
$$
-- The same under the rules once and sequenced, which count operations: the first statement of one is written into the mark.
CREATE PROCEDURE fenced_guard.decide_counted(p_scope VARBINARY(64), p_table VARBINARY(64), p_rule VARBINARY(9), p_name MEDIUMBLOB)
decide: BEGIN
  DECLARE v_line MEDIUMBLOB DEFAULT fenced_guard.line_of(p_scope, p_name);
  DECLARE v_name VARBINARY(200) DEFAULT LEFT(p_name, 200);
  DECLARE v_verdict VARBINARY(12);
  DECLARE v_let BOOLEAN;
  DECLARE m_token BIGINT DEFAULT 0;
  DECLARE m_seq BIGINT;
  DECLARE m_grant, m_operation VARBINARY(32);
  IF v_line IS NULL THEN
    CALL fenced_guard.not_announced(p_scope, p_table, p_name);
    SET @fenced_ok = CONCAT(NOW(6), p_table, ':', p_name);
    LEAVE decide;
  END IF;
  CALL fenced_guard.let_through(p_scope, p_table, p_name, v_line, v_let);
  IF NOT v_let THEN
    SELECT token, grant_id, seq, operation INTO m_token, m_grant, m_seq, m_operation FROM fenced_guard.mark
    WHERE scope = p_scope AND name = v_name FOR UPDATE;
    SET v_verdict = fenced_guard.judge(m_token, m_grant, m_seq, m_operation, fenced_guard.part(v_line, 2), fenced_guard.part(v_line, 3),
      fenced_guard.part(v_line, 4), p_rule, FALSE, @fenced_operation);
    IF v_verdict = 'rises' AND fenced_guard.part(v_line, 2) > m_token THEN
      CALL fenced_guard.not_locked();
    ELSEIF v_verdict = 'rises' THEN
      UPDATE fenced_guard.mark SET seq = fenced_guard.part(v_line, 4), operation = @fenced_operation
      WHERE scope = p_scope AND name = v_name;
    ELSEIF v_verdict <> 'admit' THEN
      CALL fenced_guard.rule_on(p_scope, p_table, p_name, fenced_guard.part(v_line, 5), m_token, m_grant, m_seq, v_verdict);
    END IF;
  END IF;
  SET @fenced_ok = CONCAT(NOW(6), p_table, ':', p_name);
END
$$
-- What was announced about a name: A (admitted) or L (let through), token, grant, seq, stamp, separated by tabs; NULL if nothing was.
CREATE FUNCTION fenced_guard.line_of(p_scope VARBINARY(64), p_name MEDIUMBLOB) RETURNS MEDIUMBLOB NOT DETERMINISTIC NO SQL
BEGIN
  DECLARE v_key MEDIUMBLOB DEFAULT CONCAT(x'0A', p_scope, '/', p_name, x'09');
  DECLARE v_at BIGINT DEFAULT LOCATE(v_key, @fenced_lines);
  RETURN IF(v_at > 0, SUBSTRING_INDEX(SUBSTRING(@fenced_lines, v_at + LENGTH(v_key)), x'0A', 1), NULL);
END
$$
CREATE FUNCTION fenced_guard.part(p_line MEDIUMBLOB, p_number INT) RETURNS MEDIUMBLOB DETERMINISTIC NO SQL
BEGIN
  RETURN SUBSTRING_INDEX(SUBSTRING_INDEX(p_line, x'09', p_number), x'09', -1);
END
$$
-- Whether the announcement was recorded and let through, and the mode still refuses nothing.
CREATE PROCEDURE fenced_guard.let_through(
  p_scope VARBINARY(64), p_table VARBINARY(64), p_name MEDIUMBLOB, p_line MEDIUMBLOB, OUT p_let BOOLEAN
)
BEGIN
  DECLARE v_mode VARBINARY(40);
  DECLARE v_refuses, v_requires BOOLEAN;
  SET p_let = FALSE;
  IF LEFT(p_line, 1) = 'L' THEN
    CALL fenced_guard.mode_of(p_scope, p_table, p_name, v_mode, v_refuses, v_requires);
    SET p_let = NOT v_refuses;
  END IF;
END
$$
-- No mark is raised by a write: this transaction may have read before it had the lock.
CREATE PROCEDURE fenced_guard.not_locked()
BEGIN
  SIGNAL SQLSTATE 'ZF001' SET MYSQL_ERRNO = 911,
    MESSAGE_TEXT = 'fenced: the mark was not locked when this transaction announced it; begin again';
END
$$
-- Rule on a write under a name that this transaction has not announced.
CREATE PROCEDURE fenced_guard.not_announced(p_scope VARBINARY(64), p_table VARBINARY(64), p_name MEDIUMBLOB)
BEGIN
  DECLARE v_free BOOLEAN;
  IF LOCATE(CONCAT(x'0A', p_scope, '/'), @fenced_lines) > 0 THEN
    CALL fenced_guard.rule_on(p_scope, p_table, p_name,
      SUBSTRING_INDEX(SUBSTRING_INDEX(SUBSTRING(@fenced_lines, 2), x'0A', 1), x'09', -1), 0, NULL, NULL, 'uncovered');
  ELSE
    CALL fenced_guard.rule_on(p_scope, p_table, p_name, NULL, 0, NULL, NULL, 'missing');
    -- Where every name has one mode, and it only counts, the other rows of this statement need no look.
    SELECT NOT patterned AND mode <> 'shadow' INTO v_free FROM fenced_guard.guard WHERE scope = p_scope AND tbl = p_table
    LOCK IN SHARE MODE;
    IF v_free THEN
      SET @fenced_free = CONCAT(NOW(6), p_table, ':');
    END IF;
  END IF;
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
