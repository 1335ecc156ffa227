-- Tables of the MariaDB authority, in the database that its address names. Texts are bytes, so that neither the
-- character set nor the collation of a session or a table changes what equals what. Times are nanoseconds since 1970.

-- The one stream of numbers: tokens of all namespaces, and tickets. Nothing is locked to draw one, so that grants of
-- different names do not wait for each other's commit. The newest row stays: its number is the last one.
CREATE TABLE IF NOT EXISTS fenced_number (
  id BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY
) ENGINE = InnoDB;

-- One row for each namespace, never deleted. A token is `floor` plus a number.
CREATE TABLE IF NOT EXISTS fenced_namespace (
  id      INT NOT NULL AUTO_INCREMENT PRIMARY KEY,
  name    VARBINARY(200) NOT NULL UNIQUE,
  realm   VARBINARY(16) NOT NULL UNIQUE,
  floor   BIGINT NOT NULL DEFAULT 0,
  lineage VARBINARY(200) NOT NULL             -- the server and the tables whose numbers these are
) ENGINE = InnoDB;

-- What is locked to decide about a name.
CREATE TABLE IF NOT EXISTS fenced_name (
  namespace INT NOT NULL,
  name      VARBINARY(200) NOT NULL,
  attempt   VARBINARY(32) NOT NULL DEFAULT '', -- who holds it, or held it last
  held      BOOLEAN NOT NULL DEFAULT FALSE,    -- false: surely nobody holds it; true: see the attempt's own row
  PRIMARY KEY (namespace, name)
) ENGINE = InnoDB;

-- One row for each ask, by its public id: waiting, granted, or ended and remembered for a while.
CREATE TABLE IF NOT EXISTS fenced_attempt (
  id         VARBINARY(32) NOT NULL PRIMARY KEY,
  namespace  INT NOT NULL,
  state      VARBINARY(9) NOT NULL,            -- waiting, granted, released, withdrawn, expired, revoked
  names      MEDIUMBLOB NOT NULL,              -- JSON array, sorted
  ttl        BIGINT NOT NULL,
  lock_delay BIGINT NOT NULL,
  ticket     BIGINT NOT NULL,                  -- 0: never stood in a queue
  token      BIGINT NOT NULL,
  expires    BIGINT NOT NULL,
  forget     BIGINT NOT NULL,
  holder     BLOB NOT NULL                     -- JSON: id, label, host, pid
) ENGINE = InnoDB;

-- Who waits for a name, in the order of the tickets. One ask for several names has one ticket.
CREATE TABLE IF NOT EXISTS fenced_queue (
  namespace INT NOT NULL,
  name      VARBINARY(200) NOT NULL,
  ticket    BIGINT NOT NULL,
  attempt   VARBINARY(32) NOT NULL,
  PRIMARY KEY (namespace, name, ticket),
  KEY waits (attempt)
) ENGINE = InnoDB;

-- Which version the tables have, and by which clients they can be read, in one row. It is written last.
CREATE TABLE IF NOT EXISTS fenced_schema (
  one         TINYINT NOT NULL DEFAULT 1 PRIMARY KEY,
  version     INT NOT NULL,
  readable_by INT NOT NULL,                    -- the oldest version that a client must know
  made_by     VARBINARY(40) NOT NULL           -- the fenced that stored it
) ENGINE = InnoDB;
