-- Tables of the MariaDB guard, in a database of their own. `scope` is the program's database, so that the programs of one
-- server have nothing in common but these tables. A writer needs EXECUTE on the database fenced_guard, and no table.
CREATE DATABASE IF NOT EXISTS fenced_guard CHARACTER SET utf8mb4 COLLATE utf8mb4_bin
$$
-- The version of the tables and routines, in one row.
CREATE TABLE IF NOT EXISTS fenced_guard.schema_version (
  one         TINYINT NOT NULL PRIMARY KEY DEFAULT 1,
  version     INT NOT NULL,
  readable_by INT NOT NULL,                          -- the oldest version that a client must know
  `release`   VARCHAR(40) NOT NULL,                  -- the fenced that replaced the routines last
  routines    VARCHAR(64) NOT NULL                   -- a digest of their text
) ENGINE = InnoDB
$$
-- What the guards of a database trust.
CREATE TABLE IF NOT EXISTS fenced_guard.trust (
  scope    VARBINARY(64) NOT NULL PRIMARY KEY,
  realm    VARBINARY(16),                            -- the one authority that is trusted; NULL: the first one that announces
  floor    BIGINT NOT NULL DEFAULT 0,                -- tokens below it are stale, even for names without a mark
  proof    BOOLEAN NOT NULL DEFAULT FALSE            -- whether only a signed stamp may raise a mark
) ENGINE = InnoDB
$$
-- The keys that may sign stamps. Of a secret there are the two blocks that HMAC-SHA256 begins with.
CREATE TABLE IF NOT EXISTS fenced_guard.proof_key (
  scope       VARBINARY(64) NOT NULL,
  id          VARBINARY(32) NOT NULL,
  kind        VARBINARY(8) NOT NULL,
  inner_block VARBINARY(64) NOT NULL,
  outer_block VARBINARY(64) NOT NULL,
  added       DATETIME(6) NOT NULL,
  revoked     DATETIME(6),
  PRIMARY KEY (scope, id)
) ENGINE = InnoDB
$$
-- The highest stamp admitted for each name. Its row lock is the fence. Token 0: nothing was admitted yet.
CREATE TABLE IF NOT EXISTS fenced_guard.mark (
  scope     VARBINARY(64) NOT NULL,
  name      VARBINARY(200) NOT NULL,
  token     BIGINT NOT NULL,
  grant_id  VARBINARY(32) NOT NULL,
  seq       BIGINT NOT NULL,
  operation VARBINARY(32),                           -- the transaction that wrote, for its further statements
  PRIMARY KEY (scope, name)
) ENGINE = InnoDB
$$
-- The guarded tables. Whoever meets a guard locks its row in share mode, so a change of a mode waits for open transactions.
CREATE TABLE IF NOT EXISTS fenced_guard.guard (
  scope      VARBINARY(64) NOT NULL,
  tbl        VARBINARY(64) NOT NULL,
  template   VARBINARY(800) NOT NULL,
  rule       VARBINARY(9) NOT NULL,
  mandatory  BOOLEAN NOT NULL,
  epoch      VARBINARY(64),                          -- the column that keeps the token of the last write
  epoch_made BOOLEAN NOT NULL DEFAULT FALSE,         -- whether the installation made that column
  claims     MEDIUMBLOB,                             -- the rows themselves are claimed, and are the marks
  mode       VARBINARY(40) NOT NULL,                 -- of the pattern *
  percent    DOUBLE NOT NULL DEFAULT 0,              -- of a canary
  patterned  BOOLEAN NOT NULL DEFAULT FALSE,         -- whether other patterns have a mode
  lifted     DATETIME(6),                            -- until when some override lets names through
  triggers   VARBINARY(64) NOT NULL,                 -- a digest of the statements that make the triggers
  PRIMARY KEY (scope, tbl)
) ENGINE = InnoDB
$$
-- The stage of the rollout, by guard and name pattern; the longest pattern counts.
CREATE TABLE IF NOT EXISTS fenced_guard.mode (
  scope   VARBINARY(64) NOT NULL,
  tbl     VARBINARY(64) NOT NULL,
  pattern VARBINARY(800) NOT NULL,
  likes   VARBINARY(1600) NOT NULL,                  -- the same pattern for LIKE ... ESCAPE '|'
  length  INT NOT NULL,                              -- of the pattern, in characters
  mode    VARBINARY(40) NOT NULL,
  percent DOUBLE NOT NULL,
  since   DATETIME(6) NOT NULL,
  PRIMARY KEY (scope, tbl, pattern)
) ENGINE = InnoDB
$$
-- Overrides, for emergencies. Until `until`, writes to names that match are let through and recorded, whatever the mode is.
CREATE TABLE IF NOT EXISTS fenced_guard.override (
  id      BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
  scope   VARBINARY(64) NOT NULL,
  tbl     VARBINARY(64) NOT NULL,
  pattern VARBINARY(800) NOT NULL,
  likes   VARBINARY(1600) NOT NULL,
  until   DATETIME(6) NOT NULL,
  who     VARBINARY(400) NOT NULL,
  why     MEDIUMBLOB NOT NULL,
  KEY (scope, tbl)
) ENGINE = InnoDB
$$
-- What operators did.
CREATE TABLE IF NOT EXISTS fenced_guard.history (
  id     BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
  at     DATETIME(6) NOT NULL,
  who    VARBINARY(400) NOT NULL,
  scope  VARBINARY(64) NOT NULL,
  tbl    VARBINARY(64),
  what   VARBINARY(40) NOT NULL,
  detail MEDIUMBLOB NOT NULL,
  KEY (scope, id)
) ENGINE = InnoDB
$$
-- The audit. Writers only insert, so that no writer waits for another. It is InnoDB like everything here: a table of another
-- engine that a trigger mentions is locked as a whole by every statement that fires the trigger.
CREATE TABLE IF NOT EXISTS fenced_guard.record (
  id       BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
  at       DATETIME(6) NOT NULL,
  scope    VARBINARY(64) NOT NULL,
  tbl      VARBINARY(64) NOT NULL,
  name     VARBINARY(200),
  stamp    MEDIUMBLOB,
  token    BIGINT,                                   -- the mark at the time of the decision
  grant_id VARBINARY(32),
  seq      BIGINT,
  verdict  VARBINARY(12) NOT NULL,
  ruling   VARBINARY(8) NOT NULL,                    -- refuse, record or count
  mode     VARBINARY(40) NOT NULL,
  who      VARBINARY(400) NOT NULL,
  address  VARBINARY(400) NOT NULL,
  pid      BIGINT NOT NULL,
  count    BIGINT NOT NULL,                          -- how many decisions like it this record stands for
  KEY (scope, tbl, id)
) ENGINE = InnoDB
$$
-- Old records, added up.
CREATE TABLE IF NOT EXISTS fenced_guard.tally (
  scope   VARBINARY(64) NOT NULL,
  tbl     VARBINARY(64) NOT NULL,
  verdict VARBINARY(12) NOT NULL,
  ruling  VARBINARY(8) NOT NULL,
  mode    VARBINARY(40) NOT NULL,
  who     VARBINARY(400) NOT NULL,
  count   BIGINT NOT NULL,
  last    DATETIME(6) NOT NULL,
  PRIMARY KEY (scope, tbl, verdict, ruling, mode, who)
) ENGINE = InnoDB
