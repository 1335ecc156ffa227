-- create: messages that are committed with the writes that they report, until a relay has sent them
CREATE TABLE IF NOT EXISTS {table} (
  id BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
  headers LONGTEXT CHARACTER SET utf8mb4 NOT NULL,
  topic LONGTEXT CHARACTER SET utf8mb4 NOT NULL,
  body LONGBLOB NOT NULL
) ENGINE = InnoDB;

-- put: in the transaction of a producer; texts are hexadecimal, so that no setting of the connection matters
INSERT INTO {table} (headers, topic, body)
VALUES (CONVERT(UNHEX('{headers}') USING utf8mb4), CONVERT(UNHEX('{topic}') USING utf8mb4), UNHEX('{body}'));

-- take: the oldest messages
SELECT id, headers, topic, body FROM {table} ORDER BY id LIMIT {count};

-- remove: messages that the broker has confirmed
DELETE FROM {table} WHERE id IN ({ids});
