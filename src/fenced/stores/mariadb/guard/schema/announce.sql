-- Announcing: lock the marks of stamps, and let this transaction write under them.
--
-- @fenced_lines has a line for each announced name: scope/name, A (admitted) or L (let through), token, grant, seq, stamp. They are
-- hints: `decide` compares a line with the mark, under its lock, for every statement. So a line that is left over or made up
-- admits nothing that is stale.

-- Whether a key of this database has signed the stamp, whatever its seq. HMAC: SHA256(outer, SHA256(inner, message)).
CREATE PROCEDURE fenced_guard.check_proof(p_scope VARBINARY(64), p_stamp MEDIUMBLOB, p_proof MEDIUMBLOB, OUT p_proven BOOLEAN)
BEGIN
  DECLARE v_inner, v_outer VARBINARY(64);
  DECLARE v_message MEDIUMBLOB DEFAULT CONCAT('fenced proof 1', x'0A', SUBSTRING_INDEX(p_stamp, ':', 3), ':-:',
    SUBSTRING(p_stamp, LENGTH(SUBSTRING_INDEX(p_stamp, ':', 4)) + 2));
  SELECT inner_block, outer_block INTO v_inner, v_outer FROM fenced_guard.proof_key
  WHERE scope = p_scope AND id = LEFT(SUBSTRING_INDEX(p_proof, ':', 1), 32) AND revoked IS NULL LOCK IN SHARE MODE;
  SET p_proven = COALESCE(
    SHA2(CONCAT(v_outer, UNHEX(SHA2(CONCAT(v_inner, v_message), 256))), 256) = SUBSTRING(p_proof, LOCATE(':', p_proof) + 1), FALSE);
END
$$
-- Decide about one name: lock its mark, judge the stamp, raise the mark. `p_verdict` 'contended': the mode refuses nothing, and
-- another transaction has locked the mark.
--
-- `p_step`: alone, an announcement in a separate transaction; announce, a write will follow; write, it is the write itself.
CREATE PROCEDURE fenced_guard.admit(
  p_scope VARBINARY(64), p_name VARBINARY(200), p_covered BOOLEAN, p_stamp MEDIUMBLOB, p_rule VARBINARY(9), p_step VARBINARY(8),
  p_operation VARBINARY(32), p_refuses BOOLEAN, p_proof MEDIUMBLOB,
  OUT p_verdict VARBINARY(12), OUT m_token BIGINT, OUT m_grant VARBINARY(32), OUT m_seq BIGINT, OUT s_token BIGINT,
  OUT s_grant VARBINARY(32), OUT s_seq BIGINT
)
admit: BEGIN
  DECLARE v_realm, v_stamped VARBINARY(16);
  DECLARE v_text VARBINARY(40);
  DECLARE v_floor, v_wait BIGINT;
  DECLARE v_operation, v_kept VARBINARY(32);
  DECLARE v_proof, v_proven BOOLEAN;
  DECLARE EXIT HANDLER FOR 1205 BEGIN
    SET SESSION innodb_lock_wait_timeout = v_wait;
    IF p_refuses THEN
      RESIGNAL;
    END IF;
    SET p_verdict = 'contended';
  END;
  SET v_wait = @@SESSION.innodb_lock_wait_timeout, m_token = 0, m_grant = NULL, m_seq = NULL;
  SET v_stamped = SUBSTRING_INDEX(SUBSTRING_INDEX(p_stamp, ':', 2), ':', -1);
  SET v_text = LEFT(SUBSTRING_INDEX(SUBSTRING_INDEX(p_stamp, ':', 3), ':', -1), 40);
  SET s_token = IF(LENGTH(v_text) <= 16 AND CONVERT(v_text USING utf8mb4) REGEXP '^[1-9][0-9]*$', CAST(v_text AS SIGNED), 0);
  SET v_text = LEFT(SUBSTRING_INDEX(SUBSTRING_INDEX(p_stamp, ':', 4), ':', -1), 40);
  SET s_seq = CASE WHEN v_text = '-' THEN 0 WHEN LENGTH(v_text) <= 16 AND CONVERT(v_text USING utf8mb4) REGEXP '^[0-9]+$' THEN CAST(v_text AS SIGNED) ELSE -1 END;
  SET s_grant = SUBSTRING_INDEX(SUBSTRING_INDEX(p_stamp, ':', 5), ':', -1);
  IF NOT p_refuses THEN  -- 0 on MariaDB; MySQL makes it a second
    SET SESSION innodb_lock_wait_timeout = 0;
  END IF;
  SELECT realm, floor, proof INTO v_realm, v_floor, v_proof FROM fenced_guard.trust
  WHERE scope = p_scope LOCK IN SHARE MODE;
  IF s_token < 1 OR s_token > 9007199254740991 OR s_seq < 0 OR s_seq > 9007199254740991 THEN
    SET p_verdict = 'invalid', SESSION innodb_lock_wait_timeout = v_wait;
    LEAVE admit;
  ELSEIF v_proof THEN
    CALL fenced_guard.check_proof(p_scope, p_stamp, p_proof, v_proven);
    IF NOT v_proven THEN
      SET p_verdict = 'forged', SESSION innodb_lock_wait_timeout = v_wait;
      LEAVE admit;
    END IF;
  END IF;
  IF v_realm <> v_stamped THEN
    SET p_verdict = 'foreign', SESSION innodb_lock_wait_timeout = v_wait;
    LEAVE admit;
  ELSEIF NOT p_covered THEN
    SET p_verdict = 'uncovered', SESSION innodb_lock_wait_timeout = v_wait;
    LEAVE admit;
  END IF;
  SET v_operation = IF(p_step = 'write', p_operation, NULL);
  -- Creates the mark, or locks it exclusively, without a lock on the gap beside it. A lock in share mode first would be one.
  INSERT INTO fenced_guard.mark (scope, name, token, grant_id, seq) VALUES (p_scope, p_name, 0, '', 0)
  ON DUPLICATE KEY UPDATE seq = seq;
  SELECT token, grant_id, seq, operation INTO m_token, m_grant, m_seq, v_kept FROM fenced_guard.mark
  WHERE scope = p_scope AND name = p_name FOR UPDATE;
  SET p_verdict = fenced_guard.judge(m_token, m_grant, m_seq, v_kept, s_token, s_grant, s_seq, p_rule, p_step <> 'write', v_operation);
  IF p_verdict IN ('admit', 'rises') AND p_step = 'announce' AND p_rule <> 'retry' AND s_seq = 0 THEN
    SET p_verdict = 'invalid';  -- the write that follows would be invalid
  ELSEIF p_verdict = 'rises' AND m_token = 0 AND s_token < v_floor THEN
    SET p_verdict = 'stale';
  END IF;
  IF p_verdict = 'rises' THEN
    UPDATE fenced_guard.mark SET token = s_token, grant_id = s_grant, seq = IF(p_step = 'write', s_seq, 0), operation = v_operation
    WHERE scope = p_scope AND name = p_name;
    IF v_realm IS NULL THEN
      UPDATE fenced_guard.trust SET realm = v_stamped WHERE scope = p_scope AND realm IS NULL;
    END IF;
    SET p_verdict = 'admit';
  ELSEIF m_token = 0 THEN
    DELETE FROM fenced_guard.mark WHERE scope = p_scope AND name = p_name AND token = 0;
  END IF;
  SET SESSION innodb_lock_wait_timeout = v_wait;
END
$$
-- Announce each name in the order given, which is the same for everybody, so that two announcements cannot deadlock.
--
-- `p_stamps`  separated by spaces
-- `p_names`   a line for each name: the place of its stamp (0: no stamp covers it, and the first one is judged), a space, the name
-- `p_proofs`  one for each stamp, separated by spaces
CREATE PROCEDURE fenced_guard.announce(
  p_scope VARBINARY(64), p_table VARBINARY(64), p_rule VARBINARY(9), p_stamps MEDIUMBLOB, p_names MEDIUMBLOB, p_step VARBINARY(8),
  p_operation VARBINARY(32), p_proofs MEDIUMBLOB
)
BEGIN
  DECLARE v_rule VARBINARY(9);
  DECLARE v_line, v_stamp, v_lines MEDIUMBLOB DEFAULT '';
  DECLARE v_name VARBINARY(200);
  DECLARE v_place INT;
  DECLARE v_mode VARBINARY(40);
  DECLARE v_refuses, v_requires BOOLEAN;
  DECLARE v_verdict VARBINARY(12);
  DECLARE m_token, m_seq, s_token, s_seq BIGINT;
  DECLARE m_grant, s_grant VARBINARY(32);
  DECLARE v_says VARCHAR(128) CHARACTER SET utf8mb4;
  SELECT rule INTO v_rule FROM fenced_guard.guard WHERE scope = p_scope AND tbl = p_table LOCK IN SHARE MODE;
  IF v_rule IS NULL THEN
    SET v_says = LEFT(CONCAT('fenced: no guard is installed for ', COALESCE(CONVERT(p_scope USING utf8mb4), '?'), '.',
      CONVERT(p_table USING utf8mb4)), 120);
    SIGNAL SQLSTATE 'ZF001' SET MYSQL_ERRNO = 912, MESSAGE_TEXT = v_says;
  ELSEIF p_rule <> v_rule THEN
    SET v_says = CONCAT('fenced: rule ', CONVERT(v_rule USING utf8mb4));
    SIGNAL SQLSTATE 'ZF001' SET MYSQL_ERRNO = 913, MESSAGE_TEXT = v_says;
  END IF;
  WHILE p_names <> '' DO
    SET v_line = SUBSTRING_INDEX(p_names, x'0A', 1), p_names = SUBSTRING(p_names, LENGTH(v_line) + 2);
    SET v_place = SUBSTRING_INDEX(v_line, ' ', 1), v_name = SUBSTRING(v_line, LOCATE(' ', v_line) + 1);
    SET v_stamp = SUBSTRING_INDEX(SUBSTRING_INDEX(p_stamps, ' ', GREATEST(v_place, 1)), ' ', -1);
    CALL fenced_guard.mode_of(p_scope, p_table, v_name, v_mode, v_refuses, v_requires);
    CALL fenced_guard.admit(p_scope, v_name, v_place > 0, v_stamp, v_rule, p_step, p_operation, v_refuses,
      SUBSTRING_INDEX(SUBSTRING_INDEX(p_proofs, ' ', GREATEST(v_place, 1)), ' ', -1),
      v_verdict, m_token, m_grant, m_seq, s_token, s_grant, s_seq);
    IF v_verdict NOT IN ('admit', 'contended') THEN
      CALL fenced_guard.rule_on(p_scope, p_table, v_name, v_stamp, m_token, m_grant, m_seq, v_verdict);
    END IF;
    SET v_lines = CONCAT(v_lines, x'0A', p_scope, '/', v_name, x'09', IF(v_verdict = 'admit', 'A', 'L'), x'09', s_token, x'09', s_grant,
      x'09', s_seq, x'09', v_stamp);
  END WHILE;
  IF p_step <> 'alone' THEN
    -- Before the lines of an earlier announcement in this transaction: the first line of a name counts.
    SET @fenced_lines = CONCAT(v_lines, COALESCE(@fenced_lines, x'0A')), @fenced_operation = p_operation, @fenced_ok = NULL;
  END IF;
END
$$
-- Forget everything about the transaction that is over.
CREATE PROCEDURE fenced_guard.forget()
BEGIN
  SET @fenced_lines = NULL, @fenced_operation = NULL, @fenced_ok = NULL, @fenced_free = NULL;
  IF @fenced_idle IS NOT NULL THEN
    SET SESSION wait_timeout = @fenced_idle;
    SET @fenced_idle = NULL;
  END IF;
END
$$
-- Begin a transaction, and announce in it before anything is read.
--
-- `p_again`  this client has seen that the one name carries the mark of this stamp. Then nothing is written: the mark is locked
--            in share mode. If it has another one by now, the transaction begins again.
-- `p_left`   for how many seconds the connection may be idle; then the server ends it
CREATE PROCEDURE fenced_guard.enter(
  p_scope VARBINARY(64), p_table VARBINARY(64), p_rule VARBINARY(9), p_stamps MEDIUMBLOB, p_names MEDIUMBLOB, p_step VARBINARY(8),
  p_operation VARBINARY(32), p_proofs MEDIUMBLOB, p_again BOOLEAN, p_left BIGINT
)
enter: BEGIN
  DECLARE v_token BIGINT;
  DECLARE v_grant VARBINARY(32);
  DECLARE v_short BOOLEAN DEFAULT FALSE;
  DECLARE v_name VARBINARY(200);
  {refuse_open}
  START TRANSACTION;
  SAVEPOINT fenced_guard;
  SET @fenced_lines = NULL, @fenced_ok = NULL, @fenced_free = NULL, @fenced_refused = NULL;
  IF p_left < @@SESSION.wait_timeout THEN
    SET @fenced_idle = @@SESSION.wait_timeout;
    SET SESSION wait_timeout = p_left;
  END IF;
  IF p_again THEN
    SELECT rule = 'retry' AND COALESCE(p_rule, 'retry') = 'retry' AND mode IN ('enforce', 'require') AND NOT patterned AND lifted IS NULL
    INTO v_short FROM fenced_guard.guard WHERE scope = p_scope AND tbl = p_table LOCK IN SHARE MODE;
  END IF;
  IF v_short AND LENGTH(p_names) <= 202 THEN  -- a mode that refuses nothing must not wait for a lock, either
    SET v_name = SUBSTRING(p_names, 3);
    SELECT m.token, m.grant_id INTO v_token, v_grant FROM fenced_guard.trust t STRAIGHT_JOIN fenced_guard.mark m
    WHERE t.scope = p_scope AND t.realm = SUBSTRING(p_stamps, 3, 16) AND NOT t.proof AND m.scope = p_scope AND m.name = v_name LOCK IN SHARE MODE;
    IF CONCAT(':', v_token, ':') = SUBSTRING(p_stamps, 19, LENGTH(v_token) + 2) AND LOCATE(CONCAT(':', v_grant, ':'), p_stamps) > 0 THEN
      SET @fenced_lines = CONCAT(x'0A', p_scope, '/', SUBSTRING(p_names, 3), x'094109', v_token, x'09', v_grant, x'0930', x'09', p_stamps,
        x'0A');
      LEAVE enter;
    END IF;
    ROLLBACK;  -- gives up the locks, before stronger ones are taken
    START TRANSACTION;
    SAVEPOINT fenced_guard;
  END IF;
  CALL fenced_guard.announce(p_scope, p_table, p_rule, p_stamps, p_names, p_step, p_operation, p_proofs);
END
$$
-- Announce in a separate transaction: reads that begin afterwards are fenced.
CREATE PROCEDURE fenced_guard.announce_alone(
  p_scope VARBINARY(64), p_table VARBINARY(64), p_rule VARBINARY(9), p_stamps MEDIUMBLOB, p_names MEDIUMBLOB, p_proofs MEDIUMBLOB
)
BEGIN
  {refuse_open}
  START TRANSACTION;
  SET @fenced_refused = NULL;
  CALL fenced_guard.announce(p_scope, p_table, p_rule, p_stamps, p_names, 'alone', NULL, p_proofs);
  COMMIT;
END
$$
-- Announce in the transaction that the program has begun. With autocommit off, the next statement begins one.
CREATE PROCEDURE fenced_guard.announce_within(
  p_scope VARBINARY(64), p_table VARBINARY(64), p_rule VARBINARY(9), p_stamps MEDIUMBLOB, p_names MEDIUMBLOB, p_step VARBINARY(8),
  p_operation VARBINARY(32), p_proofs MEDIUMBLOB
)
BEGIN
  {refuse_idle}
  SET @fenced_refused = NULL;
  CALL fenced_guard.announce(p_scope, p_table, p_rule, p_stamps, p_names, p_step, p_operation, p_proofs);
END
$$
-- Fail unless the announced transaction still runs, and nothing in it was refused; then forget its stamps. COMMIT comes next.
CREATE PROCEDURE fenced_guard.finish()
BEGIN
  DECLARE EXIT HANDLER FOR 1305 BEGIN
    CALL fenced_guard.forget();
    SIGNAL SQLSTATE 'ZF001' SET MYSQL_ERRNO = 914,
      MESSAGE_TEXT = 'fenced: the transaction was ended inside the guarded block';
  END;
  IF @fenced_refused IS NOT NULL THEN
    SIGNAL SQLSTATE 'ZF001' SET MYSQL_ERRNO = 915,
      MESSAGE_TEXT = 'fenced: a statement was refused inside the block, and the program caught its error';
  END IF;
  RELEASE SAVEPOINT fenced_guard;  -- 1305 if there is none: a savepoint ends with its transaction
  CALL fenced_guard.forget();
END
$$
-- Commit the announced transaction.
CREATE PROCEDURE fenced_guard.leave()
BEGIN
  DECLARE EXIT HANDLER FOR 1305 BEGIN
    CALL fenced_guard.finish();  -- which says the same
  END;
  IF @fenced_refused IS NOT NULL OR @fenced_idle IS NOT NULL THEN
    CALL fenced_guard.finish();
  ELSE  -- the same without another call
    RELEASE SAVEPOINT fenced_guard;
    SET @fenced_lines = NULL, @fenced_operation = NULL, @fenced_ok = NULL, @fenced_free = NULL;
  END IF;
  COMMIT;
END
$$
-- Roll back, forget the stamps, and record the refusal if there was one: what was recorded inside is rolled back.
CREATE PROCEDURE fenced_guard.undo()
BEGIN
  DECLARE v_told MEDIUMBLOB DEFAULT @fenced_refused;
  DECLARE v_verdict VARBINARY(12) DEFAULT SUBSTRING_INDEX(v_told, ',', 1);
  ROLLBACK;
  SET @fenced_refused = NULL;
  CALL fenced_guard.forget();
  IF v_told IS NOT NULL AND v_verdict <> 'applied' THEN
    CALL fenced_guard.note(
      UNHEX(SUBSTRING_INDEX(SUBSTRING_INDEX(v_told, ',', 2), ',', -1)), UNHEX(SUBSTRING_INDEX(SUBSTRING_INDEX(v_told, ',', 3), ',', -1)),
      UNHEX(SUBSTRING_INDEX(SUBSTRING_INDEX(v_told, ',', 4), ',', -1)),
      NULLIF(UNHEX(SUBSTRING_INDEX(SUBSTRING_INDEX(v_told, ',', 5), ',', -1)), ''),
      SUBSTRING_INDEX(SUBSTRING_INDEX(v_told, ',', 6), ',', -1), SUBSTRING_INDEX(SUBSTRING_INDEX(v_told, ',', 7), ',', -1),
      SUBSTRING_INDEX(SUBSTRING_INDEX(v_told, ',', 8), ',', -1), v_verdict, 'refuse', SUBSTRING_INDEX(v_told, ',', -1), 1);
    COMMIT;
  END IF;
END
$$
-- Remove the first line of each of these names from what was announced in this transaction.
CREATE PROCEDURE fenced_guard.clear(p_scope VARBINARY(64), p_names MEDIUMBLOB)
BEGIN
  DECLARE v_name VARBINARY(200);
  DECLARE v_at BIGINT;
  SET @fenced_ok = NULL;
  WHILE p_names <> '' DO
    SET v_name = SUBSTRING_INDEX(p_names, x'0A', 1), p_names = SUBSTRING(p_names, LENGTH(v_name) + 2);
    SET v_at = LOCATE(CONCAT(x'0A', p_scope, '/', v_name, x'09'), @fenced_lines);
    IF v_at > 0 THEN
      SET @fenced_lines = CONCAT(LEFT(@fenced_lines, v_at - 1), SUBSTRING(@fenced_lines, LOCATE(x'0A', @fenced_lines, v_at + 1)));
    END IF;
  END WHILE;
  IF @fenced_lines = x'0A' THEN
    CALL fenced_guard.forget();
  END IF;
END
$$
-- Fail unless the authority in the guarded database says that each of these leases is still held. It is called when the marks are
-- locked, and locks no attempt: a lock would block renewals. That is safe, because a successor that is granted a name later
-- must wait for our lock of its mark.
CREATE PROCEDURE fenced_guard.still_held(p_scope VARBINARY(64), p_stamps MEDIUMBLOB)
BEGIN
  DECLARE v_stamp MEDIUMBLOB;
  DECLARE v_scope VARBINARY(64);
  DECLARE EXIT HANDLER FOR 1146, 1049 SIGNAL SQLSTATE 'ZF001' SET MYSQL_ERRNO = 919,
    MESSAGE_TEXT = 'fenced: still_held needs the authority in the same database';
  SELECT scope INTO v_scope FROM fenced_guard.trust WHERE scope = p_scope LOCK IN SHARE MODE;
  SET @fenced_query = CONCAT('SELECT COUNT(*) INTO @fenced_held FROM `', REPLACE(v_scope, '`', '``'), '`.fenced_attempt a JOIN `',
    REPLACE(v_scope, '`', '``'), '`.fenced_namespace n ON n.id = a.namespace WHERE a.id = ? AND n.realm = ? AND a.token = ? ',
    'AND a.state = ''granted'' AND a.expires > TIMESTAMPDIFF(MICROSECOND, ''1970-01-01'', UTC_TIMESTAMP(6)) * 1000');
  PREPARE fenced_held FROM @fenced_query;
  WHILE p_stamps <> '' DO
    SET v_stamp = SUBSTRING_INDEX(p_stamps, ' ', 1), p_stamps = SUBSTRING(p_stamps, LENGTH(v_stamp) + 2);
    SET @fenced_realm = SUBSTRING_INDEX(SUBSTRING_INDEX(v_stamp, ':', 2), ':', -1),
      @fenced_token = SUBSTRING_INDEX(SUBSTRING_INDEX(v_stamp, ':', 3), ':', -1),
      @fenced_grant = SUBSTRING_INDEX(SUBSTRING_INDEX(v_stamp, ':', 5), ':', -1);
    EXECUTE fenced_held USING @fenced_grant, @fenced_realm, @fenced_token;
    IF @fenced_held = 0 THEN
      SIGNAL SQLSTATE 'ZF001' SET MYSQL_ERRNO = 918, MESSAGE_TEXT = 'fenced: the lease is over';
    END IF;
  END WHILE;
  DEALLOCATE PREPARE fenced_held;
END
