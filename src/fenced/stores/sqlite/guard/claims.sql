-- claimed: A claim. The worker declares a token of its authority: above that of the last claim, with all that goes with it.
CREATE TRIGGER main."fenced_{table}_claimed" BEFORE UPDATE ON "{table}"
WHEN NEW.claim_holder IS NOT NULL AND NEW.claim_holder IS NOT OLD.claim_holder
BEGIN
  SELECT RAISE(ABORT, 'fenced:stale:{table}') WHERE NEW.claim_token <= OLD.claim_token;
  SELECT RAISE(ABORT, 'fenced:missing:{table}') WHERE OLD.claim_holder IS NOT NULL OR {moved}
    OR typeof(NEW.claim_token) <> 'integer' OR NEW.claim_token NOT BETWEEN 1 AND 8796093022207
    OR NEW.claim_write IS NOT NEW.claim_token << 20 OR NEW.claim_attempts IS NOT OLD.claim_attempts + 1;
END;

-- update: Any other write of a row that is or was claimed, unless it carries the next number under the row's own token, or its
-- transaction has announced the claim, or gives back the rows of a worker that is over. Whoever writes the columns of a
-- claim is refused in every mode; the mode decides about writes that leave them alone.
CREATE TRIGGER main."fenced_{table}_update" BEFORE UPDATE ON "{table}"
WHEN (NEW.claim_holder IS NULL OR NEW.claim_holder IS OLD.claim_holder)
  AND (OLD.claim_token IS NOT NULL OR NEW.claim_token IS NOT NULL OR NEW.claim_write IS NOT NULL)
  AND NOT coalesce(NEW.claim_write > OLD.claim_write AND NEW.claim_write >> 20 = OLD.claim_token
    AND NEW.claim_token = OLD.claim_token AND NOT ({moved}), 0)
  AND NOT (NEW.claim_token IS OLD.claim_token AND NEW.claim_write IS OLD.claim_write AND NOT ({moved}) AND EXISTS (
    SELECT 1 FROM fenced_stamp WHERE guard = '{table}' AND (
      (name = char(10) || '@' || {name} AND seq = OLD.claim_token)
      OR (NEW.claim_holder IS NULL AND name = char(10) || '~' || OLD.claim_holder))))
BEGIN
  SELECT RAISE(ABORT, 'fenced:uncovered:{table}') WHERE {moved};
  SELECT RAISE(ABORT, 'fenced:forged:{table}') WHERE NEW.claim_write IS NOT OLD.claim_write AND NEW.claim_write >> 20 > OLD.claim_token;
  SELECT RAISE(ABORT, 'fenced:stale:{table}')
    WHERE NEW.claim_write IS NOT OLD.claim_write AND coalesce(NEW.claim_write >> 20 < OLD.claim_token, NEW.claim_write IS NOT NULL);
  SELECT RAISE(ABORT, 'fenced:out_of_order:{table}') WHERE NEW.claim_write < OLD.claim_write;
  SELECT RAISE(ABORT, 'fenced:missing:{table}')
    WHERE NEW.claim_token IS NOT OLD.claim_token OR NEW.claim_write IS NOT OLD.claim_write
      OR NEW.claim_holder IS NOT OLD.claim_holder OR NEW.claim_attempts IS NOT OLD.claim_attempts OR NEW.claim_at IS NOT OLD.claim_at;
  INSERT INTO "{gate}" (name) VALUES ({name});
END;

-- insert: Nobody is born claimed.
CREATE TRIGGER main."fenced_{table}_insert" BEFORE INSERT ON "{table}"
WHEN NEW.claim_token IS NOT NULL OR NEW.claim_holder IS NOT NULL OR NEW.claim_write IS NOT NULL
BEGIN SELECT RAISE(ABORT, 'fenced:missing:{table}'); END;

-- delete: A claimed row is deleted by its worker alone.
CREATE TRIGGER main."fenced_{table}_delete" BEFORE DELETE ON "{table}"
WHEN OLD.claim_holder IS NOT NULL AND NOT EXISTS (
  SELECT 1 FROM fenced_stamp WHERE guard = '{table}' AND name = char(10) || '@' || {name} AND seq = OLD.claim_token)
BEGIN INSERT INTO "{gate}" (name) VALUES ({name}); END;
