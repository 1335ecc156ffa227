-- create: messages that are committed with the writes that they report, until a relay has sent them
CREATE TABLE IF NOT EXISTS {table} (
  id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  headers text NOT NULL,
  topic text NOT NULL,
  body bytea NOT NULL
);

-- put: in the transaction of a producer; texts are hexadecimal, so that no setting of the connection matters
INSERT INTO {table} (headers, topic, body)
VALUES (convert_from(decode('{headers}', 'hex'), 'UTF8'), convert_from(decode('{topic}', 'hex'), 'UTF8'), decode('{body}', 'hex'));

-- take: the oldest messages
SELECT id, headers, topic, body FROM {table} ORDER BY id LIMIT {count};

-- remove: messages that the broker has confirmed
DELETE FROM {table} WHERE id IN ({ids});
