-- guards: The guarded tables of a database, and the engine of each; NULL for a table that was dropped or renamed.
SELECT g.tbl, g.template, g.rule, g.mandatory, g.epoch, g.triggers, t.ENGINE, g.claims
FROM fenced_guard.guard g LEFT JOIN information_schema.TABLES t
  ON t.TABLE_SCHEMA = CONVERT(g.scope USING utf8mb4) AND t.TABLE_NAME = CONVERT(g.tbl USING utf8mb4)
WHERE g.scope = {scope} ORDER BY 1;

-- modes: The modes, the shortest pattern first.
SELECT tbl, pattern, mode, since FROM fenced_guard.mode WHERE scope = {scope} ORDER BY tbl, length, pattern;

-- overrides: The overrides in force.
SELECT tbl, pattern, until, who, why FROM fenced_guard.override WHERE scope = {scope} AND until > UTC_TIMESTAMP(6) ORDER BY until;

-- counts: Decisions by kind and writer, under the pattern whose mode counts for the name now. A sum of old records has only
-- the time of its last record, and counts as recent if that time is recent.
SELECT r.tbl, r.verdict, r.ruling, r.mode, SUM(r.count),
  SUM(IF(r.at >= GREATEST(m.since, UTC_TIMESTAMP(6) - INTERVAL {quiet} SECOND), r.count, 0)), MAX(r.at), r.who, m.pattern,
  SUBSTRING_INDEX(GROUP_CONCAT(r.address ORDER BY r.id DESC), ',', 1), SUBSTRING_INDEX(GROUP_CONCAT(r.pid ORDER BY r.id DESC), ',', 1)
FROM fenced_guard.record r JOIN fenced_guard.mode m ON m.scope = r.scope AND m.tbl = r.tbl AND m.pattern = (
  SELECT n.pattern FROM fenced_guard.mode n WHERE n.scope = r.scope AND n.tbl = r.tbl AND COALESCE(r.name, '') LIKE n.likes ESCAPE '|'
  ORDER BY n.length DESC, n.pattern DESC LIMIT 1)
WHERE r.scope = {scope} GROUP BY r.tbl, r.verdict, r.ruling, r.mode, r.who, m.pattern
UNION ALL
SELECT tbl, verdict, ruling, mode, count, IF(last >= UTC_TIMESTAMP(6) - INTERVAL {quiet} SECOND, count, 0), last, who, NULL, NULL, NULL
FROM fenced_guard.tally WHERE scope = {scope};

-- marks: How many marks a guard's template can have, and the highest of them.
SELECT COUNT(*), COALESCE(MAX(token), 0) FROM fenced_guard.mark
WHERE scope = {scope} AND token > 0 AND name LIKE {likes} ESCAPE '|'
  AND ({whole} OR LENGTH(name) - LENGTH(REPLACE(name, '/', '')) = {slashes});

-- extent: How many marks there are, and the highest of them.
SELECT COUNT(*), COALESCE(MAX(token), 0) FROM fenced_guard.mark WHERE scope = {scope} AND token > 0;

-- triggers: The triggers of the guarded tables.
SELECT EVENT_OBJECT_TABLE, TRIGGER_NAME FROM information_schema.TRIGGERS
WHERE TRIGGER_SCHEMA = CONVERT({scope} USING utf8mb4) AND TRIGGER_NAME LIKE 'fenced|_%' ESCAPE '|';

-- bypass: The users that can drop the triggers or the table, or truncate it, and by which privileges.
SELECT GRANTEE, GROUP_CONCAT(DISTINCT PRIVILEGE_TYPE ORDER BY PRIVILEGE_TYPE SEPARATOR ', ') FROM (
  SELECT GRANTEE, PRIVILEGE_TYPE FROM information_schema.USER_PRIVILEGES
  UNION ALL SELECT GRANTEE, PRIVILEGE_TYPE FROM information_schema.SCHEMA_PRIVILEGES
  WHERE {database} LIKE TABLE_SCHEMA OR TABLE_SCHEMA = 'fenced_guard'
  UNION ALL SELECT GRANTEE, PRIVILEGE_TYPE FROM information_schema.TABLE_PRIVILEGES
  WHERE TABLE_SCHEMA = {database} AND TABLE_NAME = {table}
) AS granted WHERE PRIVILEGE_TYPE IN ('TRIGGER', 'DROP', 'ALTER', 'SUPER') GROUP BY GRANTEE ORDER BY GRANTEE;

-- records: The newest lines of the audit, the newest first. A write without a stamp locks no mark: it has the present one.
SELECT r.at, r.tbl, r.name, r.stamp, COALESCE(r.token, m.token), COALESCE(r.grant_id, m.grant_id), COALESCE(r.seq, m.seq), r.verdict,
  r.ruling, r.mode, r.who, r.address, r.pid
FROM fenced_guard.record r LEFT JOIN fenced_guard.mark m ON m.scope = r.scope AND m.name = r.name AND m.token > 0
WHERE r.scope = {scope} AND r.tbl = COALESCE({table}, r.tbl) ORDER BY r.id DESC LIMIT {limit};

-- history: What operators did, the newest first.
SELECT at, who, tbl, what, detail FROM fenced_guard.history
WHERE scope = {scope} AND ({table} IS NULL OR tbl = {table}) ORDER BY id DESC LIMIT {limit};

-- store: What a crash of this server would do to marks.
SELECT @@innodb_flush_log_at_trx_commit, @@log_bin, @@sync_binlog, @@innodb_doublewrite, UTC_TIMESTAMP(6);

-- outboxes: Tables of messages: guards without triggers, and the columns that fenced.messages makes.
SELECT g.tbl FROM fenced_guard.guard g WHERE g.scope = {scope} AND NOT g.mandatory AND (
  SELECT COUNT(*) FROM information_schema.COLUMNS c WHERE c.TABLE_SCHEMA = CONVERT(g.scope USING utf8mb4)
    AND c.TABLE_NAME = CONVERT(g.tbl USING utf8mb4) AND c.COLUMN_NAME IN ('id', 'headers', 'topic', 'body')) = 4;

-- keys: The keys that may sign stamps, and those that were revoked.
SELECT id, kind, added, revoked FROM fenced_guard.proof_key WHERE scope = {scope} ORDER BY added, id;
