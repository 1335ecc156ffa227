-- trigger: Runs for every row that is written to a guarded table. It looks for an open stamp, and calls the gate if there
-- is none. It is small, because SQLite sets up the whole trigger for every row.
CREATE TRIGGER {trigger} {when} {event} ON {table_name}
WHEN {guard_if}NOT EXISTS (
  SELECT 1 FROM fenced_stamp WHERE name = {name} AND open = 1 AND (verdict = 'admit' OR guard = '{table}')
)
BEGIN INSERT INTO "{gate}" (name) VALUES ({name}); END;

-- replaced: Runs before a row is written whose unique key a row of another name has. Only a REPLACE removes that row. In the
-- statements of a trigger SQLite follows the conflict policy of the outer statement, so the first one below succeeds under
-- REPLACE alone. Under IGNORE, and without a policy (an upsert, too), it does nothing; under other policies it fails, as
-- the outer statement would.
CREATE TRIGGER {trigger} {when} {event} ON {table_name}
WHEN {guard_if}NOT EXISTS (
  SELECT 1 FROM fenced_stamp WHERE name = {name} AND open = 1 AND (verdict = 'admit' OR guard = '{table}')
)
BEGIN
  INSERT OR IGNORE INTO fenced_policy (one, replaces) VALUES (1, 1);
  INSERT INTO "{gate}" (name) SELECT {name} FROM fenced_policy WHERE replaces = 1;
  UPDATE fenced_policy SET replaces = 0 WHERE replaces = 1;
END;

-- view: A table's gate. It has no rows: inserting a name into it makes its trigger decide about that name.
CREATE VIEW main."{gate}" AS SELECT NULL AS name WHERE 0;

-- gate: Decides about a write under a name without an open stamp.
CREATE TRIGGER main."{gate}_decides" INSTEAD OF INSERT ON "{gate}"
BEGIN
  -- The first write of an admitted operation raises the mark's seq. Its other writes find an open stamp.
  UPDATE fenced_mark SET seq = (SELECT seq FROM fenced_stamp WHERE name = NEW.name)
    WHERE name = NEW.name AND EXISTS (SELECT 1 FROM fenced_stamp WHERE name = NEW.name AND verdict = 'admit');
  -- A stamp for this name was judged when it was announced. If another guard announced it, this guard's own mode decides
  -- whether a bad verdict is refused.
  SELECT CASE (
      SELECT verdict FROM fenced_stamp WHERE name = NEW.name AND CASE guard WHEN '{table}' THEN refuse
        ELSE verdict = 'applied' OR (verdict <> 'admit' AND {mode} IN ('enforce', 'require')) END
    )
    WHEN 'applied' THEN RAISE(ABORT, 'fenced:applied:{table}')
    WHEN 'stale' THEN RAISE(ABORT, 'fenced:stale:{table}')
    WHEN 'duplicate' THEN RAISE(ABORT, 'fenced:duplicate:{table}')
    WHEN 'out_of_order' THEN RAISE(ABORT, 'fenced:out_of_order:{table}')
    WHEN 'reused' THEN RAISE(ABORT, 'fenced:reused:{table}')
    WHEN 'foreign' THEN RAISE(ABORT, 'fenced:foreign:{table}')
    WHEN 'uncovered' THEN RAISE(ABORT, 'fenced:uncovered:{table}')
    WHEN 'invalid' THEN RAISE(ABORT, 'fenced:invalid:{table}')
  END;
  -- No stamp has this name: this transaction has announced other names, or nothing. RAISE takes no expression, but the error
  -- of a wrong JSON path contains the path, and so the name.
  SELECT CASE WHEN EXISTS (SELECT 1 FROM fenced_stamp WHERE name = NEW.name) THEN NULL
    WHEN EXISTS (SELECT 1 FROM fenced_stamp) AND {mode} IN ('enforce', 'require')
      THEN json_extract('{{}}', 'fenced:uncovered:{table}:' || coalesce(NEW.name, ''))
    WHEN NOT EXISTS (SELECT 1 FROM fenced_stamp) AND {mode} = 'require'
      THEN RAISE(ABORT, 'fenced:missing:{table}')
  END;
  -- The remaining writes are let through against their verdict: counted, and recorded unless the mode is observe.
  INSERT INTO fenced_tally (guard, verdict, mode, count)
    SELECT '{table}', {verdict}, {mode}, 1 WHERE {verdict} <> 'admit'
    ON CONFLICT (guard, verdict, mode) DO UPDATE SET count = count + 1;
  INSERT INTO fenced_record (time, guard, name, stamp, token, grant_id, seq, verdict, ruling, mode)
    SELECT (julianday('now') - 2440587.5) * 86400.0, '{table}', NEW.name,
      (SELECT replace(CASE s.stamp WHEN '' THEN o.stamp ELSE s.stamp END, ':-:',
         CASE s.seq WHEN 0 THEN ':-:' ELSE ':' || s.seq || ':' END)
       FROM fenced_stamp s LEFT JOIN fenced_mark o USING (name) ORDER BY name LIMIT 1), m.token,
      m.grant_id, m.seq, {verdict}, 'record', {mode}
    FROM (SELECT 1) LEFT JOIN fenced_mark m ON m.name = NEW.name
    WHERE {verdict} <> 'admit' AND ({mode} = 'shadow' OR ({mode} <> 'observe' AND {verdict} <> 'missing'));
  -- Decide once per operation and name.
  UPDATE fenced_stamp SET open = 1 WHERE name = NEW.name AND (verdict = 'admit' OR guard = '{table}');
END;
