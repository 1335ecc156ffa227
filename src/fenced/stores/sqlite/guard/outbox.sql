-- create: messages that are committed with the writes that they report, until a relay has sent them
CREATE TABLE IF NOT EXISTS {table} (
  id INTEGER PRIMARY KEY AUTOINCREMENT, -- an id is never given twice, also after the last row was removed
  headers TEXT NOT NULL,
  topic TEXT NOT NULL,
  body BLOB NOT NULL
);

-- put: in the transaction of a producer; texts are hexadecimal, so that none needs quoting
INSERT INTO {table} (headers, topic, body)
VALUES (CAST(X'{headers}' AS TEXT), CAST(X'{topic}' AS TEXT), X'{body}');

-- take: the oldest messages
SELECT id, headers, topic, body FROM {table} ORDER BY id LIMIT {count};

-- remove: messages that the broker has confirmed
DELETE FROM {table} WHERE id IN ({ids});
